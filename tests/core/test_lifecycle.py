"""The flow of a guarded request: every verdict and every way it can end."""

import zlib

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
    lifecycle,
    outcome_kind_of_error,
    release_of_claim,
    retry_after_s,
)
from coatcheck.core.policy import Policy
from coatcheck.core.progress import (
    NOTHING,
    Progress,
    Step,
    encoded,
    noted,
    progress_of,
    with_failure,
)
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
    renewed,
)
from coatcheck.errors import (
    ClaimLost,
    Resumable,
    StepInDoubt,
    StoreUnavailable,
    Uncertain,
    Unreadable,
)
from coatcheck.operation import Operation

from .flows import NOW, REQUEST, end_of

LEASE = 20_000
DAY = 86_400_000
POLICY = Policy()
MANUAL = Policy(recovery="manual")
RECONCILE = Policy(recovery="reconcile", reconcile=print)
ANSWER = Outcome(OutcomeKind.COMPLETE, b"answer")
# The same operation, a while ago, in another process.
EARLIER = REQUEST._replace(nonce=6, now_ms=NOW - 1_000)
FIRST = first_attempt(EARLIER, POLICY, GONE, EARLIER.now_ms)
DEAD = first_attempt(EARLIER._replace(now_ms=NOW - LEASE), POLICY, GONE, NOW - LEASE)
DONE = completed(FIRST, b"answer")


def started(policy=POLICY, request=REQUEST, **options):
    flow = lifecycle(request, policy, **options)
    return flow, next(flow)


def refused(answer):
    assert isinstance(answer, Refuse)
    return answer.problem.code, answer.problem.status


def met(current, policy=POLICY, request=REQUEST):
    """What the flow does next if its claim conflicts with *current*."""
    flow, swap = started(policy, request)
    assert swap.expected == 0
    try:
        return flow, flow.send(current)
    except StopIteration as stopped:
        return flow, stopped.value


def test_a_new_key_is_claimed_executed_and_completed():
    """L1, L2: one swap to claim, one to complete."""
    flow, claim = started()
    assert claim == Claim(REQUEST.id, 0, claim.record)
    assert claim.record.lease_until_ms == NOW + LEASE
    assert claim.record.window_until_ms == NOW + DAY
    execute = flow.send(None)
    assert execute == Execute(claim.record)
    complete = flow.send(ANSWER)
    assert complete == Swap(REQUEST.id, claim.record.version, completed(claim.record, b"answer"))
    assert end_of(flow, None) == Executed(claim.record)


def test_a_rejected_retry_does_not_free_the_key_for_another_request():
    """F1: the attempt before it may have had an effect, which belongs to its own request."""
    flow, swap = met(failed(FIRST))
    assert isinstance(flow.send(None), Execute)
    released = flow.send(Outcome(OutcomeKind.REJECT)).record
    assert (released.attempt, released.fingerprint) == (2, REQUEST.fingerprint)
    assert swap.record.attempt == 2


def test_an_attempt_that_was_ended_before_its_request_knew_of_it_is_followed_by_the_next():
    """L5, L6: the answer to its claim was lost, and an operator has settled it meanwhile."""
    flow, second = met(failed(FIRST))
    third = flow.send(failed(second.record))
    assert (second.record.attempt, third.record.attempt) == (2, 3)
    assert flow.send(None) == Execute(third.record)


@pytest.mark.parametrize(
    ("kind", "fingerprint"),
    [(OutcomeKind.REJECT, b""), (OutcomeKind.RELEASE, REQUEST.fingerprint)],
)
def test_a_key_stays_free_while_every_attempt_is_rejected(kind, fingerprint):
    """L4: once a handler has run, the key belongs to its request."""
    flow, _ = met(failed(FIRST)._replace(fingerprint=b""))
    assert isinstance(flow.send(None), Execute)
    released = flow.send(Outcome(kind)).record
    assert (released.attempt, released.fingerprint) == (2, fingerprint)


def test_a_rejected_request_that_took_a_step_keeps_its_key():
    """F1, L7: otherwise another request would get the results of its steps."""
    flow, _ = started()
    claim = flow.send(None).claim
    lost = flow.send(Outcome(OutcomeKind.REJECT))
    assert lost.record.fingerprint == b""
    released = flow.send(noted(claim, Progress(steps=(Step("charge", 1, b"\x02{}"),)))).record
    assert (released.state, released.fingerprint) == (FAILED, REQUEST.fingerprint)


