"""Laws of one swap: who wins, what the loser learns, and that nothing is bent on the way."""

from __future__ import annotations

from copy import deepcopy

import pytest

from coatcheck.core.flow import Flow
from coatcheck.core.progress import PROGRESS_BYTES_MAX
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    GONE,
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

from .effects import GetAll, ReadKind, SwapAll, find_all, get, law
from .records import (
    ID,
    LARGE,
    LEASE_MS,
    NOW_MS,
    RETENTION_MS,
    WINDOW_MS,
    assert_exactly,
    changed,
    claim_of,
    claimed,
    id_of,
    new_life,
    next_attempt,
)

STRANGE_IDS = (b"\x00" * 16, b"\xff" * 16, b"\x00\xff" * 8, b"';\r\n\x00\"%s?:id{}\\\xfe")
STRANGE_TEXTS = (
    "",
    "x" * 255,
    " spaces before and after ",
    'O\'Reilly "and" `sons`; -- \\ %s %% ? :id $1 {} \\x00',
    "two\r\nlines\tand \x01\x1f\x7f",
    "before\x00after",
    "🧥 für Müller \u202e e\u0301 \U0010ffff",
    # What a database escapes, packs or cannot store: a path may hold any bytes.
    *("\x00", "\x1bescape", "a\x1bb", '{"a,b\\"}', "é" * 8, "\ud800", "\udfff" * 5),
    *("a" * 12 + "\ud800", "before\x00 \udc80", "00a1b2c3d4e5f607", "%_"),
)
STRANGE_BYTES = (None, b"", b"\x00", b"'\"\\\r\n\xff\x00", b"null", LARGE)


@law
def a_claim_of_an_absent_record_wins() -> Flow[None]:
    """L1: one round trip is enough when the key is new."""
    claim = claim_of()
    assert (yield from Swap(ID, 0, claim)) is None
    assert_exactly((yield from get(ID)), claim)


@law
def a_second_claim_gets_the_record_that_stands() -> Flow[None]:
    """L1, L2: the round trip that loses already holds what a replay needs."""
    first = yield from claimed(claim_of(nonce=1))
    assert_exactly((yield from Swap(ID, 0, claim_of(nonce=2))), first)
    answered = yield from changed(first, completed(first, b"201 Created"))
    assert_exactly((yield from Swap(ID, 0, claim_of(nonce=3))), answered)


@law
def a_record_comes_back_exactly_as_it_was_written() -> Flow[None]:
    """D1, L12: ids, blobs and numbers at their edges; None and empty are different things."""
    kind = yield from ReadKind()
    for number, record in enumerate(strange_records()):
        if kind.refuses(record):
            with pytest.raises(ValueError, match="note less"):
                yield from Swap(record.id, 0, record)
            assert (yield from get(record.id)) is None
            continue
        yield from claimed(record)
        assert_exactly((yield from get(record.id)), kind.as_kept(record))
        assert_exactly((yield from Swap(record.id, 0, record)), record)
        after = record._replace(version=record.version + 1, state=FAILED, nonce=number)
        yield from changed(record, after)
        assert_exactly((yield from get(record.id)), kind.as_kept(after))


def strange_records() -> list[Record]:
    """Records at the edges of every field that a machine reads."""
    plain = [claim_of(id) for id in STRANGE_IDS]
    usual = [claim_of(id_of(number)) for number in range(12)]
    blobs = [
        usual[number]._replace(progress=progress, response=response, state=COMPLETED)
        for number, (progress, response) in enumerate(
            zip(STRANGE_BYTES, reversed(STRANGE_BYTES), strict=True)
        )
    ]
    numbers = [
        usual[6]._replace(nonce=2**63 - 1, attempt=2**31 - 1, version=2**48),
        usual[7]._replace(nonce=0, version=1, created_ms=0, lease_until_ms=0),
        usual[8]._replace(nonce=2**53 + 1, fingerprint=b""),
        usual[9]._replace(nonce=2**62, fingerprint=b"\x00" * 16, state=IN_DOUBT),
    ]
    return [*plain, *blobs, *numbers]


@law
def what_people_read_comes_back_too_unless_the_store_is_compact() -> Flow[None]:
    """K5, O1, S1: label, scope and key, whatever a client put into them, and searches for them."""
    kind = yield from ReadKind()
    yield from claimed(claim_of()._replace(label="X ", scope="X ", key="X "))
    for number, text in enumerate(STRANGE_TEXTS):
        for field in ("label", "scope", "key"):
            record = claim_of(id_of(number + 2))._replace(**{field: text})
            yield from claimed(record)
            assert_exactly((yield from get(record.id)), kind.as_kept(record))
            if text and not (kind.is_compact and field != "label"):
                found = yield from find_all(Query(**{field: text}))
                assert found == [record]
            after = failed(record)._replace(**{field: text[::-1]})
            yield from changed(record, after)
            assert_exactly((yield from Swap(record.id, 0, record)), kind.as_kept(after))
            assert (yield from Swap(record.id, after.version, None)) is None


@law
def a_write_replaces_every_field() -> Flow[None]:
    """T2: a new life has nothing in common with the one before but its id."""
    first = yield from claimed(claim_of()._replace(progress=b"step 1"))
    old = yield from changed(first, completed(first, b"old"))
    later_ms = NOW_MS + RETENTION_MS
    life = new_life(old, later_ms, nonce=77)._replace(fingerprint=b"another request!", attempt=9)
    assert [field for field in Record._fields if getattr(life, field) == getattr(old, field)] == [
        *("id", "label", "scope", "key")
    ]
    yield from changed(old, life)
    assert_exactly((yield from get(ID)), life)


