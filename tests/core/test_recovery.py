"""Recovery without a client, stepped by hand: what is left alone, parked, asked for and settled."""

import pytest

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import ClaimRequest, Reconcile, Snapshot, first_attempt
from coatcheck.core.policy import Policy
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    GONE,
    IN_DOUBT,
    RUNNING,
    Swap,
    completed,
    failed,
    in_doubt,
    legal_moves,
)
from coatcheck.core.recovery import DOUBLINGS_MAX, ask_from_ms, recover

NOW = 1_700_000_000_000
LEASE = 60_000
RETRY = Policy()
MANUAL = Policy(recovery="manual")
ASKING = Policy(recovery="reconcile", reconcile=lambda operation: None)
TICKET = ClaimRequest(b"i" * 16, b"f" * 16, NOW, 7, "POST /orders", "caller", "key")
DEAD = first_attempt(TICKET._replace(nonce=6), RETRY, GONE, NOW - LEASE)
ALIVE = DEAD._replace(lease_until_ms=NOW + 1)
OLD = DEAD._replace(window_until_ms=NOW)


def begun(standing, policy):
    """The first effect, or how it ended without one."""
    flow = recover(Snapshot(standing, NOW), TICKET, policy)
    try:
        return flow, next(flow)
    except StopIteration as stopped:
        return flow, stopped.value


def end_of(flow, sent):
    with pytest.raises(StopIteration) as stopped:
        flow.send(sent)
    return stopped.value.value


@pytest.mark.parametrize("policy", [RETRY, MANUAL, ASKING], ids=lambda policy: policy.recovery)
@pytest.mark.parametrize(
    "standing",
    [ALIVE, completed(DEAD, b"answer"), failed(DEAD), OLD, GONE],
    ids=["alive", "completed", "failed", "out of its window", "gone"],
)
def test_what_is_not_abandoned_is_left_alone(policy, standing):
    """L6: who executes, what has ended, and what a new life may begin with."""
    assert begun(standing, policy)[1] is None


@pytest.mark.parametrize("standing", [DEAD, in_doubt(DEAD)], ids=["dead", "in doubt"])
def test_what_may_simply_run_again_waits_for_its_retry(standing):
    """L6: nobody but a client brings the request."""
    assert begun(standing, RETRY)[1] is None


def test_under_manual_the_dead_are_parked_where_people_look():
    """L6."""
    flow, swap = begun(DEAD, MANUAL)
    assert swap == Swap(DEAD.id, DEAD.version, in_doubt(DEAD))
    assert legal_moves(DEAD, swap.record, NOW)
    assert end_of(flow, None) is OutcomeKind.IN_DOUBT
    assert begun(in_doubt(DEAD), MANUAL)[1] is None


def test_whoever_is_late_with_parking_leaves_what_stands():
    """L5."""
    flow, _swap = begun(DEAD, MANUAL)
    assert end_of(flow, completed(DEAD, b"answer")) is None


@pytest.mark.parametrize("standing", [DEAD, in_doubt(DEAD)], ids=["dead", "in doubt"])
@pytest.mark.parametrize(
    ("told", "state"),
    [
        (Outcome(OutcomeKind.COMPLETE, b"answer"), COMPLETED),
        (Outcome(OutcomeKind.RELEASE), FAILED),
        (Outcome(OutcomeKind.IN_DOUBT), IN_DOUBT),
    ],
    ids=["happened", "did not happen", "unknown"],
)
def test_the_application_is_asked_and_its_word_settles_it(standing, told, state):
    """L6: by the next attempt, so that no two ask at once, and who comes back late is fenced off."""
    flow, swap = begun(standing, ASKING)
    claim = swap.record
    assert swap == Swap(standing.id, standing.version, claim)
    assert legal_moves(standing, claim, NOW)
    assert (claim.state, claim.attempt, claim.nonce) == (RUNNING, 2, TICKET.nonce)
    assert claim.lease_until_ms == NOW + LEASE
    assert flow.send(None) == Reconcile(claim)
    end = flow.send(told)
    assert (end.expected, end.record.state) == (claim.version, state)
    assert end.record.response == told.response
    assert end_of(flow, None) is told.kind


def test_of_two_who_recover_one_asks():
    """L1, L6."""
    flow, swap = begun(DEAD, ASKING)
    assert end_of(flow, swap.record._replace(nonce=8)) is None


def test_a_question_that_took_too_long_settles_nothing():
    """L5: the claim was taken over while the application was thinking."""
    flow, swap = begun(DEAD, ASKING)
    flow.send(None)
    flow.send(Outcome(OutcomeKind.COMPLETE, b"answer"))
    assert end_of(flow, completed(swap.record._replace(nonce=8), b"theirs")) is None


def test_the_more_attempts_there_were_the_later_it_is_asked_again():
    """L6: a minute, two, four, and no more than about an hour; the same on every node."""
    late = DEAD._replace(version=DEAD.created_ms + 86_400_000)
    pauses = [
        ask_from_ms(late._replace(attempt=attempt), 60_000) - late.version
        for attempt in (1, 2, 3, DOUBLINGS_MAX + 1, DOUBLINGS_MAX + 2, 1_000)
    ]
    assert pauses == [60_000, 120_000, 240_000, 3_840_000, 3_840_000, 3_840_000]


def test_clients_that_retry_do_not_put_off_the_next_question():
    """L6: their attempts count, too, but nothing waits longer than twice as long as it is known."""
    asked_ms = 90_000
    retried = DEAD._replace(attempt=8, version=DEAD.created_ms + asked_ms)
    assert ask_from_ms(retried, 60_000) - retried.version == 2 * asked_ms
    at_once = DEAD._replace(attempt=8, version=DEAD.created_ms + 7)
    assert ask_from_ms(at_once, 60_000) - at_once.version == 60_000


def test_what_has_been_running_for_hours_is_asked_about_as_soon_as_anything_else():
    """L6: the age of the operation alone puts nothing off."""
    taken_over = DEAD._replace(attempt=2, version=DEAD.created_ms + 3 * 3_600_000)
    assert ask_from_ms(taken_over, 60_000) - taken_over.version == 120_000
