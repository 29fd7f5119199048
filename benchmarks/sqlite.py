"""How fast are durable claims on SQLite, with `synchronous=FULL`?

Floors: one transaction per statement, and a bare group-commit loop that only inserts and updates.
idemkit has no SQLite backend.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

from benchmarks.comparison import (
    AT_A_TIME,
    RESPONSE,
    Contender,
    Operation,
    measure_rates,
    measure_times,
    names_of,
    place,
    place_sync,
    product,
    product_sync,
    rows_of_times,
)
from benchmarks.machine import scratch_directory
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target
from benchmarks.sqlite_floors import GroupedWriter, OneByOne

# After so many operations the log is reused and stops growing. Syncing a growing log takes nearly
# twice as long, which a server sees only in its first second.
WARM_UP = 520


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    with scratch_directory() as directory:
        files = (Path(directory) / f"{number}.db" for number in itertools.count())
        rates: dict[str, Contender] = {
            "product": lambda: product(_url(files)),
            "grouped": partial(_grouped, files),
            "one by one": partial(_one_by_one, files),
        }
        times: dict[str, Contender] = {
            "product, thread": lambda: product_sync(_url(files)),
            "product, event loop": lambda: product(_url(files)),
            "sqlite3": partial(_sqlite3, files),
            "sqlite3 in a thread": partial(_in_a_thread, files),
        }
        rows = _rows(measure_rates(rates, quick=quick))
        found = measure_times(times, quick=quick, warm_up=WARM_UP)
    return Table(
        name="sqlite",
        question="keyed operations on SQLite with synchronous=FULL: two durable writes each",
        rows=[
            *rows,
            *rows_of_times(found, {"thread": "sqlite3", "event loop": "sqlite3 in a thread"}),
        ],
        notes=[
            "one by one: every statement is a transaction, from 64 threads on one connection",
            "bare grouped: one transaction for all writes that arrived during the last one",
            "1 at a time: contenders alternate after every operation",
            "sqlite3 blocks an event loop, so async code calls it in a thread",
        ],
    )


def _rows(found: dict[str, Samples]) -> list[Row]:
    ours = found["product"]
    faster, share = ours.over(found["one by one"]), ours.over(found["grouped"])
    return [
        Row(
            what=f"{AT_A_TIME} at a time, operations/s; floor: one by one",
            product=ours,
            floor=found["one by one"],
            ratios=[(f"{TIMES} one by one", faster)],
            targets=[Target(measured=faster, bound="≥", limit=5, unit=f"{TIMES} one by one")],
        ),
        Row(
            what=f"{AT_A_TIME} at a time, operations/s; floor: bare grouped",
            product=ours,
            floor=found["grouped"],
            ratios=[("of bare grouped", share)],
            targets=[Target(measured=share, bound="≥", limit=0.5, unit="of bare grouped")],
        ),
    ]


def _url(files: Iterator[Path]) -> str:
    return f"sqlite:///{next(files)}"


# --- the floors -------------------------------------------------------------------------------


@asynccontextmanager
async def _one_by_one(files: Iterator[Path]) -> AsyncIterator[Operation]:
    """
    Two transactions per operation, from 64 threads that share a connection.

    A connection for each thread is slower, because SQLite's writers then sleep and try again.
    """
    loop, mutex = asyncio.get_running_loop(), threading.Lock()
    with closing(OneByOne(next(files))) as records, ThreadPoolExecutor(AT_A_TIME) as threads:

        def write(number: int) -> None:
            id, fingerprint = names_of(number)
            with mutex:
                records.insert(id, fingerprint)
            place_sync(number)
            with mutex:
                records.update(id, RESPONSE)

        yield lambda number: loop.run_in_executor(threads, write, number)


@asynccontextmanager
async def _sqlite3(files: Iterator[Path]) -> AsyncIterator[Operation]:
    """Two transactions per operation, in the calling thread."""
    with closing(OneByOne(next(files))) as records:

        async def operation(number: int) -> None:
            id, fingerprint = names_of(number)
            records.insert(id, fingerprint)
            place_sync(number)
            records.update(id, RESPONSE)

        yield operation


@asynccontextmanager
async def _in_a_thread(files: Iterator[Path]) -> AsyncIterator[Operation]:
    """The same in a thread, so that the event loop is not blocked."""
    loop = asyncio.get_running_loop()
    with closing(OneByOne(next(files))) as records, ThreadPoolExecutor(1) as thread:

        async def operation(number: int) -> None:
            id, fingerprint = names_of(number)
            await loop.run_in_executor(thread, records.insert, id, fingerprint)
            await place(number)
            await loop.run_in_executor(thread, records.update, id, RESPONSE)

        yield operation


@asynccontextmanager
async def _grouped(files: Iterator[Path]) -> AsyncIterator[Operation]:
    with closing(GroupedWriter(next(files))) as writer:

        async def operation(number: int) -> None:
            id, fingerprint = names_of(number)
            await writer.insert(id, fingerprint)
            await place(number)
            await writer.update(id, RESPONSE)

        yield operation
