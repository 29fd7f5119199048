"""Steps, notes and reports, stepped by hand (L7): what is written, when, and what it means later."""

import pytest

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import ClaimRequest, first_attempt, next_attempt
from coatcheck.core.policy import Policy
from coatcheck.core.progress import (
    NOT_KEPT,
    NOTHING,
    PROGRESS_BYTES_MAX,
    STEP_BYTES_MAX,
    Note,
    Progress,
    Report,
    Resolution,
    Step,
    encoded,
    noted,
    progress_of,
)
from coatcheck.core.record import GONE, RUNNING, Swap, completed, legal_moves, renewed
from coatcheck.core.steps import Probe, Run, StepPlan, missing_steps, remember, take
from coatcheck.errors import ClaimLost, Misconfigured, StepInDoubt, StepsChanged, Unreadable

NOW = 1_700_000_000_000
TICKET = ClaimRequest(b"i" * 16, b"f" * 16, NOW, 7)
CLAIM = first_attempt(TICKET, Policy(), GONE, NOW)
DONE = Step("charge", 1, b"\x02{}")
BEGUN = Step("charge", 1)


def end_of(flow, sent):
    with pytest.raises(StopIteration) as stopped:
        flow.send(sent)
    return stopped.value.value


def claim_with(*steps):
    """A claim in which earlier attempts have taken *steps*."""
    return noted(CLAIM, Progress(steps=steps))


# --- what is kept -----------------------------------------------------------------------------


def test_progress_comes_back_as_it_was_written():
    """L7: bytes, text and all."""
    progress = Progress(
        steps=(DONE, Step("raw", 2, b"\x03\x00\xff", ("charge",)), BEGUN._replace(name="ship")),
        notes=(Note(NOW, 1, {"about": "to charge"}), Note(NOW + 1, 2, "again")),
        report=Report(0.5, "half"),
        resolutions=(Resolution(NOW, "failed", "ann", "asked the bank"),),
        handed=("charge",),
        input=b"\x03\x00\xff",
    )
    record = CLAIM._replace(progress=encoded(progress))
    assert progress_of(record) == progress
    assert progress_of(CLAIM) == NOTHING
    assert progress_of(CLAIM._replace(progress=encoded(NOTHING))) == NOTHING


def test_a_stored_input_is_there_also_if_it_is_empty():
    """L7: an empty input is not "no input"."""
    for given in (b"", b"\x02null", b"\x03\xff"):
        record = CLAIM._replace(progress=encoded(NOTHING._replace(input=given)))
        assert progress_of(record).input == given
    assert b"input" not in encoded(NOTHING)
    assert progress_of(CLAIM).input is None


def test_steps_notes_and_decisions_leave_the_stored_input_as_it_is():
    """L7: an attempt adds to it, and the next one runs with the same input."""
    progress = NOTHING._replace(input=b"\x02[1]").with_step(DONE).with_note(Note(NOW, 1, "a"))
    progress = progress.with_resolution(Resolution(NOW, "run again", "ann", "asked"))
    assert progress_of(CLAIM._replace(progress=encoded(progress))) == progress
    assert progress.input == b"\x02[1]"


def test_what_is_written_down_is_a_legal_move_of_the_same_attempt():
    """It is seen by whoever holds an older version, like a renewal."""
    record = noted(CLAIM, NOTHING.with_note(Note(NOW, 1, "x")))
    assert [move.name for move in legal_moves(CLAIM, record, NOW)] == ["renew"]


def test_a_resolution_stays_beside_those_before_it():
    first, second = Resolution(1, "failed", "ann", "x"), Resolution(2, "completed", "bob", "y")
    progress = NOTHING.with_resolution(first).with_resolution(second)
    assert progress.resolutions == (first, second)


# --- writing it down --------------------------------------------------------------------------


def test_a_change_is_one_swap():
    flow = remember(CLAIM, lambda progress: progress.with_note(Note(NOW, 1, "x")))
    swap = next(flow)
    assert swap == Swap(CLAIM.id, CLAIM.version, swap.record)
    assert end_of(flow, None) == swap.record
    assert swap.record.state == RUNNING


def test_a_renewal_that_came_between_is_written_on_top_of():
    """L5: the heart and the handler write into the same claim."""
    flow = remember(CLAIM, lambda progress: progress.with_note(Note(NOW, 1, "x")))
    next(flow)
    beaten = renewed(CLAIM, NOW + 90_000)
    again = flow.send(beaten)
    assert again.expected == beaten.version
    assert again.record.lease_until_ms == NOW + 90_000
    assert end_of(flow, None) == again.record


def test_who_has_lost_its_claim_learns_it_when_it_writes():
    """L5: before it does anything more."""
    flow = remember(CLAIM, lambda progress: progress)
    next(flow)
    with pytest.raises(ClaimLost):
        flow.send(CLAIM._replace(nonce=8, attempt=2, version=CLAIM.version + 1))