@pytest.mark.parametrize(
    ("outcome", "state", "fingerprint"),
    [
        (Outcome(OutcomeKind.COMPLETE, None), COMPLETED, REQUEST.fingerprint),
        (Outcome(OutcomeKind.RELEASE), FAILED, REQUEST.fingerprint),
        (Outcome(OutcomeKind.REJECT), FAILED, b""),
        (Outcome(OutcomeKind.IN_DOUBT), IN_DOUBT, REQUEST.fingerprint),
    ],
)
def test_the_outcome_decides_the_state_of_the_record(outcome, state, fingerprint):
    """L4."""
    flow, _ = started()
    flow.send(None)
    swap = flow.send(outcome)
    assert (swap.record.state, swap.record.fingerprint) == (state, fingerprint)


@pytest.mark.parametrize(
    ("policy", "error", "state"),
    [
        (POLICY, ZeroDivisionError(), FAILED),
        (MANUAL, ZeroDivisionError(), IN_DOUBT),
        (MANUAL, Resumable("again"), FAILED),
        (POLICY, StepInDoubt("charge"), IN_DOUBT),
        (POLICY, Uncertain("the provider did not answer"), IN_DOUBT),
    ],
)
def test_an_error_releases_the_claim_or_leaves_it_in_doubt(policy, error, state):
    """L4, L6."""
    flow, claim = started(policy)
    flow.send(None)
    swap = flow.throw(error)
    assert (swap.expected, swap.record.state) == (claim.record.version, state)
    with pytest.raises(type(error)):
        flow.send(None)