@law
def every_legal_change_of_a_running_record_can_be_written() -> Flow[None]:
    """L5, L6, L7: renewing, remembering, parking, resolving, retrying, taking over."""
    claim = yield from claimed(claim_of())
    longer = yield from changed(claim, renewed(claim, NOW_MS + 2 * LEASE_MS))
    noted = yield from changed(longer, renewed(longer, 0)._replace(progress=b"charged"))
    parked = yield from changed(noted, in_doubt(noted))
    freed = yield from changed(parked, failed(parked))
    retry = yield from changed(freed, next_attempt(freed, NOW_MS + 1, nonce=2))
    third = yield from changed(retry, next_attempt(retry, NOW_MS + LEASE_MS + 1, nonce=3))
    final = yield from changed(third, completed(third, b"201"))
    assert final.attempt == 3
    assert_exactly((yield from get(ID)), final._replace(progress=b"charged"))


@law
def a_stale_version_loses_and_gets_the_standing_record() -> Flow[None]:
    """L5: neither an old version nor one that was never handed out opens the record."""
    first = yield from claimed(claim_of())
    standing = yield from changed(first, renewed(first, NOW_MS + 2 * LEASE_MS))
    for wrong in (0, 1, first.version, standing.version + 1, 2**48):
        attack = Swap(ID, wrong, completed(standing, b"never"))
        assert_exactly((yield from attack), standing)
        assert_exactly((yield from get(ID)), standing)


@law
def a_stale_holder_cannot_complete() -> Flow[None]:
    """L5: a zombie that wakes after its lease changes nothing, and learns who came after."""
    first = yield from claimed(claim_of(nonce=1))
    second = yield from changed(first, next_attempt(first, NOW_MS + LEASE_MS, nonce=2))
    assert_exactly((yield from Swap(ID, first.version, completed(first, b"stale"))), second)
    fresh = yield from changed(second, completed(second, b"fresh"))
    assert_exactly((yield from Swap(ID, first.version, completed(first, b"stale"))), fresh)


@law
def a_write_that_expects_a_record_where_there_is_none_is_told_it_is_gone() -> Flow[None]:
    """L5, T3: whoever slept through the whole retention does not bring the record back."""
    claim = claim_of()
    assert (yield from Swap(ID, claim.version, completed(claim, b"late"))) == GONE
    assert (yield from Swap(ID, claim.version, None)) == GONE
    assert (yield from get(ID)) is None


@law
def a_record_is_deleted_by_who_knows_its_version_only() -> Flow[None]:
    """T3: the loser of a delete gets the standing record like any loser."""
    claim = yield from claimed(claim_of())
    for wrong in (0, claim.version - 1, claim.version + 1):
        assert_exactly((yield from Swap(ID, wrong, None)), claim)
    assert (yield from Swap(ID, claim.version, None)) is None
    assert (yield from get(ID)) is None
    assert (yield from Swap(ID, claim.version, None)) == GONE


@law
def a_record_can_be_deleted_in_any_state() -> Flow[None]:
    """R3: an operator erases what a caller has stored, long before its retention is over."""
    ends = (lambda c: c, lambda c: completed(c, b"personal"), failed, in_doubt)
    records = [end(claim_of(id_of(number))) for number, end in enumerate(ends)]
    yield from SwapAll([Swap(record.id, 0, record) for record in records])
    done = records[1]
    assert_exactly((yield from Swap(done.id, done.version - 1, None)), done)
    deletes = [Swap(record.id, record.version, None) for record in records]
    assert list((yield from SwapAll(deletes))) == [None] * 4
    assert list((yield from GetAll([record.id for record in records]))) == [None] * 4


@law
def a_deleted_id_can_be_claimed_again_at_any_version() -> Flow[None]:
    """T2: versions are the core's care; a store whose clock stepped back must still serve."""
    first = yield from claimed(claim_of())
    assert (yield from Swap(ID, first.version, None)) is None
    earlier = yield from claimed(claim_of(now_ms=NOW_MS - WINDOW_MS))
    assert_exactly((yield from get(ID)), earlier)


@law
def an_equal_swap_repeated_finds_its_own_write() -> Flow[None]:
    """L1: when an acknowledgement is lost, trying again shows the writer what it wrote."""
    claim = claim_of(nonce=2**63 - 1)
    answer = completed(claim, b"\x00\xff")
    for swap in (Swap(ID, 0, claim), Swap(ID, claim.version, answer)):
        assert (yield from swap) is None
        assert_exactly((yield from swap), swap.record)
    delete = Swap(ID, answer.version, None)
    assert (yield from delete) is None
    assert (yield from delete) == GONE


@law
def ids_that_look_alike_are_different_records() -> Flow[None]:
    """S1: no trimming, no case folding, no end at a NUL byte."""
    alike = [b"Key\x00" + b"\x00" * 12, b"key\x00" + b"\x00" * 12, b"key " + b" " * 12]
    alike += [b"key\x00" + b"\x00" * 11 + b"\x01", b"\x00" * 12 + b"key\x00"]
    for nonce, id in enumerate(alike):
        yield from claimed(claim_of(id, nonce=nonce))
    for nonce, id in enumerate(alike):
        assert_exactly((yield from get(id)), claim_of(id, nonce=nonce))


@law
def a_store_does_not_touch_what_it_is_given() -> Flow[None]:
    """D1: the engine goes on with the record it has just written."""
    progress = LARGE[:PROGRESS_BYTES_MAX]
    claim = claim_of()._replace(label="POST /orders", progress=progress, response=LARGE)
    for swap in (Swap(ID, 0, claim), Swap(ID, 0, claim), Swap(ID, claim.version, failed(claim))):
        before = deepcopy((swap.id, swap.expected, swap.record))
        yield from swap
        assert (swap.id, swap.expected, swap.record) == before
        assert swap.record is None or type(swap.record) is Record
    assert claim.state == RUNNING
