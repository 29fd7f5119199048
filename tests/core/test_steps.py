"""Steps: what is written, when, and what it means for the next attempt."""

import pytest

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import first_attempt, next_attempt
from coatcheck.core.policy import Policy
from coatcheck.core.progress import (
    NOT_KEPT,
    NOTHING,
    PROGRESS_BYTES_MAX,
    STEP_BYTES_MAX,
    Note,
    Progress,
    Step,
    noted,
    progress_of,
)
from coatcheck.core.record import GONE, RUNNING, Swap, completed, renewed
from coatcheck.core.steps import (
    ALWAYS_MS,
    Probe,
    Run,
    StepPlan,
    again_until_ms,
    missing_steps,
    remember,
    take,
)
from coatcheck.errors import ClaimLost, Misconfigured, StepInDoubt, StepsChanged

from .flows import NOW, REQUEST, end_of

CLAIM = first_attempt(REQUEST, Policy(), GONE, NOW)
THEIRS = next_attempt(CLAIM, REQUEST._replace(nonce=8), Policy(), NOW)
RESULT = b"\x02{}"
DONE = Step("charge", 1, RESULT)
BEGUN = Step("charge", 1)
NO_RESULT = Step("charge", 1, NOT_KEPT)
PROBED = StepPlan("charge", has_probe=True)
ONCE = StepPlan("charge", at_most_once=True)


def claim_with(*steps):
    """A claim with *steps* of earlier attempts."""
    return noted(CLAIM, Progress(steps=steps))


def add_note(progress):
    return progress.with_note(Note(NOW, 1, "x"))


def probing(*steps):
    """The flow of a step with a probe, after the probe was called."""
    flow = take(claim_with(*steps), PROBED)
    assert next(flow) == Probe("charge")
    return flow


# --- writing --------------------------------------------------------------------------------


def test_a_change_is_one_swap():
    """L7."""
    flow = remember(CLAIM, add_note)
    swap = next(flow)
    assert swap == Swap(CLAIM.id, CLAIM.version, swap.record)
    assert end_of(flow, None) == swap.record
    assert swap.record.state == RUNNING


def test_a_change_is_repeated_on_top_of_a_renewal():
    """L5: the heartbeat and the handler write into the same claim."""
    flow = remember(CLAIM, add_note)
    next(flow)
    renewal = renewed(CLAIM, NOW + 90_000)
    again = flow.send(renewal)
    assert again.expected == renewal.version
    assert again.record.lease_until_ms == NOW + 90_000
    assert end_of(flow, None) == again.record


@pytest.mark.parametrize(
    ("current", "reason"),
    [
        (THEIRS, "another attempt"),
        (completed(THEIRS, RESULT), "another attempt"),
        (completed(CLAIM, RESULT), "final answer already"),
    ],
    ids=["taken over", "completed by another attempt", "answered"],
)
def test_an_attempt_that_has_lost_its_claim_cannot_write(current, reason):
    """L5, L7: nor can a background task of an attempt that has answered."""
    flow = remember(CLAIM, add_note)
    next(flow)
    with pytest.raises(ClaimLost, match=reason):
        flow.send(current)


def test_too_much_progress_is_refused_before_it_is_written():
    """X2."""
    note = Note(NOW, 1, "x" * PROGRESS_BYTES_MAX)
    with pytest.raises(Misconfigured, match="can be stored"):
        next(remember(CLAIM, lambda progress: progress.with_note(note)))


# --- one step -------------------------------------------------------------------------------


def test_a_step_runs_and_then_its_result_is_written():
    """L7: one write, because an attempt that dies in it may run it again."""
    flow = take(CLAIM, StepPlan("charge"))
    assert next(flow) == Run("charge")
    swap = flow.send(RESULT)
    assert progress_of(swap.record).steps == (DONE,)
    assert end_of(flow, None) == (swap.record, RESULT)


