"""Laws of forgetting: the sweep takes what retention allows, all of it, and nothing else.

A store that forgets by itself, on its own clock, sweeps nothing when told to: it declares so, and
the laws then hold it to leaving everything alone whose time has not come on that clock.
"""

from __future__ import annotations

from coatcheck.core.flow import Flow
from coatcheck.core.record import GONE, Record, Swap, completed, failed, in_doubt, renewed
from coatcheck.stores.contract import Query

from .effects import (
    GetAll,
    ReadClock,
    ReadKind,
    SwapAll,
    Sweep,
    Together,
    find_all,
    get,
    law,
)
from .records import (
    ID,
    LEASE_MS,
    NOW_MS,
    RETENTION_MS,
    WINDOW_MS,
    assert_exactly,
    claim_of,
    claimed,
    id_of,
)

OVER_MS = NOW_MS + RETENTION_MS


def finished(count: int, *, expires_ms: int = OVER_MS, start: int = 0) -> Flow[list[Record]]:
    """*count* completed records, now standing."""
    records = [
        completed(claim_of(id_of(start + n)), b"done")._replace(expires_ms=expires_ms)
        for n in range(count)
    ]
    yield from SwapAll([Swap(record.id, 0, record) for record in records])
    return records


def standing(ids: list[bytes]) -> Flow[list[bytes]]:
    """Those of *ids* that still have a record."""
    found = yield from GetAll(ids)
    return [record.id for record in found if record is not None]


@law
def a_sweep_takes_only_what_retention_allows() -> Flow[None]:
    """T1, T3: to the millisecond, whatever the state."""
    kind = yield from ReadKind()
    ends = (lambda c: completed(c, b""), failed, in_doubt, lambda c: c)
    records = [
        end(claim_of(id_of(10 * late + n)))._replace(expires_ms=OVER_MS + late)
        for late in (0, 1)
        for n, end in enumerate(ends)
    ]
    ids = [record.id for record in records]
    yield from SwapAll([Swap(record.id, 0, record) for record in records])
    assert (yield from Sweep(OVER_MS - 1)) == 0
    assert (yield from standing(ids)) == ids
    assert (yield from Sweep(OVER_MS)) == (4 if kind.sweeps else 0)
    assert (yield from standing(ids)) == (ids[4:] if kind.sweeps else ids)
    for record in records[4:]:
        assert_exactly((yield from get(record.id)), record)


@law
def a_sweep_never_takes_a_claim_that_is_held() -> Flow[None]:
    """L5, T3: work that outlives its retention keeps its record as long as it renews."""
    kind = yield from ReadKind()
    held = yield from claimed(claim_of()._replace(lease_until_ms=OVER_MS + LEASE_MS))
    assert (yield from Sweep(OVER_MS)) == 0
    assert (yield from Sweep(OVER_MS + LEASE_MS - 1)) == 0
    assert_exactly((yield from get(ID)), held)
    assert (yield from Sweep(OVER_MS + LEASE_MS)) == (1 if kind.sweeps else 0)
    assert (yield from get(ID)) == (None if kind.sweeps else held)


@law
def a_sweep_waits_until_the_clock_has_passed_the_version() -> Flow[None]:
    """L5, T2: the next life starts from the clock, and must start above the versions of this one."""
    kind = yield from ReadKind()
    busy = completed(claim_of(), b"")._replace(version=OVER_MS + 5)
    yield from claimed(busy)
    assert (yield from Sweep(OVER_MS + 5)) == 0
    assert (yield from find_all(Query(expired_at_ms=OVER_MS + 5))) == []
    assert_exactly((yield from get(ID)), busy)
    assert (yield from find_all(Query(expired_at_ms=OVER_MS + 6))) == [busy]
    assert (yield from Sweep(OVER_MS + 6)) == (1 if kind.sweeps else 0)


@law
def no_store_forgets_a_held_claim_by_itself() -> Flow[None]:
    """L5, T1: also on the store's own clock a live lease protects a record past its retention."""
    now_ms = yield from ReadClock()
    began = claim_of(now_ms=now_ms - RETENTION_MS - 1)
    held = yield from claimed(began._replace(lease_until_ms=now_ms + WINDOW_MS))
    assert_exactly((yield from get(ID)), held)
    kept = yield from claimed(claim_of(id_of(2), now_ms=now_ms - WINDOW_MS))
    assert_exactly((yield from get(kept.id)), kept)