def test_what_is_too_much_to_keep_is_refused_before_it_is_written():
    note = Note(NOW, 1, "x" * PROGRESS_BYTES_MAX)
    with pytest.raises(Misconfigured, match="are kept"):
        next(remember(CLAIM, lambda progress: progress.with_note(note)))


# --- steps ------------------------------------------------------------------------------------


def test_a_step_runs_and_then_its_result_is_written():
    """L7: one write, because an attempt that dies in it may simply run it again."""
    flow = take(CLAIM, StepPlan("charge"))
    assert next(flow) == Run("charge")
    swap = flow.send(b"\x02{}")
    assert progress_of(swap.record).steps == (DONE,)
    assert end_of(flow, None) == (swap.record, b"\x02{}")


def test_a_step_that_is_done_is_neither_run_nor_written_again():
    claim = claim_with(DONE)
    assert end_of(take(claim, StepPlan("charge")), None) == (claim, b"\x02{}")


@pytest.mark.parametrize(
    "plan", [StepPlan("charge", at_most_once=True), StepPlan("charge", has_probe=True)]
)
def test_a_step_whose_outcome_matters_is_written_down_before_it_runs(plan):
    """L7: so that a later attempt can tell that one has died in it."""
    flow = take(CLAIM, plan)
    swap = next(flow)
    assert progress_of(swap.record).steps == (BEGUN,)
    assert flow.send(None) == Run("charge")
    done = flow.send(b"\x02{}")
    assert done.expected == swap.record.version
    assert progress_of(done.record).steps == (DONE,)
    end_of(flow, None)


@pytest.mark.parametrize("at_most_once", [True, False])
def test_a_step_that_was_begun_is_in_doubt_whatever_it_is_called_now(at_most_once):
    """L6: whatever the route's policy is, and whatever the handler says of it since."""
    with pytest.raises(StepInDoubt, match="charge"):
        next(take(claim_with(BEGUN), StepPlan("charge", at_most_once=at_most_once)))


def test_a_probe_tells_what_became_of_a_step():
    plan = StepPlan("charge", at_most_once=True, has_probe=True)
    flow = take(claim_with(BEGUN), plan)
    assert next(flow) == Probe("charge")
    swap = flow.send(Outcome(OutcomeKind.COMPLETE, b'\x02"ch_1"'))
    assert progress_of(swap.record).step("charge").value == b'\x02"ch_1"'
    assert end_of(flow, None) == (swap.record, b'\x02"ch_1"')


def test_a_probe_that_raises_leaves_it_in_doubt():
    """L6: it may have asked nobody; only that its claim is lost, it knows for sure."""
    flow = take(claim_with(BEGUN), StepPlan("charge", has_probe=True))
    next(flow)
    with pytest.raises(StepInDoubt, match="its probe has failed") as caught:
        flow.throw(ConnectionError("away"))
    assert isinstance(caught.value.__cause__, ConnectionError)
    flow = take(claim_with(BEGUN), StepPlan("charge", has_probe=True))
    next(flow)
    with pytest.raises(ClaimLost):
        flow.throw(ClaimLost("taken over"))


def test_a_step_that_did_not_happen_is_begun_again():
    flow = take(claim_with(BEGUN), StepPlan("charge", at_most_once=True, has_probe=True))
    next(flow)
    begun = flow.send(Outcome(OutcomeKind.RELEASE))
    assert isinstance(begun, Swap)
    assert flow.send(None) == Run("charge")


def test_a_probe_that_does_not_know_leaves_it_in_doubt():
    flow = take(claim_with(BEGUN), StepPlan("charge", has_probe=True))
    next(flow)
    with pytest.raises(StepInDoubt):
        flow.send(Outcome(OutcomeKind.IN_DOUBT))


# --- a result that cannot be kept -------------------------------------------------------------

UNSPEAKABLE = Misconfigured("neither JSON nor bytes")
LARGE = b"\x03" + b"x" * STEP_BYTES_MAX
NOT_KEPT_STEP = Step("charge", 1, NOT_KEPT)


def filled(bytes_left, *steps):
    """A claim that has room for so many bytes and no more."""
    room = PROGRESS_BYTES_MAX - bytes_left
    claim = noted(CLAIM, Progress(steps, notes=(Note(NOW, 1, ""),)))
    note = Note(NOW, 1, "x" * (room - len(claim.progress)))
    claim = noted(CLAIM, Progress(steps, notes=(note,)))
    assert len(claim.progress) == room
    return claim


