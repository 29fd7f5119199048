"""Reporting: one table for each question, as text, as Markdown and as JSON.

product | idemkit | floor | ratio, and what we set out to reach with its verdict. Verdicts compare
medians that were measured a moment ago; nothing here knows a figure by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.measuring import Samples

# By its name, because in the text it looks too much like a letter.
TIMES = "\N{MULTIPLICATION SIGN}"
NOTHING = "\N{EN DASH}"
HEAD = ("", "product", "idemkit", "floor", "ratio", "to reach")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the median of *measured* should be: at least, or at most, *limit*."""

    measured: Samples
    bound: Literal["≥", "≤"]
    limit: float
    unit: str

    @property
    def is_met(self) -> bool:
        """The measured median keeps to the limit."""
        median = self.measured.median
        return median >= self.limit if self.bound == "≥" else median <= self.limit

    def __str__(self) -> str:
        verdict = "pass" if self.is_met else "MISS"
        return f"{self.bound} {_number(self.limit)} {self.unit}: {verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table; a contender that has no such thing is None."""

    what: str
    product: Samples | None = None
    idemkit: Samples | None = None
    floor: Samples | None = None
    ratios: Sequence[tuple[str, Samples]] = ()  # what it is a ratio to, and its values
    targets: Sequence[Target] = ()
    more: dict[str, Any] = field(default_factory=dict)  # for the JSON only

    def cells(self) -> tuple[str, ...]:
        """The line as text."""
        ratios = "; ".join(f"{_number(ratio.median)} {of}" for of, ratio in self.ratios)
        targets = "; ".join(map(str, self.targets))
        contenders = map(_cell, (self.product, self.idemkit, self.floor))
        return (self.what, *contenders, ratios or NOTHING, targets or NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The answer to one question."""

    name: str
    question: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """For a terminal."""
        lines = [HEAD, *(row.cells() for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
        drawn = [
            "   ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines
        ]
        drawn.insert(1, "   ".join("─" * width for width in widths))
        notes = [f"  · {note}" for note in self.notes]
        return "\n".join([f"{self.name}: {self.question}", *(f"  {d}" for d in drawn), *notes])

    def markdown(self) -> str:
        """For the docs; one sentence per line."""
        lines = [HEAD, ("---", *["---:"] * 3, "---", "---"), *(row.cells() for row in self.rows)]
        drawn = [f"| {' | '.join(line)} |" for line in lines]
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"## {self.name}", "", self.question, "", *drawn, "", *notes, ""])

    def data(self) -> dict[str, Any]:
        """For programs: every value of every round."""
        return {
            "name": self.name,
            "question": self.question,
            "notes": list(self.notes),
            "rows": [_row_data(row) for row in self.rows],
        }


def _row_data(row: Row) -> dict[str, Any]:
    contenders = {"product": row.product, "idemkit": row.idemkit, "floor": row.floor}
    return {
        "what": row.what,
        **{name: s and _samples_data(s) for name, s in contenders.items()},
        "ratios": {of: _samples_data(ratio) for of, ratio in row.ratios},
        "targets": [
            {"bound": t.bound, "limit": t.limit, "unit": t.unit, "is_met": t.is_met}
            for t in row.targets
        ],
        **row.more,
    }


def _samples_data(samples: Samples) -> dict[str, Any]:
    return {"median": samples.median, "values": list(samples.values)}


def _cell(samples: Samples | None) -> str:
    if samples is None:
        return NOTHING
    if samples.low == samples.high:
        return _number(samples.median)
    return f"{_number(samples.median)} ({_number(samples.low)}{NOTHING}{_number(samples.high)})"


def counted(value: float) -> str:
    """A whole number as people read it: 1 000 000."""
    return f"{value:,.0f}".replace(",", " ")


def _number(value: float) -> str:
    """Three figures are what a benchmark knows."""
    if value == 0 or abs(value) >= 100:
        return counted(value)
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
