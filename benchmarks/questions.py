"""The questions, in the order in which they are asked."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from typing import Protocol

from benchmarks.report import Table

# Those about time come first, each with the machine to itself; the others may share it. What takes
# longer to be set up than to be asked is set up beside them, and asked last.
TIMED = (
    *("memory", "sqlite", "postgres", "mysql", "redis", "latency"),
    *("transactions", "replays", "powertools", "http", "waiting"),
)
UNTIMED = ("flatness", "size")
SET_UP = "sweeping"
NAMES = (*TIMED, *UNTIMED, SET_UP)


class Question(Protocol):
    """A module that answers with a table."""

    def measure(self, *, quick: bool, **set_up: object) -> Table:
        """Measure and answer, with what was set up for it, if anything."""
        ...


def answer(name: str, *, quick: bool, **set_up: object) -> Table:
    """The answer to *name*; imported only when asked, because each brings its own libraries."""
    question: Question = importlib.import_module(f"benchmarks.{name}")
    started_s = time.monotonic()
    table = question.measure(quick=quick, **set_up)
    took = f"it took {time.monotonic() - started_s:.0f} s to ask"
    return replace(table, notes=[*table.notes, took])
