"""Deliveries: what a consumer does with a message, decided by how its operation ended.

A broker delivers at least once. The consumer acknowledges a message when its record is completed,
and not before: a message that is acknowledged first is lost if its handler fails.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from coatcheck.core.problem import Problem


class Acknowledge(NamedTuple):
    """The message is handled, now or before (*is_duplicate*): the broker may forget it."""

    is_duplicate: bool = False


class Redeliver(NamedTuple):
    """The message is not handled yet: the broker is to deliver it again, after this time."""

    after_s: float
    reason: str


class DeadLetter(NamedTuple):
    """The message is not handled, and another delivery would not help: a person has to look."""

    reason: str


Action: TypeAlias = Acknowledge | Redeliver | DeadLetter


def action_of_refusal(problem: Problem) -> Action:
    """What to do with a message whose operation was refused."""
    if problem.code == "result-unavailable":  # it was executed; only its result was not stored
        return Acknowledge(is_duplicate=True)
    if problem.kind.retry == "same-key":
        return Redeliver(problem.retry_after_s or 1, problem.detail)
    return DeadLetter(_reason_of(problem))


def _reason_of(problem: Problem) -> str:
    if problem.code == "key-reused":
        return "another message with this event id, and another payload, came before"
    reference = "" if problem.reference is None else f" (reference {problem.reference})"
    return f"{problem.code}: {problem.detail}{reference}"


def action_of_failure(
    error: Exception,
    *,
    attempt: int,
    attempts_max: int | None,
    backoff_s: float,
    backoff_s_max: float,
) -> Redeliver | DeadLetter:
    """What to do with a message whose handler raised *error* in this *attempt*."""
    failure = f"the handler raised {type(error).__name__} in attempt {attempt}"
    if attempts_max is not None and attempt >= attempts_max:
        return DeadLetter(f"{failure}, the last that is allowed")
    # 2 ** 30 is already longer than any limit; larger powers would only cost time.
    after_s = min(backoff_s_max, backoff_s * 2.0 ** min(attempt - 1, 30))
    return Redeliver(after_s, failure)
