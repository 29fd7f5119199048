"""What people see of a saga: its state, its steps, its history, and pictures of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from coatcheck.core.describe import iso
from coatcheck.core.key import reference_of
from coatcheck.core.progress import NOT_KEPT, Progress, Step, readable_progress_of
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT, Record, is_lease_over
from coatcheck.core.saga.actions import (
    LABEL_PREFIX,
    PIVOT,
    UNDO,
    UNDOING,
    Ended,
    Failure,
    decode_step,
)
from coatcheck.core.saga.outline import OutlineStep
from coatcheck.errors import Unreadable


class SagaStep(NamedTuple):
    """
    One step of a saga that has begun.

    *state*: "begun", "done" or "failed"; "undone" if its undo has run, "undo failed" if that blocks
    the saga.
    """

    name: str
    state: str
    attempt: int
    ended_ms: int | None = None
    undone_ms: int | None = None
    error: str = ""  # the name of its type


class SagaRun(NamedTuple):
    """
    One saga, as its record shows it.

    *state*: "running", "lease expired", "undoing", "waiting" (the next call or the background
    continues it), "blocked", "completed" or "undone".
    """

    name: str
    key: str
    reference: str
    state: str
    attempt: int
    created_ms: int
    steps: tuple[SagaStep, ...]
    is_past_pivot: bool
    cause: Failure | None  # why it is undone
    blocked_at: str  # the step or undo, if it is blocked at one
    blocked_because: str
    history: tuple[str, ...]
    next: str  # what happens next, or what to do


def is_saga(record: Record) -> bool:
    """*record* is one of a saga."""
    return record.label.startswith(LABEL_PREFIX)


def blocked_of(progress: Progress) -> tuple[str, str] | None:
    """Where and why the saga was last blocked."""
    for note in reversed(progress.notes):
        if isinstance(note.what, dict) and "blocked" in note.what:
            return str(note.what["blocked"]), str(note.what.get("why", ""))
    return None


def saga_run(record: Record, now_ms: int) -> SagaRun:
    """What *record* shows of its saga; its steps are left out if they are encrypted or damaged."""
    progress = readable_progress_of(record) or Progress()
    ends = {step.name: _ended(step) for step in progress.steps}
    cause = ends[UNDOING].failure if UNDOING in ends else None
    state = _state_of(record, now_ms, is_undoing=UNDOING in ends)
    blocked = _blocked(record, progress)
    return SagaRun(
        name=record.label.removeprefix(LABEL_PREFIX),
        key=record.key,
        reference=reference_of(record.id),
        state=state,
        attempt=record.attempt,
        created_ms=record.created_ms,
        steps=tuple(_steps(progress.steps, ends, blocked[0])),
        is_past_pivot=PIVOT in ends,
        cause=cause,
        blocked_at=blocked[0],
        blocked_because=blocked[1],
        history=tuple(text for _, text in sorted(_history(record, progress, ends), key=_time)),
        next=_next(state, blocked[0]),
    )


def _state_of(record: Record, now_ms: int, *, is_undoing: bool) -> str:
    if record.state == COMPLETED:
        return "undone" if is_undoing else "completed"
    if record.state == IN_DOUBT:
        return "blocked"
    if record.state == FAILED:
        return "waiting"
    if is_lease_over(record, now_ms):
        return "lease expired"
    return "undoing" if is_undoing else "running"


def _blocked(record: Record, progress: Progress) -> tuple[str, str]:
    """Where and why *record* is blocked; empty if it is not."""
    if record.state != IN_DOUBT:
        return "", ""
    begun = [step.name for step in progress.steps if step.value is None]
    found = blocked_of(progress)
    if found is not None:
        return found
    return (begun[0] if begun else ""), progress.failure or "an attempt did not finish"


def _ended(step: Step) -> Ended:
    """How *step* has ended; without a time if it was only begun, or is not readable."""
    if not step.value or step.value == NOT_KEPT:
        return Ended(0)
    try:
        return decode_step(step.value)
    except Unreadable:
        return Ended(0)


def _steps(steps: Iterable[Step], ends: dict[str, Ended], blocked_at: str) -> Iterator[SagaStep]:
    for step in steps:
        if ":" in step.name:
            continue
        end, undo = ends[step.name], ends.get(step.name + UNDO)
        state = "begun" if step.value is None else "done"
        if end.failure is not None:
            state = "failed"
        if undo is not None:
            state = "undone"
        elif blocked_at == step.name + UNDO:
            state = "undo failed"
        error = "" if end.failure is None else end.failure.error
        undone_ms = None if undo is None else undo.at_ms
        yield SagaStep(step.name, state, step.attempt, end.at_ms or None, undone_ms, error)


def _history(
    record: Record, progress: Progress, ends: dict[str, Ended]
) -> Iterator[tuple[int, str]]:
    """What happened, with its time."""
    yield record.created_ms, f"{iso(record.created_ms)} begun"
    for name, end in ends.items():
        if end.at_ms:
            yield end.at_ms, f"{iso(end.at_ms)} {_happened(name, end)}"
    for note in progress.notes[1:]:
        if isinstance(note.what, dict) and "blocked" in note.what:
            at, why = str(note.what["blocked"]), note.what.get("why", "")
            yield note.at_ms, f"{iso(note.at_ms)} blocked{f' at {at}' * bool(at)}: {why}"
    for at_ms, outcome, by, why in progress.resolutions:
        yield at_ms, f"{iso(at_ms)} {outcome}, by {by}: {why}"


def _time(entry: tuple[int, str]) -> int:
    return entry[0]


def _happened(name: str, end: Ended) -> str:
    if name == PIVOT:
        return "past the pivot"
    if name == UNDOING:
        return "undoing begins"
    if end.failure is not None:
        return f"{name} failed: {end.failure.error}"
    return f"{name.removesuffix(UNDO)} undone" if name.endswith(UNDO) else f"{name} done"


def _next(state: str, blocked_at: str) -> str:
    if state == "blocked" and not blocked_at:
        return (
            "a person decides: sagas.resume to try again, with accept_change=True to go on with a "
            "definition that has changed"
        )
    if state == "blocked":
        return (
            f"a person decides about {blocked_at!r}: sagas.resume to try again, sagas.resolve to "
            "say what happened, sagas.skip to go on without it"
        )
    return {
        "running": "it is being executed",
        "undoing": "its undos are being executed",
        "lease expired": "its process may be dead: the background of any node continues it",
        "waiting": "the next call or the background of any node continues it",
        "completed": "every call returns its result",
        "undone": "every call raises SagaUndone",
    }[state]


def facts_of_saga(run: SagaRun) -> dict[str, Any]:
    """*run* as JSON."""
    facts = run._asdict()
    facts["created"] = iso(facts.pop("created_ms"))
    facts["cause"] = None if run.cause is None else run.cause._asdict()
    facts["steps"] = [step._asdict() for step in run.steps]
    return facts


# --- pictures -----------------------------------------------------------------------------------


def picture_of_definition(name: str, outline: tuple[OutlineStep, ...]) -> str:
    """The steps of a definition as a Mermaid flowchart, with the undo of each."""
    lines = ["flowchart TD", f"    start([{_quoted(name)}])"]
    before, group_before, group = ["start"], ["start"], 0
    for number, step in enumerate(outline):
        node = f"s{number}"
        if step.group and step.group == group:
            sources = group_before
        else:
            sources, group_before, group = before, before, step.group
            before = []
        shape = f"{{{{{_quoted(step.name)}}}}}" if step.is_pivot else f"[{_quoted(step.name)}]"
        lines.append(f"    {node}{shape}")
        lines += [f"    {source} --> {node}" for source in sources]
        if step.undo:
            lines.append(f"    {node} -. undo .-> u{number}[{_quoted(step.undo)}]")
        before = [*before, node] if step.group else [node]
    lines += [f"    {source} --> done([done])" for source in before]
    return "\n".join(lines) + "\n"


_CLASSES = {
    "done": "done",
    "undone": "undone",
    "failed": "failed",
    "begun": "begun",
    "undo failed": "failed",
}


def picture_of_run(run: SagaRun) -> str:
    """The steps of one saga as a Mermaid flowchart, coloured by their states."""
    lines = ["flowchart TD", f"    start([{_quoted(f'{run.name} {run.key}')}])"]
    before = "start"
    for number, step in enumerate(run.steps):
        words = f"{step.name}: {step.state}" + f" ({step.error})" * bool(step.error)
        lines.append(f"    s{number}[{_quoted(words)}]:::{_CLASSES[step.state]}")
        lines.append(f"    {before} --> s{number}")
        before = f"s{number}"
    lines.append(f"    {before} --> state([{_quoted(run.state)}])")
    lines += [
        "    classDef done fill:#cfc",
        "    classDef undone fill:#eee",
        "    classDef failed fill:#fcc",
        "    classDef begun fill:#ffc",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """*text* as Mermaid takes any text: in quotes, with quotes and line breaks escaped."""
    plain = text.replace("#", "#35;").replace('"', "#quot;").replace("\n", " ")
    return f'"{plain}"'
