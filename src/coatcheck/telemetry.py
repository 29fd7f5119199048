"""Telemetry: one decision and one log line per request, and an event for each change of a claim.

An observer is a function of a `Decision`; the engine calls it once for each guarded request or
call. A listener is a function of an `Event`, for metrics and traces that need more. Neither gets
bodies or keys, only references. Log lines go to the logger "coatcheck" with their parts as
attributes, so that structured handlers need not parse them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from coatcheck.core.keep import Outcome
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import Answer, ClaimRequest, Executed, Replay
from coatcheck.core.progress import trace_of
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT, Record, State
from coatcheck.core.saga.actions import LABEL_PREFIX

logger = logging.getLogger("coatcheck")


# Why an operation is in doubt, if its reconcile function was called.
STILL_UNKNOWN = "its reconcile function does not know what happened"
# 10 000: a process with more operations in doubt at once may log some of them again.
DOUBTS_MAX = 10_000

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
    trace: str = ""  # of a replay: the `traceparent` of the original execution, if that was traced


# Called in the thread or on the event loop of the request, so it must not block; in observe mode,
# in a background thread. An exception is logged and goes no further.
Observer: TypeAlias = Callable[[Decision], object]


# Not frozen, which takes twice as long to make. Do not change one: other listeners get it, too.
@dataclass(slots=True, unsafe_hash=True)
class OperationEvent:
    """The base class of events about one operation."""

    reference: str
    label: str
    scope: str
    attempt: int


@dataclass(slots=True, unsafe_hash=True)
class WriteEvent(OperationEvent):
    """The base class of events about a write to the store."""

    # How long the store took. None: not measured, because the write was part of a transaction or
    # was made in the background.
    write_s: float | None = field(default=None, compare=False)


class Claimed(WriteEvent):
    """An attempt began: this process holds the claim."""

    __slots__ = ()


@dataclass(slots=True, unsafe_hash=True)
class Waited(OperationEvent):
    """A duplicate waited for the attempt of another request."""

    duration_ms: int


class Renewed(OperationEvent):
    """The lease of a running attempt was renewed."""

    __slots__ = ()


class Lost(OperationEvent):
    """Another attempt took over while this one ran."""

    __slots__ = ()


class Completed(WriteEvent):
    """The final answer is stored."""

    __slots__ = ()


class Released(WriteEvent):
    """The attempt ended without a final answer; the next retry runs again."""

    __slots__ = ()


class InDoubt(WriteEvent):
    """It is unknown whether the effect took place; an operator or a reconcile function decides."""

    __slots__ = ()


@dataclass(slots=True, unsafe_hash=True)
class Recovered(OperationEvent):
    """The background settled an abandoned operation."""

    outcome: Literal["completed", "released", "in doubt", "run again"]


@dataclass(slots=True, unsafe_hash=True)
class Observed(OperationEvent):
    """Observe mode: what record mode would have done with a request; see `Decision`."""

    outcome: DecisionOutcome
    code: str


@dataclass(frozen=True, slots=True)
class Swept:
    """A sweep ended; it deleted this many expired records, or none."""

    records: int


@dataclass(frozen=True, slots=True)
class CountedInDoubt:
    """
    The background has counted: so many operations of the store are in doubt now.

    It counts up to 500 in each round; if there are more, the number is reached after some rounds.
    """

    records: int


Event: TypeAlias = OperationEvent | Swept | CountedInDoubt

# The event when an attempt has ended in this state.
ENDS: dict[State, type[WriteEvent]] = {
    COMPLETED: Completed,
    FAILED: Released,
    IN_DOUBT: InDoubt,
}

# Called in whatever thread the event happens in, so it must not block. An exception is logged and
# goes no further.
Listener: TypeAlias = Callable[[Event], object]

# Called when a handler has ended, with its request and the time, before the answer is stored;
# returns the trace context to store with it, or "".
Tracing: TypeAlias = Callable[[ClaimRequest, int], str]


class Telemetry:
    """The observers and listeners of one engine."""

    def __init__(self, observers: Sequence[Observer], listeners: Sequence[Listener]) -> None:
        self.observers = observers
        self.listeners = listeners
        self.tracing: Tracing | None = None  # set by an exporter of spans
        # How many operations have become in doubt in this process, for metrics.
        self.in_doubt_count = 0
        # The doubts that were logged: the key and generation of each, the oldest first.
        self._doubts: dict[tuple[bytes, int], None] = {}

    def report(self, decision: Decision) -> None:
        """Log *decision*, and call the observers with it."""
        log_decision(decision)
        for observer in self.observers:
            try:
                observer(decision)
            except Exception:  # the operation has its outcome, which this must not change
                logger.exception("coatcheck: an observer raised; the operation is not affected")

    def traced(
        self, tracing: Tracing, request: ClaimRequest, outcome: Outcome, now_ms: int
    ) -> Outcome:
        """*outcome* of *request* with its trace context."""
        try:
            return outcome._replace(trace=tracing(request, now_ms))
        except Exception:
            logger.exception("coatcheck: tracing raised; the operation is not affected")
            return outcome

    def became_in_doubt(self, record: Record, why: str) -> None:
        """
        Count and log that *record* is in doubt: without a person it stays so.

        That a reconcile function was called again in vain is logged only if this process has not
        logged the doubt before.
        """
        doubt = record.id, record.created_ms
        if why == STILL_UNKNOWN and doubt in self._doubts:
            return
        if len(self._doubts) >= DOUBTS_MAX:
            self._doubts.pop(next(iter(self._doubts), doubt), None)
        self._doubts[doubt] = None
        self.in_doubt_count += 1
        reference = reference_of(record.id)
        command = "sagas show" if record.label.startswith(LABEL_PREFIX) else "lookup"
        logger.warning(
            "coatcheck: operation %s (%s) is in doubt: %s; see coatcheck %s %s",
            *(reference, record.label, why, command, reference),
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
    attempt, code, trace = 0, "", ""
    if isinstance(answer, Executed):
        outcome, attempt = "executed", answer.record.attempt
        if not answer.record.version:
            outcome, code = "unguarded", "store-unavailable"
    elif isinstance(answer, Replay):
        outcome, attempt, trace = "replayed", answer.record.attempt, trace_of(answer.record)
    elif answer is not None:
        outcome, code = "refused", answer.problem.code
    duration_ms = now_ms - request.now_ms
    reference, label, scope = reference_of(request.id), request.label, request.scope
    return Decision(outcome, reference, label, scope, attempt, code, duration_ms, trace)


def log_decision(decision: Decision) -> None:
    """Log what happened, to which operation, and how long it took."""
    is_unguarded = decision.outcome == "unguarded"
    if logger.isEnabledFor(logging.WARNING if is_unguarded else logging.INFO):
        log = logger.warning if is_unguarded else logger.info
        log(
            "coatcheck: operation %s (%s) %s",
            decision.reference or "without a reference",
            decision.label,
            _WORDS[decision.outcome].format(decision),
            extra=decision._asdict(),
        )


_WORDS: dict[DecisionOutcome, str] = {
    "executed": "was executed as attempt {0.attempt} in {0.duration_ms} ms",
    "replayed": "was replayed in {0.duration_ms} ms",
    "refused": "was refused with {0.code} in {0.duration_ms} ms",
    "failed": "failed in {0.duration_ms} ms",
    "unguarded": "ran without protection in {0.duration_ms} ms: the store is unavailable",
    # Observe mode, in which it ran.
    "would_replay": "was run, and would have been replayed",
    "would_wait": "was run, and would have waited for the first request",
    "would_refuse": "was run, and would have been refused with {0.code}",
}
