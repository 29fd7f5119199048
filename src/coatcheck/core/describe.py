"""Descriptions of a record for operators: everything except for responses and results of steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from coatcheck.core.key import reference_of
from coatcheck.core.progress import NOT_KEPT, Progress, is_sealed, readable_progress_of
from coatcheck.core.record import (
    RUNNING,
    STATE_NAMES,
    Record,
    attempt_began_ms,
    is_lease_over,
)
from coatcheck.core.response import outline_of


def facts_of(record: Record, now_ms: int) -> dict[str, Any]:
    """*record* as JSON."""
    running = record.state == RUNNING
    return {
        "reference": reference_of(record.id),
        "id": record.id.hex(),
        "state": STATE_NAMES[record.state],
        "label": record.label,
        "attempt": record.attempt,
        "scope": record.scope,
        "key": record.key,
        "created": iso(record.created_ms),
        "last_attempt": iso(attempt_began_ms(record)),
        "lease_until": iso(record.lease_until_ms) if record.lease_until_ms else None,
        "window_until": iso(record.window_until_ms),
        "expires": iso(record.expires_ms),
        "is_lease_over": is_lease_over(record, now_ms) if running else None,
        "response": _response_facts(record.response),
        **_progress_facts(readable_progress_of(record)),
    }


def _response_facts(blob: bytes | None) -> dict[str, Any] | None:
    if blob is None:
        return None
    status, size_bytes = outline_of(blob)
    return {"status": status, "bytes": size_bytes}


def _progress_facts(progress: Progress | None) -> dict[str, Any]:
    """*progress* as JSON; every member is None if it cannot be read."""
    if progress is None:
        return dict.fromkeys(("steps", "notes", "progress", "resolutions"))
    report = progress.report
    return {
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


def times_of(record: Record) -> str:
    """One line with the times of *record*: its last attempt, its lease and its window."""
    times = [f"attempt {record.attempt} began {iso(attempt_began_ms(record))}"]
    if record.lease_until_ms:
        times.append(f"lease until {iso(record.lease_until_ms)}")
    return ", ".join([*times, f"window until {iso(record.window_until_ms)}"])


def story_of(record: Record) -> Iterator[tuple[str, str]]:
    """The progress of *record* in lines, each with its kind: "step", "note" or "resolution"."""
    progress = readable_progress_of(record)
    if progress is None:
        yield "notes", "encrypted" if is_sealed(record) else "damaged"
        return
    for step in progress.steps:
        end = "done" if step.value is not None else "begun"
        not_kept = ", its result was not stored" if step.value == NOT_KEPT else ""
        yield "step", f"{step.name}: {end} by attempt {step.attempt}{not_kept}"
    for note in progress.notes:
        what = note.what if isinstance(note.what, str) else json.dumps(note.what)
        yield "note", f"{iso(note.at_ms)} attempt {note.attempt}: {what}"
    for at_ms, outcome, by, why in progress.resolutions:
        yield "resolution", f"{iso(at_ms)} {outcome}, by {by}: {why}"


def iso(at_ms: int) -> str:
    """*at_ms* as an ISO 8601 timestamp."""
    return datetime.fromtimestamp(at_ms // 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
