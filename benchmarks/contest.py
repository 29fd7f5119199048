"""A contest on a server: the same keyed operations by everybody, together and one at a time."""

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
# A round of all who run alone: some hundred operations of each.
ALONE_S = 0.8
ALONE_S_QUICK = 0.15
# Never slower alone than this many times the driver's own two statements.
ALONE_MAX = 1.2
# What an answer of a small API looks like, for the floors; the others keep their own.
RESPONSE = b'{"order": 17, "state": "placed", "amount": 1999}'
# For the floors: a time as a published window would end, and a day.
EXPIRES_MS = 1_800_000_000_000
DAY_MS = 86_400_000

Operation: TypeAlias = Callable[[int], Awaitable[object]]
Contender: TypeAlias = Callable[[], AbstractAsyncContextManager[Operation]]
Execute: TypeAlias = Callable[..., Awaitable[Any]]


# --- those who run together, and alone --------------------------------------------------------


def together(contenders: Mapping[str, Contender], *, quick: bool) -> dict[str, Samples]:
    """
    Operations a second of each, 64 at a time.

    Every slot opens what it needs and begins with a table of its own. Where it must be quick, all
    slots of a contender share both: together they are as long as one of the others.
    """
    if quick:
        return _together_open(contenders)
    slots = {name: _slot(make, SLOT_S) for name, make in contenders.items()}
    return interleave(slots, ROUNDS)


def _slot(make: Contender, wall_s: float) -> Slot:
    async def run() -> Cost:
        async with make() as operation:
            # Opens, imports, starts threads and prepares statements, which is not what is asked.
            await drive(operation, iter(range(-AT_A_TIME, 0)), at_a_time=AT_A_TIME)
            return await drive(operation, For(wall_s), at_a_time=AT_A_TIME)

    return lambda: asyncio.run(run()).per_second


def _together_open(contenders: Mapping[str, Contender]) -> dict[str, Samples]:
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        try:
            slots = {name: _open_slot(runner, stack, make) for name, make in contenders.items()}
            return interleave(slots, ROUNDS_QUICK)
        finally:
            runner.run(stack.aclose())


def _open_slot(runner: asyncio.Runner, stack: AsyncExitStack, make: Contender) -> Slot:
    numbers = count()

    async def opened() -> Operation:
        operation = await stack.enter_async_context(make())
        await drive(operation, iter(range(-AT_A_TIME, 0)), at_a_time=AT_A_TIME)
        return operation

    async def run() -> Cost:
        return await drive(operation, For(SLOT_S_QUICK, numbers), at_a_time=AT_A_TIME)

    operation = runner.run(opened())
    return lambda: runner.run(run()).per_second


def alone(contenders: Mapping[str, Contender], *, quick: bool) -> dict[str, Samples]:
    """
    The median time of one operation, µs; contenders take turns after every single one.

    A commit waits for the disk, and the disk is never the same for two seconds.
    """
    if quick:
        found = asyncio.run(_in_turns(contenders, ALONE_S_QUICK, ROUNDS_QUICK))
    else:
        found = [asyncio.run(_in_turns(contenders, ALONE_S, 1))[0] for _ in range(ROUNDS)]
    return {name: Samples(tuple(one[name] for one in found)) for name in contenders}


async def _in_turns(
    contenders: Mapping[str, Contender], wall_s: float, rounds: int
) -> list[dict[str, float]]:
    """What each has found in each round; all rounds share connections and tables."""
    numbers = count()
    async with AsyncExitStack() as stack:
        turns: Sequence[tuple[str, Operation]] = [
            (name, await stack.enter_async_context(make())) for name, make in contenders.items()
        ]
        for _, operation in turns:
            await operation(-1)
        return [await _round(turns, For(wall_s, numbers)) for _ in range(rounds)]


async def _round(turns: Sequence[tuple[str, Operation]], numbers: For) -> dict[str, float]:
    times_us: dict[str, list[float]] = {name: [] for name, _ in turns}
    for number in numbers:
        turns = turns[::-1]  # nobody always comes after the same one
        for name, operation in turns:
            start_s = time.perf_counter()
            await operation(number)
            times_us[name].append((time.perf_counter() - start_s) * 1e6)
    return {name: statistics.median(values) for name, values in times_us.items()}


def rows_alone(found: dict[str, Samples], floors: Mapping[str, str]) -> list[Row]:
    """A row for each world, with the driver that is its floor: `{"thread": "psycopg", …}`."""
    rows: list[Row] = []
    for world, floor in floors.items():
        ours, bare = found[f"product, {world}"], found[floor]
        slower, of = ours.over(bare), f"{TIMES} {floor}"
        row = Row(
            what=f"1 at a time, {world}, µs; floor: {floor}",
            product=ours,
            floor=bare,
            ratios=[(of, slower)],
            targets=[Target(measured=slower, bound="≤", limit=ALONE_MAX, unit=of)],
        )
        rows.append(row)
    return rows


# --- the product ------------------------------------------------------------------------------


async def place(order: int) -> dict[str, object]:
    """What is done once for each key."""
    return {"order": order, "state": "placed", "amount": 1999}


def place_here(order: int) -> dict[str, object]:
    """The same, for those who do not await."""
    return {"order": order, "state": "placed", "amount": 1999}


@asynccontextmanager
async def product(url: str) -> AsyncIterator[Operation]:
    """We ourselves, on the store that *url* names, in an event loop."""
    async with AsyncEngine(url) as engine:
        yield lambda number: engine.run(f"order-{number}", place, number, scope="orders")


@asynccontextmanager
async def product_here(url: str) -> AsyncIterator[Operation]:
    """We ourselves as sync code has us: in the thread of whoever calls."""
    with Engine(url) as engine:

        async def operation(number: int) -> None:
            engine.run(f"order-{number}", place_here, number, scope="orders")

        yield operation


# --- for the floors ---------------------------------------------------------------------------


def names_of(number: int) -> tuple[bytes, bytes]:
    """The id and the fingerprint of an order, as lean as they can be."""
    key = b"order-%d" % number
    return hashlib.blake2b(key, digest_size=16).digest(), hashlib.md5(key).digest()


def on_free_session(sessions: Iterable[Execute]) -> Execute:
    """Execute on whichever session is free: a driver's own pool asks the server for more."""
    free: asyncio.LifoQueue[Execute] = asyncio.LifoQueue()
    for session in sessions:
        free.put_nowait(session)

    async def execute(*asked: object) -> object:
        session = await free.get()
        try:
            return await session(*asked)
        finally:
            free.put_nowait(session)

    return execute
