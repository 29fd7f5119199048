"""The flow of a guarded request, stepped by hand: every verdict and every way it can end."""

import zlib

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
    lifecycle,
    outcome_kind_of_error,
    release_of_claim,
)
from coatcheck.core.policy import Policy
from coatcheck.core.progress import NOTHING, Progress, Step, encoded, noted, progress_of
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

NOW = 1_700_000_000_000
LEASE = 60_000
DAY = 86_400_000
POLICY = Policy()
TICKET = ClaimRequest(b"i" * 16, b"f" * 16, NOW, 7, "POST /orders", "caller", "key")
# The same operation, a while ago, by somebody else.
EARLIER = TICKET._replace(nonce=6, now_ms=NOW - 1_000)
FIRST = first_attempt(EARLIER, POLICY, GONE, EARLIER.now_ms)
DEAD = first_attempt(EARLIER._replace(now_ms=NOW - LEASE), POLICY, GONE, NOW - LEASE)
DONE = completed(FIRST, b"answer")


def begun(policy=POLICY, request=TICKET, **options):
    flow = lifecycle(request, policy, **options)
    return flow, next(flow)


def end_of(flow, sent):
    with pytest.raises(StopIteration) as stopped:
        flow.send(sent)
    return stopped.value.value


def refused(answer):
    assert isinstance(answer, Refuse)
    return answer.problem.code, answer.problem.status


def met(standing, policy=POLICY, request=TICKET):
    """What the flow does next when its claim meets *standing*."""
    flow, swap = begun(policy, request)
    assert swap.expected == 0
    try:
        return flow, flow.send(standing)
    except StopIteration as stopped:
        return flow, stopped.value


def test_a_new_key_is_claimed_executed_and_completed():
    """L1, L2: one swap to claim, one to complete."""
    flow, claim = begun()
    assert claim == Claim(TICKET.id, 0, claim.record)
    assert claim.record.lease_until_ms == NOW + LEASE
    assert claim.record.window_until_ms == NOW + DAY
    execute = flow.send(None)
    assert execute == Execute(claim.record)
    complete = flow.send(Outcome(OutcomeKind.COMPLETE, b"answer"))
    assert complete == Swap(TICKET.id, claim.record.version, completed(claim.record, b"answer"))
    assert end_of(flow, None) == Executed(claim.record)


@pytest.mark.parametrize("recovery", ["retry", "manual"])
def test_an_error_goes_by_what_is_known_of_the_effect(recovery):
    """L6: whatever the policy is, where the handler or a step has said it."""
    for error, state in ((StepInDoubt("charge"), IN_DOUBT), (Resumable("again"), FAILED)):
        flow, _ = begun(Policy(recovery=recovery))
        flow.send(None)
        assert flow.throw(error).record.state == state


def test_a_refusal_at_the_door_forgets_only_what_the_first_attempt_asked_for():
    """F1: an attempt before this one may have had its effect, and that is its request's."""
    flow, swap = met(failed(FIRST))
    assert isinstance(flow.send(None), Execute)
    released = flow.send(Outcome(OutcomeKind.REJECT)).record
    assert (released.attempt, released.fingerprint) == (2, TICKET.fingerprint)
    assert swap.record.attempt == 2


def test_a_key_that_was_only_ever_refused_at_the_door_stays_free():
    """L4: however often; but what has run once under it has used it up."""
    refused_once = failed(FIRST)._replace(fingerprint=b"")
    flow, _ = met(refused_once)
    assert isinstance(flow.send(None), Execute)
    again = flow.send(Outcome(OutcomeKind.REJECT)).record
    assert (again.attempt, again.fingerprint) == (2, b"")
    flow, _ = met(refused_once)
    assert isinstance(flow.send(None), Execute)
    released = flow.send(Outcome(OutcomeKind.RELEASE)).record
    assert (released.attempt, released.fingerprint) == (2, TICKET.fingerprint)


def test_a_key_under_which_something_is_remembered_stays_that_requests():
    """F1, L7: or another request would get the results of its steps."""
    flow, _ = begun()
    claim = flow.send(None).claim
    lost = flow.send(Outcome(OutcomeKind.REJECT))
    assert lost.record.fingerprint == b""
    released = flow.send(noted(claim, Progress(steps=(Step("charge", 1, b"\x02{}"),)))).record
    assert (released.state, released.fingerprint) == (FAILED, TICKET.fingerprint)