@pytest.mark.parametrize("plan", [StepPlan("charge"), StepPlan("charge", at_most_once=True)])
@pytest.mark.parametrize("told", [UNSPEAKABLE, LARGE])
def test_a_step_whose_result_cannot_be_kept_is_written_down_as_done(plan, told):
    """L7: and then it fails loudly; it never runs again because of its result."""
    flow = take(CLAIM, plan)
    if plan.at_most_once:
        next(flow)
    assert flow.send(None) == Run("charge")
    done = flow.send(told)
    assert progress_of(done.record).steps == (NOT_KEPT_STEP,)
    with pytest.raises(Misconfigured, match=r"neither JSON|65536 are remembered"):
        flow.send(None)


def test_a_result_that_does_not_fit_beside_the_others_is_not_kept():
    """L7: each is small enough, and all of them are too much."""
    flow = take(filled(1_000), StepPlan("charge"))
    next(flow)
    done = flow.send(b"\x03" + b"x" * 1_000)
    assert progress_of(done.record).steps == (NOT_KEPT_STEP,)
    with pytest.raises(Misconfigured, match="are kept"):
        flow.send(None)


def test_that_it_is_done_is_written_even_where_the_room_was_filled_meanwhile():
    """L7: by another step at the same time, while this one ran."""
    flow = take(CLAIM, StepPlan("charge"))
    next(flow)
    flow.send(b"\x02{}")
    full = filled(0)._replace(version=CLAIM.version + 9)
    flow.send(full)
    done = flow.send(full)
    assert done.expected == full.version
    assert progress_of(done.record).steps == (NOT_KEPT_STEP,)


@pytest.mark.parametrize("plan", [StepPlan("charge"), StepPlan("charge", has_probe=True)])
def test_a_step_does_not_begin_where_its_end_could_not_be_written(plan):
    """L7: nothing has happened then."""
    with pytest.raises(Misconfigured, match="are kept"):
        next(take(filled(10), plan))
    next(take(filled(100), plan))


@pytest.mark.parametrize("at_most_once", [True, False])
def test_a_step_that_is_done_without_a_result_does_not_run_again(at_most_once):
    """L7: nobody can go on without it; a person must look."""
    with pytest.raises(StepInDoubt, match="it is done, but what it returned could not be kept"):
        next(take(claim_with(NOT_KEPT_STEP), StepPlan("charge", at_most_once=at_most_once)))


def test_a_probe_may_know_the_result_that_was_not_kept():
    """L7: then the attempt goes on; whatever else it says, the step has happened."""
    flow = take(claim_with(NOT_KEPT_STEP), StepPlan("charge", has_probe=True))
    assert next(flow) == Probe("charge")
    swap = flow.send(Outcome(OutcomeKind.COMPLETE, b'\x02"ch_1"'))
    assert end_of(flow, None) == (swap.record, b'\x02"ch_1"')
    for kind in (OutcomeKind.RELEASE, OutcomeKind.IN_DOUBT):
        flow = take(claim_with(NOT_KEPT_STEP), StepPlan("charge", has_probe=True))
        next(flow)
        with pytest.raises(StepInDoubt):
            flow.send(Outcome(kind))


@pytest.mark.parametrize("told", [None, LARGE])
def test_what_a_probe_knows_and_cannot_be_kept_has_happened_all_the_same(told):
    """L6, L7: it is no reason to run the step."""
    flow = take(claim_with(BEGUN), StepPlan("charge", has_probe=True))
    next(flow)
    swap = flow.send(Outcome(OutcomeKind.COMPLETE, told))
    assert progress_of(swap.record).steps == (NOT_KEPT_STEP,)
    with pytest.raises(Misconfigured):
        flow.send(None)


def test_a_step_without_a_result_is_done_and_must_be_asked_for():
    assert why_not(claim_with(NOT_KEPT_STEP)) is StepsChanged
    assert progress_of(claim_with(NOT_KEPT_STEP)).steps == (NOT_KEPT_STEP,)


# --- who does not go on -----------------------------------------------------------------------


def test_who_was_stopped_past_its_lease_asks_before_it_does_anything():
    """L5: a zombie learns that it has lost before the step runs, not after it."""
    flow = take(CLAIM, StepPlan("charge", now_ms=CLAIM.lease_until_ms))
    swap = next(flow)
    assert swap.expected == CLAIM.version
    assert flow.send(None) == Run("charge")
    flow = take(CLAIM, StepPlan("charge", now_ms=CLAIM.lease_until_ms))
    next(flow)
    with pytest.raises(ClaimLost):
        flow.send(CLAIM._replace(nonce=8, attempt=2, version=CLAIM.version + 1))


def test_an_error_of_a_step_is_its_callers():
    flow = take(CLAIM, StepPlan("charge"))
    next(flow)
    with pytest.raises(ValueError, match="declined"):
        flow.throw(ValueError("declined"))


def test_a_step_that_was_renamed_fails_before_it_runs():
    """L7: under its new name it would run a second time."""
    with pytest.raises(StepsChanged, match=r"'charge card' is new.*taken 'charge'"):
        next(take(claim_with(DONE), StepPlan("charge card")))


