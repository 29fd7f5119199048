"""Recovery: what the background ends without a client, and what an operator decides."""

import pytest

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import Execute, Executed, Reconcile, Snapshot, first_attempt
from coatcheck.core.policy import Policy
from coatcheck.core.progress import (
    NOTHING,
    Note,
    Resolution,
    Step,
    encoded,
    progress_of,
    with_failure,
)
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    GONE,
    IN_DOUBT,
    OPERATOR_MOVES,
    RUNNING,
    Swap,
    completed,
    failed,
    in_doubt,
    legal_moves,
)
from coatcheck.core.recovery import (
    DID_NOT_HAPPEN,
    DOUBLINGS_MAX,
    RESOLUTIONS_MAX,
    Resolved,
    Unchanged,
    ask_from_ms,
    recover,
    rerun,
    resolve,
)

from .flows import NOW, REQUEST, end_of, first_of

LEASE = 20_000
RETRY = Policy()
MANUAL = Policy(recovery="manual")
RECONCILE = Policy(recovery="reconcile", reconcile=lambda operation: None)
NOTED = encoded(NOTHING.with_note(Note(NOW - LEASE, 1, "about to charge")))
DEAD = first_attempt(REQUEST._replace(nonce=6, progress=NOTED), RETRY, GONE, NOW - LEASE)
ALIVE = DEAD._replace(lease_until_ms=NOW + 1)
DOUBT = in_doubt(DEAD)
HAPPENED = Outcome(OutcomeKind.COMPLETE, b"answer")
DID_NOT = Outcome(OutcomeKind.RELEASE)
UNKNOWN = Outcome(OutcomeKind.IN_DOUBT)

dead_or_in_doubt = pytest.mark.parametrize("current", [DEAD, DOUBT], ids=["dead", "in doubt"])


def recovered(current, policy):
    """A recovery, and its first effect."""
    flow = recover(Snapshot(current, NOW), REQUEST, policy)
    return flow, first_of(flow)


@pytest.mark.parametrize("policy", [RETRY, MANUAL, RECONCILE], ids=lambda policy: policy.recovery)
@pytest.mark.parametrize(
    "current",
    [ALIVE, completed(DEAD, b"answer"), failed(DEAD), DEAD._replace(window_until_ms=NOW), GONE],
    ids=["alive", "completed", "failed", "past its window", "gone"],
)
def test_an_operation_that_is_not_abandoned_is_left_alone(policy, current):
    """L6."""
    assert recovered(current, policy)[1] is None


@dead_or_in_doubt
def test_under_retry_an_operation_waits_for_its_client(current):
    """L6: only a client brings the request again."""
    assert recovered(current, RETRY)[1] is None


def test_under_manual_a_dead_attempt_is_marked_in_doubt():
    """L6."""
    flow, swap = recovered(DEAD, MANUAL)
    doubt = with_failure(DOUBT, "never finished", MANUAL.words)
    assert swap == Swap(DEAD.id, DEAD.version, doubt)
    assert legal_moves(DEAD, swap.record, NOW)
    assert end_of(flow, None) is OutcomeKind.IN_DOUBT
    assert recovered(DOUBT, MANUAL)[1] is None


@dead_or_in_doubt
@pytest.mark.parametrize(
    ("known", "state"),
    [(HAPPENED, COMPLETED), (DID_NOT, FAILED), (UNKNOWN, IN_DOUBT)],
    ids=["happened", "did not happen", "unknown"],
)
def test_under_reconcile_the_operation_ends_as_the_application_says(current, known, state):
    """L6: as the next attempt, so that only one process asks and a late one changes nothing."""
    flow, swap = recovered(current, RECONCILE)
    claim = swap.record
    assert swap == Swap(current.id, current.version, claim)
    assert legal_moves(current, claim, NOW)
    assert (claim.state, claim.attempt, claim.nonce) == (RUNNING, 2, REQUEST.nonce)
    assert claim.lease_until_ms == NOW + LEASE
    assert flow.send(None) == Reconcile(claim)
    end = flow.send(known)
    assert (end.expected, end.record.state) == (claim.version, state)
    assert end.record.response == known.response
    assert end_of(flow, None) is known.kind


