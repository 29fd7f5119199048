"""Descriptions of a record for operators: everything except for responses and results of steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from coatcheck.core.key import reference_of
from coatcheck.core.progress import NOT_KEPT, NOTHING, Progress, is_sealed, readable_progress_of
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    IN_DOUBT,
    RUNNING,
    STATE_NAMES,
    Record,
    attempt_began_ms,
    is_lease_over,
)
from coatcheck.core.recovery import can_correct
from coatcheck.core.response import outline_of
from coatcheck.core.saga.actions import LABEL_PREFIX


def facts_of(record: Record, now_ms: int) -> dict[str, Any]:
    """*record* as JSON."""
    running = record.state == RUNNING
    return {
        "reference": reference_of(record.id),
        "id": record.id.hex(),
        "state": STATE_NAMES[record.state],
        "label": record.label,
        "attempt": record.attempt,
        "caller": record.scope,
        "caller_name": (readable_progress_of(record) or NOTHING).caller or None,
        "key": record.key,
        "created": iso(record.created_ms),
        "last_attempt": iso(attempt_began_ms(record)),
        "lease_until": iso(record.lease_until_ms) if record.lease_until_ms else None,
        "window_until": iso(record.window_until_ms),
        "expires": iso(record.expires_ms),
        "is_lease_over": is_lease_over(record, now_ms) if running else None,
        "response": _response_facts(record.response),
        **_progress_facts(readable_progress_of(record)),
        "next": advice_of(record, now_ms)._asdict(),
    }


def _response_facts(blob: bytes | None) -> dict[str, Any] | None:
    if blob is None:
        return None
    status, size_bytes = outline_of(blob)
    return {"status": status, "bytes": size_bytes}


def _progress_facts(progress: Progress | None) -> dict[str, Any]:
    """*progress* as JSON; every member is None if it cannot be read."""
    if progress is None:
        return dict.fromkeys(("failure", "policy", "steps", "notes", "progress", "resolutions"))
    report = progress.report
    return {
        "failure": progress.failure or None,
        "policy": progress.policy or None,
        "steps": [
            {"name": step.name, "attempt": step.attempt, "is_done": step.value is not None}
            for step in progress.steps
        ],
        "notes": [
            {"at": iso(note.at_ms), "attempt": note.attempt, "what": note.what}
            for note in progress.notes
        ],
        "progress": None if report is None else report._asdict(),
        "resolutions": [
            {"at": iso(at_ms), "outcome": outcome, "by": by, "why": why}
            for at_ms, outcome, by, why in progress.resolutions
        ],
    }


def lines_of(record: Record, now_ms: int) -> Iterator[tuple[str, str]]:
    """*record* in lines, each with a name: its state, its texts, its times and its history."""

    def at(time_ms: int) -> str:
        return f"{iso(time_ms)} ({age_of(time_ms, now_ms)})"

    yield "reference", reference_of(record.id)
    yield "state", state_of(record, now_ms)
    yield "label", record.label
    yield "attempt", str(record.attempt)
    progress = readable_progress_of(record) or NOTHING
    if record.scope:
        yield "caller", f"{progress.caller} ({record.scope})" if progress.caller else record.scope
    if record.key:
        yield "key", record.key
    yield "created", at(record.created_ms)
    yield "last attempt", at(attempt_began_ms(record))
    if record.lease_until_ms:
        yield "lease until", at(record.lease_until_ms)
    yield "window until", at(record.window_until_ms)
    yield "expires", at(record.expires_ms)
    yield "policy", ", ".join(filter(None, (progress.policy, _window(record))))
    if record.state == COMPLETED:
        yield "response", _outline(record.response)
    yield from story_of(record)


def _window(record: Record) -> str:
    """The times of its policy that *record* shows."""
    window_ms = record.window_until_ms - record.created_ms
    margin_ms = record.expires_ms - record.window_until_ms
    return f"window {_length(window_ms)}, kept for {_length(margin_ms)} longer"


def _outline(blob: bytes | None) -> str:
    if blob is None:
        return "not kept"
    status, size_bytes = outline_of(blob)
    kind = "a value" if status is None else f"status {status}"
    return f"{kind}, {size_bytes:,} bytes"


def story_of(record: Record) -> Iterator[tuple[str, str]]:
    """The progress of *record* in lines, each with its kind, such as "step" or "note"."""
    progress = readable_progress_of(record)
    if progress is None:
        yield "notes", "encrypted" if is_sealed(record) else "damaged"
        return
    if progress.failure:
        yield "failure", progress.failure
    for step in progress.steps:
        end = "done" if step.value is not None else "begun"
        not_kept = ", its result was not stored" if step.value == NOT_KEPT else ""
        yield "step", f"{step.name}: {end} by attempt {step.attempt}{not_kept}"
    for note in progress.notes:
        what = note.what if isinstance(note.what, str) else json.dumps(note.what)
        yield "note", f"{iso(note.at_ms)} attempt {note.attempt}: {what}"
    for at_ms, outcome, by, why in progress.resolutions:
        yield "resolution", f"{iso(at_ms)} {outcome}, by {by}: {why}"


def state_of(record: Record, now_ms: int) -> str:
    """The state of *record* for people; "lease expired": it runs, but its lease is over."""
    if record.state == RUNNING and is_lease_over(record, now_ms):
        return "lease expired"
    return STATE_NAMES[record.state].replace("_", " ")


class Advice(NamedTuple):
    """What happens to an operation next, and the commands that change that."""

    words: str
    commands: tuple[str, ...]


def advice_of(record: Record, now_ms: int) -> Advice:
    """What an operator can do about *record*."""
    if record.label.startswith(LABEL_PREFIX):
        words = "it is a saga, whose steps and undos are decided one by one"
        return Advice(words, (f"coatcheck sagas show {reference_of(record.id)}",))
    resolve = f"coatcheck resolve {reference_of(record.id)}"
    if record.state == RUNNING and not is_lease_over(record, now_ms):
        return Advice(f"attempt {record.attempt} is running: there is nothing to decide", ())
    if record.state == IN_DOUBT:
        words = "find out whether it happened; retries are refused until you decide"
        return Advice(words, _decisions(record, resolve))
    if record.state == RUNNING:
        words = (
            "the next retry follows the recovery policy; if none comes and its process is dead, "
            "decide"
        )
        return Advice(words, _decisions(record, f"{resolve} --abandoned"))
    words = (
        "retries get the stored response"
        if record.state == COMPLETED
        else "the next retry executes it"
    )
    if readable_progress_of(record) is None or not can_correct(record):
        return Advice(words, ())
    both = _decisions(record, f"{resolve} --correct")
    return Advice(f"{words}, as a person decided", both[:1] if record.state == FAILED else both)


def _decisions(record: Record, resolve: str) -> tuple[str, str]:
    answer = "--status 201 --body-file FILE" if record.scope else "--value JSON"
    who = "--by YOU --why REASON"
    return f"{resolve} --completed {answer} {who}", f"{resolve} --failed {who}"


_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000))


def age_of(time_ms: int, now_ms: int) -> str:
    """How long ago *time_ms* is, or how far ahead: "3 m ago", "in 2 h"."""
    apart_ms = abs(now_ms - time_ms)
    for unit, unit_ms in _UNITS:
        if apart_ms >= unit_ms:
            length = f"{apart_ms // unit_ms} {unit}"
            return f"{length} ago" if time_ms < now_ms else f"in {length}"
    return "now"


def _length(length_ms: int) -> str:
    """*length_ms* as people write it in a policy: "24 h", "3 d", "90 s"."""
    for unit, unit_ms in _UNITS:
        is_one_day = unit == "d" and length_ms == unit_ms  # 24 h, the default
        if length_ms and length_ms % unit_ms == 0 and not is_one_day:
            return f"{length_ms // unit_ms} {unit}"
    return f"{length_ms / 1_000:g} s"


def iso(at_ms: int) -> str:
    """*at_ms* as an ISO 8601 timestamp."""
    return datetime.fromtimestamp(at_ms // 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
