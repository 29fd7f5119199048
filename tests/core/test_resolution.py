"""A person's decision, stepped by hand: what it changes, what it writes down, and when it is late."""

import pytest

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import ClaimRequest, Execute, Executed, Snapshot, first_attempt
from coatcheck.core.policy import Policy
from coatcheck.core.progress import NOTHING, Note, Resolution, Step, encoded, progress_of
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
from coatcheck.core.resolution import RESOLUTIONS_MAX, Resolved, Stands, rerun, resolve

NOW = 1_700_000_000_000
LEASE = 60_000
POLICY = Policy(recovery="manual")
TICKET = ClaimRequest(b"i" * 16, b"f" * 16, NOW, 7, "POST /orders", "caller", "key")
NOTED = encoded(NOTHING.with_note(Note(NOW - LEASE, 1, "about to charge")))
RAN = first_attempt(TICKET._replace(nonce=6), POLICY, GONE, NOW - LEASE)._replace(progress=NOTED)
DOUBT = in_doubt(RAN)
ALIVE = RAN._replace(lease_until_ms=NOW + 1)
HAPPENED = Outcome(OutcomeKind.COMPLETE, b"answer")
DID_NOT = Outcome(OutcomeKind.RELEASE)
BY_ADA = Resolution(NOW, "happened", "ada", "it is in the bank's list")


def begun(flow):
    """The first swap of *flow*, or how it ended without one."""
    try:
        return next(flow)
    except StopIteration as stopped:
        return stopped.value


def end_of(flow, sent):
    with pytest.raises(StopIteration) as stopped:
        flow.send(sent)
    return stopped.value.value


@pytest.mark.parametrize("standing", [DOUBT, RAN], ids=["in doubt", "abandoned"])
@pytest.mark.parametrize(
    ("outcome", "state"), [(HAPPENED, COMPLETED), (DID_NOT, FAILED)], ids=["happened", "did not"]
)
def test_a_doubt_ends_as_a_person_says_and_the_record_says_who(standing, outcome, state):
    """L6: one swap, which is a legal move, and carries the decision."""
    flow = resolve(Snapshot(standing, NOW), outcome, BY_ADA, abandoned=True)
    swap = begun(flow)
    record = swap.record
    assert swap == Swap(standing.id, standing.version, record)
    assert (record.state, record.response) == (state, outcome.response)
    assert legal_moves(standing, record, NOW)
    assert progress_of(record).resolutions == (BY_ADA,)
    assert progress_of(record).notes == progress_of(standing).notes
    assert end_of(flow, None) == Resolved(record)


@pytest.mark.parametrize("decide", ["resolve", "rerun"])
@pytest.mark.parametrize(
    ("standing", "abandoned"),
    [
        (completed(RAN, b"other"), True),
        (failed(RAN), True),
        (ALIVE, True),
        (RAN, False),
        (GONE, True),
    ],
    ids=["completed", "failed", "alive", "not called abandoned", "gone"],
)
def test_what_is_not_in_doubt_is_not_decided_about(decide, standing, abandoned):
    """L6: a lease that is over is a doubt only where a person knows that its executor is dead."""
    seen = Snapshot(standing, NOW)
    flow = (
        resolve(seen, HAPPENED, BY_ADA, abandoned=abandoned)
        if decide == "resolve"
        else rerun(seen, BY_ADA, TICKET, POLICY, abandoned=abandoned)
    )
    assert begun(flow) == Stands(standing)


def test_a_person_who_says_it_did_not_happen_frees_the_steps_that_were_begun():
    """L6, L7: else they would be in doubt again at the next attempt; what is done stays done."""
    done, begun_only = Step("reserve", 1, b"\x02{}"), Step("charge", 1)
    noted = encoded(NOTHING.with_step(done).with_step(begun_only))
    seen = Snapshot(DOUBT._replace(progress=noted), NOW)
    freed = begun(resolve(seen, DID_NOT, BY_ADA)).record
    assert progress_of(freed).steps == (done,)
    again = begun(rerun(seen, BY_ADA, TICKET, POLICY)).record
    assert progress_of(again).steps == (done,)
    kept = begun(resolve(seen, HAPPENED, BY_ADA)).record
    assert progress_of(kept).steps == (done, begun_only)


def test_who_decides_too_late_changes_nothing_and_is_told_what_stands():
    """L6: of two people one decides."""
    first = completed(DOUBT, b"theirs")
    flow = resolve(Snapshot(DOUBT, NOW), DID_NOT, BY_ADA)
    begun(flow)
    assert end_of(flow, first) == Stands(first)
    flow = rerun(Snapshot(DOUBT, NOW), BY_ADA, TICKET, POLICY)
    begun(flow)
    assert end_of(flow, first) == Stands(first)


def test_a_record_remembers_the_last_decisions_only():
    """L6: everything has a limit."""
    standing = DOUBT
    for number in range(RESOLUTIONS_MAX + 1):
        by = BY_ADA._replace(why=f"run {number}")
        claim = begun(rerun(Snapshot(standing, NOW), by, TICKET, POLICY)).record
        standing = in_doubt(claim)
    reasons = [resolution.why for resolution in progress_of(standing).resolutions]
    assert reasons == [f"run {number}" for number in range(1, RESOLUTIONS_MAX + 1)]


@pytest.mark.parametrize("standing", [DOUBT, RAN], ids=["in doubt", "abandoned"])
def test_what_is_run_again_is_the_next_attempt(standing):
    """L6: claimed, executed, completed; a legal move, and another attempt than the one in doubt."""
    flow = rerun(Snapshot(standing, NOW), BY_ADA, TICKET, POLICY, abandoned=True)
    swap = begun(flow)
    claim = swap.record
    assert swap == Swap(standing.id, standing.version, claim)
    assert legal_moves(standing, claim, NOW)
    assert (claim.state, claim.attempt, claim.nonce) == (RUNNING, 2, TICKET.nonce)
    assert claim.lease_until_ms == NOW + LEASE
    assert (claim.label, claim.key, claim.fingerprint) == (RAN.label, RAN.key, RAN.fingerprint)
    assert progress_of(claim).resolutions == (BY_ADA,)
    assert flow.send(None) == Execute(claim)
    end = flow.send(HAPPENED)
    assert end == Swap(claim.id, claim.version, completed(claim, b"answer"))
    assert end_of(flow, None) == Executed(claim)


@pytest.mark.parametrize(
    ("outcome", "state"), [(Outcome(OutcomeKind.IN_DOUBT), IN_DOUBT), (DID_NOT, FAILED)], ids=str
)
def test_what_is_run_again_and_fails_is_in_doubt_again_or_given_back(outcome, state):
    """L6."""
    flow = rerun(Snapshot(DOUBT, NOW), BY_ADA, TICKET, POLICY)
    begun(flow)
    flow.send(None)
    assert flow.send(outcome).record.state == state


def test_a_run_that_lost_its_claim_is_told_what_stands():
    """L5: an operator's run is fenced like any other."""
    flow = rerun(Snapshot(DOUBT, NOW), BY_ADA, TICKET, POLICY)
    claim = begun(flow).record
    flow.send(None)
    flow.send(HAPPENED)
    theirs = completed(claim._replace(nonce=8, version=claim.version + 9), b"theirs")
    assert end_of(flow, theirs) == Stands(theirs)


def test_a_run_that_took_longer_than_its_whole_retention_is_done_even_so():
    flow = rerun(Snapshot(DOUBT, NOW), BY_ADA, TICKET, POLICY)
    claim = begun(flow).record
    flow.send(None)
    flow.send(HAPPENED)
    assert end_of(flow, GONE) == Executed(claim)