def test_a_recovery_that_comes_too_late_changes_nothing():
    """L1, L5, L6: another process has ended the operation, asks, or took over meanwhile."""
    flow, _swap = recovered(DEAD, MANUAL)
    assert end_of(flow, completed(DEAD, b"answer")) is None
    flow, swap = recovered(DEAD, RECONCILE)
    theirs = swap.record._replace(nonce=8)
    assert end_of(flow, theirs) is None
    flow, swap = recovered(DEAD, RECONCILE)
    assert end_of(flow, None, HAPPENED, completed(theirs, b"theirs")) is None


@pytest.mark.parametrize(
    ("attempts", "minutes_since_first", "minutes"),
    [
        *(
            (n, 1_440, pause)
            for n, pause in ((1, 1), (2, 2), (3, 4), (7, 64), (8, 64), (1_000, 64))
        ),
        (2, 180, 2),  # a long first attempt postpones nothing
        (8, 1.5, 3),  # many retries of clients within a short time
        (8, 0, 1),
    ],
)
def test_the_more_attempts_there_were_the_later_the_next_question(
    attempts, minutes_since_first, minutes
):
    """L6: from a minute to about an hour, but at most twice the time since the first attempt."""
    assert DOUBLINGS_MAX == 6
    began_ms = DEAD.created_ms + round(minutes_since_first * 60_000)
    current = DEAD._replace(attempt=attempts, version=began_ms)
    assert ask_from_ms(current, 60_000) - began_ms == minutes * 60_000


# --- an operator decides --------------------------------------------------------------------

BY_ADA = Resolution(NOW, "happened", "ada", "it is in the bank's list")


def rerun_of(current, **options):
    flow = rerun(Snapshot(current, NOW), BY_ADA, REQUEST, MANUAL, **options)
    return flow, first_of(flow)


@dead_or_in_doubt
@pytest.mark.parametrize(
    ("outcome", "state"), [(HAPPENED, COMPLETED), (DID_NOT, FAILED)], ids=["happened", "did not"]
)
def test_a_decision_ends_the_operation_and_is_stored_with_it(current, outcome, state):
    """L6: in one swap, which is a legal move."""
    flow = resolve(Snapshot(current, NOW), outcome, BY_ADA, abandoned=True)
    swap = first_of(flow)
    record = swap.record
    assert swap == Swap(current.id, current.version, record)
    assert (record.state, record.response) == (state, outcome.response)
    assert legal_moves(current, record, NOW)
    assert progress_of(record).resolutions == (BY_ADA,)
    assert progress_of(record).notes == progress_of(current).notes
    assert end_of(flow, None) == Resolved(record)


@pytest.mark.parametrize(
    ("current", "abandoned"),
    [
        (completed(DEAD, b"other"), True),
        (failed(DEAD), True),
        (ALIVE, True),
        (DEAD, False),
        (GONE, True),
    ],
    ids=["completed", "failed", "alive", "not called abandoned", "gone"],
)
def test_an_operation_that_is_not_in_doubt_cannot_be_resolved(current, abandoned):
    """L6: an expired lease is enough only if the operator knows that the process is dead."""
    flow = resolve(Snapshot(current, NOW), HAPPENED, BY_ADA, abandoned=abandoned)
    assert first_of(flow) == Unchanged(current)
    assert rerun_of(current, abandoned=abandoned)[1] == Unchanged(current)


def test_steps_that_were_begun_may_run_again_unless_the_operation_happened():
    """L6, L7: otherwise the next attempt would be in doubt again; a step that is done stays."""
    done, begun = Step("reserve", 1, b"\x02{}"), Step("charge", 1)
    current = DOUBT._replace(progress=encoded(NOTHING.with_step(done).with_step(begun)))
    for outcome, steps in ((DID_NOT, (done,)), (HAPPENED, (done, begun))):
        swap = first_of(resolve(Snapshot(current, NOW), outcome, BY_ADA))
        assert progress_of(swap.record).steps == steps
    assert progress_of(rerun_of(current)[1].record).steps == (done,)


def decided(current, outcome):
    """*current*, after an operator decided so."""
    by = BY_ADA._replace(outcome="happened" if outcome is HAPPENED else DID_NOT_HAPPEN)
    return first_of(resolve(Snapshot(current, NOW), outcome, by)).record


