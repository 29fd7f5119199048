"""Sending: the attempts of one call of a client, from the first to the answer.

    key ─► SEND ─► definite answer → done or refused
             │ lost, 408, 409 in progress, 425, 429, 5xx
             ▼
           pause ─► SEND again, with the same key and the same bytes
             │ no attempts, no time or no budget left
             ▼
           unknown, or refused if no attempt can have reached the application

The flow decides; a client library performs `Send`, `Sleep` and `NewKey`. Times and random numbers
are results of these effects.

Invariants, checked by `tests/core/client/test_send.py` over every sequence of answers: all attempts
have the same key, unless the application allowed a new one for an expired key; a definite answer
ends the flow; no attempt begins after the deadline; a POST without a key is sent once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, NamedTuple, TypeAlias

from coatcheck.core.client.retry_policy import Preset, RetryBudget, RetryPolicy
from coatcheck.core.flow import Effect, Flow
from coatcheck.core.problem import Retry

Outcome: TypeAlias = Literal["done", "refused", "unknown"]
# Why the client stopped before it had a definite answer; "": it had one.
GaveUp: TypeAlias = Literal["", "attempts", "deadline", "budget", "no-key", "cannot-send"]


class Answer(NamedTuple):
    """A response, reduced to what decides about a retry; see `answer_of`."""

    status: int
    code: str | None = None  # of its problem document
    advice: Retry | None = None  # the `retry` member of its problem document
    hint: bool | None = None  # of the retry header of the preset
    retry_after_s: float | None = None
    is_replay: bool = False
    location: str | None = None


class Lost(NamedTuple):
    """No response came; *may_have_arrived*: the server may have got the request."""

    may_have_arrived: bool = True


class Reply(NamedTuple):
    """What came of one attempt, when, and a random number from 0 to 1."""

    answer: Answer | Lost
    now_s: float
    jitter: float


@dataclass(slots=True)
class Send(Effect[Reply]):
    """Send the request, with *key*; or ask *poll*, the address of an accepted operation."""

    key: str | None
    attempt: int
    time_left_s: float
    poll: str | None = None


@dataclass(slots=True)
class Sleep(Effect[float]):
    """Wait for *seconds*; returns the time after that."""

    seconds: float


@dataclass(slots=True)
class NewKey(Effect[str]):
    """Make a new key."""


class Order(NamedTuple):
    """One call: what to send, and by which rules."""

    method: str
    key: str | None
    policy: RetryPolicy
    preset: Preset
    # What requests of the same action have done that were redirected to this one.
    spent_s: float = 0.0
    may_have_run: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """
    What came of a call.

    *outcome* is "done", "refused" (it did not happen), or "unknown" (it may have happened; send it
    again with the same key to find out). *gave_up* is why the client stopped without a definite
    answer: "attempts", "deadline", "budget", "no-key", or "cannot-send" if the certificate of the
    server is wrong, or the URL; empty if it had one. *advice* is what the server advised:
    "same-key", "new-key" or "never".
    """

    outcome: Outcome
    attempts: int
    was_replayed: bool
    key: str | None
    gave_up: GaveUp = ""
    code: str | None = None
    advice: Retry | None = None


# Where a response has its `Result`: in the extensions of httpx, as an attribute elsewhere.
EXTENSION = "coatcheck"


def result_of(thing: object) -> Result | None:
    """What came of the call that returned the response, or raised the error, *thing*."""
    for one in (thing, getattr(thing, "response", None)):  # the latter: of `raise_for_status`
        extensions = getattr(one, "extensions", None)
        found = extensions.get(EXTENSION) if isinstance(extensions, dict) else None
        found = getattr(one, EXTENSION, None) if found is None else found
        if isinstance(found, Result):
            return found
    return None


def send(order: Order, budget: RetryBudget, now_s: float) -> Flow[Result]:
    """Send the request of *order*, and again until there is a definite answer or a limit."""
    policy = order.policy
    until_s = now_s + policy.deadline_s - order.spent_s
    key = order.key
    may_have_run = order.may_have_run
    attempts = 0
    while True:
        attempts += 1
        reply = yield from Send(key, attempts, until_s - now_s)
        answer = reply.answer
        if policy.follow_accepted and isinstance(answer, Answer) and _is_accepted(answer):
            may_have_run = True
            reply = yield from _followed(answer, reply, policy, until_s)
            answer = reply.answer
        may_have_run = may_have_run or may_have_run_after(answer)
        wants_renewal = _wants_renewal(answer, policy, is_renewed=key != order.key)
        if not wants_renewal and not is_retried(answer, order.preset):
            budget.give()
            assert isinstance(answer, Answer)
            return _ended(answer, attempts, key, may_have_run=may_have_run)
        pause_s = _pause_s(answer, policy, attempts, reply.jitter)
        gave_up: GaveUp = ""
        if key is None and order.method not in policy.methods_without_key:
            gave_up = "no-key"
        elif attempts >= policy.attempts_max:
            gave_up = "attempts"
        elif reply.now_s + pause_s >= until_s:
            gave_up = "deadline"
        elif not _is_in_progress(answer) and not budget.take():
            gave_up = "budget"
        else:
            now_s = yield from Sleep(pause_s)
            gave_up = "deadline" if now_s >= until_s else ""
        if gave_up:
            return _given_up(answer, attempts, key, gave_up, may_have_run=may_have_run)
        if wants_renewal:
            key = yield from NewKey()


def is_retried(answer: Answer | Lost, preset: Preset) -> bool:
    """Whether a request with this *answer* is sent again, with the same key."""
    if isinstance(answer, Lost):
        return True
    # A replay is the stored answer: each retry would get it again.
    if answer.is_replay or answer.status < 400:
        # The address of an accepted operation may answer: it was interrupted, send it again.
        return answer.status == 200 and not answer.is_replay and answer.advice == "same-key"
    if answer.hint is not None:
        return answer.hint
    if answer.advice is not None:
        return answer.advice == "same-key"
    return _is_in_progress(answer) or answer.status in preset.retry_statuses


def _is_accepted(answer: Answer) -> bool:
    return answer.status == 202 and answer.location is not None


# How long to wait before an accepted operation is asked for, where the server does not say. 1 s:
# work that answers 202 takes seconds.
POLL_S = 1.0


def _followed(answer: Answer, reply: Reply, policy: RetryPolicy, until_s: float) -> Flow[Reply]:
    """Ask the address of an accepted operation until it has a result, or the deadline comes."""
    location, polls = answer.location, 0
    while True:
        polls += 1
        if isinstance(reply.answer, Answer) and not _is_poll_repeated(reply.answer):
            return reply
        asked = getattr(reply.answer, "retry_after_s", None)
        pause_s = POLL_S if asked is None else min(asked, policy.retry_after_max_s)
        # The backoff makes clients that were accepted together ask apart, and a failing server
        # less and less often.
        pause_s += policy.backoff_s(polls) * reply.jitter
        if reply.now_s + pause_s >= until_s:
            return reply._replace(answer=Lost(), now_s=until_s)
        now_s = yield from Sleep(pause_s)
        if now_s >= until_s:
            return reply._replace(answer=Lost(), now_s=now_s)
        reply = yield from Send(None, 0, until_s - now_s, location)
        if isinstance(reply.answer, Answer) and _is_address_gone(reply.answer):
            return reply._replace(answer=reply.answer._replace(code="outcome-unknown"))


def _is_poll_repeated(answer: Answer) -> bool:
    """The operation still runs, or the address could not be read: ask again."""
    if answer.is_replay:
        return False
    return answer.status in {202, 408, 425, 429} or answer.status >= 500


def _is_address_gone(answer: Answer) -> bool:
    """This is no answer of the operation: the address is not known, or not to this caller."""
    return answer.status in {401, 403, 404, 410} and not answer.is_replay


def _is_in_progress(answer: Answer | Lost) -> bool:
    """The first attempt still runs: a healthy server asks to come back later."""
    if isinstance(answer, Lost) or answer.status != 409:
        return False
    if answer.code is not None:
        return answer.code in {"in-progress", "idempotency_key_in_use"}
    return answer.retry_after_s is not None


def _wants_renewal(answer: Answer | Lost, policy: RetryPolicy, *, is_renewed: bool) -> bool:
    """The key has expired, and the application allowed a new one; once, not again and again."""
    if not policy.renew_expired or is_renewed or isinstance(answer, Lost):
        return False
    return answer.code == "key-expired"


def _pause_s(answer: Answer | Lost, policy: RetryPolicy, retry: int, jitter: float) -> float:
    """How long to wait before the retry: what the server asked for, and a random backoff."""
    asked_s = getattr(answer, "retry_after_s", None) or 0.0
    # The random part is added to what the server asked for: otherwise all clients that it has sent
    # away would return at the same moment.
    pause_s: float = min(asked_s, policy.retry_after_max_s) + policy.backoff_s(retry) * jitter
    return pause_s


# Redirects that nothing followed: another address has to do it. 302 and 303 lead to a result.
_REDIRECTS = frozenset({301, 307, 308})
# Given before the server looks for the key: after a lost attempt they say nothing about it.
BEFORE_THE_KEY = _REDIRECTS | {401, 403, 407, 413, 415, 425, 429}
# Problems that say what is known of the operation.
_OUTCOMES: dict[str | None, Outcome] = {
    "result-unavailable": "done",
    "outcome-unknown": "unknown",
    "too-many-attempts": "unknown",
    "key-expired": "unknown",
}


def may_have_run_after(answer: Answer | Lost) -> bool:
    """Whether the application may have run because of this attempt, or of one before it."""
    if isinstance(answer, Lost):
        return answer.may_have_arrived
    return answer.status >= 500 or answer.status in {408, 409}


def _ended(answer: Answer, attempts: int, key: str | None, *, may_have_run: bool) -> Result:
    """The result of a definite *answer*."""
    outcome: Outcome
    if answer.status < 400 and answer.status not in _REDIRECTS:
        outcome = "done"
    elif answer.code in _OUTCOMES:
        outcome = _OUTCOMES[answer.code]
    elif answer.status >= 500 or (
        may_have_run and answer.status in BEFORE_THE_KEY and not answer.is_replay
    ):
        outcome = "unknown"
    else:
        outcome = "refused"
    return Result(outcome, attempts, answer.is_replay, key, code=answer.code, advice=answer.advice)


def _given_up(
    answer: Answer | Lost, attempts: int, key: str | None, gave_up: GaveUp, *, may_have_run: bool
) -> Result:
    """The result if the client stops after *answer*, which is not definite."""
    outcome: Outcome = "unknown" if may_have_run else "refused"
    code, advice = (answer.code, answer.advice) if isinstance(answer, Answer) else (None, None)
    return Result(outcome, attempts, False, key, gave_up, code, advice)  # noqa: FBT003 - no replay


# -------------------------------------------------------------------------- reading a response

# 64 KiB: problem documents have a few hundred bytes.
PROBLEM_BYTES_MAX = 64 * 1024


def answer_of(
    status: int,
    header: Callable[[str], str | None],
    body: bytes,
    *,
    preset: Preset,
    wall_s: float,
) -> Answer:
    """
    The answer in a response.

    *header* returns the value of a header, *body* may be empty where nothing reads it (see
    `is_body_read`), and *wall_s* is the time of day.
    """
    marker = preset.replayed_header
    is_replay = marker is not None and (header(marker) or "").strip().lower() == "true"
    if status < 400 and status != 202 and not body:
        return Answer(status, is_replay=is_replay)  # nothing else of it decides
    code, advice = _problem_of(header("Content-Type"), body)
    hint = preset.retry_header and (header(preset.retry_header) or "").strip().lower()
    return Answer(
        status,
        code,
        advice,
        _HINTS.get(hint),
        _retry_after_s(header, wall_s),
        is_replay,
        header("Location"),
    )


_HINTS: dict[str | None, bool] = {"true": True, "false": False}


def is_body_read(status: int, content_type: str | None, *, is_poll: bool = False) -> bool:
    """Whether the body of a response can decide about a retry."""
    return (status >= 400 or (is_poll and status == 200)) and _is_json(content_type)


def _is_json(content_type: str | None) -> bool:
    return content_type is not None and "json" in content_type.lower()


def _problem_of(content_type: str | None, body: bytes) -> tuple[str | None, Retry | None]:
    """The code and the advice in a problem document, whatever its other members say."""
    if not body or len(body) > PROBLEM_BYTES_MAX or not _is_json(content_type):
        return None, None
    try:
        members: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(members, dict):
        return None, None
    advice = members.get("retry")
    if advice not in ("same-key", "new-key", "never"):
        advice = None
    return _code_of(members), advice


def _code_of(members: dict[str, Any]) -> str | None:
    """`code`, `error.code` (Stripe), or the end of `type`."""
    error = members.get("error")
    for code in (members.get("code"), error.get("code") if isinstance(error, dict) else None):
        if isinstance(code, str):
            return code
    type = members.get("type")
    if not isinstance(type, str) or type == "about:blank":
        return None
    return type.rpartition("#")[2].rpartition("/")[2] or None


def _retry_after_s(header: Callable[[str], str | None], wall_s: float) -> float | None:
    """`Retry-After` in seconds from now; None if it is missing or is neither form of it."""
    value = header("Retry-After")
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        # 12 digits are thousands of years; int() refuses very long numbers.
        return float(value[:12])
    until_s = _date_s(value)
    if until_s is None:
        return None
    # The server's own clock, where it sends it: the two may differ by hours.
    sent_s = _date_s(header("Date") or "")
    return max(0.0, until_s - (wall_s if sent_s is None else sent_s))


def _date_s(value: str) -> float | None:
    """An HTTP date in seconds since 1970; None if it is none."""
    try:
        date: datetime = parsedate_to_datetime(value)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
