"""Question: what do durable claims cost on SQLite, with `synchronous=FULL`?

Beside two floors: every statement its own transaction, as a first version of any such library
does it, and a bare group-commit loop that only inserts and updates. idemkit has no SQLite backend.
Every slot begins with a new file.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import TypeAlias

from benchmarks.floors import GroupedWriter, OneByOne
from benchmarks.machine import workshop
from benchmarks.measuring import (
    ROUNDS_QUICK,
    Cost,
    For,
    Samples,
    drive,
    drive_threads,
    interleave,
)
from benchmarks.report import TIMES, Row, Table, Target
from coatcheck import AsyncEngine, Engine

Operation: TypeAlias = Callable[[int], Awaitable[None]]

AT_A_TIME = 64
ROUNDS = 5

SLOT_S = 0.5
SLOT_S_QUICK = 0.1
# So many operations it takes until a log is written over, and grows no more. To sync one that grows
# takes nearly twice as long, for everybody alike, which a server sees in its first second only.
LOG_GROWS = 520
# What an answer of a small API looks like, for the floors; the product keeps its own.
RESPONSE = b'{"order": 17, "state": "placed", "amount": 1999}'


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    wall_s, rounds = (SLOT_S_QUICK, ROUNDS_QUICK) if quick else (SLOT_S, ROUNDS)
    with workshop() as directory:
        files = (Path(directory) / f"{number}.db" for number in itertools.count())
        turns = {name: Turn(run, files, wall_s) for name, run in TOGETHER.items()}
        together = interleave(turns, rounds)
        alone = asyncio.run(_alone(files, 2 * wall_s, rounds))
    cpu_us = {name: Samples(tuple(turn.cpu_us)) for name, turn in turns.items()}
    wall_us = {name: Samples(tuple(found[name] for found in alone)) for name in alone[0]}
    return Table(
        name="sqlite",
        question="keyed operations on SQLite with synchronous=FULL: two durable writes each",
        rows=[*_rows_together(together), _cpu_row(cpu_us), *_rows_alone(wall_us)],
        notes=[
            "one by one: every statement is a transaction, here from 64 threads",
            "grouped: a bare loop that writes whatever has gathered in one transaction",
            "1 at a time: after every operation it is another contender's turn; no log grows any more",
            "1 at a time: sqlite3 by itself blocks an event loop, in a thread it does not",
        ],
    )


def _rows_together(found: dict[str, Samples]) -> list[Row]:
    product = found["product"]
    one_by_one, grouped = found["one by one"], found["grouped"]
    faster, share = product.over(one_by_one), product.over(grouped)
    return [
        Row(
            what="64 at a time, operations/s; floor: one by one",
            product=product,
            floor=one_by_one,
            ratios=[(f"{TIMES} one by one", faster)],
            targets=[Target(measured=faster, bound="≥", limit=5, unit=f"{TIMES} one by one")],
        ),
        Row(
            what="64 at a time, operations/s; floor: bare grouped loop",
            product=product,
            floor=grouped,
            ratios=[("of bare grouped", share)],
            targets=[Target(measured=share, bound="≥", limit=0.6, unit="of bare grouped")],
        ),
    ]


def _cpu_row(cpu_us: dict[str, Samples]) -> Row:
    """Steadier than operations a second on a machine whose disk is busy."""
    product, grouped = cpu_us["product"], cpu_us["grouped"]
    return Row(
        what="64 at a time, processor µs; floor: bare grouped loop",
        product=product,
        floor=grouped,
        ratios=[(f"{TIMES} bare grouped", product.over(grouped))],
    )


def _rows_alone(found: dict[str, Samples]) -> list[Row]:
    rows: list[Row] = []
    for ours, floor, limit in (
        ("product, thread", "sqlite3", 1.2),
        ("product, event loop", "sqlite3", 1.2),
        ("product, event loop", "sqlite3 in a thread", None),
    ):
        slower = found[ours].over(found[floor])
        of = f"{TIMES} {floor}"
        row = Row(
            what=f"1 at a time{ours.removeprefix('product')}, µs; floor: {floor}",
            product=found[ours],
            floor=found[floor],
            ratios=[(of, slower)],
            targets=[Target(measured=slower, bound="≤", limit=limit, unit=of)] if limit else (),
        )
        rows.append(row)
    return rows


class Turn:
    """What a contender does in its slot, on a file of its own."""

    def __init__(
        self, run: Callable[[Path, For], Cost], files: Iterator[Path], wall_s: float
    ) -> None:
        self._run = run
        self._files = files
        self._wall_s = wall_s
        self.cpu_us: list[float] = []

    def __call__(self) -> float:
        """Operations a second."""
        cost = self._run(next(self._files), For(self._wall_s))
        self.cpu_us.append(cost.cpu_us)
        return cost.per_second


# --- the product ------------------------------------------------------------------------------


async def _place(order: int) -> dict[str, object]:
    return {"order": order, "state": "placed", "amount": 1999}


def _place_here(order: int) -> dict[str, object]:
    return {"order": order, "state": "placed", "amount": 1999}


def _product(path: Path, numbers: For) -> Cost:
    async def run() -> Cost:
        async with AsyncEngine(_url(path)) as engine:

            async def operation(number: int) -> object:
                return await engine.run(f"order-{number}", _place, number, scope="orders")

            await operation(-1)
            return await drive(operation, numbers, at_a_time=AT_A_TIME)

    return asyncio.run(run())


# --- the floors -------------------------------------------------------------------------------


def _names(number: int) -> tuple[bytes, bytes]:
    key = b"order-%d" % number
    return hashlib.blake2b(key, digest_size=16).digest(), hashlib.md5(key).digest()


def _one_by_one(path: Path, numbers: For) -> Cost:
    """
    64 threads that share one connection, a statement at a time.

    A connection for each thread is slower: SQLite's writers then sleep and ask again.
    """
    records = OneByOne(path)
    turn = threading.Lock()

    def operation(number: int) -> None:
        id, fingerprint = _names(number)
        with turn:
            records.insert(id, fingerprint)
        _place_here(number)
        with turn:
            records.update(id, RESPONSE)

    operation(-1)
    cost = drive_threads(operation, numbers, at_a_time=AT_A_TIME)
    records.close()
    return cost


def _grouped(path: Path, numbers: For) -> Cost:
    async def run() -> Cost:
        writer = GroupedWriter(path)

        async def operation(number: int) -> None:
            id, fingerprint = _names(number)
            await writer.insert(id, fingerprint)
            await _place(number)
            await writer.update(id, RESPONSE)

        await operation(-1)
        cost = await drive(operation, numbers, at_a_time=AT_A_TIME)
        writer.close()
        return cost

    return asyncio.run(run())


TOGETHER = {"product": _product, "grouped": _grouped, "one by one": _one_by_one}


# --- one at a time ----------------------------------------------------------------------------


async def _alone(files: Iterator[Path], wall_s: float, rounds: int) -> list[dict[str, float]]:
    """
    The median time of one operation in each round, µs; contenders take turns after every one.

    A commit waits for the disk, and the disk is never the same for two seconds.
    """
    async with AsyncExitStack() as stack:
        contenders = {
            "product, thread": _engine_alone(stack.enter_context(Engine(_url(next(files))))),
            "product, event loop": _async_engine_alone(
                await stack.enter_async_context(AsyncEngine(_url(next(files))))
            ),
            "sqlite3": _sqlite3_alone(stack.enter_context(closing(OneByOne(next(files))))),
            "sqlite3 in a thread": _sqlite3_apart(
                stack.enter_context(closing(OneByOne(next(files)))),
                stack.enter_context(ThreadPoolExecutor(1)),
            ),
        }
        numbers = itertools.count()
        for number in itertools.islice(numbers, LOG_GROWS):
            for operation in contenders.values():
                await operation(number)
        return [await _round(contenders, numbers, For(wall_s)) for _ in range(rounds)]


async def _round(
    contenders: dict[str, Operation], numbers: Iterator[int], times: For
) -> dict[str, float]:
    times_us: dict[str, list[float]] = {name: [] for name in contenders}
    for _, number in zip(times, numbers, strict=False):
        for name, operation in contenders.items():
            start_s = time.perf_counter()
            await operation(number)
            times_us[name].append((time.perf_counter() - start_s) * 1e6)
    return {name: statistics.median(values) for name, values in times_us.items()}


def _engine_alone(engine: Engine) -> Operation:
    async def operation(number: int) -> None:
        engine.run(f"order-{number}", _place_here, number, scope="orders")

    return operation


def _async_engine_alone(engine: AsyncEngine) -> Operation:
    async def operation(number: int) -> None:
        await engine.run(f"order-{number}", _place, number, scope="orders")

    return operation


def _sqlite3_alone(records: OneByOne) -> Operation:
    async def operation(number: int) -> None:
        id, fingerprint = _names(number)
        records.insert(id, fingerprint)
        _place_here(number)
        records.update(id, RESPONSE)

    return operation


def _sqlite3_apart(records: OneByOne, thread: ThreadPoolExecutor) -> Operation:
    """What an async program does so that its event loop goes on."""

    async def operation(number: int) -> None:
        loop = asyncio.get_running_loop()
        id, fingerprint = _names(number)
        await loop.run_in_executor(thread, records.insert, id, fingerprint)
        await _place(number)
        await loop.run_in_executor(thread, records.update, id, RESPONSE)

    return operation


def _url(path: Path) -> str:
    return f"sqlite:///{path}"