@pytest.mark.parametrize("before", [HAPPENED, DID_NOT], ids=["happened", "did not"])
@pytest.mark.parametrize("after", [HAPPENED, DID_NOT], ids=["happened", "did not"])
def test_a_later_decision_corrects_an_earlier_one(before, after):
    """L6: both are kept; the moves are those that only a person orders."""
    current = decided(DOUBT, before)
    flow = resolve(Snapshot(current, NOW), after, BY_ADA._replace(by="eve"), correct=True)
    record = first_of(flow).record
    assert record.version > current.version
    moves = {(move.source, move.target) for move in OPERATOR_MOVES if move.name == "correct"}
    assert (current.state, record.state) in moves
    assert (record.state, record.response) == (
        (COMPLETED, after.response) if after is HAPPENED else (FAILED, None)
    )
    assert [resolution.by for resolution in progress_of(record).resolutions] == ["ada", "eve"]


def test_what_was_executed_cannot_be_corrected():
    """L6: not even if a person had decided before that it may run."""
    again = decided(DOUBT, DID_NOT)._replace(state=RUNNING)
    for current in (completed(DEAD, b"r"), failed(DEAD), DOUBT, completed(again, b"r"), GONE):
        flow = resolve(Snapshot(current, NOW), HAPPENED, BY_ADA, correct=True)
        assert first_of(flow) == Unchanged(current)


def test_a_decision_that_comes_too_late_changes_nothing():
    """L6: one of two operators decides."""
    theirs = completed(DOUBT, b"theirs")
    flow = resolve(Snapshot(DOUBT, NOW), DID_NOT, BY_ADA)
    assert end_of(flow, None, theirs) == Unchanged(theirs)
    flow, _swap = rerun_of(DOUBT)
    assert end_of(flow, theirs) == Unchanged(theirs)


def test_a_record_keeps_only_the_last_decisions():
    """L6: everything has a limit."""
    current = DOUBT
    for number in range(RESOLUTIONS_MAX + 1):
        by = BY_ADA._replace(why=f"run {number}")
        swap = first_of(rerun(Snapshot(current, NOW), by, REQUEST, MANUAL))
        current = in_doubt(swap.record)
    reasons = [resolution.why for resolution in progress_of(current).resolutions]
    assert reasons == [f"run {number}" for number in range(1, RESOLUTIONS_MAX + 1)]


@dead_or_in_doubt
def test_a_rerun_is_the_next_attempt(current):
    """L6: claimed, executed, completed."""
    flow, swap = rerun_of(current, abandoned=True)
    claim = swap.record
    assert swap == Swap(current.id, current.version, claim)
    assert legal_moves(current, claim, NOW)
    assert (claim.state, claim.attempt, claim.nonce) == (RUNNING, 2, REQUEST.nonce)
    assert claim.lease_until_ms == NOW + LEASE
    assert (claim.label, claim.key, claim.fingerprint) == (DEAD.label, DEAD.key, DEAD.fingerprint)
    assert progress_of(claim).resolutions == (BY_ADA,)
    assert flow.send(None) == Execute(claim)
    assert flow.send(HAPPENED) == Swap(claim.id, claim.version, completed(claim, b"answer"))
    assert end_of(flow, None) == Executed(claim)


@pytest.mark.parametrize(("outcome", "state"), [(UNKNOWN, IN_DOUBT), (DID_NOT, FAILED)], ids=str)
def test_a_rerun_that_fails_is_in_doubt_again_or_released(outcome, state):
    """L6."""
    flow, _swap = rerun_of(DOUBT)
    flow.send(None)
    assert flow.send(outcome).record.state == state


def test_a_rerun_that_lost_its_claim_changes_nothing():
    """L5: a run of an operator is fenced like any other."""
    flow, swap = rerun_of(DOUBT)
    theirs = completed(swap.record._replace(nonce=8, version=swap.record.version + 9), b"theirs")
    assert end_of(flow, None, HAPPENED, theirs) == Unchanged(theirs)


def test_a_rerun_that_took_longer_than_its_retention_is_done():
    """L6."""
    flow, swap = rerun_of(DOUBT)
    assert end_of(flow, None, HAPPENED, GONE) == Executed(swap.record)