def test_a_new_step_after_those_that_are_known_is_taken():
    plan = StepPlan("ship", asked=frozenset({"charge"}))
    assert next(take(claim_with(DONE), plan)) == Run("ship")


def test_the_steps_of_who_handed_the_work_over_are_not_asked_for_again():
    """L7, L10: a worker's steps are others than those of the handler."""
    claim = noted(CLAIM, Progress(steps=(DONE,), handed=("charge",)))
    assert next(take(claim, StepPlan("ship"))) == Run("ship")


def test_a_step_that_was_under_way_beside_a_finished_one_is_known():
    """L7: two at once, of which one had ended when the attempt died."""
    claim = claim_with(DONE._replace(beside=("ship",)))
    assert next(take(claim, StepPlan("ship"))) == Run("ship")
    flow = take(CLAIM, StepPlan("charge", beside=lambda: ("ship",)))
    next(flow)
    swap = flow.send(b"\x02{}")
    assert progress_of(swap.record).step("charge").beside == ("ship",)


# --- at the end -------------------------------------------------------------------------------


def why_not(claim, *asked, may_differ=False):
    """Why an attempt that has *asked* for these may not end *claim*: the kind of error."""
    error = missing_steps(claim, asked, may_differ=may_differ)
    assert error is None or isinstance(error, Unreadable) or "'charge'" in str(error)
    return error if error is None else type(error)


def test_who_has_asked_for_all_that_is_known_may_end():
    assert why_not(CLAIM) is None
    assert why_not(noted(CLAIM, NOTHING.with_note(Note(NOW, 1, "x")))) is None
    assert why_not(claim_with(DONE), "charge", "ship") is None
    assert why_not(claim_with(BEGUN), "charge") is None


def test_what_was_begun_is_not_forgotten_at_the_end():
    """L6: not even by who refuses: with a final answer nobody would ever ask."""
    claim = claim_with(DONE._replace(name="reserve"), BEGUN)
    for may_differ in (True, False):
        assert why_not(claim, may_differ=may_differ) is StepInDoubt
        assert why_not(claim, "reserve", may_differ=may_differ) is StepInDoubt


def test_what_is_done_is_asked_for_before_the_end_unless_it_is_a_refusal():
    """L7: who says "done" must know what was."""
    assert why_not(claim_with(DONE)) is StepsChanged
    assert why_not(claim_with(DONE), "ship") is StepsChanged
    assert why_not(claim_with(DONE), may_differ=True) is None


def test_what_was_handed_on_is_not_asked_for_at_the_end():
    """L10: the handler's steps are its own, begun ones as well."""
    claim = noted(CLAIM, Progress(steps=(BEGUN, DONE._replace(name="reserve"))))
    progress = progress_of(claim)._replace(handed=("charge", "reserve"))
    assert why_not(noted(claim, progress)) is None


def test_what_cannot_be_read_is_not_forgotten_either():
    """X1: an engine without the key ring has taken over."""
    assert why_not(CLAIM._replace(progress=b"\xa5sealed")) is Unreadable


def test_who_notes_after_the_answer_is_told_that_it_is_late():
    """L7: a background task is not told that somebody else has taken over."""
    flow = remember(CLAIM, lambda progress: progress.with_note(Note(NOW, 1, "late")))
    next(flow)
    with pytest.raises(ClaimLost, match="given already"):
        flow.send(completed(CLAIM, b"\x02{}"))
    flow = remember(CLAIM, lambda progress: progress.with_note(Note(NOW, 1, "late")))
    next(flow)
    with pytest.raises(ClaimLost, match="another attempt"):
        flow.send(
            completed(next_attempt(CLAIM, TICKET._replace(nonce=8), Policy(), NOW), b"\x02{}")
        )


@pytest.mark.parametrize(
    "damaged", [b"", b"\x00", b"[]", b'{"steps":[[]]}', b'{"steps":[["a",1,"\xc3\xa4",[]]]}', b"7"]
)
def test_what_is_damaged_ends_in_a_clear_error_and_nobody_goes_on(damaged):
    """X1, L7: neither a step, nor an end, nor the next attempt."""
    claim = CLAIM._replace(progress=damaged)
    assert why_not(claim) is Unreadable
    with pytest.raises(Unreadable, match="damaged"):
        next(take(claim, StepPlan("charge")))
    with pytest.raises(Unreadable, match="damaged"):
        next_attempt(claim, TICKET, Policy(), NOW)


def test_a_record_of_before_is_read_as_it_was_written():
    """L7: by a version that did not say who had handed nothing on."""
    record = CLAIM._replace(progress=b'{"steps":[["charge",1,null,[]]]}')
    assert progress_of(record) == Progress(steps=(BEGUN,), handed=None)