def test_a_step_that_is_done_neither_runs_nor_writes_again():
    """L7."""
    claim = claim_with(DONE)
    assert end_of(take(claim, StepPlan("charge"))) == (claim, RESULT)


@pytest.mark.parametrize("plan", [ONCE, PROBED])
def test_a_step_that_may_not_simply_run_again_is_written_before_it_runs(plan):
    """L7: so that the next attempt knows that one has died in it."""
    flow = take(CLAIM, plan)
    swap = next(flow)
    assert progress_of(swap.record).steps == (BEGUN,)
    assert flow.send(None) == Run("charge")
    done = flow.send(RESULT)
    assert done.expected == swap.record.version
    assert progress_of(done.record).steps == (DONE,)
    end_of(flow, None)


def test_a_step_whose_key_is_remembered_is_written_with_the_end_of_that_time():
    """L7, E3."""
    flow = take(CLAIM, StepPlan("charge", now_ms=NOW, again_until_ms=NOW + 500))
    swap = next(flow)
    assert progress_of(swap.record).steps == (BEGUN._replace(again_until_ms=NOW + 500),)


@pytest.mark.parametrize("plan", [StepPlan("charge"), PROBED, ONCE])
def test_a_step_whose_key_is_remembered_runs_again_whatever_is_declared_now(plan):
    """L7, E3: the time counts from the first call."""
    begun = BEGUN._replace(again_until_ms=NOW + 500)
    flow = take(claim_with(begun), plan._replace(now_ms=NOW + 499, again_until_ms=NOW + 9_000))
    swap = next(flow)
    assert progress_of(swap.record).steps == (begun,)
    assert flow.send(None) == Run("charge")


def test_a_step_whose_key_is_forgotten_is_left_to_its_probe_or_an_operator():
    """L6, L7, E3."""
    claim = claim_with(BEGUN._replace(again_until_ms=NOW + 500))
    late = {"now_ms": NOW + 500, "again_until_ms": NOW + 9_000}
    assert next(take(claim, PROBED._replace(**late))) == Probe("charge")
    with pytest.raises(StepInDoubt):
        next(take(claim, StepPlan("charge", **late)))


def test_a_key_counts_as_remembered_until_shortly_before_the_end():
    """E3: what is sent in the last moment may arrive after it."""
    assert again_until_ms(NOW, 0) == 0
    assert again_until_ms(NOW, 1_000) == NOW + 900
    assert again_until_ms(NOW, 86_400_000) == NOW + 86_400_000 - 60_000
    assert again_until_ms(NOW, ALWAYS_MS) == ALWAYS_MS


def test_a_parallel_step_may_come_before_the_steps_of_its_neighbours():
    """E3: a retry takes the branches in another order."""
    plan = StepPlan("ship")
    with pytest.raises(StepsChanged):
        next(take(claim_with(DONE), plan))
    assert next(take(claim_with(DONE), plan._replace(is_parallel=True))) == Run("ship")


@pytest.mark.parametrize("plan", [ONCE, StepPlan("charge")])
@pytest.mark.parametrize(
    ("step", "reason"), [(BEGUN, "charge"), (NO_RESULT, "it is done, but its result could not")]
)
def test_a_step_without_a_result_is_in_doubt_whatever_the_handler_now_declares(plan, step, reason):
    """L6, L7: it was begun, or it is done and its result is lost; an operator must look."""
    with pytest.raises(StepInDoubt, match=reason):
        next(take(claim_with(step), plan))


def test_an_error_of_a_step_is_raised_in_its_handler():
    """L7."""
    flow = take(CLAIM, StepPlan("charge"))
    next(flow)
    with pytest.raises(ValueError, match="declined"):
        flow.throw(ValueError("declined"))


