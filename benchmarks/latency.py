"""How long does one operation take on each store?

Claim: from the call to the first line of the function. Completion: from its last line to the
result. Replay: a call of another engine, which reads the store. Servers that survive a power cut
are on a disk; server and client share the machine. The stores alternate after every operation,
because the speed of a disk changes from second to second.
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

from benchmarks.comparison import ROUNDS
from benchmarks.machine import scratch_directory
from benchmarks.measuring import ROUNDS_QUICK, Samples
from benchmarks.report import Figures, Table
from benchmarks.servers import durable_mariadb, durable_postgres, server_for
from coatcheck import AsyncEngine, Engine
from coatcheck.stores import AsyncStore, Store
from coatcheck.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support.servers.redis import Redis

# Operations of each store in a round: enough that the p99 is not just the slowest one.
TURNS = 200
TURNS_QUICK = 30
# Not measured: connecting, importing, preparing statements.
WARM_UP = 10
RUNS_IN = ("thread", "event loop")


class Took(NamedTuple):
    """How long each part of an operation took."""

    claim: float
    completion: float
    replay: float


Ask: TypeAlias = Callable[[int], Awaitable[Took]]
Contender: TypeAlias = Callable[[], AbstractAsyncContextManager[Ask]]
SHARES = {"p50": 50, "p99": 99}
COLUMNS = [f"{step} {share}" for step in Took._fields for share in SHARES]


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    turns, rounds = (TURNS_QUICK, ROUNDS_QUICK) if quick else (TURNS, ROUNDS)
    with _places(quick=quick) as urls:
        contenders = {
            (store, runs_in): _contender(url, runs_in)
            for store, url in urls.items()
            for runs_in in RUNS_IN
        }
        found = asyncio.run(_in_turns(contenders, turns, rounds))
    return Table(
        name="latency",
        question="one operation at a time, p50 and p99 of its steps, µs",
        rows=[
            Figures(
                what=f"{store}, {runs_in}",
                columns=columns,
                more={"store": store, "runs_in": runs_in},
            )
            for (store, runs_in), columns in found.items()
        ],
        notes=[
            f"{turns} operations in each of {rounds} rounds; a cell has the median round",
            "replay: by an engine that has not completed the key, so it reads the store",
            "thread: the sync engine, in the calling thread; event loop: the async engine",
            "PostgreSQL with fsync, MariaDB with innodb_flush_log_at_trx_commit = 1",
            "the servers are on the same machine; add the round trips to yours",
        ],
        head=("", *COLUMNS),
    )


@contextmanager
def _places(*, quick: bool) -> Iterator[dict[str, str]]:
    """Start the servers and yield a URL for each store, in the order of the table."""
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        directory = Path(stack.enter_context(scratch_directory()))
        starting_postgres = pool.submit(
            stack.enter_context, server_for(durable_postgres, quick=quick)
        )
        starting_mariadb = pool.submit(
            stack.enter_context, server_for(durable_mariadb, quick=quick)
        )
        everysec, always = Redis(on_disk=True), Redis(on_disk=True, appendfsync="always")
        stack.callback(everysec.remove)
        stack.callback(always.remove)
        postgres, mariadb = starting_postgres.result(), starting_mariadb.result()
        yield {
            "memory": "memory://",
            "SQLite": f"sqlite:///{directory}/{{runs_in}}.db",
            "PostgreSQL": f"{postgres.url}?schema={{runs_in}}",
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
        for number in range(-WARM_UP, 0):
            for _, ask in asks:
                await ask(number)
        for number in range(rounds * turns):
            asks.reverse()  # so that no store always follows the same one
            for name, ask in asks:
                if number % turns == 0:
                    found[name].append([])
                found[name][-1].append(await ask(number))
    return {name: _columns(times) for name, times in found.items()}


def _columns(rounds: list[list[Took]]) -> dict[str, Samples]:
    """Return the percentiles of each step, one value for each round."""
    columns: dict[str, Samples] = {}
    for place, step in enumerate(Took._fields):
        sorted_us = [sorted(took[place] * 1e6 for took in times) for times in rounds]
        for name, share in SHARES.items():
            values = (times_us[len(times_us) * share // 100] for times_us in sorted_us)
            columns[f"{step} {name}"] = Samples(tuple(values))
    return columns


# --- threads and event loops ---------------------------------------------------------------------------


def _contender(url: str, runs_in: str) -> Contender:
    """Two engines on the same records, for threads or for an event loop."""
    scope, here = runs_in.replace(" ", "_"), url.format(runs_in=runs_in.replace(" ", "_"))
    if runs_in == "thread":
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
    """The guarded function, which notes the time of its call."""

    def __init__(self) -> None:
        self._placed_s: list[float] = []

    def place(self) -> dict[str, object]:
        """The function."""
        self._placed_s.append(time.perf_counter())
        return {"order": 17, "state": "placed", "amount": 1999}

    async def place_soon(self) -> dict[str, object]:
        """The same, async."""
        return self.place()

    def took(self, asked_s: float, answered_s: float) -> Took:
        """Return the parts of an operation whose replay has just returned."""
        replayed_s = time.perf_counter()
        (placed_s,) = self._placed_s  # called once, otherwise it was no replay
        return Took(placed_s - asked_s, answered_s - placed_s, replayed_s - answered_s)
