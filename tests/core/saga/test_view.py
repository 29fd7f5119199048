"""What people see of a saga, and what they decide (E3)."""

import pytest

from coatcheck.core.progress import NOT_KEPT, Note, Progress, Resolution, Step, encoded, progress_of
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT, RUNNING, Record, Swap
from coatcheck.core.recovery import RESOLUTIONS_MAX, Resolved, Unchanged
from coatcheck.core.response import encode_value
from coatcheck.core.saga.actions import PIVOT, UNDOING, Ended, Failure, decode_step, encode_ended
from coatcheck.core.saga.decisions import (
    decide,
    is_blocked,
    open_steps,
    with_step_done,
    without_definition,
    without_step,
)
from coatcheck.core.saga.outline import OutlineStep
from coatcheck.core.saga.view import (
    facts_of_saga,
    is_saga,
    picture_of_definition,
    picture_of_run,
    saga_run,
)
from tests.core.flows import end_of

NOW_MS = 1_700_000_000_000
FAILURE = Failure("car", "ValueError", "no cars")


def value(at_ms=0, failure=None):
    return encode_value(encode_ended(Ended(NOW_MS + at_ms, b"\x02null", failure)))


BEGAN = Note(NOW_MS, 1, {"saga": "trip", "steps": ["flight (undo)"]})
STEPS = (
    Step("flight", 1, value(1)),
    Step("hotel", 1, value(2)),
    Step("car", 2, value(3, FAILURE)),
    Step(UNDOING, 2, value(4, FAILURE)),
    Step("hotel:undo", 2, value(5)),
)


def record(state=RUNNING, steps=STEPS, *, notes=(BEGAN,), resolutions=(), failure="", label="trip"):
    progress = Progress(steps, notes, resolutions=resolutions, failure=failure)
    return Record(
        *(b"i" * 16, NOW_MS, state, 2, b"f" * 16, NOW_MS, NOW_MS + 20_000, NOW_MS + 10**9),
        *(NOW_MS + 2 * 10**9, 7, f"saga {label}", "", "42", encoded(progress), None),
    )


STATES = [
    (record(), "undoing", "its undos are being executed"),
    (record(steps=STEPS[:2]), "running", "it is being executed"),
    (record(state=FAILED), "waiting", "the next call or the background"),
    (record(state=COMPLETED), "undone", "every call raises SagaUndone"),
    (record(state=COMPLETED, steps=STEPS[:2]), "completed", "every call returns its result"),
    (record(state=IN_DOUBT), "blocked", "a person decides: sagas.resume"),
]


@pytest.mark.parametrize(("given", "state", "words"), STATES)
def test_the_state_of_a_saga_says_what_comes_next(given, state, words):
    """E3."""
    run = saga_run(given, NOW_MS)
    assert (run.state, run.name, run.key) == (state, "trip", "42")
    assert run.next.startswith(words)


def test_a_lease_that_is_over_is_shown():
    assert saga_run(record(), NOW_MS + 30_000).state == "lease expired"


def test_each_step_has_its_state_and_its_history():
    run = saga_run(record(), NOW_MS)
    states = {step.name: (step.state, step.error) for step in run.steps}
    assert states == {
        "flight": ("done", ""),
        "hotel": ("undone", ""),
        "car": ("failed", "ValueError"),
    }
    assert run.cause == FAILURE
    assert not run.is_past_pivot
    assert [line.partition("Z ")[2] for line in run.history] == [
        *("begun", "flight done", "hotel done", "car failed: ValueError", "undoing begins"),
        "hotel undone",
    ]
    facts = facts_of_saga(run)
    assert facts["cause"]["error"] == "ValueError"
    assert facts["created"] == "2023-11-14T22:13:20Z"
    assert facts_of_saga(saga_run(record(steps=()), NOW_MS))["cause"] is None


def test_a_blocked_saga_shows_where_and_why():
    """E3."""
    notes = (
        *(BEGAN, Note(NOW_MS + 6, 2, {"blocked": "flight:undo", "why": "it raised OSError"})),
        Note(NOW_MS + 7, 2, "a word"),
        Note(NOW_MS + 8, 2, {"blocked": "", "why": "changed"}),
    )
    decided = Resolution(NOW_MS + 7, "resumed", "ada", "again")
    steps = (*STEPS, Step(PIVOT, 2, value(9)), Step("mail", 2))
    blocked = record(IN_DOUBT, steps, notes=notes[:3], resolutions=(decided,))
    run = saga_run(blocked, NOW_MS)
    assert (run.blocked_at, run.blocked_because) == ("flight:undo", "it raised OSError")
    assert "about 'flight:undo'" in run.next
    assert run.is_past_pivot
    assert {step.name: step.state for step in run.steps}["flight"] == "undo failed"
    assert "blocked at flight:undo: it raised OSError" in " ".join(run.history)
    assert "resumed, by ada: again" in " ".join(run.history)
    nowhere = saga_run(record(IN_DOUBT, notes=notes), NOW_MS)
    assert (nowhere.blocked_at, nowhere.blocked_because) == ("", "changed")
    assert "blocked: changed" in " ".join(nowhere.history)