def test_an_attempt_whose_lease_is_over_checks_its_claim_before_a_step_runs():
    """L5: an attempt that was paused learns that it has lost before the step, not after it."""
    flow = take(CLAIM, StepPlan("charge", now_ms=CLAIM.lease_until_ms))
    assert next(flow).expected == CLAIM.version
    assert flow.send(None) == Run("charge")
    flow = take(CLAIM, StepPlan("charge", now_ms=CLAIM.lease_until_ms))
    next(flow)
    with pytest.raises(ClaimLost):
        flow.send(THEIRS)


# --- probes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [BEGUN, NO_RESULT], ids=["begun", "done without a result"])
def test_a_probe_that_knows_the_result_replaces_the_step(step):
    """L6, L7."""
    flow = probing(step)
    swap = flow.send(Outcome(OutcomeKind.COMPLETE, b'\x02"ch_1"'))
    assert progress_of(swap.record).step("charge").value == b'\x02"ch_1"'
    assert end_of(flow, None) == (swap.record, b'\x02"ch_1"')


def test_a_step_that_did_not_happen_begins_again():
    """L6."""
    flow = probing(BEGUN)
    assert isinstance(flow.send(Outcome(OutcomeKind.RELEASE)), Swap)
    assert flow.send(None) == Run("charge")


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (BEGUN, OutcomeKind.IN_DOUBT),
        (NO_RESULT, OutcomeKind.IN_DOUBT),
        (NO_RESULT, OutcomeKind.RELEASE),  # it has happened, whatever the probe says
    ],
)
def test_a_probe_that_does_not_know_leaves_the_step_in_doubt(step, kind):
    """L6, L7."""
    with pytest.raises(StepInDoubt):
        probing(step).send(Outcome(kind))


def test_a_probe_that_raises_leaves_the_step_in_doubt():
    """L6: unless it found that the claim is lost."""
    with pytest.raises(StepInDoubt, match="its probe raised") as caught:
        probing(BEGUN).throw(ConnectionError("away"))
    assert isinstance(caught.value.__cause__, ConnectionError)
    with pytest.raises(ClaimLost):
        probing(BEGUN).throw(ClaimLost("taken over"))


# --- a result that cannot be stored ---------------------------------------------------------

NOT_JSON = Misconfigured("neither JSON nor bytes")
LARGE = b"\x03" + b"x" * STEP_BYTES_MAX


def filled(bytes_left):
    """A claim with room for so many bytes."""
    claim = noted(CLAIM, Progress(notes=(Note(NOW, 1, ""),)))
    note = Note(NOW, 1, "x" * (PROGRESS_BYTES_MAX - bytes_left - len(claim.progress)))
    claim = noted(CLAIM, Progress(notes=(note,)))
    assert len(claim.progress) == PROGRESS_BYTES_MAX - bytes_left
    return claim


@pytest.mark.parametrize("plan", [StepPlan("charge"), ONCE])
@pytest.mark.parametrize("result", [NOT_JSON, LARGE])
def test_a_step_whose_result_cannot_be_stored_is_done_and_raises(plan, result):
    """L7: it does not run again because of its result."""
    flow = take(CLAIM, plan)
    if plan.at_most_once:
        next(flow)
    assert flow.send(None) == Run("charge")
    done = flow.send(result)
    assert progress_of(done.record).steps == (NO_RESULT,)
    with pytest.raises(Misconfigured, match=r"neither JSON|65536 can be stored"):
        flow.send(None)


@pytest.mark.parametrize("result", [None, LARGE])
def test_a_step_whose_probe_knows_a_result_that_cannot_be_stored_is_done(result):
    """L6, L7."""
    flow = probing(BEGUN)
    swap = flow.send(Outcome(OutcomeKind.COMPLETE, result))
    assert progress_of(swap.record).steps == (NO_RESULT,)
    with pytest.raises(Misconfigured):
        flow.send(None)


def test_a_result_that_does_not_fit_beside_the_others_is_not_stored():
    """L7: each is small enough, and all of them are too much."""
    flow = take(filled(1_000), StepPlan("charge"))
    next(flow)
    done = flow.send(b"\x03" + b"x" * 1_000)
    assert progress_of(done.record).steps == (NO_RESULT,)
    with pytest.raises(Misconfigured, match="can be stored"):
        flow.send(None)


