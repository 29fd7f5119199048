"""Decisions of an outbox: when an action is sent, and what its answer means.

An action is on disk until its answer is definite. A call that ended without one is repeated later,
with the same key, as long as the server remembers the key.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from coatcheck.core.client.send import BEFORE_THE_KEY, Result

State: TypeAlias = Literal["pending", "done", "refused", "unknown"]

# 1 s, 2 s, 4 s … 5 min between two calls: each call has made several attempts already.
PAUSE_MS = 1_000
PAUSE_MS_MAX = 300_000


class Entry(NamedTuple):
    """One action, as the outbox has stored it."""

    id: int
    key: str
    lane: str
    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    first_sent_ms: int | None  # before this call; None: no server can have got it
    calls: int  # this one included


class Verdict(NamedTuple):
    """What becomes of an action after a call."""

    state: State
    reason: str = ""
    was_sent: bool = True  # False: no server can have got it


def is_too_late(entry: Entry, now_ms: int, window_ms: int, horizon_ms: int) -> bool:
    """
    Whether the server may have forgotten the key before the last attempt of a call.

    It would then execute the action again.
    """
    if entry.first_sent_ms is None:
        return False
    return now_ms + horizon_ms > entry.first_sent_ms + window_ms


TOO_LATE = Verdict("unknown", "it was first sent before the window of the server, and not answered")


def verdict_of(entry: Entry, result: Result, status: int | None) -> Verdict:
    """What *result*, of a call with this last *status*, means for the action."""
    if result.gave_up:
        was_sent = entry.first_sent_ms is not None or result.outcome == "unknown"
        return Verdict("pending", result.gave_up, was_sent)
    if result.outcome == "unknown":
        return Verdict("unknown", result.code or f"status {status}")
    if (
        result.outcome == "refused"
        and entry.first_sent_ms is not None
        and status in BEFORE_THE_KEY
        and not result.was_replayed
    ):
        # An earlier call may have been executed, and this answer does not say.
        return Verdict("unknown", f"status {status} after a call without an answer")
    return Verdict(result.outcome)


def pause_ms(calls: int, jitter: float) -> int:
    """How long to wait before the next call; *jitter* is from 0 to 1."""
    longest_ms = min(float(PAUSE_MS_MAX), PAUSE_MS * 2.0 ** min(calls - 1, 20))
    return round(longest_ms * (1 + jitter) / 2)
