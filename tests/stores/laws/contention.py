"""Laws of the crowd: whatever happens at the same moment, each record has one history."""

from __future__ import annotations

from coatcheck.core.flow import Flow
from coatcheck.core.record import Record, Swap, completed, renewed

from .effects import GetAll, ReadKind, SwapAll, Together, get, law
from .records import ID, NOW_MS, assert_exactly, claim_of, claimed, id_of

CROWD = 8


def answer_to(swap: Swap) -> Flow[Record | None]:
    """What a member of the crowd is told."""
    return (yield from swap)


@law
def of_simultaneous_claims_exactly_one_wins() -> Flow[None]:
    """L1: and every other claimant gets the winner's record in the same round trip."""
    kind = yield from ReadKind()
    for round in range(kind.rounds):
        claims = [claim_of(id_of(round), nonce=nonce) for nonce in range(CROWD)]
        swaps = [Swap(claim.id, 0, claim) for claim in claims]
        answers = yield from Together([answer_to(swap) for swap in swaps])
        winner = claims[answers.index(None)]
        assert answers.count(None) == 1
        for answer in answers:
            if answer is not None:
                assert_exactly(answer, winner)
        assert_exactly((yield from get(winner.id)), winner)


@law
def of_simultaneous_completions_exactly_one_stands() -> Flow[None]:
    """L5: two answers for one operation would be two coats for one ticket."""
    kind = yield from ReadKind()
    for round in range(kind.rounds):
        claim = yield from claimed(claim_of(id_of(round)))
        endings = [completed(claim, b"%d" % number) for number in range(CROWD)]
        swaps = [Swap(claim.id, claim.version, ending) for ending in endings]
        answers = yield from Together([answer_to(swap) for swap in swaps])
        winner = endings[answers.index(None)]
        assert [answer for answer in answers if answer is not None] == [winner] * (CROWD - 1)
        assert_exactly((yield from get(claim.id)), winner)


@law
def no_update_is_lost_in_a_crowd() -> Flow[None]:
    """L5, L7: as many changes stand as were acknowledged."""
    first = yield from claimed(claim_of())
    each = (yield from ReadKind()).rounds

    def member() -> Flow[None]:
        seen = first
        for _ in range(each):
            while lost := (yield from Swap(ID, seen.version, renewed(seen, NOW_MS))):
                assert lost.version > seen.version, "who lost sees what came before it"
                seen = lost
            seen = renewed(seen, NOW_MS)

    yield from Together([member() for _ in range(CROWD)])
    assert_exactly(
        (yield from get(ID)), renewed(first, NOW_MS)._replace(version=NOW_MS + each * CROWD)
    )


@law
def batches_that_cross_each_other_all_come_through() -> Flow[None]:
    """L1, D2: the same ids in opposite orders make no deadlock, and each id has one winner."""
    kind = yield from ReadKind()
    for round in range(kind.rounds):
        ids = [id_of(100 * round + number) for number in range(20)]

        def member(nonce: int, ids: list[bytes] = ids) -> Flow[dict[bytes, Record | None]]:
            turned = ids[nonce:] + ids[:nonce]
            order = turned[::-1] if nonce % 2 else turned
            swaps = [Swap(id, 0, claim_of(id, nonce=nonce)) for id in order]
            answers = yield from SwapAll(swaps)
            return dict(zip(order, answers, strict=True))

        told = yield from Together([member(nonce) for nonce in range(4)])
        standing = yield from GetAll(ids)
        for id, record in zip(ids, standing, strict=True):
            assert record is not None
            answers = [answers[id] for answers in told]
            assert answers.count(None) == 1
            assert answers.index(None) == record.nonce
            assert [a for a in answers if a is not None] == [record] * 3


@law
def a_reader_in_a_crowd_sees_whole_records_only() -> Flow[None]:
    """L2: a record is never half of one write and half of another."""
    first = yield from claimed(claim_of()._replace(progress=b"0" * 5000))

    def writer() -> Flow[None]:
        seen = first
        for number in range(1, 40):
            blob = b"%d" % (number % 10) * 5000
            after = renewed(seen, NOW_MS + number)._replace(progress=blob, nonce=number)
            assert (yield from Swap(ID, seen.version, after)) is None
            seen = after

    def reader() -> Flow[None]:
        version = 0
        for _ in range(200):
            seen = yield from get(ID)
            assert seen is not None
            assert seen.version >= version, "a reader never goes back in time"
            version = seen.version
            number = version - NOW_MS
            assert seen.progress == b"%d" % (number % 10) * 5000
            assert number == 0 or (seen.nonce, seen.lease_until_ms) == (number, NOW_MS + number)

    yield from Together([writer(), reader(), reader()])