def test_that_a_step_is_done_is_written_even_if_there_is_no_room():
    """L7: another step has used the room while this one ran."""
    flow = take(CLAIM, StepPlan("charge"))
    next(flow)
    flow.send(RESULT)
    full = filled(0)._replace(version=CLAIM.version + 9)
    flow.send(full)
    done = flow.send(full)
    assert done.expected == full.version
    assert progress_of(done.record).steps == (NO_RESULT,)


@pytest.mark.parametrize("plan", [StepPlan("charge"), PROBED])
def test_a_step_does_not_begin_if_its_end_could_not_be_written(plan):
    """L7."""
    with pytest.raises(Misconfigured, match="can be stored"):
        next(take(filled(10), plan))
    next(take(filled(100), plan))


# --- the steps of an earlier attempt --------------------------------------------------------


def test_a_step_that_was_renamed_fails_before_it_runs():
    """L7: under its new name it would run a second time."""
    with pytest.raises(StepsChanged, match=r"'charge card' is new.*the step 'charge'"):
        next(take(claim_with(DONE), StepPlan("charge card")))


@pytest.mark.parametrize(
    ("progress", "asked"),
    [
        (Progress((DONE,)), {"charge"}),
        (Progress((DONE,), handed=("charge",)), set()),
        (Progress((DONE._replace(beside=("ship",)),)), set()),
    ],
    ids=["after those that are known", "after those of the handler", "one that ran beside it"],
)
def test_a_new_step_runs(progress, asked):
    """L7, L10."""
    plan = StepPlan("ship", asked=frozenset(asked))
    assert next(take(noted(CLAIM, progress), plan)) == Run("ship")


def test_a_step_stores_which_others_ran_beside_it():
    """L7: of two at the same time, one had ended when the attempt died."""
    flow = take(CLAIM, StepPlan("charge", beside=lambda: ("ship",)))
    next(flow)
    swap = flow.send(RESULT)
    assert progress_of(swap.record).step("charge").beside == ("ship",)


def problem_of(claim, *asked, may_differ=False):
    """The kind of error that keeps an attempt that has *asked* for these from ending *claim*."""
    error = missing_steps(claim, asked, may_differ=may_differ)
    assert error is None or "'charge'" in str(error)
    return error if error is None else type(error)


def test_an_attempt_that_has_asked_for_all_known_steps_may_end():
    """L7."""
    assert problem_of(CLAIM) is None
    assert problem_of(noted(CLAIM, add_note(NOTHING))) is None
    assert problem_of(claim_with(DONE), "charge", "ship") is None
    assert problem_of(claim_with(BEGUN), "charge") is None


def test_an_attempt_may_not_end_before_it_has_asked_for_a_step_that_was_begun():
    """L6: not even with a refusal: after a final answer the question is never asked."""
    claim = claim_with(DONE._replace(name="reserve"), BEGUN)
    for may_differ in (True, False):
        assert problem_of(claim, may_differ=may_differ) is StepInDoubt
        assert problem_of(claim, "reserve", may_differ=may_differ) is StepInDoubt


@pytest.mark.parametrize("step", [DONE, NO_RESULT])
def test_an_attempt_may_not_succeed_before_it_has_asked_for_a_step_that_is_done(step):
    """L7: but it may refuse."""
    assert problem_of(claim_with(step)) is StepsChanged
    assert problem_of(claim_with(step), "ship") is StepsChanged
    assert problem_of(claim_with(step), may_differ=True) is None


def test_a_worker_may_end_without_the_steps_of_the_handler():
    """L10: not even those that were begun."""
    steps = (BEGUN, DONE._replace(name="reserve"))
    assert problem_of(noted(CLAIM, Progress(steps, handed=("charge", "reserve")))) is None
