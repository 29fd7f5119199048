"""The benchmarks, in the order in which they run."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from typing import Protocol

from benchmarks.report import Table

# Benchmarks of time run first, one after the other. Those that measure bytes then run side by side.
# The tables of `sweeping` take longer to fill than to measure, so they are filled meanwhile.
TIMED = (
    *("memory", "sqlite", "postgres", "mysql", "redis", "latency"),
    *(
        "transactions",
        "consumers",
        "replays",
        "powertools",
        "http",
        "waiting",
        "telemetry",
        "adapters",
        "client",
    ),
)
UNTIMED = ("memory_growth", "size")
SET_UP = "sweeping"
NAMES = (*TIMED, *UNTIMED, SET_UP)


class Benchmark(Protocol):
    """A module that measures one thing."""

    def measure(self, *, quick: bool, **set_up: object) -> Table:
        """Measure with what was set up, if anything, and return the table."""
        ...


def run(name: str, *, quick: bool, **set_up: object) -> Table:
    """Run one benchmark; imported here, because each has its own dependencies."""
    benchmark: Benchmark = importlib.import_module(f"benchmarks.{name}")
    started_s = time.monotonic()
    table = benchmark.measure(quick=quick, **set_up)
    return replace(table, took_s=time.monotonic() - started_s)
