"""One table for each benchmark, as text, as Markdown and as JSON.

The text and the JSON also have our targets, each with whether the run has met it; the Markdown for
the docs has not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.measuring import Samples

# By name, because the character looks like a letter.
TIMES = "\N{MULTIPLICATION SIGN}"
NOTHING = "\N{EN DASH}"
HEAD = ("", "coatcheck", "idemkit", "floor", "ratio")
TARGET = "target"
# Columns of text, which are aligned left; all others have numbers.
TEXTS = ("", "ratio", TARGET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A limit for the median of *measured*."""

    measured: Samples
    bound: Literal["≥", "≤"]
    limit: float
    unit: str

    @property
    def is_met(self) -> bool:
        """Whether the median is within the limit."""
        median = self.measured.median
        return median >= self.limit if self.bound == "≥" else median <= self.limit

    def __str__(self) -> str:
        verdict = "pass" if self.is_met else "MISS"
        return f"{self.bound} {number_of(self.limit)} {self.unit}: {verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table; None for a contender that cannot do this."""

    what: str
    product: Samples | None = None
    idemkit: Samples | None = None
    floor: Samples | None = None
    ratios: Sequence[tuple[str, Samples]] = ()  # the unit of the ratio, and its values
    targets: Sequence[Target] = ()
    more: dict[str, Any] = field(default_factory=dict)  # for the JSON only

    def cells(self) -> tuple[str, ...]:
        """Return the cells as text, without targets."""
        ratios = "; ".join(f"{number_of(ratio.median)} {of}" for of, ratio in self.ratios)
        contenders = map(_cell, (self.product, self.idemkit, self.floor))
        return (self.what, *contenders, ratios or NOTHING)

    def data(self) -> dict[str, Any]:
        """Return the line for programs, with every value of every round."""
        contenders = {"product": self.product, "idemkit": self.idemkit, "floor": self.floor}
        return {
            "what": self.what,
            **{name: s and _samples_data(s) for name, s in contenders.items()},
            "ratios": {of: _samples_data(ratio) for of, ratio in self.ratios},
            "targets": [
                {"bound": t.bound, "limit": t.limit, "unit": t.unit, "is_met": t.is_met}
                for t in self.targets
            ],
            **self.more,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A line with figures of coatcheck alone, one for each column."""

    what: str
    columns: Mapping[str, Samples]
    more: dict[str, Any] = field(default_factory=dict)  # for the JSON only
    targets: Sequence[Target] = ()

    def cells(self) -> tuple[str, ...]:
        """Return the cells as text."""
        return (self.what, *map(_cell, self.columns.values()))

    def data(self) -> dict[str, Any]:
        """Return the line for programs, with every value of every round."""
        columns = {name: _samples_data(samples) for name, samples in self.columns.items()}
        return {"what": self.what, "columns": columns, **self.more}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The result of one benchmark."""

    name: str
    question: str
    rows: Sequence[Row] | Sequence[Figures]
    notes: Sequence[str] = ()
    head: Sequence[str] = HEAD
    took_s: float = 0.0

    def text(self) -> str:
        """Return the table for a terminal, with targets."""
        lines = [self.head, *(row.cells() for row in self.rows)]
        if any(row.targets for row in self.rows):
            targets = ["; ".join(map(str, row.targets)) for row in self.rows]
            lines = [(*line, last) for line, last in zip(lines, [TARGET, *targets], strict=True)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        drawn = [
            "   ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines
        ]
        drawn.insert(1, "   ".join("─" * width for width in widths))
        notes = [f"  · {note}" for note in (*self.notes, f"measured in {self.took_s:.0f} s")]
        return "\n".join([f"{self.name}: {self.question}", *(f"  {d}" for d in drawn), *notes])

    def markdown(self) -> str:
        """Return the table for the docs, without targets."""
        drawn = drawn_table(self.head, [row.cells() for row in self.rows])
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"## {self.name}", "", self.question, "", *drawn, "", *notes, ""])

    def data(self) -> dict[str, Any]:
        """Return the table for programs, with every value of every round."""
        return {
            "name": self.name,
            "question": self.question,
            "notes": list(self.notes),
            "rows": [row.data() for row in self.rows],
        }


def drawn_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    rule = ["---" if name in TEXTS else "---:" for name in head]
    return [f"| {' | '.join(line)} |" for line in (head, rule, *lines)]


def _samples_data(samples: Samples) -> dict[str, Any]:
    return {"median": samples.median, "values": list(samples.values)}


def _cell(samples: Samples | None) -> str:
    if samples is None:
        return NOTHING
    if samples.low == samples.high:
        return number_of(samples.median)
    return (
        f"{number_of(samples.median)} ({number_of(samples.low)}{NOTHING}{number_of(samples.high)})"
    )


def counted(value: float) -> str:
    """Return a whole number with spaces: 1 000 000."""
    return f"{value:,.0f}".replace(",", " ")


def number_of(value: float) -> str:
    """Return *value* with three digits; a benchmark is not more exact."""
    if value == 0 or abs(value) >= 100:
        return counted(value)
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
