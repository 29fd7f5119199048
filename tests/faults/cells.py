"""The cells of the matrix, and a sample of them in which every two things meet."""

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
# When the retry comes: when the first attempt is over, or while it is still at it.
RETRIES: tuple[Literal["afterwards", "meanwhile"], ...] = ("afterwards", "meanwhile")
# Where a handler can be met that goes on afterwards.
_IN_HANDLER = ("after claim", "in step", "after effect", "after step")


class Cell(NamedTuple):
    """Where what happens to whom, and when the retry comes."""

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
        """What the table says."""
        return outcomes.outcome_of(self.fault, self.point, self.recovery)

    @property
    def exists(self) -> bool:
        """There is such a thing; see `outcomes.ABSENT` for what there is not."""
        if self.retry == "meanwhile" and not (
            self.fault.startswith("store") and self.point in _IN_HANDLER
        ):
            return False
        is_run = outcomes.is_run(self.fault, self.recovery, self.store, self.code)
        return is_run and self.outcome is not None

    def pairs(self) -> set[tuple[tuple[str, str], ...]]:
        """Every two things that meet in it."""
        return set(itertools.combinations(zip(self._fields, self, strict=True), 2))


def all_cells() -> list[Cell]:
    """The whole matrix."""
    product = itertools.product(FAULTS, crash.POINTS, RECOVERIES, STORES, CODE, RETRIES)
    return [cell for cell in itertools.starmap(Cell, product) if cell.exists]


def sample(cells: Sequence[Cell]) -> list[Cell]:
    """
    A few of *cells*, in which every two things meet that meet in any of them.

    Of those that bring equally many new meetings, one whose store, code and so on were seen least.
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
    """Those that are run."""
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
        """How often it has happened."""
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
