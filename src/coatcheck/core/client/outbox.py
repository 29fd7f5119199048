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
    key: str  # of the action
    sent_key: str  # the same, unless the action was sent again with a new one
    lane: str
    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    state: State  # "pending" to be sent, "unknown" to be looked for
    submitted_ms: int
    first_sent_ms: int | None  # before this call; None: no server can have got it
    calls: int  # this one included


class Verdict(NamedTuple):
    """What becomes of an action after a call."""

    state: State
    reason: str = ""
    was_sent: bool = True  # False: no server can have got it
    needs_new_key: bool = False


# How far the clocks of two processes may differ: by seconds, if anything sets them.
CLOCKS_DIFFER_MS = 60_000


def too_late(entry: Entry, now_ms: int, window_ms: int, horizon_ms: int) -> Verdict | None:
    """
    The verdict, if the server may have forgotten the key before the last attempt of a call.

    It would then execute the action again.
    """
    if entry.first_sent_ms is None:
        return None
    if now_ms + horizon_ms > entry.first_sent_ms + window_ms:
        return TOO_LATE
    if entry.first_sent_ms > now_ms + CLOCKS_DIFFER_MS:
        return CLOCK_SET_BACK
    return None


TOO_LATE = Verdict("unknown", "it was first sent before the window of the server, and not answered")
CLOCK_SET_BACK = Verdict(
    "unknown", "the clock was set back since it was sent, so its age is not known"
)


def latest_ms(now_ms: int, lease_ms: int) -> int:
    """
    The latest time at which a pause or a lease may end that is stored now.

    A later one was stored before the clock was set back; nothing waits for it.
    """
    return now_ms + max(lease_ms, PAUSE_MS_MAX) + CLOCKS_DIFFER_MS


def verdict_of(
    entry: Entry, result: Result, status: int | None, *, renews: bool = False
) -> Verdict:
    """
    What *result*, of a call with this last *status*, means for the action.

    *renews*: the application allows a new key where the server has forgotten the first one.
    """
    if result.gave_up:
        was_sent = entry.first_sent_ms is not None or result.outcome == "unknown"
        return Verdict("pending", result.gave_up, was_sent)
    if result.code == "key-expired" and renews and entry.sent_key == entry.key:
        return Verdict("pending", result.code, was_sent=False, needs_new_key=True)
    reason = "" if result.outcome == "done" else result.code or f"status {status}"
    if result.outcome == "unknown":
        return Verdict("unknown", reason)
    if (
        result.outcome == "refused"
        and entry.first_sent_ms is not None
        and status in BEFORE_THE_KEY
        and not result.was_replayed
    ):
        # An earlier call may have been executed, and this answer does not say.
        return Verdict("unknown", f"status {status} after a call without an answer")
    return Verdict(result.outcome, reason)


def limited(verdict: Verdict, entry: Entry, now_ms: int, lane_wait_ms: int) -> Verdict:
    """*verdict*, or a refusal: an action that cannot be sent holds its lane for a limited time."""
    if verdict.state != "pending" or verdict.was_sent or verdict.needs_new_key:
        return verdict
    # The distance: otherwise a clock that was set back would make it years.
    if abs(now_ms - entry.submitted_ms) < lane_wait_ms:
        return verdict
    return Verdict("refused", f"it could not be sent: {verdict.reason}", was_sent=False)


def pause_ms(calls: int, jitter: float) -> int:
    """How long to wait before the next call; *jitter* is from 0 to 1."""
    longest_ms = min(float(PAUSE_MS_MAX), PAUSE_MS * 2.0 ** min(calls - 1, 20))
    return round(longest_ms * (1 + jitter) / 2)
