"""Telemetry: one decision and one log line per request, and an event for each change of a claim.

An observer is a function of a `Decision`; the engine calls it once for each guarded request or
call. A listener is a function of an `Event`, for metrics and traces that need more. Neither gets
bodies or keys, only references. Log lines go to the logger "coatcheck" with their parts as
attributes, so that structured handlers need not parse them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import Answer, ClaimRequest, Executed, Refuse, Replay
from coatcheck.core.record import Record

logger = logging.getLogger("coatcheck")


DecisionOutcome: TypeAlias = Literal[
    "executed",
    "replayed",
    "refused",
    "failed",
    "unguarded",
    "would_replay",
    "would_wait",
    "would_refuse",
]


class Decision(NamedTuple):
    """
    The outcome of one guarded request or call, for observers.

    "executed": the handler ran; "replayed": the stored response was returned; "refused": the
    response is a problem document with this *code*; "failed": the handler raised, or its
    transaction was rolled back; "unguarded": the handler ran without protection, because the store
    was unavailable (`on_outage="execute"`).

    In observe mode the handler runs in any case. "would_replay", "would_wait" and "would_refuse":
    record mode would have done that; "executed" and "failed": as above.
    """

    outcome: DecisionOutcome
    reference: str  # for `coatcheck lookup`; "" if the request had no valid key
    label: str  # "POST /orders", or the scope of a guarded function
    scope: str  # the caller's digest
    attempt: int  # 1 for the first; 0 if it was refused or failed
    code: str  # of the problem, if it was refused, would have been, or ran unguarded; else ""
    duration_ms: int


# Called in the thread or on the event loop of the request, so it must not block; in observe mode,
# in a background thread. An exception is logged and goes no further.
Observer: TypeAlias = Callable[[Decision], object]


@dataclass(frozen=True, slots=True)
class OperationEvent:
    """The base class of events about one operation."""

    reference: str
    label: str
    scope: str
    attempt: int


class Claimed(OperationEvent):
    """An attempt began: this process holds the claim."""


@dataclass(frozen=True, slots=True)
class Waited(OperationEvent):
    """A duplicate waited for the attempt of another request."""

    duration_ms: int


class Renewed(OperationEvent):
    """The lease of a running attempt was renewed."""


class Lost(OperationEvent):
    """Another attempt took over while this one ran."""


class Completed(OperationEvent):
    """The final answer is stored."""


class Released(OperationEvent):
    """The attempt ended without a final answer; the next retry runs again."""


class InDoubt(OperationEvent):
    """It is unknown whether the effect took place; an operator or a reconcile function decides."""


@dataclass(frozen=True, slots=True)
class Recovered(OperationEvent):
    """The background settled an abandoned operation."""

    outcome: Literal["completed", "released", "in doubt", "run again"]


@dataclass(frozen=True, slots=True)
class Observed(OperationEvent):
    """Observe mode: what record mode would have done with a request; see `Decision`."""

    outcome: DecisionOutcome
    code: str


@dataclass(frozen=True, slots=True)
class Swept:
    """A sweep ended; it deleted this many expired records, or none."""

    records: int


Event: TypeAlias = OperationEvent | Swept

# Called in whatever thread the event happens in, so it must not block. An exception is logged and
# goes no further.
Listener: TypeAlias = Callable[[Event], object]


class Telemetry:
    """The observers and listeners of one engine."""

    def __init__(self, observers: Sequence[Observer], listeners: Sequence[Listener]) -> None:
        self.observers = observers
        self.listeners = listeners
        # How many operations have become in doubt in this process, for metrics.
        self.in_doubt_count = 0

    def report(self, decision: Decision) -> None:
        """Log *decision*, and call the observers with it."""
        log_decision(decision)
        for observer in self.observers:
            try:
                observer(decision)
            except Exception:  # the operation has its outcome, which this must not change
                logger.exception("coatcheck: an observer raised; the operation is not affected")

    def became_in_doubt(self, record: Record, why: str) -> None:
        """Count and log that *record* is in doubt: without a person it stays so."""
        self.in_doubt_count += 1
        reference = reference_of(record.id)
        logger.warning(
            "coatcheck: operation %s (%s) is in doubt: %s; see coatcheck lookup %s",
            *(reference, record.label, why, reference),
            extra={"reference": reference, "label": record.label, "attempt": record.attempt},
        )

    def happened(self, kind: type[OperationEvent], record: Record, *more: Any) -> None:
        """Call the listeners with an event of this *kind*."""
        if self.listeners:
            what = (reference_of(record.id), record.label, record.scope, record.attempt)
            self.emit(kind(*what, *more))

    def emit(self, event: Event) -> None:
        """Call the listeners with *event*."""
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("coatcheck: a listener raised; the operation is not affected")


def decision_of(request: ClaimRequest, answer: Answer | None, now_ms: int) -> Decision:
    """What became of *request*; None: its handler failed."""
    outcome: DecisionOutcome = "failed"
    attempt, code = 0, ""
    match answer:
        case Executed(record):
            outcome, attempt = "executed", record.attempt
            if not record.version:
                outcome, code = "unguarded", "store-unavailable"
        case Replay(record):
            outcome, attempt = "replayed", record.attempt
        case Refuse(refusal):
            outcome, code = "refused", refusal.code
        case None:
            pass
    duration_ms = now_ms - request.now_ms
    reference = reference_of(request.id)
    return Decision(outcome, reference, request.label, request.scope, attempt, code, duration_ms)


def log_decision(decision: Decision) -> None:
    """Log what happened, to which operation, and how long it took."""
    level = logging.WARNING if decision.outcome == "unguarded" else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(
            level,
            "coatcheck: operation %s (%s) %s in %d ms",
            decision.reference or "without a reference",
            decision.label,
            _WORDS[decision.outcome].format(decision),
            decision.duration_ms,
            extra=decision._asdict(),
        )


_WORDS: dict[DecisionOutcome, str] = {
    "executed": "was executed as attempt {0.attempt}",
    "replayed": "was replayed",
    "refused": "was refused with {0.code}",
    "failed": "failed",
    "unguarded": "ran unguarded, because the store is unavailable",
    "would_replay": "ran; its route is only observed, and it would have been replayed",
    "would_wait": "ran; its route is only observed, and it would have waited",
    "would_refuse": "ran; its route is only observed, and it would have been refused with {0.code}",
}
