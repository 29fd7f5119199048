"""What both libraries share: events become changes of instruments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, Self, TypeAlias

from coatcheck.engine.base import EngineBase
from coatcheck.errors import Misconfigured
from coatcheck.metrics.labels import Labels
from coatcheck.telemetry import (
    Claimed,
    Completed,
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
)

# Up to a minute: longer than clients wait. 1 ms is the smallest difference a decision has.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

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
    """What is changed by events; each function takes an amount, except the last two."""

    in_flight: Callable[[int], object]  # also by negative amounts
    waited_s: Callable[[float], object]
    renewed: Callable[[int], object]
    lost: Callable[[int], object]
    in_doubt: Callable[[int], object]
    swept: Callable[[int], object]
    last_sweep_s: Callable[[float], object]  # takes a Unix time
    recovered: Callable[[str], object]  # takes an outcome


class Exporter:
    """Counts what engines do; `observe` and `listen` are an observer and a listener."""

    def __init__(self, labels: Labels, instruments: Instruments) -> None:
        self._labels = labels
        self._instruments = instruments
        self._running: dict[tuple[str, int], bool] = {}
        instruments.in_flight(0)
        instruments.last_sweep_s(time.time())  # a process that has just begun is not late

    def instrument(self, *engines: Instrumented) -> Self:
        """Count what these engines do from now on; a middleware stands for its engine."""
        for telemetry in [_telemetry_of(engine) for engine in engines]:
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
        to = self._instruments
        match event:
            case Claimed():
                self._begin(event)
            case Completed() | Released():
                self._end(event)
            case Waited():
                to.waited_s(event.duration_ms / 1_000)
            case Renewed():
                to.renewed(1)
            case Lost():
                self._end(event)
                to.lost(1)
            case InDoubt():
                self._end(event)
                to.in_doubt(1)
            case Recovered():
                self._end(event)
                to.recovered(event.outcome)
            case Swept():
                to.swept(event.records)
                to.last_sweep_s(time.time())
            case _:
                pass  # such as `Observed`, which has a decision too

    def _begin(self, event: OperationEvent) -> None:
        attempt = event.reference, event.attempt
        if attempt in self._running:
            return
        self._running[attempt] = True
        if len(self._running) <= _RUNNING_MAX:
            self._instruments.in_flight(1)
        else:
            self._running.pop(next(iter(self._running)), None)

    def _end(self, event: OperationEvent) -> None:
        if self._running.pop((event.reference, event.attempt), False):
            self._instruments.in_flight(-1)


def _telemetry_of(given: object) -> Telemetry:
    engine = getattr(given, "engine", given)
    if not isinstance(engine, EngineBase):
        raise Misconfigured(f"{given!r} is neither an engine nor a middleware that has one")
    return engine.attempts.telemetry
