"""Progress: what attempts store in the record for the attempts after them.

Steps that are done, with their results; steps that were begun; notes; how far the work is; and the
decisions of operators. It is stored as JSON and only grows within a generation. The caller's name
is there, too, if the application gives one: so it is encrypted where the steps are.
"""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple

from coatcheck.core.record import Record
from coatcheck.core.response import PACKED
from coatcheck.errors import Unreadable

# 64 KiB: many times the size of a usual response. A larger result belongs into a database.
STEP_BYTES_MAX = 64 * 1024
NOTE_BYTES_MAX = 4 * 1024
# 256 KiB for everything, as it is stored: each step writes all of it again, and a DynamoDB item has
# room for 400 KB with the response. Only "this step is done" may exceed it; see `core/steps.py`.
PROGRESS_BYTES_MAX = 256 * 1024

# The value of a step that is done, but whose result could not be stored. It differs from every
# encoded result: those begin with a byte for their kind.
NOT_KEPT = b""

# Bytes are stored in base 85, which is short. From this size on in base 64, after a colon, which
# base 85 does not have: each step reads and writes all results, and base 64 is 40 times as fast.
_LONG_BYTES = 512
_LONG = ":"


class Step(NamedTuple):
    """
    One named step; *value* is its encoded result or `NOT_KEPT`, None if it was only begun.

    *beside*: the steps that were running when this one ended. *again_until_ms*: until then a step
    that was only begun may simply run again; 0: only its probe or an operator decides.
    """

    name: str
    attempt: int
    value: bytes | None = None
    beside: tuple[str, ...] = ()
    again_until_ms: int = 0


class Note(NamedTuple):
    """What a handler was about to do, in its own words."""

    at_ms: int
    attempt: int
    what: Any


class Report(NamedTuple):
    """How far an attempt is: a fraction from 0 to 1, and words."""

    fraction: float | None
    words: str = ""


class Resolution(NamedTuple):
    """An operator's decision about an operation: when, what, who and why."""

    at_ms: int
    outcome: str
    by: str
    why: str


class Progress(NamedTuple):
    """Everything that is stored; empty for most operations."""

    steps: tuple[Step, ...] = ()
    notes: tuple[Note, ...] = ()
    report: Report | None = None
    resolutions: tuple[Resolution, ...] = ()
    # The steps of the handler that deferred the work; None if it was not deferred.
    handed: tuple[str, ...] | None = None
    # The encoded input of a registered function, with which any process can run it again.
    input: bytes | None = None
    # How the last attempt without a final answer ended, and its policy, for operators.
    failure: str = ""
    policy: str = ""
    # The name of the caller, if the application gives one, for operators.
    caller: str = ""
    # The fingerprint of the first attempt, if a later one is bound to a session: the keys of
    # downstream calls are derived from it.
    origin: bytes = b""
    # The trace context of the attempt whose answer this is, as the header `traceparent` has it.
    trace: str = ""

    def step(self, name: str) -> Step | None:
        """The step called *name*, done or begun."""
        return next((step for step in self.steps if step.name == name), None)

    def with_step(self, step: Step) -> Progress:
        """With *step*, which replaces a step of the same name."""
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
    """The progress of *record* is encrypted."""
    return record.progress is not None and record.progress[:1] in PACKED


def progress_of(record: Record) -> Progress:
    """The progress in *record*; raises `Unreadable` if it is encrypted or damaged."""
    if record.progress is None:
        return NOTHING
    if is_sealed(record):
        raise Unreadable(
            "the steps of earlier attempts are encrypted; this process has no key ring"
        )
    try:
        return _decoded(record.progress)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Unreadable("the stored steps of earlier attempts are damaged") from error


def readable_progress_of(record: Record) -> Progress | None:
    """The progress in *record*, for display; None if it is encrypted or damaged."""
    try:
        return progress_of(record)
    except Unreadable:
        return None


