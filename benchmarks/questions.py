"""The questions, in the order in which they are asked."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from typing import Protocol

from benchmarks.report import Table

# Those about time come first, each with the machine to itself; the others may share it.
TIMED = (
    *("memory", "sqlite", "postgres", "mysql", "redis", "latency"),
    *("sweeping", "transactions", "replays", "powertools", "http", "waiting"),
)
UNTIMED = ("flatness", "size")
NAMES = (*TIMED, *UNTIMED)


class Question(Protocol):
    """A module that answers with a table."""

    def measure(self, *, quick: bool) -> Table:
        """Measure and answer."""
        ...


def answer(name: str, *, quick: bool) -> Table:
    """The answer to *name*; imported only when asked, because each brings its own libraries."""
    question: Question = importlib.import_module(f"benchmarks.{name}")
    started_s = time.monotonic()
    table = question.measure(quick=quick)
    took = f"it took {time.monotonic() - started_s:.0f} s to ask"
    return replace(table, notes=[*table.notes, took])
