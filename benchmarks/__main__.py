"""`python -m benchmarks [--quick] [--only NAME] [--json FILE] [--markdown FILE] [--stores FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import sweeping
from benchmarks.machine import RESULTS, facts
from benchmarks.pages import page_of, with_figures
from benchmarks.report import Table
from benchmarks.suite import NAMES, SET_UP, TIMED, UNTIMED, run


def main() -> int:
    """Run the benchmarks, print each table when it is ready, and write the results."""
    chosen = _arguments()
    machine = facts()
    started_s = time.monotonic()
    print("  ".join(f"{name}: {value}" for name, value in machine.items() if name != "packages"))
    print("  ".join(f"{name} {number}" for name, number in machine["packages"].items()), "\n")
    tables: list[Table] = []
    for table in _tables(list(dict.fromkeys(chosen.only or NAMES)), quick=chosen.quick):
        tables.append(table)
        print(table.text(), "\n", flush=True)
    machine["took_s"] = round(time.monotonic() - started_s)
    machine["quick"] = chosen.quick
    _write(tables, machine, chosen)
    missed = [
        f"{table.name}, {row.what}"
        for table in tables
        for row in table.rows
        if not all(target.is_met for target in row.targets)
    ]
    print(f"{machine['took_s']} s; results in {chosen.json}")
    print(f"targets missed: {'; '.join(missed) or 'none'}")
    return 0


def _tables(names: Sequence[str], *, quick: bool) -> Iterator[Table]:
    """Run the benchmarks of time one after the other, and then the others side by side."""
    for name in names:
        if name in TIMED:
            yield run(name, quick=quick)
    untimed = [name for name in names if name in UNTIMED]
    with ExitStack() as stack, ThreadPoolExecutor(len(UNTIMED) + 1) as threads:
        if SET_UP not in names:
            yield from threads.map(partial(run, quick=quick), untimed)
            return
        filling = threads.submit(stack.enter_context, sweeping.set_up(quick=quick))
        yield from threads.map(partial(run, quick=quick), untimed)
        yield run(SET_UP, quick=quick, tables=filling.result())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="about a minute, with wider spreads")
    parser.add_argument("--only", action="append", choices=NAMES, help="run one; can be repeated")
    parser.add_argument(
        "--json",
        type=Path,
        default=RESULTS / "bench.json",
        metavar="FILE",
        help="write all values of all rounds (default: %(default)s)",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write docs/benchmarks.md")
    parser.add_argument(
        "--stores", type=Path, metavar="FILE", help="replace the figures in docs/stores.md"
    )
    chosen = parser.parse_args()
    if chosen.quick and chosen.stores:
        parser.error("--stores needs a full run: a quick one has too few operations for a p99")
    return chosen


def _write(tables: list[Table], machine: dict[str, Any], chosen: argparse.Namespace) -> None:
    """Write the results as JSON and, if the options name them, to the docs."""
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": machine, "tables": [table.data() for table in tables]}
    chosen.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    if chosen.markdown is not None:
        chosen.markdown.write_text(page_of(tables, machine))
    if chosen.stores is not None:
        chosen.stores.write_text(with_figures(chosen.stores.read_text(), found))


if __name__ == "__main__":
    sys.exit(main())