@law
def a_sweep_takes_no_more_than_its_limit_and_repeated_sweeps_take_all() -> Flow[None]:
    """T3: small batches, so that claims beside it do not wait."""
    kind = yield from ReadKind()
    expired = [record.id for record in (yield from finished(25))]
    live = [record.id for record in (yield from finished(5, start=100, expires_ms=OVER_MS + 1))]
    if not kind.sweeps:
        assert (yield from Sweep(OVER_MS)) == 0
        assert (yield from standing([*expired, *live])) == [*expired, *live]
        return
    counts = []
    while count := (yield from Sweep(OVER_MS, limit=10)):
        counts.append(count)
        assert len((yield from standing(expired))) == 25 - sum(counts)
    assert counts == [10, 10, 5]
    assert (yield from standing([*expired, *live])) == live
    assert (yield from Sweep(OVER_MS)) == 0


@law
def a_sweep_is_not_held_up_by_claims_that_outlive_their_retention() -> Flow[None]:
    """T3: ever so many held records at the front of the line do not stop the sweep."""
    kind = yield from ReadKind()
    held = [
        claim_of(id_of(n))._replace(expires_ms=OVER_MS - 1, lease_until_ms=OVER_MS + LEASE_MS)
        for n in range(20)
    ]
    yield from SwapAll([Swap(record.id, 0, record) for record in held])
    expired = [record.id for record in (yield from finished(5, start=100))]
    taken = 0
    while count := (yield from Sweep(OVER_MS, limit=3)):
        taken += count
    assert taken == (5 if kind.sweeps else 0)
    assert (yield from standing(expired)) == ([] if kind.sweeps else expired)
    assert list((yield from GetAll([record.id for record in held]))) == held


@law
def a_swept_id_is_free_and_its_old_holder_is_told_so() -> Flow[None]:
    """L5, T2: the zombie of a life that was swept can change nothing in the next one."""
    kind = yield from ReadKind()
    old = yield from claimed(claim_of(nonce=1))
    taken = yield from Sweep(OVER_MS)
    if not kind.sweeps:
        assert taken == 0
        assert_exactly((yield from get(ID)), old)
        return
    assert taken == 1
    assert (yield from Swap(ID, old.version, completed(old, b"late"))) == GONE
    new = yield from claimed(claim_of(now_ms=OVER_MS, nonce=2))
    assert_exactly((yield from Swap(ID, old.version, completed(old, b"late"))), new)


@law
def sweeps_at_the_same_time_take_every_record_once() -> Flow[None]:
    """T3: safe on every node at once; the counts add up to what was there."""
    kind = yield from ReadKind()
    expired = [record.id for record in (yield from finished(120))]
    live = [record.id for record in (yield from finished(10, start=500, expires_ms=OVER_MS + 1))]

    def sweeper() -> Flow[int]:
        taken = 0
        while count := (yield from Sweep(OVER_MS, limit=7)):
            assert count <= 7
            taken += count
        return taken

    counts = yield from Together([sweeper() for _ in range(4)])
    assert sum(counts) == (120 if kind.sweeps else 0)
    assert (yield from standing([*expired, *live])) == (live if kind.sweeps else [*expired, *live])


@law
def of_a_sweep_and_a_renewal_one_wins() -> Flow[None]:
    """L5, T3: a holder that was told its lease is renewed still has its record."""
    claims = [claim_of(id_of(number)) for number in range(40)]
    yield from SwapAll([Swap(claim.id, 0, claim) for claim in claims])

    def holder(some: list[Record]) -> Flow[list[Record | None]]:
        answers = []
        for claim in some:
            longer = renewed(claim, OVER_MS + LEASE_MS)
            answers.append((yield from Swap(claim.id, claim.version, longer)))
        return answers

    def sweeper() -> Flow[int]:
        taken = 0
        for _ in range(12):
            taken += yield from Sweep(OVER_MS, limit=4)
        return taken

    holders = [holder(claims[n::2]) for n in range(2)]
    *answers, taken = yield from Together([*holders, sweeper()])
    assert taken == sum(answer == GONE for some in answers for answer in some)
    told = zip([*claims[::2], *claims[1::2]], [*answers[0], *answers[1]], strict=True)
    for claim, answer in told:
        found = yield from get(claim.id)
        if answer is None:
            assert_exactly(found, renewed(claim, OVER_MS + LEASE_MS))
        else:
            assert (answer, found) == (GONE, None)
