"""Laws of reading: what waiters poll (`get`) and what operators look for (`find`)."""

from __future__ import annotations

from coatcheck.core.flow import Flow
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    IN_DOUBT,
    RUNNING,
    Record,
    Swap,
    completed,
    failed,
    in_doubt,
    renewed,
)
from coatcheck.stores.contract import Query

from .effects import Find, GetAll, ReadKind, SwapAll, find_all, law
from .records import LEASE_MS, NOW_MS, RETENTION_MS, assert_exactly, claim_of, id_of


def written(records: list[Record]) -> Flow[list[Record]]:
    """*records*, now standing; in any order, given back in id order."""
    shuffled = records[1::2] + records[::2][::-1]
    answers = yield from SwapAll([Swap(record.id, 0, record) for record in shuffled])
    assert list(answers) == [None] * len(records)
    return sorted(records)


@law
def records_are_read_in_the_order_they_were_asked_for() -> Flow[None]:
    """D1: missing ones are None in their place, and the same id may be asked for twice."""
    a, b, c = yield from written([claim_of(id_of(number)) for number in range(3)])
    missing = id_of(99)
    ids = [c.id, missing, a.id, c.id, c.id, missing, b.id]
    assert list((yield from GetAll(ids))) == [c, None, a, c, c, None, b]
    for record in (a, b, c):
        assert_exactly((yield from GetAll([record.id]))[0], record)


@law
def many_records_are_read_at_once() -> Flow[None]:
    """D1: more ids than any batch, half of them missing."""
    yield from written([claim_of(id_of(number)) for number in range(0, 600, 2)])
    standing = yield from GetAll([id_of(number) for number in range(600)])
    wanted = [None if number % 2 else claim_of(id_of(number)) for number in range(600)]
    assert list(standing) == wanted


@law
def an_operator_sees_all_records_in_the_order_of_their_ids() -> Flow[None]:
    """O1: without conditions everything is found; an empty store is an empty page."""
    assert (yield from find_all(Query())) == []
    records = yield from written([claim_of(id_of(number)) for number in range(20)])
    found = yield from find_all(Query())
    assert found == records
    for record, original in zip(found, records, strict=True):
        assert_exactly(record, original)


@law
def paging_covers_every_record_exactly_once() -> Flow[None]:
    """O1: whatever the page size, also where the last page is full."""
    records = yield from written([claim_of(id_of(number)) for number in range(12)])
    for limit in (1, 2, 5, 6, 11, 12, 13, 1000):
        assert (yield from find_all(Query(limit=limit))) == records
    page = yield from Find(Query(limit=5))
    assert list(page.records) == records[:5]
    assert page.next_after_id == records[4].id
    rest = yield from Find(Query(after_id=records[4].id))
    assert list(rest.records) == records[5:]
    assert rest.next_after_id is None


@law
def paging_goes_on_while_records_come_and_go() -> Flow[None]:
    """O1: the place in the list is an id, so a record that was deleted there does no harm."""
    records = yield from written([claim_of(id_of(number)) for number in range(0, 12, 2)])
    page = yield from Find(Query(limit=3))
    last = page.records[-1]
    assert (yield from Swap(last.id, last.version, None)) is None
    between = claim_of(id_of(7))
    assert (yield from Swap(between.id, 0, between)) is None
    rest = yield from find_all(Query(after_id=last.id))
    assert rest == sorted([*records[3:], between])


@law
def a_reference_finds_its_record_by_the_first_bytes_of_its_id() -> Flow[None]:
    """K5: a prefix of any length, also where no byte string comes after it."""
    ids = (b"\x00" * 16, b"\x00" * 7 + b"\x01" * 9, b"\x7f" + b"\x00" * 15, b"\xfe" + b"\xff" * 15)
    ids += (b"\xff" * 16, b"\xff" * 7 + b"\x00" * 9, b"\xff" * 8 + b"\x00" * 8)
    records = yield from written([claim_of(id) for id in ids])
    prefixes = [b"", b"\x00", b"\x00" * 7, b"\x00" * 8, b"\x7f", b"\x80", b"\xfe", b"\xfe\xff"]
    prefixes += [b"\xff", b"\xff" * 7, b"\xff" * 8, b"\xff" * 16, *ids]
    for prefix in prefixes:
        wanted = [record for record in records if record.id[: len(prefix)] == prefix]
        assert (yield from find_all(Query(id_prefix=prefix))) == wanted, prefix
        assert (yield from find_all(Query(id_prefix=prefix, limit=1))) == wanted, prefix


@law
def an_operator_finds_records_by_state_and_age() -> Flow[None]:
    """O1: every condition narrows, and the age is the beginning of the life."""
    claims = [claim_of(id_of(number), now_ms=NOW_MS + number) for number in range(8)]
    ends = (lambda c: c, lambda c: completed(c, b""), failed, in_doubt)
    records = yield from written([ends[n % 4](claim) for n, claim in enumerate(claims)])
    for n, state in enumerate((RUNNING, COMPLETED, FAILED, IN_DOUBT)):
        assert (yield from find_all(Query(state=state))) == records[n::4]
        older = Query(state=state, created_before_ms=NOW_MS + 4)
        assert (yield from find_all(older)) == [records[n]]
        assert (yield from find_all(Query(state=state, limit=1))) == records[n::4]
    assert (yield from find_all(Query(created_before_ms=NOW_MS))) == []
    assert (yield from find_all(Query(created_before_ms=NOW_MS + 1))) == records[:1]
    assert (yield from find_all(Query(created_after_ms=NOW_MS + 5))) == records[6:]
    middle = Query(created_after_ms=NOW_MS + 2, created_before_ms=NOW_MS + 5)
    assert (yield from find_all(middle)) == records[3:5]
    both = Query(state=FAILED, id_prefix=records[6].id[:4])
    assert (yield from find_all(both)) == [records[6]]


