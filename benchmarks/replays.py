"""How many retries of completed operations are answered per second?

Cold: by an engine that has completed none of them, so every response comes from the store; each key
is used once. Warm: by the engine that has completed them, from its memory. The floor is a bare loop
that reads all waiting keys at once, and compares nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from itertools import count
from typing import NamedTuple, TypeAlias

from idemkit import MethodConfig, idempotent
from idemkit.backends.base import IdempotencyBackend
from idemkit.backends.postgres import PostgresBackend, init_pg
from idemkit.backends.redis import RedisBackend

from benchmarks.comparison import AT_A_TIME, RESPONSE, ROUNDS, Operation, names_of, place, product
from benchmarks.grouped_floors import GroupedPostgres, GroupedRedis
from benchmarks.measuring import ROUNDS_QUICK, Cost, Samples, Slot, drive, interleave
from benchmarks.report import TIMES, Row, Table
from benchmarks.servers import durable_postgres, server_for
from coatcheck import AsyncEngine
from tests.support.servers.redis import Redis

TABLE = "idemkit_replays"
# How many keys each contender replays: as many as it can in a few tenths of a second.
KEYS = {"product": 4_000, "idemkit": 500, "floor": 8_000}
KEYS_QUICK = {"product": 1_000, "idemkit": 100, "floor": 2_000}
# How many keys are replayed from memory, and how often each.
WARM_KEYS = 300
WARM_TIMES = 60
WARM_TIMES_QUICK = 20

_numbers = count()
_executed: list[int] = []

STORES = {"postgres": "PostgreSQL", "redis": "Redis"}


class Replayer(NamedTuple):
    """What a contender does: fill its store, and answer from it."""

    fill: Operation
    answer: Operation


Contender: TypeAlias = Callable[[], AbstractAsyncContextManager[Replayer]]


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    logging.getLogger("idemkit").setLevel(logging.ERROR)
    keys = KEYS_QUICK if quick else KEYS
    times = WARM_TIMES_QUICK if quick else WARM_TIMES
    with ExitStack() as stack:
        postgres, redis = stack.enter_context(server_for(durable_postgres, quick=quick)), Redis()
        stack.callback(redis.remove)
        warm = {
            "memory": "memory://",
            "postgres": postgres.url + "?schema=warm_{number}",
            "redis": redis.url + "?prefix=warm{number}:",
        }
        contenders = {**_on_postgres(postgres.url), **_on_redis(redis.url)}
        slots: dict[str, Slot] = {}
        for name, make in contenders.items():
            keys_count = keys[name.split(", ")[0]]
            asyncio.run(_fill(make, keys_count))
            slots[name] = partial(_cold, make, keys_count)
        for store, url in warm.items():
            slots[f"warm, {store}"] = partial(_warm, url, times)
        found = interleave(slots, ROUNDS_QUICK if quick else ROUNDS)
    return Table(
        name="replays",
        question="answers a second to retries of completed keys, 64 at a time",
        rows=[row for store in STORES for row in _rows(found, store)],
        notes=[
            "cold: from the store, by an engine that has completed none of them; every key once",
            f"warm: from memory, {WARM_KEYS} keys many times; floor: the memory store",
            "bare grouped: asyncpg or redis.asyncio, one read for all waiting keys",
        ],
    )


def _rows(found: Mapping[str, Samples], store: str) -> list[Row]:
    product, idemkit, floor = (found[f"{name}, {store}"] for name in KEYS)
    warm, memory = found[f"warm, {store}"], found["warm, memory"]
    faster, as_memory = product.over(idemkit), warm.over(memory)
    return [
        Row(
            what=f"cold, {STORES[store]}; floor: bare grouped reads",
            product=product,
            idemkit=idemkit,
            floor=floor,
            ratios=[(f"{TIMES} idemkit", faster), ("of bare grouped", product.over(floor))],
        ),
        Row(
            what=f"warm, {STORES[store]}; floor: the memory store",
            product=warm,
            floor=memory,
            ratios=[("of the memory store", as_memory)],
        ),
    ]


# --- slots ------------------------------------------------------------------------------------


async def _fill(make: Contender, keys_count: int) -> None:
    async with make() as replayer:
        await drive(replayer.fill, iter(range(-AT_A_TIME, keys_count)), at_a_time=AT_A_TIME)


def _cold(make: Contender, keys_count: int) -> float:
    async def run() -> Cost:
        async with make() as replayer:
            # Not measured: connecting, importing and starting threads, with other keys.
            await drive(replayer.answer, iter(range(-AT_A_TIME, 0)), at_a_time=AT_A_TIME)
            return await drive(replayer.answer, iter(range(keys_count)), at_a_time=AT_A_TIME)

    before = len(_executed)
    cost = asyncio.run(run())
    assert len(_executed) == before, "an operation was executed instead of replayed"
    return cost.per_second


def _warm(url: str, times: int) -> float:
    async def run() -> Cost:
        # An empty store: this engine replays what it has completed itself.
        async with product(url.format(number=next(_numbers))) as operation:
            await drive(operation, iter(range(WARM_KEYS)), at_a_time=AT_A_TIME)
            again = (number for _ in range(times) for number in range(WARM_KEYS))
            return await drive(operation, again, at_a_time=AT_A_TIME)

    return asyncio.run(run()).per_second


# --- the contenders ---------------------------------------------------------------------------


async def _place(order: int) -> dict[str, object]:
    _executed.append(order)
    return await place(order)


@asynccontextmanager
async def _product(url: str) -> AsyncIterator[Replayer]:
    async with AsyncEngine(url) as engine:

        async def operation(number: int) -> object:
            return await engine.run(f"order-{number}", _place, number, scope="orders")

        yield Replayer(operation, operation)


def _idemkit(backend: IdempotencyBackend) -> Replayer:
    guarded = idempotent(backend=backend, config=MethodConfig(scope=lambda _: "orders"))(_place)

    async def operation(number: int) -> object:
        return await guarded(number, idempotency_key=f"order-{number}")

    return Replayer(operation, operation)


def _floor(grouped: GroupedPostgres | GroupedRedis) -> Replayer:
    async def fill(number: int) -> None:
        id, fingerprint = names_of(number)
        await grouped.insert(id, fingerprint)
        await grouped.update(id, RESPONSE)

    async def answer(number: int) -> None:
        id, _ = names_of(number)
        assert await grouped.get(id) == RESPONSE

    return Replayer(fill, answer)


def _on_postgres(url: str) -> dict[str, Contender]:
    @asynccontextmanager
    async def idemkit() -> AsyncIterator[Replayer]:
        await init_pg(url, table=TABLE)
        async with PostgresBackend.from_url(url, table=TABLE) as backend:
            yield _idemkit(backend)

    @asynccontextmanager
    async def floor() -> AsyncIterator[Replayer]:
        grouped = await GroupedPostgres.open(url, "floor")
        try:
            yield _floor(grouped)
        finally:
            await grouped.close()

    return {
        "product, postgres": partial(_product, url),
        "idemkit, postgres": idemkit,
        "floor, postgres": floor,
    }


def _on_redis(url: str) -> dict[str, Contender]:
    @asynccontextmanager
    async def idemkit() -> AsyncIterator[Replayer]:
        async with RedisBackend.from_url(url) as backend:
            yield _idemkit(backend)

    @asynccontextmanager
    async def floor() -> AsyncIterator[Replayer]:
        grouped = GroupedRedis(url)
        try:
            yield _floor(grouped)
        finally:
            await grouped.close()

    return {
        "product, redis": partial(_product, url),
        "idemkit, redis": idemkit,
        "floor, redis": floor,
    }
