"""Writes the results of a run into the docs.

docs/benchmarks.md is written as a whole. In docs/stores.md only the parts between two marks are
replaced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from benchmarks.report import Table, drawn_table, number_of
from benchmarks.sample_records import BODY

Found: TypeAlias = dict[str, Any]  # a run, as in its JSON file

# A day of 10 000 requests a second.
KEYS = 864_000_000
WHERE = {
    "SQLite": "of disk",
    "PostgreSQL": "of disk",
    "MariaDB": "of disk",
    "Redis": "of memory, on each copy",
    "DynamoDB": "billed by the month",
}
SHARES = ("p50", "p99")
# Servers that were not measured, but store records in the same way.
RELATIVES = {"MariaDB": "MySQL, MariaDB", "Redis": "Redis, Valkey"}


def page_of(tables: Sequence[Table], machine: Found) -> str:
    """Return docs/benchmarks.md."""
    return "\n".join([_head(machine), *(table.markdown() for table in tables)])


def _head(machine: Found) -> str:
    """Return the text before the first table."""
    lines = [
        "# Benchmarks",
        "",
        "This command writes this page, and the tables of [stores](stores.md):",
        "",
        '    make bench ARGS="--markdown docs/benchmarks.md --stores docs/stores.md"',
        "",
        "- A cell is the median of all rounds, with the smallest and the largest in brackets.",
        "- All contenders run in turn, and a ratio is computed within each round.",
        "  So ratios are comparable between machines; absolute figures are not.",
        "- idemkit 1.0.2 is another library; a dash means that it has no such feature.",
        "- The floor is the least that any implementation has to do, and protects much less.",
        "",
        "`benchmarks/README.md` has the details.",
        "",
        "## Machine",
        "",
        *(f"- {name}: {value}" for name, value in machine.items() if name != "packages"),
        *(f"- {name} {number}" for name, number in machine["packages"].items()),
        "",
    ]
    if machine["load_before"] > 1:
        lines += [
            "The machine was busy with other work during this run.",
            "Rates are lower and spreads wider than on an idle machine; compare processor times.",
            "",
        ]
    return "\n".join(lines)


# --- the stores, side by side -----------------------------------------------------------------


def with_figures(page: str, found: Found) -> str:
    """Return *page* with the figures of this run between its marks."""
    rows = {table["name"]: table["rows"] for table in found["tables"]}
    machine = found["machine"]
    stamp = (
        f"Measured at {machine['at']} on {machine['cpu']}, {machine['cpus']} processors, "
        f"{machine['fsync_us']} µs to sync a page, load {machine['load_before']} before."
    )
    for name, lines_of in {"latency": _latency_lines, "size": _size_lines}.items():
        if name in rows:
            made = "\n".join([f"<!-- {name} -->", *lines_of(rows[name]), "", stamp])
            marks = re.compile(f"<!-- {name} -->.*(?=\n<!-- /{name} -->)", re.DOTALL)
            page, count = marks.subn(lambda _: made, page)  # noqa: B023 - used at once
            assert count == 1, f"the page has no place for {name}"
    return page


def _latency_lines(rows: list[Found]) -> list[str]:
    """Return the table of latencies: median and 99th percentile in one cell."""
    steps = list(dict.fromkeys(column.split()[0] for column in rows[0]["columns"]))
    lines = [(row["what"], *(_shares(row["columns"], step) for step in steps)) for row in rows]
    return drawn_table(["", *steps], lines)


def _shares(columns: Found, step: str) -> str:
    return " / ".join(number_of(columns[f"{step} {share}"]["median"]) for share in SHARES)


def _size_lines(rows: list[Found]) -> list[str]:
    """Return the table of sizes: of one key, and of all keys of a day."""
    taken = {(row["store"], row["kind"]): round(row["product"]["median"]) for row in rows}
    kinds = ("plain", "compact")
    lines = [
        (
            RELATIVES.get(store, store),
            *(str(taken[store, kind]) for kind in kinds),
            *(f"{gigabytes(taken[store, kind])} GB" for kind in kinds),
            where,
        )
        for store, where in WHERE.items()
    ]
    compact = "with `compact=1`"
    head = ["", "bytes for a key", compact, "864 million keys need", compact, ""]
    return [*drawn_table(head, lines), "", *_postgres_lines(taken)]


def _postgres_lines(taken: dict[tuple[str, str], int]) -> list[str]:
    """Return what the figures mean for the disk and the memory of a PostgreSQL server."""
    keys, indexes = (
        gigabytes(taken["PostgreSQL", kind]) for kind in ("compact", "compact indexes")
    )
    bodies = f"{gigabytes(len(BODY))} GB for bodies of {len(BODY)} bytes"
    fit = "and should fit into memory: every claim reads a random page of them"
    return [
        f"So PostgreSQL, compact, needs {keys} GB for keys and {bodies}.",
        f"Its indexes are {indexes} GB of that, {fit}.",
        f"With a thousand requests a second they take {round(indexes / 10)} GB.",
    ]


def gigabytes(each: int) -> int:
    """Return the gigabytes for all keys of a day, with *each* so many bytes."""
    return round(each * KEYS / 1e9)
