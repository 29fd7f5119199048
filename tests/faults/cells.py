"""The cells of the matrix, and a sample of them with every pair of values."""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal, NamedTuple

import psycopg

from coatcheck.verify import crash
from tests.faults import outcomes
from tests.faults.outcomes import CODE, FAULTS, RECOVERIES, STORES, Fault, Outcome, Recovery

IS_ALL = os.environ.get("COATCHECK_FAULTS") == "all"
# When the retry comes: after the first attempt is over, or while it runs.
RETRIES: tuple[Literal["afterwards", "meanwhile"], ...] = ("afterwards", "meanwhile")
# Where a retry can find the handler still running.
_IN_HANDLER = ("after claim", "in step", "after effect", "after step")


class Cell(NamedTuple):
    """One fault at one point, under one recovery, and when the retry comes."""

    fault: Fault
    point: crash.Point
    recovery: Recovery
    store: outcomes.Place
    code: outcomes.Place
    retry: Literal["afterwards", "meanwhile"]

    def __str__(self) -> str:
        return "-".join(self).replace(" ", "_")

    @property
    def outcome(self) -> Outcome | None:
        """What the table promises."""
        return outcomes.outcome_of(self.fault, self.point, self.recovery)

    @property
    def exists(self) -> bool:
        """The combination exists; `outcomes.ABSENT` has those that do not."""
        if self.retry == "meanwhile" and not (
            self.fault.startswith("store") and self.point in _IN_HANDLER
        ):
            return False
        is_run = outcomes.is_run(self.fault, self.recovery, self.store, self.code)
        return is_run and self.outcome is not None

    def pairs(self) -> set[tuple[tuple[str, str], ...]]:
        """Every two values that are combined in it."""
        return set(itertools.combinations(zip(self._fields, self, strict=True), 2))


def all_cells() -> list[Cell]:
    """The whole matrix."""
    product = itertools.product(FAULTS, crash.POINTS, RECOVERIES, STORES, CODE, RETRIES)
    return [cell for cell in itertools.starmap(Cell, product) if cell.exists]


def sample(cells: Sequence[Cell]) -> list[Cell]:
    """
    A few of *cells*, with every pair of values that any of them has.

    Of the cells with equally many new pairs, it takes one whose store, code and so on it has least.
    """
    taken: list[Cell] = []
    seen: Counter[str] = Counter()
    pairs = {cell: cell.pairs() for cell in cells}
    missing = set(itertools.chain.from_iterable(pairs.values()))
    while missing:
        best = max(
            cells, key=lambda cell: (len(pairs[cell] & missing), -sum(seen[x] for x in cell))
        )
        taken.append(best)
        seen.update(best)
        missing -= pairs[best]
    return taken


def cells() -> list[Cell]:
    """The cells that are run."""
    return all_cells() if IS_ALL else sample(all_cells())


class Place(NamedTuple):
    """The store of one cell, and where its effects are counted."""

    url: str
    ledger: str

    @property
    def path(self) -> str:
        """The file of a store on SQLite."""
        return self.url.removeprefix("sqlite:///").partition("?")[0]

    def effects(self, recovery: Recovery) -> int:
        """How often the effect has happened."""
        if recovery != "transaction":
            path = Path(self.ledger)
            return len(path.read_text().splitlines()) if path.exists() else 0
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.path)) as connection:
                return connection.execute("select count(*) from effects").fetchone()[0]
        with psycopg.connect(self.url) as connection:
            return connection.execute("select count(*) from effects").fetchone()[0]

    def prepare(self) -> None:
        """Make the application's own table."""
        table = "create table effects (number integer)"
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.path)) as connection:
                connection.execute(table)
        elif self.url.startswith("postgresql"):
            with psycopg.connect(self.url) as connection:
                connection.execute(table)