def _decoded(text: bytes) -> Progress:
    members = json.loads(text)
    return Progress(
        tuple(
            Step(
                *(name, attempt, None if value is None else _bytes_of(value)),
                tuple(beside),
                *until_ms,
            )
            for name, attempt, value, beside, *until_ms in members.get("steps", ())
        ),
        tuple(Note(*note) for note in members.get("notes", ())),
        Report(*members["report"]) if "report" in members else None,
        tuple(Resolution(*resolution) for resolution in members.get("resolutions", ())),
        tuple(members["handed"]) if "handed" in members else None,
        _bytes_of(members["input"]) if "input" in members else None,
        members.get("failure", ""),
        members.get("policy", ""),
        members.get("caller", ""),
        bytes.fromhex(members.get("origin", "")),
        members.get("trace", ""),
    )


def encoded(progress: Progress) -> bytes:
    """*progress* as a record stores it."""
    members: dict[str, Any] = {}
    if progress.steps:
        members["steps"] = [
            (
                *(name, attempt, None if value is None else _text_of(value)),
                beside,
                *((until_ms,) if until_ms else ()),  # as earlier releases wrote it, where possible
            )
            for name, attempt, value, beside, until_ms in progress.steps
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
        members["input"] = _text_of(progress.input)
    texts = {
        "failure": progress.failure,
        "policy": progress.policy,
        "caller": progress.caller,
        "origin": progress.origin.hex(),
        "trace": progress.trace,
    }
    members |= {name: text for name, text in texts.items() if text}
    return json.dumps(members, separators=(",", ":")).encode()


def _text_of(value: bytes) -> str:
    if len(value) < _LONG_BYTES:
        return base64.b85encode(value).decode()
    return _LONG + base64.b64encode(value).decode()


def _bytes_of(text: str) -> bytes:
    if text.startswith(_LONG):
        return base64.b64decode(text.removeprefix(_LONG), validate=True)
    return base64.b85decode(text)


def has_notes(record: Record) -> bool:
    """An attempt has stored something in *record*, or its input: more than the caller's name."""
    if record.progress is None:
        return False
    if not record.progress.startswith(b'{"caller":'):  # nearly always
        return True
    progress = readable_progress_of(record)
    return progress is None or progress != Progress(caller=progress.caller)


def with_failure(record: Record, failure: str, policy: str = "") -> Record:
    """*record*, the end of an attempt under *policy*, with how it ended: "raised TimeoutError"."""
    words = f"attempt {record.attempt} {failure}"
    progress = progress_of(record)._replace(failure=words, policy=policy)
    return record._replace(progress=encoded(progress))


def in_session(claim: Record, fingerprint: bytes) -> Record:
    """*claim*, of a request without a session, bound to one: *fingerprint* is that with it."""
    progress = progress_of(claim)
    origin = progress.origin or claim.fingerprint
    return claim._replace(
        fingerprint=fingerprint, progress=encoded(progress._replace(origin=origin))
    )


def origin_of(record: Record) -> bytes:
    """The fingerprint that the keys of downstream calls are derived from."""
    progress = NOTHING if record.progress is None else readable_progress_of(record)
    return (progress or NOTHING).origin or record.fingerprint


def with_trace(record: Record, trace: str) -> Record:
    """*record*, the answer of an attempt, with the trace context of that attempt."""
    return record._replace(progress=encoded(progress_of(record)._replace(trace=trace)))


def trace_of(record: Record) -> str:
    """The trace context in *record*; empty if it has none, or if it cannot be read."""
    if record.progress is None or b'"trace":' not in record.progress:
        return ""
    return (readable_progress_of(record) or NOTHING).trace


def only_trace(record: Record) -> Record:
    """*record* with its trace context, and without all other progress."""
    trace = trace_of(record)
    return record._replace(progress=encoded(Progress(trace=trace)) if trace else None)


def noted(claim: Record, progress: Progress) -> Record:
    """*claim* with *progress*; a new version, as for a renewal."""
    return claim._replace(version=claim.version + 1, progress=encoded(progress))
