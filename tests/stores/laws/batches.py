"""Laws of a batch: one round trip, but every swap is judged alone and answered in its place."""

from __future__ import annotations

from coatcheck.core.flow import Flow
from coatcheck.core.record import GONE, Record, Swap, completed, renewed

from .effects import GetAll, ReadKind, SwapAll, get, law
from .records import LARGE, LEASE_MS, NOW_MS, assert_exactly, claim_of, claimed, id_of

# Around the sizes where stores change their ways: alone, in company, and past a full batch.
SIZES = (1, 2, 3, 64, 300)


@law
def an_empty_batch_is_no_work_and_no_error() -> Flow[None]:
    """D1: as many answers as questions, also when there are none."""
    assert list((yield from SwapAll([]))) == []
    assert list((yield from GetAll([]))) == []


@law
def each_swap_of_a_batch_is_judged_alone() -> Flow[None]:
    """L1: winners and losers share a round trip, not a outcome."""
    held, stale, doomed, safe, absent, new = (claim_of(id_of(number)) for number in range(6))
    for claim in (held, stale, doomed, safe):
        yield from claimed(claim)
    longer = NOW_MS + 2 * LEASE_MS
    answers = yield from SwapAll(
        [
            Swap(new.id, 0, new),
            Swap(stale.id, stale.version - 1, completed(stale, b"stale")),
            Swap(held.id, held.version, renewed(held, longer)),
            Swap(absent.id, absent.version, completed(absent, b"late")),
            Swap(doomed.id, doomed.version, None),
            Swap(safe.id, 0, claim_of(safe.id, nonce=99)),
        ]
    )
    assert list(answers) == [None, stale, None, GONE, None, safe]
    standing = yield from GetAll([id_of(number) for number in range(6)])
    assert list(standing) == [renewed(held, longer), stale, None, safe, None, new]


@law
def answers_come_in_the_order_of_the_swaps() -> Flow[None]:
    """L1: in batches of every size, and whatever the order of the ids."""
    start = 0
    for size in SIZES:
        numbers = [start + (7 * n) % size for n in range(size)]  # 7 divides no size: a shuffle
        start += size
        claims = [claim_of(id_of(n), nonce=n) for n in numbers]
        assert list((yield from SwapAll([Swap(c.id, 0, c) for c in claims]))) == [None] * size
        again = yield from SwapAll([Swap(c.id, 0, c._replace(nonce=0)) for c in reversed(claims)])
        assert list(again) == claims[::-1]
        # Every third completes, every third is stale, every third is deleted.
        swaps = [
            (
                Swap(claim.id, claim.version, completed(claim, b"%d" % n)),
                Swap(claim.id, claim.version + 1, completed(claim, b"stale")),
                Swap(claim.id, claim.version, None),
            )[n % 3]
            for n, claim in enumerate(claims)
        ]
        answers = yield from SwapAll(swaps)
        assert list(answers) == [c if n % 3 == 1 else None for n, c in enumerate(claims)]
        standing = yield from GetAll([claim.id for claim in claims])
        kept = [(completed(c, b"%d" % n), c, None)[n % 3] for n, c in enumerate(claims)]
        assert list(standing) == kept


@law
def applied_and_conflicting_swaps_share_a_batch_in_every_mixture() -> Flow[None]:
    """L1, L5: late claims, stale holders, missing records, deletes, new lives and repetitions."""
    for size in (2, 3, 7, 47, 130):
        old = [claim_of(id_of(1_000 * size + n)) for n in range(size)]
        standing = [record for n, record in enumerate(old) if n % 7 not in (0, 1)]
        yield from SwapAll([Swap(record.id, 0, record) for record in standing])
        swaps, wanted, after = zip(*map(_one_of_seven, range(size), old), strict=True)
        assert list((yield from SwapAll(swaps))) == [*wanted]
        assert list((yield from GetAll([record.id for record in old]))) == [*after]
        # An equal swap of a second caller conflicts, though it would leave the same values.
        pairs = [(s, r) for s, r in zip(swaps, after, strict=True) if s.record is not None]
        answers = yield from SwapAll([swap for swap, _ in pairs])
        assert list(answers) == [GONE if record is None else record for _, record in pairs]


def _one_of_seven(n: int, record: Record) -> tuple[Swap, Record | None, Record | None]:
    """A swap, its answer, and what stands after it; only 0 and 1 find no record."""
    done = completed(record, b"done")
    life = record._replace(version=record.version + 1, expires_ms=record.expires_ms + 1)
    return (
        (Swap(record.id, 0, record), None, record),
        (Swap(record.id, record.version, done), GONE, None),
        (Swap(record.id, 0, record._replace(nonce=7)), record, record),
        (Swap(record.id, record.version, done), None, done),
        (Swap(record.id, record.version, life), None, life),
        (Swap(record.id, record.version - 1, life), record, record),
        (Swap(record.id, record.version, None), None, None),
    )[n % 7]


@law
def large_and_small_records_share_a_batch() -> Flow[None]:
    """L12: a response of a megabyte does not push its neighbours out, whether it is kept or not."""
    kind = yield from ReadKind()
    claims = [claim_of(id_of(number)) for number in range(8)]
    yield from SwapAll([Swap(claim.id, 0, claim) for claim in claims])
    sizes = (0, 1, 1 << 20, 10, 1 << 20, 1000, 65_536, 3)
    answers = [completed(claim, LARGE[:size]) for claim, size in zip(claims, sizes, strict=True)]
    lost = yield from SwapAll([Swap(a.id, a.version - 1, a) for a in answers])
    assert list(lost) == [None] * 8
    for answer in answers:
        assert_exactly((yield from get(answer.id)), kind.as_kept(answer))
