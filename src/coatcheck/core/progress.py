"""Progress: what an attempt has written down for whoever comes after it (L7).

Steps that are done, with their results; steps that were begun; notes of what was about to be sent;
how far it is; and how a person has decided, if one had to. It is kept in the record, as JSON, and
only ever grows within a life.
"""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple

from coatcheck.core.record import Record
from coatcheck.core.response import PACKED
from coatcheck.errors import Unreadable

# 64 KiB: what a downstream answers to one call fits many times; what does not is for a database.
STEP_BYTES_MAX = 64 * 1024
NOTE_BYTES_MAX = 4 * 1024
# 256 KiB for all of it, as it is stored: every step writes all of it anew, and DynamoDB takes 400
# KB with the response. Only that a step is done is written past it: see `core/steps.py`.
PROGRESS_BYTES_MAX = 256 * 1024

# In the place of a result that could not be kept, of a step that is done all the same. Every
# result begins with a byte that says what it is, so none is empty.
NOT_KEPT = b""


class Step(NamedTuple):
    """
    One named step; *value* is its encoded result or `NOT_KEPT`, None where it was only begun.

    *beside*: the steps that were under way at the same time when this one ended.
    """

    name: str
    attempt: int
    value: bytes | None = None
    beside: tuple[str, ...] = ()


class Note(NamedTuple):
    """What an attempt was about to do, in the words of its handler."""

    at_ms: int
    attempt: int
    what: Any


class Report(NamedTuple):
    """How far an attempt is: from 0 to 1, and in words."""

    fraction: float | None
    words: str = ""


class Resolution(NamedTuple):
    """How a person ended a doubt, or asked for another run; and who, when and why."""

    at_ms: int
    outcome: str
    by: str
    why: str


class Progress(NamedTuple):
    """All of it; empty for most operations."""

    steps: tuple[Step, ...] = ()
    notes: tuple[Note, ...] = ()
    report: Report | None = None
    resolutions: tuple[Resolution, ...] = ()
    # The steps of the handler that deferred the work; None: it was not deferred.
    handed: tuple[str, ...] | None = None
    # The encoded input of a registered function, which the background can run again.
    input: bytes | None = None

    def step(self, name: str) -> Step | None:
        """The step called *name*, done or begun."""
        return next((step for step in self.steps if step.name == name), None)

    def with_step(self, step: Step) -> Progress:
        """With *step*, in the place of one of the same name."""
        others = tuple(other for other in self.steps if other.name != step.name)
        return self._replace(steps=(*others, step))

    def with_note(self, note: Note) -> Progress:
        """With *note* at the end."""
        return self._replace(notes=(*self.notes, note))

    def with_resolution(self, resolution: Resolution) -> Progress:
        """With *resolution* at the end."""
        return self._replace(resolutions=(*self.resolutions, resolution))


NOTHING = Progress()


def is_sealed(record: Record) -> bool:
    """What was noted in *record* can only be read with a key ring (X1)."""
    return record.progress is not None and record.progress[:1] in PACKED


def progress_of(record: Record) -> Progress:
    """What stands in *record*; raises `Unreadable` where it is sealed or damaged."""
    if record.progress is None:
        return NOTHING
    if is_sealed(record):
        raise Unreadable("what earlier attempts wrote down is sealed, and here is no key")
    try:
        return _decoded(record.progress)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Unreadable("what earlier attempts wrote down is damaged") from error


def readable_progress_of(record: Record) -> Progress | None:
    """The same for who only looks: None where it is sealed or damaged."""
    try:
        return progress_of(record)
    except Unreadable:
        return None


def _decoded(text: bytes) -> Progress:
    members = json.loads(text)
    return Progress(
        tuple(
            Step(name, attempt, None if value is None else base64.b85decode(value), tuple(beside))
            for name, attempt, value, beside in members.get("steps", ())
        ),
        tuple(Note(*note) for note in members.get("notes", ())),
        Report(*members["report"]) if "report" in members else None,
        tuple(Resolution(*resolution) for resolution in members.get("resolutions", ())),
        tuple(members["handed"]) if "handed" in members else None,
        base64.b85decode(members["input"]) if "input" in members else None,
    )


def encoded(progress: Progress) -> bytes:
    """What a record keeps of *progress*."""
    members: dict[str, Any] = {}
    if progress.steps:
        members["steps"] = [
            (name, attempt, None if value is None else base64.b85encode(value).decode(), beside)
            for name, attempt, value, beside in progress.steps
        ]
    if progress.notes:
        members["notes"] = progress.notes
    if progress.report is not None:
        members["report"] = progress.report
    if progress.resolutions:
        members["resolutions"] = progress.resolutions
    if progress.handed is not None:
        members["handed"] = progress.handed
    if progress.input is not None:
        members["input"] = base64.b85encode(progress.input).decode()
    return json.dumps(members, separators=(",", ":")).encode()


def noted(claim: Record, progress: Progress) -> Record:
    """*claim* with *progress*: a move like a renewal, so that who holds an old one learns of it."""
    return claim._replace(version=claim.version + 1, progress=encoded(progress))
