"""Progress: what attempts store in the record, and how it is read again."""

import pytest

from coatcheck.core.lifecycle import first_attempt, next_attempt
from coatcheck.core.policy import Policy
from coatcheck.core.progress import (
    NOTHING,
    Note,
    Progress,
    Report,
    Resolution,
    Step,
    encoded,
    has_notes,
    noted,
    only_trace,
    progress_of,
    readable_progress_of,
    trace_of,
    with_trace,
)
from coatcheck.core.record import GONE, legal_moves
from coatcheck.core.steps import StepPlan, missing_steps, take
from coatcheck.errors import Unreadable

from .flows import NOW, REQUEST

CLAIM = first_attempt(REQUEST, Policy(), GONE, NOW)
BEGUN = Step("ship", 1)


def stored(progress):
    """*progress* after it was written and read."""
    return progress_of(CLAIM._replace(progress=encoded(progress)))


def test_progress_is_read_as_it_was_written():
    """L7: bytes, text and all."""
    progress = Progress(
        steps=(Step("charge", 1, b"\x02{}"), Step("raw", 2, b"\x03\x00\xff", ("charge",)), BEGUN),
        notes=(Note(NOW, 1, {"about": "to charge"}), Note(NOW + 1, 2, "again")),
        report=Report(0.5, "half"),
        resolutions=(Resolution(NOW, "failed", "ann", "asked the bank"),),
        handed=("charge",),
        input=b"\x03\x00\xff",
        failure="attempt 1 raised TimeoutError",
        policy="record mode",
        caller="Zoë",
        origin=b"f" * 16,
    )
    assert stored(progress) == progress
    assert stored(NOTHING) == progress_of(CLAIM) == NOTHING


@pytest.mark.parametrize("length", [511, 512, 513, 60_000])
def test_a_result_of_any_length_is_read_as_it_was_written(length):
    """L7: a long one is written in another way, because it is faster."""
    value = (bytes(range(256)) * 240)[:length]
    progress = NOTHING.with_step(Step("charge", 1, value))
    assert progress_of(CLAIM._replace(progress=encoded(progress))) == progress


def test_an_empty_input_is_not_no_input():
    """L7."""
    for given in (b"", b"\x02null", b"\x03\xff"):
        assert stored(NOTHING._replace(input=given)).input == given
    assert stored(NOTHING).input is None


def test_the_name_of_a_caller_is_no_note():
    """L4, O1: the key of a request that is refused before its handler is free all the same."""
    named = NOTHING._replace(caller="Zoë")
    assert not has_notes(CLAIM)
    assert not has_notes(CLAIM._replace(progress=encoded(named)))
    others = (
        *(named._replace(failure="attempt 1 failed"), named._replace(origin=b"f" * 16)),
        *(named.with_note(Note(NOW, 1, "x")), NOTHING.with_step(BEGUN)),
    )
    assert all(has_notes(CLAIM._replace(progress=encoded(other))) for other in others)
    assert has_notes(CLAIM._replace(progress=b'{"caller":'))


def test_progress_only_ever_grows():
    """L7: the input stays, and each note and decision is added."""
    notes = Note(NOW, 1, "a"), Note(NOW, 2, "b")
    decisions = Resolution(1, "failed", "ann", "x"), Resolution(2, "completed", "bob", "y")
    progress = NOTHING._replace(input=b"\x02[1]").with_step(BEGUN)
    for note, decision in zip(notes, decisions, strict=True):
        progress = progress.with_note(note).with_resolution(decision)
    assert progress == Progress((BEGUN,), notes, None, decisions, input=b"\x02[1]")
    assert progress.with_step(BEGUN._replace(value=b"\x02{}")).steps == (
        Step("ship", 1, b"\x02{}"),
    )


def test_to_write_progress_is_a_legal_move_of_the_same_attempt():
    """L5, L7: an older version can no longer be written, as after a renewal."""
    record = noted(CLAIM, NOTHING.with_note(Note(NOW, 1, "x")))
    assert [move.name for move in legal_moves(CLAIM, record, NOW)] == ["renew"]


def test_progress_of_an_earlier_release_is_read():
    """L7: it did not store that a handler without steps had deferred its work."""
    record = CLAIM._replace(progress=b'{"steps":[["ship",1,null,[]]]}')
    assert progress_of(record) == Progress(steps=(BEGUN,), handed=None)


UNREADABLE = {
    b"\xa5sealed": "encrypted",
    **dict.fromkeys((b"", b"\x00", b"[]", b"7", b'{"steps":[[]]}'), "damaged"),
    b'{"steps":[["a",1,"\xc3\xa4",[]]]}': "damaged",
}


@pytest.mark.parametrize(("progress", "reason"), UNREADABLE.items())
def test_nothing_continues_an_operation_whose_progress_cannot_be_read(progress, reason):
    """X1, L7: neither a step, nor the end, nor the next attempt."""
    claim = CLAIM._replace(progress=progress)
    assert isinstance(missing_steps(claim, (), may_differ=True), Unreadable)
    with pytest.raises(Unreadable, match=reason):
        next(take(claim, StepPlan("charge")))
    with pytest.raises(Unreadable, match=reason):
        next_attempt(claim, REQUEST, Policy(), NOW)
    assert readable_progress_of(claim) is None


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_trace_context_is_stored_beside_all_other_progress():
    """O3: and a record without one has the bytes it had before."""
    record = CLAIM._replace(progress=encoded(Progress(steps=(BEGUN,))))
    traced = with_trace(record, TRACE)
    assert progress_of(traced) == Progress(steps=(BEGUN,), trace=TRACE)
    assert trace_of(traced) == TRACE
    assert trace_of(record) == trace_of(CLAIM) == ""
    assert with_trace(CLAIM, TRACE).progress == f'{{"trace":"{TRACE}"}}'.encode()


def test_of_progress_that_is_not_needed_only_the_trace_context_is_left():
    """X2, O3."""
    record = with_trace(CLAIM._replace(progress=encoded(Progress(steps=(BEGUN,)))), TRACE)
    assert only_trace(record) == with_trace(CLAIM, TRACE)
    assert only_trace(CLAIM._replace(progress=encoded(Progress(steps=(BEGUN,))))) == CLAIM


@pytest.mark.parametrize("progress", [b'\xa5sealed "trace":', b'{"trace":'])
def test_a_trace_context_that_cannot_be_read_is_none(progress):
    """D4: a replay does not fail because of it."""
    assert trace_of(CLAIM._replace(progress=progress)) == ""