def test_the_error_of_the_handler_is_raised_even_if_the_store_is_down():
    """L4."""
    flow, _ = started()
    flow.send(None)
    flow.throw(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        flow.throw(StoreUnavailable("down"))


def test_a_completed_record_is_replayed():
    """L2."""
    assert met(DONE)[1] == Replay(DONE, b"answer")


def test_a_completed_record_without_its_response_is_not_executed_again():
    """L12."""
    assert refused(met(completed(FIRST, None))[1]) == ("result-unavailable", 409)


@pytest.mark.parametrize("mark", [b"\x04", b"\xa5"], ids=["compressed, damaged", "encrypted"])
def test_a_response_that_cannot_be_read_is_neither_sent_nor_made_again(mark):
    """X1."""
    assert refused(met(completed(FIRST, mark + b"sealed"))[1]) == ("result-unavailable", 409)


def test_an_attempt_that_cannot_read_the_stored_steps_does_not_begin():
    """X1, L7: an engine without a key ring, beside others that have one."""
    with pytest.raises(Unreadable):
        met(failed(FIRST)._replace(progress=b"\xa5sealed"))


def test_a_compressed_response_is_replayed():
    """X1, L2: also by an engine that does not compress."""
    current = completed(FIRST, b"\x04" + zlib.compress(b"answer"))
    assert met(current)[1] == Replay(current, b"answer")


@pytest.mark.parametrize("current", [FIRST, DEAD, DONE, failed(FIRST), in_doubt(FIRST)])
def test_another_request_is_refused_in_every_state(current):
    """F1."""
    other = REQUEST._replace(fingerprint=b"g" * 16)
    assert refused(met(current, request=other)[1]) == ("key-reused", 422)
    assert refused(met(current, Policy(mismatch=409), other)[1]) == ("key-reused", 409)


@pytest.mark.parametrize(
    ("scope", "sentence"),
    [("caller", "(the path and one of the headers differ)"), ("", "(the arguments differ)")],
    ids=["request", "function"],
)
def test_a_refusal_names_what_differs(scope, sentence):
    """F1: a function has arguments and nothing else."""
    other = REQUEST._replace(fingerprint=b"g" * 13 + b"fgf", scope=scope)
    assert sentence in met(FIRST, request=other)[1].problem.detail


def never_finished(claim, policy):
    """In doubt, with what operators read about it."""
    return with_failure(in_doubt(claim), "never finished", policy.words)


def test_an_attempt_that_cannot_be_read_is_marked_in_doubt_as_it_is():
    """L6, X1: encrypted or damaged, it may still not run again."""
    for progress in (b"\x03sealed", b"damaged"):
        dead = DEAD._replace(progress=progress)
        assert met(dead, MANUAL)[1].record == in_doubt(dead)


# The request of FIRST again, by a client that has a session now.
IN_SESSION = REQUEST._replace(fingerprint=b"s" * 16, without_session=REQUEST.fingerprint)


def test_a_session_that_came_later_may_read_and_go_on():
    """S4: what runs in the session is then bound to it, and not shown to requests without it."""
    assert met(DONE, request=IN_SESSION)[1] == Replay(DONE, b"answer")
    assert met(FIRST, request=IN_SESSION)[1].version == FIRST.version  # it waits
    assert refused(met(in_doubt(FIRST), request=IN_SESSION)[1]) == ("outcome-unknown", 409)
    assert met(DEAD, MANUAL, IN_SESSION)[1].record == never_finished(DEAD, MANUAL)
    for current in (failed(FIRST), DEAD):
        claim = met(current, request=IN_SESSION)[1].record
        assert (claim.attempt, claim.fingerprint) == (2, IN_SESSION.fingerprint)
        assert refused(met(failed(claim))[1]) == ("key-reused", 422)
        # The keys of downstream calls stay what they were.
        assert Operation(claim).derive("charge") == Operation(current).derive("charge")
        again = met(failed(claim), request=IN_SESSION)[1].record
        assert Operation(again).derive("charge") == Operation(current).derive("charge")
    other = DONE._replace(fingerprint=b"g" * 16)
    assert refused(met(other, request=IN_SESSION)[1]) == ("key-reused", 422)


def test_a_rejected_request_may_be_corrected():
    """L4, S-50."""
    corrected = REQUEST._replace(fingerprint=b"g" * 16)
    _, swap = met(failed(FIRST)._replace(fingerprint=b""), request=corrected)
    assert swap.record.fingerprint == b"g" * 16
    assert swap.record.attempt == 2


def test_a_running_attempt_is_waited_for_and_then_replayed():
    """L3."""
    flow, watch = met(FIRST)
    assert watch == WaitForChange(REQUEST.id, FIRST.version, NOW + 2_000)
    assert end_of(flow, Snapshot(DONE, NOW + 500)) == Replay(DONE, b"answer")


def test_a_waiter_gets_the_answer_although_the_window_ended_meanwhile():
    """L1, L3: it came before that end."""
    running = FIRST._replace(window_until_ms=NOW + 1)
    flow, watch = met(running)
    assert isinstance(watch, WaitForChange)
    done = completed(running, b"answer")
    assert end_of(flow, Snapshot(done, NOW + 500)) == Replay(done, b"answer")


def test_a_waiter_that_came_after_the_window_begins_a_new_generation():
    """T2: when the attempt that was still running has ended."""
    running = FIRST._replace(window_until_ms=NOW)
    flow, watch = met(running)
    assert isinstance(watch, WaitForChange)
    swap = flow.send(Snapshot(completed(running, b"answer"), NOW + 500))
    assert (swap.expected, swap.record.attempt) == (running.version + 1, 1)
    # L5: its lease counts from now, and not from when the request came.
    assert swap.record.lease_until_ms == NOW + 500 + Policy().lease_ms


def test_a_waiter_that_finds_another_attempt_than_it_waited_for_looks_at_its_window():
    """T2: a later generation whose window is over as well."""
    flow, _ = met(FIRST)
    other = DONE._replace(nonce=99, window_until_ms=NOW + 400)
    swap = flow.send(Snapshot(other, NOW + 500))
    assert (swap.expected, swap.record.attempt) == (other.version, 1)


def test_a_waiter_that_finds_another_request_is_refused():
    """F1: the fingerprint is checked again."""
    flow, _ = met(FIRST)
    other = DONE._replace(fingerprint=b"g" * 16)
    assert refused(end_of(flow, Snapshot(other, NOW + 500))) == ("key-reused", 422)


def test_a_waiter_is_refused_when_its_time_is_over():
    """L3."""
    flow, _ = met(FIRST)
    assert refused(end_of(flow, Snapshot(FIRST, NOW + 2_000))) == ("in-progress", 409)


@pytest.mark.parametrize(
    ("began_ms", "left_ms", "seconds"),
    [
        (0, 20_000, 1),
        (2_000, 18_000, 1),
        (2_002, 18_000, 2),
        (10_000, 10_000, 5),
        (13_300, 6_700, 7),
        (16_000, 4_000, 4),
        (19_900, 100, 1),
        (600_000, 14_000, 14),  # renewed many times
        (600_000, 13_001, 14),
        (20_000, 0, 1),
        (30_000, -10_000, 1),  # an attempt that lost its claim meets a record that has ended
        (-5_000, 20_000, 1),  # written by a clock that is ahead
    ],
)
def test_a_client_asks_later_the_longer_the_operation_runs(began_ms, left_ms, seconds):
    """L3: half of the time so far, not past the end of the lease, and a second at least."""
    current = FIRST._replace(created_ms=NOW - began_ms, lease_until_ms=NOW + left_ms)
    assert retry_after_s(current, NOW) == seconds


def test_the_refusal_of_a_waiter_says_when_to_ask_again():
    """L3."""
    flow, _ = met(FIRST)
    refusal = end_of(flow, Snapshot(FIRST, NOW + 5_000)).problem
    assert refusal.retry_after_s == 3
    assert refusal.detail == (
        "the operation with key key was started 6.0 s ago and has not answered yet; retry after "
        "3 s with the same key"
    )


def test_a_waiter_waits_no_longer_than_the_lease():
    """L5."""
    short = FIRST._replace(lease_until_ms=NOW + 300)
    flow, watch = met(short)
    assert watch.until_ms == NOW + 300
    swap = flow.send(Snapshot(short, NOW + 300))
    assert (swap.expected, swap.record.attempt) == (short.version, 2)


def test_one_waiter_too_many_is_refused():
    """X2."""
    flow, _ = met(FIRST)
    assert refused(end_of(flow, None)) == ("too-many-waiting", 429)


def test_a_policy_may_refuse_at_once():
    """L3."""
    refusal = met(FIRST, Policy(in_flight="409"))[1]
    assert refused(refusal) == ("in-progress", 409)
    assert refusal.record == FIRST  # for which the client can poll


def test_the_next_attempt_takes_over_from_a_dead_one():
    """L5."""
    flow, swap = met(DEAD)
    assert swap.expected == DEAD.version
    assert swap.record.attempt == 2
    assert swap.record.version > DEAD.version
    assert swap.record.created_ms == DEAD.created_ms
    assert flow.send(None) == Execute(swap.record)


@pytest.mark.parametrize("policy", [POLICY, MANUAL], ids=["takes over", "marks in doubt"])
def test_a_process_that_loses_a_swap_answers_from_the_record_that_won(policy):
    """L1, L5."""
    flow, swap = met(DEAD, policy)
    winner = completed(swap.record._replace(nonce=99), b"other")
    assert end_of(flow, winner) == Replay(winner, b"other")


def test_under_manual_a_dead_attempt_is_marked_in_doubt():
    """L6."""
    flow, swap = met(DEAD, MANUAL)
    assert swap.record == never_finished(DEAD, MANUAL)
    assert refused(end_of(flow, None)) == ("outcome-unknown", 409)
    for policy in (MANUAL, POLICY):
        assert refused(met(in_doubt(FIRST), policy)[1]) == ("outcome-unknown", 409)


@pytest.mark.parametrize("current", [DEAD, in_doubt(FIRST)])
def test_under_reconcile_the_application_is_asked_what_a_dead_attempt_did(current):
    """L6."""
    flow, swap = met(current, RECONCILE)
    assert flow.send(None) == Reconcile(swap.record)
    complete = flow.send(ANSWER)
    assert complete.record == completed(swap.record, b"answer")
    assert end_of(flow, None).response == b"answer"


def test_an_operation_that_did_not_happen_is_executed():
    """L6."""
    flow, swap = met(DEAD, RECONCILE)
    flow.send(None)
    assert flow.send(Outcome(OutcomeKind.RELEASE)) == Execute(swap.record)


def test_an_operation_with_an_unknown_outcome_stays_in_doubt():
    """L6."""
    flow, swap = met(DEAD, RECONCILE)
    flow.send(None)
    assert flow.send(Outcome(OutcomeKind.IN_DOUBT)).record == in_doubt(swap.record)
    assert refused(end_of(flow, None)) == ("outcome-unknown", 409)


def test_a_reconciliation_that_lost_its_claim_answers_from_the_record_that_won():
    """L5."""
    flow, _ = met(DEAD, RECONCILE)
    assert end_of(flow, None, Outcome(OutcomeKind.COMPLETE, b"known"), DONE) == Replay(
        DONE, b"answer"
    )


def test_a_failed_attempt_is_followed_by_the_next():
    """L4."""
    _, swap = met(failed(FIRST))
    assert swap.expected == failed(FIRST).version
    assert (swap.record.attempt, swap.record.state) == (2, RUNNING)


def test_a_key_past_its_window_begins_a_new_generation():
    """T2."""
    old = DONE._replace(window_until_ms=NOW)
    _, swap = met(old)
    assert (swap.expected, swap.record.attempt, swap.record.created_ms) == (old.version, 1, NOW)
    assert swap.record.version > old.version


@pytest.mark.parametrize("status", [409, 429])
def test_a_late_retry_may_be_refused(status):
    """T2."""
    policy = Policy(on_expired="refuse", expired_status=status)
    old = DONE._replace(window_until_ms=NOW)
    assert refused(met(old, policy)[1]) == ("key-expired", status)


def test_a_late_retry_is_refused_no_longer_than_its_retention():
    """T2: then the key is free, swept or not."""
    policy = Policy(on_expired="refuse")
    old = DONE._replace(window_until_ms=NOW - 10, expires_ms=NOW + 1)
    assert refused(met(old, policy)[1]) == ("key-expired", 409)
    _, swap = met(old._replace(expires_ms=NOW), policy)
    assert (swap.expected, swap.record.created_ms) == (old.version, NOW)


def test_a_record_that_was_swept_during_the_wait_is_claimed_again():
    """T3."""
    flow, _ = met(FIRST)
    swap = flow.send(Snapshot(GONE, NOW + 100))
    assert (swap.expected, swap.record.attempt) == (0, 1)


def test_our_own_renewal_does_not_make_the_completion_lose():
    """L5."""
    flow, claim = started()
    flow.send(None)
    flow.send(ANSWER)
    ours = renewed(claim.record, NOW + 2 * LEASE)
    again = flow.send(ours)
    assert again == Swap(REQUEST.id, ours.version, completed(ours, b"answer"))
    assert isinstance(end_of(flow, None), Executed)


def ended_against(current):
    """The answer of an attempt that finds *current* when it completes."""
    flow, _ = started()
    return end_of(flow, None, Outcome(OutcomeKind.COMPLETE, b"late"), current)


@pytest.mark.parametrize(
    ("current", "code"),
    [
        (FIRST, "in-progress"),
        (failed(FIRST), "in-progress"),
        (in_doubt(FIRST), "outcome-unknown"),
        (FIRST._replace(fingerprint=b"g" * 16), "key-reused"),
        (DONE._replace(window_until_ms=NOW), "in-progress"),
    ],
    ids=["running", "failed", "in doubt", "another request", "past its window"],
)
def test_an_attempt_that_lost_its_claim_writes_nothing(current, code):
    """L5, F1: and claims nothing."""
    assert refused(ended_against(current))[0] == code


def test_an_attempt_that_lost_its_claim_gets_the_answer_that_won():
    """L5."""
    assert ended_against(DONE) == Replay(DONE, b"answer")


def test_an_attempt_that_ran_longer_than_its_retention_gets_its_own_answer():
    """T3."""
    assert isinstance(ended_against(GONE), Executed)


def test_a_caller_with_too_many_keys_may_only_retry_known_ones():
    """X2."""
    flow, watch = started(may_claim=False)
    assert watch == WaitForChange(REQUEST.id, 0, NOW)
    assert refused(end_of(flow, Snapshot(GONE, NOW))) == ("too-many-keys", 429)
    flow, _ = started(may_claim=False)
    assert end_of(flow, Snapshot(DONE, NOW)) == Replay(DONE, b"answer")


def test_an_attempt_that_was_marked_in_doubt_but_lives_completes():
    """L5, L6: its lease had expired, but it knows what it did."""
    flow, claim = started(MANUAL)
    flow.send(None)
    flow.send(ANSWER)
    doubt = in_doubt(claim.record)
    again = flow.send(doubt)
    assert again == Swap(REQUEST.id, doubt.version, completed(doubt, b"answer"))
    assert isinstance(end_of(flow, None), Executed)


def test_an_attempt_that_was_marked_in_doubt_and_does_not_know_either_writes_nothing():
    """L6."""
    flow, claim = started(MANUAL)
    doubt = in_doubt(claim.record)
    assert isinstance(end_of(flow, None, Outcome(OutcomeKind.IN_DOUBT), doubt), Executed)


# --- claims that no process is left to execute --------------------------------------------------


def test_a_claim_that_was_never_executed_is_free_for_any_request():
    """L5."""
    _, claim = started()
    release = release_of_claim(claim)
    assert (release.expected, release.record.state) == (claim.record.version, FAILED)
    assert release.record.fingerprint == b""


@pytest.mark.parametrize(
    ("current", "policy", "state", "fingerprint"),
    [
        (failed(FIRST), POLICY, FAILED, REQUEST.fingerprint),
        (failed(FIRST)._replace(fingerprint=b""), POLICY, FAILED, b""),
        (DEAD, POLICY, FAILED, REQUEST.fingerprint),
        (DEAD, RECONCILE, IN_DOUBT, REQUEST.fingerprint),
        (in_doubt(FIRST), RECONCILE, IN_DOUBT, REQUEST.fingerprint),
        (DONE._replace(window_until_ms=NOW), POLICY, FAILED, b""),
    ],
    ids=["failed", "rejected", "dead", "dead, reconcile", "in doubt, reconcile", "expired"],
)
def test_the_attempt_before_it_is_still_to_be_reconciled(current, policy, state, fingerprint):
    """L5, L6."""
    _, claim = met(current, policy)
    release = release_of_claim(claim)
    assert (release.expected, release.record.state) == (claim.record.version, state)
    assert release.record.fingerprint == fingerprint


# --- attempts_max: no further attempt begins ----------------------------------------------------

TWICE = Policy(attempts_max=2)
SECOND = FIRST._replace(attempt=2)
RECONCILERS = {"retry": None, "reconcile": print}


def test_the_last_attempt_that_is_allowed_still_runs():
    """L6."""
    released = failed(FIRST)
    flow, claim = met(released, TWICE)
    assert claim.record.attempt == 2
    assert flow.send(None) == Execute(claim.record)


def test_after_the_last_attempt_has_failed_every_retry_is_refused():
    """L6, K3."""
    _, answer = met(failed(SECOND), TWICE)
    assert refused(answer) == ("too-many-attempts", 409)
    assert "all 2 attempts have failed" in answer.problem.detail
    assert met(failed(SECOND))[1].record.attempt == 3  # without a limit


def test_refusals_before_the_handler_began_do_not_reach_the_limit():
    """L4, L6: nothing has run, so a corrected request may follow."""
    unbound = failed(SECOND)._replace(fingerprint=b"")
    flow, claim = met(unbound, TWICE)
    assert flow.send(None) == Execute(claim.record)


def test_a_limit_counts_the_attempts_of_one_generation():
    """T2: after the window the key is new."""
    late = REQUEST._replace(now_ms=NOW + 2 * DAY)
    _, claim = met(failed(SECOND), TWICE, late)
    assert (claim.record.attempt, claim.record.created_ms) == (1, late.now_ms)


@pytest.mark.parametrize("recovery", ["retry", "reconcile"])
def test_if_the_last_attempt_died_it_is_in_doubt(recovery):
    """L6: whether it did its work is not known, and nothing may run again."""
    policy = Policy(attempts_max=2, recovery=recovery, reconcile=RECONCILERS[recovery])
    dead = DEAD._replace(attempt=2)
    flow, swap = met(dead, policy)
    assert swap == Swap(dead.id, dead.version, never_finished(dead, policy))
    assert refused(end_of(flow, None)) == ("outcome-unknown", 409)


def test_an_operation_in_doubt_after_its_last_attempt_is_not_reconciled():
    """L6: that would be another attempt."""
    doubt = in_doubt(SECOND)
    policy = Policy(attempts_max=2, recovery="reconcile", reconcile=print)
    _, answer = met(doubt, policy)
    assert refused(answer) == ("outcome-unknown", 409)
    _, claim = met(in_doubt(FIRST), policy)
    assert claim.took.asks


def test_a_duplicate_waits_for_the_last_attempt_and_gets_its_answer():
    """L2, L3."""
    flow, wait = met(SECOND, TWICE)
    assert isinstance(wait, WaitForChange)
    done = completed(SECOND, b"answer")
    assert end_of(flow, Snapshot(done, NOW)) == Replay(done, b"answer")


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [POLICY, MANUAL], ids=["retry", "manual"])
@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (Uncertain("a time-out"), ("IN_DOUBT", "IN_DOUBT")),
        (StepInDoubt("charge"), ("IN_DOUBT", "IN_DOUBT")),
        (Resumable("nothing was sent"), ("RELEASE", "RELEASE")),
        (ClaimLost("gone"), ("RELEASE", "IN_DOUBT")),
        (KeyError("any other"), ("RELEASE", "IN_DOUBT")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_decides_the_outcome(error, kinds, policy):
    """L5, L6: `Uncertain` is in doubt even if the policy would run it again."""
    expected = kinds[policy.recovery == "manual"]
    assert outcome_kind_of_error(error, policy) is OutcomeKind[expected]


# --- the input of a registered function ---------------------------------------------------------

WITH_INPUT = REQUEST._replace(progress=encoded(NOTHING._replace(input=b"\x02[1]")))


def test_the_input_is_stored_with_the_first_claim():
    """L7: before anything runs, so that any process can run it again."""
    _, claim = started(request=WITH_INPUT)
    assert progress_of(claim.record).input == b"\x02[1]"
    assert started()[1].record.progress is None


def test_a_later_attempt_keeps_the_input_of_the_first():
    """L7: its own request brings the same, but steps were written since."""
    first = first_attempt(WITH_INPUT._replace(now_ms=NOW - 1_000), POLICY, GONE, NOW - 1_000)
    done = Step("charge", 1, b"\x02{}")
    released = failed(noted(first, progress_of(first).with_step(done)))
    _, claim = met(released, request=WITH_INPUT)
    assert progress_of(claim.record) == Progress(steps=(done,), input=b"\x02[1]")


def test_a_new_generation_begins_with_the_input_of_its_own_request():
    """T2, L7."""
    late = WITH_INPUT._replace(now_ms=NOW + 2 * DAY)
    _, claim = met(DONE._replace(progress=encoded(Progress(steps=(Step("a", 1),)))), request=late)
    assert claim.record.progress == WITH_INPUT.progress


def test_without_the_store_a_request_runs_unguarded_if_its_policy_says_so():
    """D2: no effect follows the execution, so nothing is written."""
    flow, _ = started(Policy(on_outage="execute"))
    unguarded = flow.throw(StoreUnavailable("down"))
    assert isinstance(unguarded, Execute)
    assert (unguarded.claim.version, unguarded.claim.id) == (0, REQUEST.id)
    assert end_of(flow, ANSWER) == Executed(unguarded.claim)


def test_without_the_store_a_request_is_refused_by_default():
    """D2."""
    flow, _ = started()
    with pytest.raises(StoreUnavailable):
        flow.throw(StoreUnavailable("down"))


def test_a_duplicate_that_waits_when_the_store_goes_down_never_runs_unguarded():
    """D2: it is known that another attempt runs."""
    flow, effect = met(FIRST, Policy(on_outage="execute"))
    assert isinstance(effect, WaitForChange)
    with pytest.raises(StoreUnavailable):
        flow.throw(StoreUnavailable("down"))


def test_the_trace_context_of_an_execution_is_stored_with_its_answer():
    """O3: also on top of a renewal of our own; and only with a final answer."""
    flow = lifecycle(REQUEST, POLICY)
    claim = next(flow).record
    flow.send(None)
    write = flow.send(ANSWER._replace(trace="00-7-1-01"))
    assert progress_of(write.record).trace == "00-7-1-01"
    write = flow.send(renewed(claim, NOW + 1))
    assert progress_of(write.record).trace == "00-7-1-01"
    flow = lifecycle(REQUEST, POLICY)
    next(flow)
    flow.send(None)
    write = flow.send(Outcome(OutcomeKind.RELEASE, trace="00-7-1-01"))
    assert write.record.progress is None