def test_a_saga_that_an_engine_marked_in_doubt_shows_what_was_begun():
    begun = saga_run(record(IN_DOUBT, (Step("car", 1),), failure="attempt 1 raised X"), NOW_MS)
    assert (begun.blocked_at, begun.blocked_because) == ("car", "attempt 1 raised X")
    assert begun.steps[0].state == "begun"
    unknown = saga_run(record(IN_DOUBT, ()), NOW_MS)
    assert unknown.blocked_because == "an attempt did not finish"


def test_what_cannot_be_read_is_left_out():
    sealed = record()._replace(progress=b"\x05sealed")
    assert saga_run(sealed, NOW_MS).steps == ()
    odd = saga_run(record(steps=(Step("a", 1, NOT_KEPT), Step("b", 1, b"\x02{}"))), NOW_MS)
    assert [(step.state, step.ended_ms) for step in odd.steps] == [("done", None)] * 2


# --- decisions ------------------------------------------------------------------------------------

RESUMED = Resolution(NOW_MS, "resumed", "ada", "again")


def test_a_decision_releases_a_blocked_saga_with_its_author():
    """E3, L6."""
    blocked = record(IN_DOUBT)
    flow = decide(blocked, progress_of(blocked), RESUMED)
    swap = next(flow)
    assert isinstance(swap, Swap)
    assert swap.record.state == FAILED
    assert progress_of(swap.record).resolutions == (RESUMED,)
    assert progress_of(swap.record).steps == STEPS
    assert end_of(flow, None) == Resolved(swap.record)


def test_a_decision_that_comes_too_late_changes_nothing():
    blocked, done = record(IN_DOUBT), record(COMPLETED)
    flow = decide(blocked, progress_of(blocked), RESUMED)
    next(flow)
    assert end_of(flow, done) == Unchanged(done)
    assert end_of(decide(done, progress_of(done), RESUMED)) == Unchanged(done)
    assert is_saga(blocked)
    request = blocked._replace(label="POST /orders")
    assert not is_blocked(request)
    assert not is_saga(request)


def test_old_decisions_are_dropped():
    many = record(IN_DOUBT, resolutions=(RESUMED,) * RESOLUTIONS_MAX)
    swap = next(decide(many, progress_of(many), RESUMED))
    assert len(progress_of(swap.record).resolutions) == RESOLUTIONS_MAX


def test_a_person_decides_about_what_is_open():
    """E3."""
    notes = (BEGAN, Note(NOW_MS, 1, {"blocked": "mail", "why": "x"}))
    blocked = record(IN_DOUBT, (*STEPS, Step("bus", 2)), notes=notes)
    assert open_steps(blocked) == ["bus", "mail", "flight:undo", "car:undo", "bus:undo"]
    assert open_steps(record(IN_DOUBT, (Step("bus", 2),))) == ["bus"]
    done = with_step_done(blocked, "bus", b"\x027", NOW_MS).step("bus")
    assert decode_step(done.value) == Ended(NOW_MS, b"\x027")
    assert without_step(blocked, "bus").step("bus") is None
    assert without_definition(blocked).notes[0].what == {"saga": "trip", "steps": None}
    assert without_definition(blocked).notes[1:] == notes[1:]


# --- pictures ---------------------------------------------------------------------------------------


def test_a_picture_of_a_definition_shows_branches_undos_and_the_pivot():
    """E3."""
    outline = (
        OutlineStep("flight", undo="cancel"),
        OutlineStep("hotel", group=1),
        OutlineStep('the "car" #1', group=1),
        OutlineStep("pivot", is_pivot=True),
    )
    assert picture_of_definition("trip", outline).splitlines() == [
        "flowchart TD",
        '    start(["trip"])',
        '    s0["flight"]',
        "    start --> s0",
        '    s0 -. undo .-> u0["cancel"]',
        '    s1["hotel"]',
        "    s0 --> s1",
        '    s2["the #quot;car#quot; #35;1"]',
        "    s0 --> s2",
        '    s3{{"pivot"}}',
        "    s1 --> s3",
        "    s2 --> s3",
        "    s3 --> done([done])",
    ]


def test_a_picture_of_a_run_shows_the_state_of_each_step():
    """E3."""
    lines = picture_of_run(saga_run(record(), NOW_MS)).splitlines()
    assert '    s1["hotel: undone"]:::undone' in lines
    assert '    s2["car: failed (ValueError)"]:::failed' in lines
    assert '    s2 --> state(["undoing"])' in lines