@pytest.mark.parametrize(
    ("outcome", "state", "fingerprint"),
    [
        (Outcome(OutcomeKind.COMPLETE, None), COMPLETED, TICKET.fingerprint),
        (Outcome(OutcomeKind.RELEASE), FAILED, TICKET.fingerprint),
        (Outcome(OutcomeKind.REJECT), FAILED, b""),
        (Outcome(OutcomeKind.IN_DOUBT), IN_DOUBT, TICKET.fingerprint),
    ],
)
def test_an_ending_decides_the_state_of_the_record(outcome, state, fingerprint):
    """L4."""
    flow, _ = begun()
    flow.send(None)
    swap = flow.send(outcome)
    assert (swap.record.state, swap.record.fingerprint) == (state, fingerprint)


@pytest.mark.parametrize(
    ("policy", "state"), [(POLICY, FAILED), (Policy(recovery="manual"), IN_DOUBT)]
)
def test_an_exception_gives_the_claim_back_or_leaves_it_in_doubt(policy, state):
    """L4, L6."""
    flow, _ = begun(policy)
    flow.send(None)
    swap = flow.throw(ZeroDivisionError())
    assert swap.record.state == state
    with pytest.raises(ZeroDivisionError):
        flow.send(None)


def test_the_handlers_error_is_raised_even_if_it_cannot_be_written_down():
    flow, _ = begun()
    flow.send(None)
    flow.throw(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        flow.throw(StoreUnavailable("down"))


def test_a_completed_record_is_replayed():
    """L2."""
    assert met(DONE)[1] == Replay(DONE, b"answer")


def test_a_response_that_was_not_kept_is_said_to_have_happened():
    """L12."""
    assert refused(met(completed(FIRST, None))[1]) == ("result-unavailable", 409)


@pytest.mark.parametrize("mark", [b"\x04", b"\xa5"])
def test_a_response_that_only_others_can_open_is_not_sent_as_it_is(mark):
    """X1: nor is the work done again."""
    assert refused(met(completed(FIRST, mark + b"sealed"))[1]) == ("result-unavailable", 409)


def test_who_cannot_read_what_steps_remember_does_not_begin():
    """X1, L7: an engine without a ring, beside others that have one."""
    with pytest.raises(Unreadable):
        met(failed(FIRST)._replace(progress=b"\xa5sealed"))


def test_a_response_that_a_store_has_compressed_is_replayed():
    """X1, L2: by an engine that compresses nothing itself."""
    standing = completed(FIRST, b"\x04" + zlib.compress(b"answer"))
    assert met(standing)[1] == Replay(standing, b"answer")


@pytest.mark.parametrize("standing", [FIRST, DEAD, DONE, failed(FIRST), in_doubt(FIRST)])
def test_another_request_is_refused_in_every_state(standing):
    """F1."""
    other = TICKET._replace(fingerprint=b"g" * 16)
    assert refused(met(standing, request=other)[1]) == ("key-reused", 422)
    assert refused(met(standing, Policy(mismatch=409), other)[1]) == ("key-reused", 409)


def test_what_was_refused_at_the_door_may_be_corrected():
    corrected = TICKET._replace(fingerprint=b"g" * 16)
    _, swap = met(failed(FIRST)._replace(fingerprint=b""), request=corrected)
    assert swap.record.fingerprint == b"g" * 16
    assert swap.record.attempt == 2


def test_a_running_attempt_is_waited_for_and_then_replayed():
    """L3."""
    flow, watch = met(FIRST)
    assert watch == WaitForChange(TICKET.id, FIRST.version, NOW + 2_000)
    assert end_of(flow, Snapshot(DONE, NOW + 500)) == Replay(DONE, b"answer")


def test_a_waiter_that_wakes_to_another_request_is_refused():
    """F1: the fingerprint is checked again."""
    flow, _ = met(FIRST)
    other = DONE._replace(fingerprint=b"g" * 16)
    assert refused(end_of(flow, Snapshot(other, NOW + 500))) == ("key-reused", 422)


def test_a_waiter_gives_up_when_its_time_is_over():
    """L3: and has changed nothing."""
    flow, _ = met(FIRST)
    assert refused(end_of(flow, Snapshot(FIRST, NOW + 2_000))) == ("in-progress", 409)


def test_a_waiter_waits_no_longer_than_the_lease():
    """L5."""
    short = FIRST._replace(lease_until_ms=NOW + 300)
    flow, watch = met(short)
    assert watch.until_ms == NOW + 300
    swap = flow.send(Snapshot(short, NOW + 300))
    assert (swap.expected, swap.record.attempt) == (short.version, 2)


def test_a_full_line_is_refused():
    """X2."""
    flow, _ = met(FIRST)
    assert refused(end_of(flow, None)) == ("too-many-waiting", 429)


def test_a_policy_may_refuse_at_once():
    """L3."""
    refusal = met(FIRST, Policy(in_flight="409"))[1]
    assert refused(refusal) == ("in-progress", 409)
    assert refusal.record == FIRST  # which is what the client can ask after


def test_a_dead_attempt_is_taken_over_by_the_next():
    """L5."""
    flow, swap = met(DEAD)
    assert swap.expected == DEAD.version
    assert swap.record.attempt == 2
    assert swap.record.version > DEAD.version
    assert swap.record.created_ms == DEAD.created_ms
    assert flow.send(None) == Execute(swap.record)


def test_who_loses_the_take_over_follows_the_winner():
    """L1, L5."""
    flow, swap = met(DEAD)
    winner = completed(swap.record._replace(nonce=99), b"other")
    assert end_of(flow, winner) == Replay(winner, b"other")


def test_a_dead_attempt_is_parked_where_only_a_person_may_decide():
    """L6."""
    manual = Policy(recovery="manual")
    flow, swap = met(DEAD, manual)
    assert swap.record == in_doubt(DEAD)
    assert refused(end_of(flow, None)) == ("outcome-unknown", 409)
    assert refused(met(in_doubt(FIRST), manual)[1]) == ("outcome-unknown", 409)
    assert refused(met(in_doubt(FIRST))[1]) == ("outcome-unknown", 409)


def test_who_loses_the_parking_follows_the_winner():
    flow, _ = met(DEAD, Policy(recovery="manual"))
    assert end_of(flow, DONE) == Replay(DONE, b"answer")


ASKS = Policy(recovery="reconcile", reconcile=print)


@pytest.mark.parametrize("standing", [DEAD, in_doubt(FIRST)])
def test_the_application_is_asked_what_became_of_a_dead_attempt(standing):
    """L6."""
    flow, swap = met(standing, ASKS)
    assert flow.send(None) == Reconcile(swap.record)
    write_outcome = flow.send(Outcome(OutcomeKind.COMPLETE, b"told"))
    assert write_outcome.record == completed(swap.record, b"told")
    assert end_of(flow, None).response == b"told"


def test_what_did_not_happen_is_executed():
    """L6."""
    flow, swap = met(DEAD, ASKS)
    flow.send(None)
    assert flow.send(Outcome(OutcomeKind.RELEASE)) == Execute(swap.record)


def test_what_nobody_knows_stays_in_doubt():
    """L6."""
    flow, swap = met(DEAD, ASKS)
    flow.send(None)
    assert flow.send(Outcome(OutcomeKind.IN_DOUBT)).record == in_doubt(swap.record)
    assert refused(end_of(flow, None)) == ("outcome-unknown", 409)


def test_a_reconciler_that_was_overtaken_gives_the_surviving_answer():
    flow, _ = met(DEAD, ASKS)
    flow.send(None)
    flow.send(Outcome(OutcomeKind.COMPLETE, b"told"))
    assert end_of(flow, DONE) == Replay(DONE, b"answer")


def test_a_failed_attempt_is_followed_by_the_next():
    """L4."""
    _, swap = met(failed(FIRST))
    assert (swap.expected, swap.record.attempt, swap.record.state) == (
        failed(FIRST).version,
        2,
        RUNNING,
    )


def test_a_key_past_its_window_begins_a_new_life():
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
    """T2: the refusal lasts for the grace; then the key is free, swept or not."""
    policy = Policy(on_expired="refuse")
    old = DONE._replace(window_until_ms=NOW - 10, expires_ms=NOW + 1)
    assert refused(met(old, policy)[1]) == ("key-expired", 409)
    _, swap = met(old._replace(expires_ms=NOW), policy)
    assert (swap.expected, swap.record.created_ms) == (old.version, NOW)


def test_a_record_that_is_gone_when_looked_at_again_is_claimed_anew():
    """T3."""
    flow, _ = met(FIRST)
    swap = flow.send(Snapshot(GONE, NOW + 100))
    assert (swap.expected, swap.record.attempt) == (0, 1)


def test_a_renewal_of_our_own_does_not_make_the_completion_lose():
    """L5."""
    flow, claim = begun()
    flow.send(None)
    flow.send(Outcome(OutcomeKind.COMPLETE, b"answer"))
    ours = renewed(claim.record, NOW + 2 * LEASE)
    again = flow.send(ours)
    assert again == Swap(TICKET.id, ours.version, completed(ours, b"answer"))
    assert isinstance(end_of(flow, None), Executed)


def ended_against(standing):
    flow, _ = begun()
    flow.send(None)
    flow.send(Outcome(OutcomeKind.COMPLETE, b"late"))
    return end_of(flow, standing)


def test_a_zombie_gets_the_surviving_answer():
    """L5: and overwrites nothing."""
    assert ended_against(DONE) == Replay(DONE, b"answer")
    assert refused(ended_against(in_doubt(FIRST))) == ("outcome-unknown", 409)


@pytest.mark.parametrize("standing", [FIRST, failed(FIRST)])
def test_a_zombie_whose_successor_is_not_done_is_told_to_ask_again(standing):
    """L5."""
    assert refused(ended_against(standing)) == ("in-progress", 409)


def test_a_zombie_whose_key_is_in_use_for_another_request_is_told_so():
    """F1."""
    assert refused(ended_against(FIRST._replace(fingerprint=b"g" * 16))) == ("key-reused", 422)


def test_a_zombie_never_claims_a_new_life():
    old = DONE._replace(window_until_ms=NOW)
    assert refused(ended_against(old)) == ("in-progress", 409)


def test_who_outlived_its_whole_retention_still_gets_its_answer():
    assert isinstance(ended_against(GONE), Executed)


def test_a_caller_with_too_many_keys_may_only_use_one_it_knows():
    """X2."""
    flow, watch = begun(may_claim=False)
    assert watch == WaitForChange(TICKET.id, 0, NOW)
    assert refused(end_of(flow, Snapshot(GONE, NOW))) == ("too-many-keys", 429)
    flow, _ = begun(may_claim=False)
    assert end_of(flow, Snapshot(DONE, NOW)) == Replay(DONE, b"answer")


def test_who_was_parked_but_lived_ends_the_doubt():
    """L5, L6: its lease ran out and somebody parked it, but it knows what it did."""
    flow, claim = begun(Policy(recovery="manual"))
    flow.send(None)
    flow.send(Outcome(OutcomeKind.COMPLETE, b"answer"))
    parked = in_doubt(claim.record)
    again = flow.send(parked)
    assert again == Swap(TICKET.id, parked.version, completed(parked, b"answer"))
    assert isinstance(end_of(flow, None), Executed)


def test_who_was_parked_and_does_not_know_either_leaves_it_so():
    flow, claim = begun(Policy(recovery="manual"))
    flow.send(None)
    flow.send(Outcome(OutcomeKind.IN_DOUBT))
    assert isinstance(end_of(flow, in_doubt(claim.record)), Executed)


# --- nobody is left to execute ----------------------------------------------------------------


def test_what_is_claimed_and_never_executed_belongs_to_nobody():
    """L5: nothing ran, so any request may follow."""
    _, claim = begun()
    back = release_of_claim(claim)
    assert (back.expected, back.record.state) == (claim.record.version, FAILED)
    assert back.record.fingerprint == b""


@pytest.mark.parametrize(
    ("standing", "policy", "state", "fingerprint"),
    [
        (failed(FIRST), POLICY, FAILED, TICKET.fingerprint),
        (failed(FIRST)._replace(fingerprint=b""), POLICY, FAILED, b""),
        (DEAD, POLICY, FAILED, TICKET.fingerprint),
        (DEAD, ASKS, IN_DOUBT, TICKET.fingerprint),
        (in_doubt(FIRST), ASKS, IN_DOUBT, TICKET.fingerprint),
        (DONE._replace(window_until_ms=NOW), POLICY, FAILED, b""),
    ],
    ids=["failed", "refused at the door", "dead", "dead, asks", "in doubt, asks", "expired"],
)
def test_what_came_before_it_is_as_unclear_as_it_was(standing, policy, state, fingerprint):
    """L5, L6: what is to be asked is asked by whoever is next."""
    _, claim = met(standing, policy)
    back = release_of_claim(claim)
    assert (back.expected, back.record.state) == (claim.record.version, state)
    assert back.record.fingerprint == fingerprint


# --- attempts_max: no further attempt begins ----------------------------------------------------

TWICE = Policy(attempts_max=2)
SECOND = FIRST._replace(attempt=2)


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


def test_a_limit_counts_the_attempts_of_one_generation():
    """T2: after the window the key is new."""
    late = TICKET._replace(now_ms=NOW + 2 * DAY)
    _, claim = met(failed(SECOND), TWICE, late)
    assert (claim.record.attempt, claim.record.created_ms) == (1, late.now_ms)


@pytest.mark.parametrize("recovery", ["retry", "reconcile"])
def test_if_the_last_attempt_died_it_is_in_doubt(recovery):
    """L6: whether it did its work is not known, and nothing may run again."""
    policy = Policy(
        attempts_max=2, recovery=recovery, reconcile=print if recovery == "reconcile" else None
    )
    dead = DEAD._replace(attempt=2)
    flow, swap = met(dead, policy)
    assert swap == Swap(dead.id, dead.version, in_doubt(dead))
    assert refused(end_of(flow, None)) == ("outcome-unknown", 409)


def test_what_is_in_doubt_after_its_last_attempt_is_not_asked_for_again():
    """L6: asking would take another attempt."""
    doubt = in_doubt(SECOND)
    policy = Policy(attempts_max=2, recovery="reconcile", reconcile=print)
    _, answer = met(doubt, policy)
    assert refused(answer) == ("outcome-unknown", 409)
    _, claim = met(in_doubt(FIRST), policy)
    assert claim.took.asks


def test_a_running_last_attempt_is_waited_for_like_any_other():
    """L3."""
    _, wait = met(SECOND, TWICE)
    assert isinstance(wait, WaitForChange)


def test_a_completed_last_attempt_is_replayed():
    _, answer = met(completed(SECOND, b"answer"), TWICE)
    assert answer.response == b"answer"


# --- errors that say what is known --------------------------------------------------------------


@pytest.mark.parametrize("policy", [POLICY, Policy(recovery="manual")], ids=["retry", "manual"])
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
def test_an_error_says_what_becomes_of_the_claim(error, kinds, policy):
    """L5, L6: `Uncertain` is in doubt even if the policy would run it again."""
    expected = kinds[policy.recovery == "manual"]
    assert outcome_kind_of_error(error, policy) is OutcomeKind[expected]


def test_a_handler_that_raises_uncertain_leaves_its_claim_in_doubt():
    """L6."""
    flow, claim = begun()
    flow.send(None)
    end = flow.throw(Uncertain("the provider did not answer"))
    assert end == Swap(TICKET.id, claim.record.version, in_doubt(claim.record))
    with pytest.raises(Uncertain, match="the provider"):
        flow.send(None)


# --- the input of a registered function ---------------------------------------------------------

WITH_INPUT = TICKET._replace(progress=encoded(NOTHING._replace(input=b"\x02[1]")))


def test_the_input_is_stored_with_the_first_claim():
    """L7: before anything runs, so that any process can run it again."""
    _, claim = begun(request=WITH_INPUT)
    assert progress_of(claim.record).input == b"\x02[1]"
    assert begun()[1].record.progress is None


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
