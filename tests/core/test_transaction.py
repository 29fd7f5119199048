"""The flow in one transaction: what each swap of `lifecycle` becomes (L9)."""

import pytest

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import (
    Claim,
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
from coatcheck.core.record import GONE, IN_DOUBT, RUNNING, Swap, completed, failed
from coatcheck.core.transaction import Begin, Commit, Rollback, transactional
from coatcheck.errors import StepInDoubt, StepsChanged, StoreUnavailable

from .flows import NOW, REQUEST, end_of

POLICY = Policy(mode="transaction")
ANSWER = Outcome(OutcomeKind.COMPLETE, b"answer")
# An attempt at the same operation, in record mode, that died.
DEAD = first_attempt(REQUEST._replace(nonce=6), POLICY, GONE, NOW - POLICY.lease_ms)


def started(policy=POLICY, **options):
    flow = transactional(REQUEST, policy, **options)
    return flow, next(flow)


@pytest.mark.parametrize("response", [b"answer", None])
def test_a_new_key_begins_executes_and_commits(response):
    """L9."""
    flow, begin = started()
    assert begin == Begin(Claim(REQUEST.id, 0, begin.swap.record), NOW + POLICY.wait_ms, True)
    claim = begin.swap.record
    assert flow.send(None) == Execute(claim)
    commit = flow.send(Outcome(OutcomeKind.COMPLETE, response))
    assert commit == Commit(Swap(REQUEST.id, claim.version, completed(claim, response)))
    assert end_of(flow, None) == Executed(claim)


@pytest.mark.parametrize(("value", "error"), [(None, StepInDoubt), (b"\x02{}", StepsChanged)])
def test_nothing_runs_if_an_earlier_attempt_has_stored_steps(value, error):
    """L6, L7: the route was in record mode when that attempt died; here are no steps."""
    flow, _begin = started()
    flow.send(failed(noted(DEAD, NOTHING.with_step(Step("charge", 1, value)))))
    assert flow.send(None) == Rollback()
    with pytest.raises(error, match="charge"):
        flow.send(None)


@pytest.mark.parametrize("kind", [OutcomeKind.RELEASE, OutcomeKind.REJECT, OutcomeKind.IN_DOUBT])
def test_an_answer_that_is_not_kept_is_rolled_back(kind):
    """L9: also one that would be in doubt in record mode: it is known that nothing happened."""
    flow, begin = started()
    flow.send(None)
    assert flow.send(Outcome(kind)) == Rollback()
    assert end_of(flow, None) == Executed(begin.swap.record)


@pytest.mark.parametrize(
    ("status", "commit", "scope", "can_undo", "undo"),
    [
        (399, "success", "caller", True, False),
        (400, "success", "caller", True, True),
        (500, "success", "caller", True, True),  # kept by keep="all"
        (402, "kept", "caller", False, False),
        (402, "success", "", False, False),  # a function, whose result is a success
    ],
)
def test_a_refusal_that_is_kept_undoes_the_handlers_writes(status, commit, scope, can_undo, undo):
    """L9: to the savepoint after the claim, so that the row stays locked until the commit."""
    policy = Policy(mode="transaction", commit=commit)
    flow = transactional(REQUEST._replace(scope=scope), policy)
    begin = next(flow)
    assert begin.can_undo == can_undo
    flow.send(None)
    end = flow.send(Outcome(OutcomeKind.COMPLETE, b"refusal", status))
    claim = begin.swap.record
    assert end == Commit(Swap(claim.id, claim.version, completed(claim, b"refusal")), undo)
    assert end_of(flow, None) == Executed(claim)


@pytest.mark.parametrize("recovery", ["retry", "manual"])
def test_a_handler_that_raises_is_rolled_back_and_its_error_is_raised(recovery):
    flow, _ = started(Policy(mode="transaction", recovery=recovery))
    flow.send(None)
    assert flow.throw(ValueError("no")) == Rollback()
    with pytest.raises(ValueError, match="no"):
        flow.send(None)


def test_a_commit_that_fails_raises():
    flow, _ = started()
    flow.send(None)
    flow.send(ANSWER)
    with pytest.raises(StoreUnavailable):
        flow.throw(StoreUnavailable("gone", is_ambiguous=True))


def test_a_duplicate_gets_what_was_committed():
    flow, begin = started()
    done = completed(first_attempt(REQUEST, POLICY, GONE, NOW), b"answer")
    assert end_of(flow, done) == Replay(done, b"answer")
    assert begin.swap.expected == 0


def test_a_duplicate_that_waits_for_too_long_is_refused():
    flow, begin = started()
    held = begin.swap.record._replace(nonce=-1)
    watch = flow.send(held)
    assert watch == WaitForChange(REQUEST.id, held.version, NOW + POLICY.wait_ms)
    again = flow.send(Snapshot(GONE, NOW + POLICY.wait_ms))
    assert isinstance(again, Begin)
    answer = end_of(flow, held)
    assert isinstance(answer, Refuse)
    assert answer.problem.code == "in-progress"


def test_the_attempt_after_a_failed_one_is_claimed_in_the_transaction():
    flow, _ = started()
    begin = flow.send(failed(DEAD))
    assert isinstance(begin, Begin)
    assert begin.swap.expected == failed(DEAD).version
    assert begin.swap.record.state == RUNNING
    assert isinstance(flow.send(None), Execute)


def test_a_reconciled_answer_is_committed_and_an_unknown_one_is_rolled_back():
    policy = Policy(mode="transaction", reconcile=print, recovery="reconcile")
    for known, then in ((OutcomeKind.COMPLETE, Commit), (OutcomeKind.IN_DOUBT, Rollback)):
        flow, _ = started(policy)
        flow.send(DEAD)
        assert isinstance(flow.send(None), Reconcile)
        effect = flow.send(Outcome(known, b"answer"))
        assert isinstance(effect, then)
        answer = end_of(flow, None)
        assert isinstance(answer, Replay if known is OutcomeKind.COMPLETE else Refuse)


def test_marking_a_dead_attempt_in_doubt_needs_no_transaction():
    """L6."""
    flow, _ = started(Policy(mode="transaction", recovery="manual"))
    swap = flow.send(DEAD)
    assert isinstance(swap, Swap)
    assert swap.record.state == IN_DOUBT
    answer = end_of(flow, None)
    assert answer.problem.code == "outcome-unknown"


def test_a_caller_with_too_many_keys_begins_nothing():
    flow, watch = started(may_claim=False)
    assert isinstance(watch, WaitForChange)
    assert end_of(flow, Snapshot(GONE, NOW)).problem.code == "too-many-keys"
