"""Compares contenders that do the same keyed operations: 64 at a time, and one at a time.

A contender is an async context manager that opens what it needs and yields its operation.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any, TypeAlias

from benchmarks.measuring import ROUNDS_QUICK, Cost, For, Samples, Slot, drive, interleave
from benchmarks.report import TIMES, Row, Target
from coatcheck import AsyncEngine, Engine

AT_A_TIME = 64
ROUNDS = 5
SLOT_S = 0.5
SLOT_S_QUICK = 0.1
# A round of all contenders one at a time: some hundred operations of each.
ROUND_S = 0.8
ROUND_S_QUICK = 0.15
# One at a time: at most this many times the two statements of the bare driver.
BARE_DRIVER_MAX = 1.6
# The response of a small API, for the floors; the others store their own.
RESPONSE = b'{"order": 17, "state": "placed", "amount": 1999}'
# For the floors: the end of a window, and a day.
EXPIRES_MS = 1_800_000_000_000
DAY_MS = 86_400_000

Operation: TypeAlias = Callable[[int], Awaitable[object]]
Contender: TypeAlias = Callable[[], AbstractAsyncContextManager[Operation]]
Execute: TypeAlias = Callable[..., Awaitable[Any]]


# --- 64 at a time -----------------------------------------------------------------------------


def measure_rates(
    contenders: Mapping[str, Contender], *, quick: bool, at_a_time: int = AT_A_TIME
) -> dict[str, Samples]:
    """
    Return the operations per second of each contender, *at_a_time* at a time.

    Every slot opens its own connections and an empty table. A quick run opens them once for all
    slots of a contender.
    """
    if quick:
        return _rates_of_open(contenders, at_a_time)
    slots = {name: _slot(make, SLOT_S, at_a_time) for name, make in contenders.items()}
    return interleave(slots, ROUNDS)


def _slot(make: Contender, wall_s: float, at_a_time: int) -> Slot:
    async def run() -> Cost:
        async with make() as operation:
            # Not measured: connecting, importing, starting threads, preparing statements.
            await drive(operation, iter(range(-AT_A_TIME, 0)), at_a_time=AT_A_TIME)
            return await drive(operation, For(wall_s), at_a_time=at_a_time)

    return lambda: asyncio.run(run()).per_second


def _rates_of_open(contenders: Mapping[str, Contender], at_a_time: int) -> dict[str, Samples]:
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        try:
            slots = {
                name: _open_slot(runner, stack, make, at_a_time)
                for name, make in contenders.items()
            }
            return interleave(slots, ROUNDS_QUICK)
        finally:
            runner.run(stack.aclose())


def _open_slot(
    runner: asyncio.Runner, stack: AsyncExitStack, make: Contender, at_a_time: int
) -> Slot:
    numbers = count()

    async def opened() -> Operation:
        operation = await stack.enter_async_context(make())
        await drive(operation, iter(range(-AT_A_TIME, 0)), at_a_time=AT_A_TIME)
        return operation

    async def run() -> Cost:
        return await drive(operation, For(SLOT_S_QUICK, numbers), at_a_time=at_a_time)

    operation = runner.run(opened())
    return lambda: runner.run(run()).per_second


# --- one at a time ----------------------------------------------------------------------------


def measure_times(
    contenders: Mapping[str, Contender], *, quick: bool, warm_up: int = 1
) -> dict[str, Samples]:
    """
    Return the median time of one operation, µs; contenders alternate after every operation.

    A commit waits for the disk, whose speed changes from second to second. The first *warm_up*
    operations are not measured.
    """
    if quick:
        found = asyncio.run(_alternate(contenders, warm_up, ROUND_S_QUICK, ROUNDS_QUICK))
    else:
        found = [asyncio.run(_alternate(contenders, warm_up, ROUND_S, 1))[0] for _ in range(ROUNDS)]
    return {name: Samples(tuple(one[name] for one in found)) for name in contenders}


async def _alternate(
    contenders: Mapping[str, Contender], warm_up: int, wall_s: float, rounds: int
) -> list[dict[str, float]]:
    """Return the median times of each round; all rounds share connections and tables."""
    numbers = count()
    async with AsyncExitStack() as stack:
        operations: Sequence[tuple[str, Operation]] = [
            (name, await stack.enter_async_context(make())) for name, make in contenders.items()
        ]
        for number in range(-warm_up, 0):
            for _, operation in operations:
                await operation(number)
        return [await _round(operations, For(wall_s, numbers)) for _ in range(rounds)]


async def _round(operations: Sequence[tuple[str, Operation]], numbers: For) -> dict[str, float]:
    times_us: dict[str, list[float]] = {name: [] for name, _ in operations}
    for number in numbers:
        operations = operations[::-1]  # so that no contender always follows the same one
        for name, operation in operations:
            start_s = time.perf_counter()
            await operation(number)
            times_us[name].append((time.perf_counter() - start_s) * 1e6)
    return {name: statistics.median(values) for name, values in times_us.items()}


def rows_of_times(found: dict[str, Samples], floors: Mapping[str, str]) -> list[Row]:
    """Return a row for threads and one for event loops: `{"thread": "psycopg", …}`."""
    rows: list[Row] = []
    for runs_in, floor in floors.items():
        ours, bare = found[f"product, {runs_in}"], found[floor]
        slower, of = ours.over(bare), f"{TIMES} {floor}"
        row = Row(
            what=f"1 at a time, {runs_in}, µs; floor: {floor}",
            product=ours,
            floor=bare,
            ratios=[(of, slower)],
            targets=[Target(measured=slower, bound="≤", limit=BARE_DRIVER_MAX, unit=of)],
        )
        rows.append(row)
    return rows


# --- the product ------------------------------------------------------------------------------


async def place(order: int) -> dict[str, object]:
    """The function that is guarded."""
    return place_sync(order)


def place_sync(order: int) -> dict[str, object]:
    """The same for sync code."""
    return {"order": order, "state": "placed", "amount": 1999}


@asynccontextmanager
async def product(url: str) -> AsyncIterator[Operation]:
    """The async engine, on the store at *url*."""
    async with AsyncEngine(url) as engine:
        yield lambda number: engine.run(f"order-{number}", place, number, scope="orders")


@asynccontextmanager
async def product_sync(url: str) -> AsyncIterator[Operation]:
    """The sync engine, in the calling thread."""
    with Engine(url) as engine:

        async def operation(number: int) -> None:
            engine.run(f"order-{number}", place_sync, number, scope="orders")

        yield operation


# --- for the floors ---------------------------------------------------------------------------


def names_of(number: int) -> tuple[bytes, bytes]:
    """Return an id and a fingerprint for an order, as cheaply as possible."""
    key = b"order-%d" % number
    return hashlib.blake2b(key, digest_size=16).digest(), hashlib.md5(key).digest()


def on_free_session(sessions: Iterable[Execute]) -> Execute:
    """Return a function that executes on a free session, without the extra work of a pool."""
    free: asyncio.LifoQueue[Execute] = asyncio.LifoQueue()
    for session in sessions:
        free.put_nowait(session)

    async def execute(*arguments: object) -> object:
        session = await free.get()
        try:
            return await session(*arguments)
        finally:
            free.put_nowait(session)

    return execute
