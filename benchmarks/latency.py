"""Question: how long does each store keep a request waiting, when it is alone?

A claim: from the call to the first line of the function. A completion: from its last line to the
answer. A replay: asked of another engine, which has to look into the store. Everything that should
survive a power cut is on a disk and synced; server and client share the machine. All stores take
turns after every single operation, because the disk is never the same for two seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from pathlib import Path
from typing import NamedTuple, TypeAlias

from benchmarks.contest import ROUNDS
from benchmarks.durable import durable_mariadb, durable_postgres, lent
from benchmarks.machine import workshop
from benchmarks.measuring import ROUNDS_QUICK, Samples
from benchmarks.report import Figures, Table
from coatcheck import AsyncEngine, Engine
from coatcheck.stores import AsyncStore, Store
from coatcheck.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support.servers.redis import Redis

# Operations of each in a round: enough for a hundredth of them to be more than the very worst.
TURNS = 200
TURNS_QUICK = 30
# Before the first that counts: connects, imports, prepares statements.
FIRST_TURNS = 10
WORLDS = ("thread", "event loop")


class Took(NamedTuple):
    """How long an operation took, and being asked for it again elsewhere."""

    claim: float
    completion: float
    replay: float


Ask: TypeAlias = Callable[[int], Awaitable[Took]]
Contender: TypeAlias = Callable[[], AbstractAsyncContextManager[Ask]]
SHARES = {"p50": 50, "p99": 99}
COLUMNS = [f"{step} {share}" for step in Took._fields for share in SHARES]


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    turns, rounds = (TURNS_QUICK, ROUNDS_QUICK) if quick else (TURNS, ROUNDS)
    with _places(quick=quick) as urls:
        contenders = {
            (store, world): _contender(url, world)
            for store, url in urls.items()
            for world in WORLDS
        }
        found = asyncio.run(_in_turns(contenders, turns, rounds))
    return Table(
        name="latency",
        question="one operation at a time, p50 and p99 of its steps, µs",
        rows=[
            Figures(
                what=f"{store}, {world}",
                columns=columns,
                more={"store": store, "world": world},
            )
            for (store, world), columns in found.items()
        ],
        notes=[
            f"{turns} operations in each of {rounds} rounds; a cell has the median round",
            "replay: by an engine that has not completed the key, so from the store",
            "thread: the sync engine, in the thread of whoever calls; event loop: the async one",
            "PostgreSQL with fsync, MariaDB with innodb_flush_log_at_trx_commit = 1",
            "the servers are on the same machine: the distance to yours comes on top",
        ],
        head=("", *COLUMNS),
    )


@contextmanager
def _places(*, quick: bool) -> Iterator[dict[str, str]]:
    """A URL for each kind of store, in the order of the table; servers start side by side."""
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        directory = Path(stack.enter_context(workshop()))
        starting_postgres = pool.submit(stack.enter_context, lent(durable_postgres, quick=quick))
        starting_mariadb = pool.submit(stack.enter_context, lent(durable_mariadb, quick=quick))
        everysec, always = Redis(on_disk=True), Redis(on_disk=True, appendfsync="always")
        stack.callback(everysec.remove)
        stack.callback(always.remove)
        postgres, mariadb = starting_postgres.result(), starting_mariadb.result()
        yield {
            "memory": "memory://",
            "SQLite": f"sqlite:///{directory}/{{world}}.db",
            "PostgreSQL": f"{postgres.url}?schema={{world}}",
            "MariaDB": mariadb.fresh_url(),
            "Redis, everysec": everysec.url,
            "Redis, always": always.url,
        }


async def _in_turns(
    contenders: dict[tuple[str, str], Contender], turns: int, rounds: int
) -> dict[tuple[str, str], dict[str, Samples]]:
    found: dict[tuple[str, str], list[list[Took]]] = {name: [] for name in contenders}
    async with AsyncExitStack() as stack:
        asks = [
            (name, await stack.enter_async_context(make())) for name, make in contenders.items()
        ]
        for number in range(-FIRST_TURNS, 0):
            for _, ask in asks:
                await ask(number)
        for number in range(rounds * turns):
            asks.reverse()  # nobody always comes after the same one
            for name, ask in asks:
                if number % turns == 0:
                    found[name].append([])
                found[name][-1].append(await ask(number))
    return {name: _columns(times) for name, times in found.items()}


def _columns(rounds: list[list[Took]]) -> dict[str, Samples]:
    """The shares of each step, one value for each round."""
    columns: dict[str, Samples] = {}
    for place, step in enumerate(Took._fields):
        sorted_us = [sorted(took[place] * 1e6 for took in times) for times in rounds]
        for name, share in SHARES.items():
            values = (times_us[len(times_us) * share // 100] for times_us in sorted_us)
            columns[f"{step} {name}"] = Samples(tuple(values))
    return columns


# --- the two worlds ---------------------------------------------------------------------------


def _contender(url: str, world: str) -> Contender:
    """Two engines in *world* on the same records, which are those of nobody else."""
    scope, here = world.replace(" ", "_"), url.format(world=world.replace(" ", "_"))
    if world == "thread":
        shared: Store | str = MemoryStore() if url == "memory://" else here
        return lambda: _thread(shared, scope)
    shared_async: AsyncStore | str = AsyncMemoryStore(MemoryStore()) if url == "memory://" else here
    return lambda: _event_loop(shared_async, scope)


@asynccontextmanager
async def _thread(store: Store | str, scope: str) -> AsyncIterator[Ask]:
    with Engine(store) as first, Engine(store) as second:

        async def ask(number: int) -> Took:
            watch = _Watch()
            asked_s = time.perf_counter()
            first.run(f"order-{number}", watch.place, scope=scope)
            answered_s = time.perf_counter()
            second.run(f"order-{number}", watch.place, scope=scope)
            return watch.took(asked_s, answered_s)

        yield ask


@asynccontextmanager
async def _event_loop(store: AsyncStore | str, scope: str) -> AsyncIterator[Ask]:
    async with AsyncEngine(store) as first, AsyncEngine(store) as second:

        async def ask(number: int) -> Took:
            watch = _Watch()
            asked_s = time.perf_counter()
            await first.run(f"order-{number}", watch.place_soon, scope=scope)
            answered_s = time.perf_counter()
            await second.run(f"order-{number}", watch.place_soon, scope=scope)
            return watch.took(asked_s, answered_s)

        yield ask


class _Watch:
    """What is done once, and when it was."""

    def __init__(self) -> None:
        self._placed_s: list[float] = []

    def place(self) -> dict[str, object]:
        """What is done once for each key."""
        self._placed_s.append(time.perf_counter())
        return {"order": 17, "state": "placed", "amount": 1999}

    async def place_soon(self) -> dict[str, object]:
        """The same, for those who await."""
        return self.place()

    def took(self, asked_s: float, answered_s: float) -> Took:
        """The parts of an operation whose replay has just been answered."""
        replayed_s = time.perf_counter()
        (placed_s,) = self._placed_s  # once, or it was no replay
        return Took(placed_s - asked_s, answered_s - placed_s, replayed_s - answered_s)