@law
def an_operator_sees_the_newest_records_first() -> Flow[None]:
    """O1: by age, then by id; the next page is what was created before, and no id tells of it."""
    ages_ms = (3, 0, 5, 5, 1, 5, 4)
    claims = [claim_of(id_of(n), now_ms=NOW_MS + age) for n, age in enumerate(ages_ms)]
    # Later changes do not make a record newer.
    records = claims[:1] + [completed(renewed(claim, NOW_MS), b"") for claim in claims[1:]]
    yield from written(records)
    newest = [records[n] for n in (5, 3, 2, 6, 0, 4, 1)]
    for limit in (1, 2, 4, 7, 100):
        page = yield from Find(Query(newest_first=True, limit=limit))
        assert page == (newest[:limit], None)
    older = Query(newest_first=True, created_before_ms=newest[3].created_ms, limit=2)
    assert (yield from Find(older)) == (newest[4:6], None)
    for query, wanted in (
        (Query(newest_first=True, state=RUNNING), [newest[4]]),
        (Query(newest_first=True, id_prefix=id_of(2)), [newest[2]]),
        (Query(newest_first=True, created_after_ms=NOW_MS + 4, limit=2), newest[:2]),
        (Query(newest_first=True, created_after_ms=NOW_MS + 5), []),
    ):
        assert (yield from Find(query)) == (wanted, None)


@law
def an_operator_finds_claims_whose_lease_is_over() -> Flow[None]:
    """O1: running ones only, from the very millisecond on."""
    dead = claim_of(id_of(0))
    live = claim_of(id_of(1))._replace(lease_until_ms=dead.lease_until_ms + 1)
    yield from written([dead, live, in_doubt(claim_of(id_of(2))), failed(claim_of(id_of(3)))])
    over_ms = dead.lease_until_ms
    for offset_ms, wanted in ((-1, []), (0, [dead]), (1, [dead, live])):
        query = Query(lease_expired_at_ms=over_ms + offset_ms)
        assert (yield from find_all(query)) == wanted


@law
def an_operator_finds_exactly_what_a_sweep_would_take() -> Flow[None]:
    """T3, O1: `expired_at_ms` and `sweep` agree about leases and about the very millisecond."""
    over_ms = NOW_MS + RETENTION_MS
    done = completed(claim_of(id_of(0)), b"")
    later = done._replace(id=id_of(1), expires_ms=over_ms + 1)
    alive = claim_of(id_of(2))._replace(lease_until_ms=over_ms + 1)
    dead = claim_of(id_of(3))._replace(lease_until_ms=over_ms)
    yield from written([done, later, alive, dead])
    assert (yield from find_all(Query(expired_at_ms=over_ms - 1))) == []
    assert (yield from find_all(Query(expired_at_ms=over_ms))) == [done, dead]
    assert (yield from find_all(Query(expired_at_ms=over_ms + 1))) == [done, later, alive, dead]
    running = Query(expired_at_ms=over_ms + LEASE_MS, state=RUNNING)
    assert (yield from find_all(running)) == [alive, dead]


@law
def an_operator_finds_records_by_what_the_client_sent() -> Flow[None]:
    """O1, R3, S1: by key, caller or label, exactly; a compact store has dropped key and caller."""
    kind = yield from ReadKind()
    digest = "00a1b2c3d4e5f607"
    plain = claim_of(id_of(0))._replace(key="order-1", label="POST /orders", scope="ann")
    other = plain._replace(id=id_of(1), scope=digest)
    upper = plain._replace(id=id_of(2), key="ORDER-1", label="PATCH /orders")
    quote = plain._replace(id=id_of(3), key="%' or 1=1 --", label="POST /orders/_")
    yield from written([plain, other, upper, quote])
    wanted = {
        Query(key="order-1"): [plain, other],
        Query(key="ORDER-1"): [upper],
        Query(key="order"): [],
        Query(key="%' or 1=1 --"): [quote],
        Query(key="%"): [],
        Query(label="POST /orders"): [plain, other],
        Query(label="POST /orders/_"): [quote],
        Query(label="POST /orders", key="ORDER-1"): [],
        Query(label="PATCH /orders", key="ORDER-1", state=RUNNING): [upper],
        Query(key="order-1", id_prefix=other.id): [other],
        Query(scope=digest): [other],
        Query(scope=digest.upper()): [],
        Query(scope="ann", key="order-1"): [plain],
        Query(scope="ann", newest_first=True): [quote, upper, plain],
    }
    for query, records in wanted.items():
        found = yield from find_all(query)
        is_dropped = kind.is_compact and (query.key or query.scope)
        kept = [] if is_dropped else map(kind.as_kept, records)
        assert found == [*kept], query
    assert (yield from find_all(Query(key="", limit=2))) == (
        [kind.as_kept(r) for r in (plain, other, upper, quote)] if kind.is_compact else []
    )
    assert (yield from find_all(Query(scope=""))) == []
