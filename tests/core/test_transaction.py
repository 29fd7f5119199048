"""The flow in one transaction, stepped by hand: what each swap of `lifecycle` becomes (L9)."""

import pytest

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import (
    Claim,
    ClaimRequest,
    Execute,
    Executed,
    Reconcile,
    Refuse,
    Replay,
    Snapshot,
    WaitForChange,
    first_attempt,
)
from coatcheck.core.policy import Policy
from coatcheck.core.progress import NOTHING, Step, noted
from coatcheck.core.record import COMPLETED, GONE, IN_DOUBT, RUNNING, Swap, completed, failed
from coatcheck.core.transaction import Begin, Commit, Rollback, transactional
from coatcheck.errors import StepInDoubt, StepsChanged, StoreUnavailable

NOW = 1_700_000_000_000
POLICY = Policy(mode="transaction")
TICKET = ClaimRequest(b"i" * 16, b"f" * 16, NOW, 7, "POST /orders", "caller", "key")
# The same operation by somebody who wrote it down before, in record mode, and died.
DEAD = first_attempt(TICKET._replace(nonce=6), POLICY, GONE, NOW - POLICY.lease_ms)


def begun(policy=POLICY, **options):
    flow = transactional(TICKET, policy, **options)
    return flow, next(flow)


def end_of(flow, sent):
    with pytest.raises(StopIteration) as stopped:
        flow.send(sent)
    return stopped.value.value


def test_a_new_key_begins_executes_and_commits():
    flow, begin = begun()
    assert begin == Begin(Claim(TICKET.id, 0, begin.swap.record), NOW + POLICY.wait_ms)
    claim = begin.swap.record
    assert flow.send(None) == Execute(claim)
    commit = flow.send(Outcome(OutcomeKind.COMPLETE, b"answer"))
    assert commit == Commit(Swap(TICKET.id, claim.version, completed(claim, b"answer")))
    assert end_of(flow, None) == Executed(claim)


@pytest.mark.parametrize(("value", "error"), [(None, StepInDoubt), (b"\x02{}", StepsChanged)])
def test_what_was_left_in_steps_is_not_forgotten_by_a_route_that_has_none(value, error):
    """L6, L7: it was in record mode when an attempt died, and nobody here can take a step."""
    flow, _begin = begun()
    flow.send(failed(noted(DEAD, NOTHING.with_step(Step("charge", 1, value)))))
    assert flow.send(None) == Rollback()
    with pytest.raises(error, match="charge"):
        flow.send(None)


@pytest.mark.parametrize("kind", [OutcomeKind.RELEASE, OutcomeKind.REJECT, OutcomeKind.IN_DOUBT])
def test_an_answer_that_is_not_kept_is_undone(kind):
    """Also where it would be parked without a transaction: nothing happened, and that is known."""
    flow, begin = begun()
    flow.send(None)
    assert flow.send(Outcome(kind)) == Rollback()
    assert end_of(flow, None) == Executed(begin.swap.record)


@pytest.mark.parametrize("recovery", ["retry", "manual"])
def test_a_handler_that_raises_is_undone_and_its_error_goes_on(recovery):
    flow, _ = begun(Policy(mode="transaction", recovery=recovery))
    flow.send(None)
    assert flow.throw(ValueError("no")) == Rollback()
    with pytest.raises(ValueError, match="no"):
        flow.send(None)


def test_a_commit_that_fails_is_no_answer():
    flow, _ = begun()
    flow.send(None)
    flow.send(Outcome(OutcomeKind.COMPLETE, b"answer"))
    with pytest.raises(StoreUnavailable):
        flow.throw(StoreUnavailable("gone", is_ambiguous=True))


def test_a_duplicate_gets_what_was_committed():
    flow, begin = begun()
    done = completed(first_attempt(TICKET, POLICY, GONE, NOW), b"answer")
    assert end_of(flow, done) == Replay(done, b"answer")
    assert begin.swap.expected == 0


def test_who_waits_in_vain_is_told_that_it_is_running():
    flow, begin = begun()
    held = begin.swap.record._replace(nonce=-1)
    watch = flow.send(held)
    assert watch == WaitForChange(TICKET.id, held.version, NOW + POLICY.wait_ms)
    again = flow.send(Snapshot(GONE, NOW + POLICY.wait_ms))
    assert isinstance(again, Begin)
    answer = end_of(flow, held)
    assert isinstance(answer, Refuse)
    assert answer.problem.code == "in-progress"


def test_an_attempt_that_failed_before_is_taken_over_in_the_transaction():
    flow, _ = begun()
    begin = flow.send(failed(DEAD))
    assert isinstance(begin, Begin)
    assert begin.swap.expected == failed(DEAD).version
    assert begin.swap.record.state == RUNNING
    assert isinstance(flow.send(None), Execute)


def test_a_reconciler_that_knows_is_committed_and_one_that_does_not_is_undone():
    policy = Policy(mode="transaction", reconcile=print, recovery="reconcile")
    for told, then in ((OutcomeKind.COMPLETE, Commit), (OutcomeKind.IN_DOUBT, Rollback)):
        flow, _ = begun(policy)
        flow.send(DEAD)
        assert isinstance(flow.send(None), Reconcile)
        effect = flow.send(Outcome(told, b"answer"))
        assert isinstance(effect, then)
        answer = end_of(flow, None)
        assert isinstance(answer, Replay if told is OutcomeKind.COMPLETE else Refuse)


def test_parking_another_attempt_is_a_write_of_its_own():
    """There is no transaction of ours that it could be part of."""
    flow, _ = begun(Policy(mode="transaction", recovery="manual"))
    park = flow.send(DEAD)
    assert isinstance(park, Swap)
    assert park.record.state == IN_DOUBT
    answer = end_of(flow, None)
    assert answer.problem.code == "outcome-unknown"


def test_a_caller_with_too_many_keys_begins_nothing():
    flow, watch = begun(may_claim=False)
    assert isinstance(watch, WaitForChange)
    assert end_of(flow, Snapshot(GONE, NOW)).problem.code == "too-many-keys"


def test_only_what_is_complete_is_ever_committed():
    flow, begin = begun()
    flow.send(None)
    commit = flow.send(Outcome(OutcomeKind.COMPLETE, None))
    assert commit.swap.record.state == COMPLETED
    assert commit.swap.record.response is None
    assert commit.swap.expected == begin.swap.record.version
