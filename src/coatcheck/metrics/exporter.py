"""What both libraries share: events become changes of instruments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

from coatcheck.engine.base import EngineBase
from coatcheck.errors import Misconfigured
from coatcheck.metrics.labels import Labels
from coatcheck.telemetry import (
    Claimed,
    Completed,
    CountedInDoubt,
    Decision,
    Event,
    InDoubt,
    Lost,
    OperationEvent,
    Recovered,
    Released,
    Renewed,
    Swept,
    Telemetry,
    Waited,
    WriteEvent,
)

# Up to a minute: longer than clients wait. 1 ms is the smallest difference a decision has.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

# For one write to the store: from a tenth of a millisecond, which a store in memory needs, to the
# limits that databases set.
WRITE_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5)

# What is timed beside the whole request: its name, its description, and its buckets.
TIMED = {
    "claim": ("How long the store took to write a claim.", WRITE_BUCKETS_S),
    "complete": ("How long the store took to write the end of an attempt.", WRITE_BUCKETS_S),
    "wait": ("How long duplicates waited for the attempt of another request.", BUCKETS_S),
}

# The descriptions of the two gauges whose value is not a change.
IN_DOUBT_NOW = "Operations of the store that are in doubt; 0 until the first count."
LAST_SWEEP = "When the last sweep ended; the start of the process if there was none."

# The code of a decision that the store could not take part in.
STORE_ERROR = "store-unavailable"

# What one process can execute at a time, many times over. Beyond it the oldest attempt is no longer
# counted: a cancelled one has no event at its end, and would be counted for good.
_RUNNING_MAX = 10_000


class HasEngine(Protocol):
    """Such as a middleware."""

    @property
    def engine(self) -> EngineBase:
        """The engine of its requests."""
        ...


Instrumented: TypeAlias = EngineBase | HasEngine


class Instruments(NamedTuple):
    """What is changed by events; each function takes an amount, except the last three."""

    in_flight: Callable[[int], object] | None  # also by negative amounts; None: it asks for them
    claim_s: Callable[[float], object]
    complete_s: Callable[[float], object]
    waited_s: Callable[[float], object]
    renewed: Callable[[int], object]
    lost: Callable[[int], object]
    in_doubt: Callable[[int], object]
    swept: Callable[[int], object]
    in_doubt_now: Callable[[int], object]  # takes their number
    last_sweep_s: Callable[[float], object]  # takes a Unix time
    recovered: Callable[[str], object]  # takes an outcome


class Exporter:
    """Counts what engines do; `observe` and `listen` are an observer and a listener."""

    def __init__(self, labels: Labels, instruments: Instruments) -> None:
        self._labels = labels
        self._instruments = instruments
        self._running: dict[tuple[str, int], bool] = {}
        self._handlers: dict[type, Callable[[Any], object]] = {
            Claimed: self._claimed,
            Completed: self._ended,
            Released: self._ended,
            Lost: self._lost,
            InDoubt: self._in_doubt,
            Recovered: self._recovered,
            Waited: lambda event: instruments.waited_s(event.duration_ms / 1_000),
            Renewed: lambda _: instruments.renewed(1),
            Swept: self._swept,
            CountedInDoubt: lambda event: instruments.in_doubt_now(event.records),
        }
        if instruments.in_flight is not None:
            instruments.in_flight(0)
        instruments.last_sweep_s(time.time())  # a process that has just begun is not late

    def instrument(self, *engines: Instrumented) -> Self:
        """Count what these engines do from now on; a middleware stands for its engine."""
        for telemetry in [telemetry_of(engine) for engine in engines]:
            if self.observe not in telemetry.observers:
                telemetry.observers = (*telemetry.observers, self.observe)
            if self.listen not in telemetry.listeners:
                telemetry.listeners = (*telemetry.listeners, self.listen)
        return self

    def observe(self, decision: Decision) -> None:
        """Count *decision*: an observer of engines."""
        raise NotImplementedError

    def listen(self, event: Event) -> None:
        """Count *event*: a listener of engines."""
        handler = self._handlers.get(type(event))
        if handler is not None:  # there is none for `Observed`, which has a decision too
            handler(event)

    def _claimed(self, event: Claimed) -> None:
        if event.write_s is not None:
            self._instruments.claim_s(event.write_s)
        attempt = event.reference, event.attempt
        if attempt in self._running:
            return
        self._running[attempt] = True
        if len(self._running) > _RUNNING_MAX:
            self._running.pop(next(iter(self._running)), None)
        elif self._instruments.in_flight is not None:
            self._instruments.in_flight(1)

    def _ended(self, event: WriteEvent) -> None:
        if event.write_s is not None:
            self._instruments.complete_s(event.write_s)
        self._end(event)

    def _lost(self, event: Lost) -> None:
        self._end(event)
        self._instruments.lost(1)

    def _in_doubt(self, event: InDoubt) -> None:
        self._ended(event)
        self._instruments.in_doubt(1)

    def _recovered(self, event: Recovered) -> None:
        self._end(event)
        self._instruments.recovered(event.outcome)

    def _swept(self, event: Swept) -> None:
        self._instruments.swept(event.records)
        self._instruments.last_sweep_s(time.time())

    def _end(self, event: OperationEvent) -> None:
        is_known = self._running.pop((event.reference, event.attempt), False)
        if is_known and self._instruments.in_flight is not None:
            self._instruments.in_flight(-1)


def telemetry_of(given: object) -> Telemetry:
    """The telemetry of an engine, or of a middleware that has one."""
    engine = getattr(given, "engine", given)
    if not isinstance(engine, EngineBase):
        raise Misconfigured(f"{given!r} is neither an engine nor a middleware that has one")
    return engine.attempts.telemetry
