"""How soon do waiting duplicates in the same process get their response?

A hundred duplicates wait for an operation that is running. They should not read the store while
they wait, and should be woken as soon as the first attempt ends. The floor is an `asyncio.Event`.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from idemkit import InMemoryBackend, MethodConfig, idempotent

from benchmarks.machine import scratch_directory
from benchmarks.measuring import ROUNDS_QUICK, Samples, Slot, interleave
from benchmarks.report import TIMES, Row, Table
from coatcheck import AsyncEngine, Policy, Record
from coatcheck.core.record import Swap
from coatcheck.stores import AsyncStore, ThreadedStore
from coatcheck.stores.memory import AsyncMemoryStore, MemoryStore
from coatcheck.stores.sqlite.store import SqliteStore

DUPLICATES = 100
ROUNDS = 5
# Long enough to see reads by polling.
HELD_S = 0.1
# All duplicates have tried to claim long before, even on a busy disk.
ASKED_S_MAX = 5

Handler: TypeAlias = Callable[[], Awaitable[str]]
Ask: TypeAlias = Callable[[Handler], Awaitable[object]]


class _Counts:
    """Counts the reads and writes of a store."""

    reads = 0
    swaps = 0

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Count and read."""
        self.reads += 1
        found: Sequence[Record | None] = super().get(ids)  # type: ignore[misc]  # the store is the other base class
        return found

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Count and write."""
        lost: Sequence[Record | None] = super().swap(swaps)  # type: ignore[misc]  # as above
        self.swaps += len(swaps)
        return lost


class CountingMemory(_Counts, MemoryStore):
    """The memory store, counting."""


class CountingSqlite(_Counts, SqliteStore):
    """The SQLite store, counting."""


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    reads: dict[str, list[float]] = {"memory": [], "sqlite": []}
    with scratch_directory() as directory:
        files = (Path(directory) / f"{number}.db" for number in itertools.count())

        def product_memory() -> float:
            store = CountingMemory()
            woken_us = asyncio.run(_engine(AsyncMemoryStore(store), store))
            reads["memory"].append(store.reads)
            return woken_us

        def product_sqlite() -> float:
            store = CountingSqlite(next(files))
            woken_us = asyncio.run(_engine(ThreadedStore(store), store))
            reads["sqlite"].append(store.reads)
            return woken_us

        slots: dict[str, Slot] = {
            "product memory": product_memory,
            "idemkit": lambda: asyncio.run(_wait(_idemkit())),
            "floor": lambda: asyncio.run(_event()),
            "product sqlite": product_sqlite,
        }
        found = interleave(slots, ROUNDS_QUICK if quick else ROUNDS)
    return Table(
        name="waiting",
        question=f"{DUPLICATES} duplicates that wait for the first attempt in the same process",
        rows=_rows(found, {name: Samples(tuple(values)) for name, values in reads.items()}),
        notes=[
            f"from the end of the first attempt, which takes {HELD_S} s, to the median response",
            "on SQLite this includes a durable write",
        ],
    )


def _rows(found: dict[str, Samples], reads: dict[str, Samples]) -> list[Row]:
    product, idemkit = found["product memory"], found["idemkit"]
    return [
        Row(
            what="woken after, memory, µs",
            product=product,
            idemkit=idemkit,
            floor=found["floor"],
            ratios=[(f"{TIMES} faster than idemkit", idemkit.over(product))],
        ),
        Row(what="woken after, SQLite, µs", product=found["product sqlite"]),
        *(
            Row(what=f"store reads while waiting, {name}", product=read)
            for name, read in reads.items()
        ),
    ]


async def _engine(store: AsyncStore, counts: _Counts) -> float:
    async with AsyncEngine(store, Policy(wait="60s")) as engine:
        return await _wait(
            lambda handler: engine.run("order-1", handler, scope="orders"),
            # A duplicate waits after it has tried to claim.
            have_all_asked=lambda: counts.swaps > DUPLICATES,
        )


async def _wait(ask: Ask, have_all_asked: Callable[[], bool] = lambda: True) -> float:
    """Start the duplicates, end the first attempt; return the median delay after it, µs."""
    may_end = asyncio.Event()
    ended_s = 0.0

    async def handler() -> str:
        nonlocal ended_s
        await may_end.wait()
        ended_s = time.perf_counter()
        return "placed"

    async def duplicate() -> float:
        await ask(handler)
        return time.perf_counter()

    started = [asyncio.create_task(duplicate()) for _ in range(1 + DUPLICATES)]
    end_s = time.perf_counter() + ASKED_S_MAX
    while not have_all_asked() and time.perf_counter() < end_s:  # noqa: ASYNC110 - a thread counts
        await asyncio.sleep(0.001)
    await asyncio.sleep(HELD_S)
    may_end.set()
    answered_s = await asyncio.gather(*started)
    return (statistics.median(answered_s) - ended_s) * 1e6


def _idemkit() -> Ask:
    config = MethodConfig(scope=lambda _: "orders")
    decorate = idempotent(backend=InMemoryBackend(), config=config)
    guarded: list[Callable[..., Awaitable[object]]] = []

    def ask(handler: Handler) -> Awaitable[object]:
        if not guarded:
            guarded.append(decorate(handler))
        return guarded[0](idempotency_key="order-1")

    return ask


async def _event() -> float:
    """The floor: duplicates wait for an event."""
    is_done = asyncio.Event()
    asked: list[None] = []

    async def ask(handler: Handler) -> None:
        if asked:
            await is_done.wait()
            return
        asked.append(None)
        await handler()
        is_done.set()

    return await _wait(ask)
