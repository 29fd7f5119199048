"""What a person decides about a blocked saga: it continues, as it is or with one step decided.

A blocked saga is an operation in doubt. A decision writes who decided, when and why, and releases
it; the next call or the background of any node then continues it. A decision about a saga that is
not blocked changes nothing.
"""

from __future__ import annotations

from coatcheck.core.flow import Flow
from coatcheck.core.progress import Progress, Resolution, Step, encoded, progress_of
from coatcheck.core.record import IN_DOUBT, Record, Swap, failed
from coatcheck.core.recovery import RESOLUTIONS_MAX, Resolved, Unchanged
from coatcheck.core.response import encode_value
from coatcheck.core.saga.actions import LABEL_PREFIX, UNDO, UNDOING, Ended, encode_ended
from coatcheck.core.saga.view import blocked_of

SKIPPED = "skipped"
RESUMED = "resumed"
CHANGE_ACCEPTED = "resumed with its new definition"
HAPPENED = "happened"
DID_NOT_HAPPEN = "did not happen"


def decide(
    record: Record, progress: Progress, resolution: Resolution
) -> Flow[Resolved | Unchanged]:
    """Release the blocked saga of *record* with *progress* and *resolution*."""
    if not is_blocked(record):
        return Unchanged(record)
    kept = (*progress.resolutions, resolution)[-RESOLUTIONS_MAX:]
    decided = failed(record)._replace(progress=encoded(progress._replace(resolutions=kept)))
    conflict = yield from Swap(record.id, record.version, decided)
    return Resolved(decided) if conflict is None else Unchanged(conflict)


def is_blocked(record: Record) -> bool:
    """*record* is a saga that waits for a person."""
    return record.state == IN_DOUBT and record.label.startswith(LABEL_PREFIX)


def with_step_done(record: Record, name: str, result: bytes, now_ms: int) -> Progress:
    """The progress of *record* in which the step *name* is done, with this *result*."""
    value = encode_value(encode_ended(Ended(now_ms, result)))
    return progress_of(record).with_step(Step(name, record.attempt, value))


def without_step(record: Record, name: str) -> Progress:
    """The progress of *record* in which the step *name* was never begun."""
    progress = progress_of(record)
    return progress._replace(steps=tuple(s for s in progress.steps if s.name != name))


def without_definition(record: Record) -> Progress:
    """The progress of *record* in which no definition is stored: any may continue it."""
    progress = progress_of(record)
    first = progress.notes[0]
    note = first._replace(what={**first.what, "steps": None})
    return progress._replace(notes=(note, *progress.notes[1:]))


def open_steps(record: Record) -> list[str]:
    """The steps and undos of a blocked saga that a person can decide about."""
    progress = progress_of(record)
    begun = [step.name for step in progress.steps if step.value is None]
    blocked = blocked_of(progress)
    is_undoing = progress.step(UNDOING) is not None
    undos = [f"{s.name}{UNDO}" for s in progress.steps if is_undoing and ":" not in s.name]
    known = [*begun, *([blocked[0]] if blocked is not None and blocked[0] else []), *undos]
    done = {step.name for step in progress.steps if step.value is not None}
    return [name for name in dict.fromkeys(known) if name not in done]
