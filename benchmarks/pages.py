"""Pages: what a run has found, as it stands in the docs.

The page of all tables is made whole. In the page that compares the stores, what stands between two
marks is made anew and the rest is left as it is, so that no figure there is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from benchmarks.filling import BODY
from benchmarks.report import Table, drawn_table, number_of

Found: TypeAlias = dict[str, Any]  # a run as it stands in its JSON

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
# Who was not measured, and is the same program by another name or its near relative.
RELATIVES = {"MariaDB": "MySQL, MariaDB", "Redis": "Redis, Valkey"}


def page_of(tables: Sequence[Table], machine: Found) -> str:
    """The page of all tables."""
    return "\n".join([_head(machine), *(table.markdown() for table in tables)])


def _head(machine: Found) -> str:
    """What the reader of the page must know before the first table."""
    lines = [
        "# Benchmarks",
        "",
        "Not written by hand, but made by:",
        "",
        '    make bench ARGS="--markdown docs/benchmarks.md --stores docs/stores.md"',
        "",
        "How to read the tables is said in `benchmarks/README.md`.",
        "Ratios travel from machine to machine, figures do not.",
        "",
        *(f"- {name}: {value}" for name, value in machine.items() if name != "packages"),
        *(f"- {name} {number}" for name, number in machine["packages"].items()),
        "",
    ]
    if machine["load_before"] > 1:
        lines += [
            "The machine was busy with other work when this was measured.",
            "Rates are then lower and spreads wider than on an idle one.",
            "A server with two threads then gets more of the processor than one with a single one.",
            "Read processor times before rates.",
            "",
        ]
    return "\n".join(lines)


# --- the stores, side by side -----------------------------------------------------------------


def with_figures(page: str, found: Found) -> str:
    """*page* with the figures of this run between its marks; a question not asked changes none."""
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
    """Both shares of each step in one cell."""
    steps = list(dict.fromkeys(column.split()[0] for column in rows[0]["columns"]))
    lines = [(row["what"], *(_shares(row["columns"], step) for step in steps)) for row in rows]
    return drawn_table(["", *steps], lines)


def _shares(columns: Found, step: str) -> str:
    return " / ".join(number_of(columns[f"{step} {share}"]["median"]) for share in SHARES)


def _size_lines(rows: list[Found]) -> list[str]:
    """What a key takes, and all keys of a day."""
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
    """What the figures ask of a server's disk and memory, for the first choice."""
    keys, indexes = (
        gigabytes(taken["PostgreSQL", kind]) for kind in ("compact", "compact indexes")
    )
    bodies = f"{gigabytes(len(BODY))} GB for bodies of {len(BODY)} bytes"
    page = "of which every claim touches a random page: they should fit into memory"
    return [
        f"So PostgreSQL, compact, needs {keys} GB for keys and {bodies}.",
        f"Its indexes are {indexes} GB of that, {page}.",
        f"At a tenth of it, a thousand requests a second, they take {round(indexes / 10)} GB.",
    ]


def gigabytes(each: int) -> int:
    """What all keys of a day take, of *each* so many bytes."""
    return round(each * KEYS / 1e9)
