"""Question: how fast are retries answered that were completed before?

Cold: by a process that has completed none of them, so that every answer comes from the store; each
key is asked once. Warm: by the process that has completed them, from its memory. The floor is a
bare loop that reads whatever has gathered at once: no claim, nothing compared.
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

from benchmarks.contest import AT_A_TIME, RESPONSE, ROUNDS, Operation, names_of, place, product
from benchmarks.durable import durable_postgres, lent
from benchmarks.grouped import GroupedPostgres, GroupedRedis
from benchmarks.measuring import ROUNDS_QUICK, Cost, Samples, Slot, drive, interleave
from benchmarks.report import TIMES, Row, Table, Target
from coatcheck import AsyncEngine
from tests.support.servers.redis import Redis

TABLE = "idemkit_replays"
# How many keys each has to answer for: about as many as it can in a few tenths of a second.
KEYS = {"product": 4_000, "idemkit": 500, "floor": 8_000}
KEYS_QUICK = {"product": 1_000, "idemkit": 100, "floor": 2_000}
# What is kept warm, and how often all of it is asked.
WARM_KEYS = 300
WARM_TIMES = 60
WARM_TIMES_QUICK = 20

_numbers = count()
_executed: list[int] = []

STORES = {"postgres": "PostgreSQL", "redis": "Redis"}


class Asked(NamedTuple):
    """What a contender is asked: to fill its store, and to answer from it."""

    fill: Operation
    answer: Operation


Contender: TypeAlias = Callable[[], AbstractAsyncContextManager[Asked]]


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    logging.getLogger("idemkit").setLevel(logging.ERROR)
    keys = KEYS_QUICK if quick else KEYS
    times = WARM_TIMES_QUICK if quick else WARM_TIMES
    with ExitStack() as stack:
        postgres, redis = stack.enter_context(lent(durable_postgres, quick=quick)), Redis()
        stack.callback(redis.remove)
        warm = {
            "memory": "memory://",
            "postgres": postgres.url + "?schema=warm_{number}",
            "redis": redis.url + "?prefix=warm{number}:",
        }
        contenders = {**_on_postgres(postgres.url), **_on_redis(redis.url, redis.port)}
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
            "cold: a new process has completed none of them; every key is asked once",
            f"warm: from memory, {WARM_KEYS} keys again and again; floor: our memory store",
            "bare grouped: asyncpg, or the bare protocol, reads what has gathered at once",
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
            targets=[Target(measured=faster, bound="≥", limit=10, unit=f"{TIMES} idemkit")],
        ),
        Row(
            what=f"warm, {STORES[store]}; floor: the memory store",
            product=warm,
            floor=memory,
            ratios=[("of the memory store", as_memory)],
            # 0.9 and not 1: what two equal things differ by from slot to slot.
            targets=[Target(measured=as_memory, bound="≥", limit=0.9, unit="of the memory store")],
        ),
    ]


# --- slots ------------------------------------------------------------------------------------


async def _fill(make: Contender, keys_count: int) -> None:
    async with make() as asked:
        await drive(asked.fill, iter(range(-AT_A_TIME, keys_count)), at_a_time=AT_A_TIME)


def _cold(make: Contender, keys_count: int) -> float:
    async def run() -> Cost:
        async with make() as asked:
            # Opens, imports and starts threads, with keys that are not asked again.
            await drive(asked.answer, iter(range(-AT_A_TIME, 0)), at_a_time=AT_A_TIME)
            return await drive(asked.answer, iter(range(keys_count)), at_a_time=AT_A_TIME)

    before = len(_executed)
    cost = asyncio.run(run())
    assert len(_executed) == before, "what was to be replayed was executed"
    return cost.per_second


def _warm(url: str, times: int) -> float:
    async def run() -> Cost:
        # A store of its own: what is replayed is what this engine has completed.
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
async def _product(url: str) -> AsyncIterator[Asked]:
    async with AsyncEngine(url) as engine:

        async def operation(number: int) -> object:
            return await engine.run(f"order-{number}", _place, number, scope="orders")

        yield Asked(operation, operation)


def _idemkit(backend: IdempotencyBackend) -> Asked:
    guarded = idempotent(backend=backend, config=MethodConfig(scope=lambda _: "orders"))(_place)

    async def operation(number: int) -> object:
        return await guarded(number, idempotency_key=f"order-{number}")

    return Asked(operation, operation)


def _floor(grouped: GroupedPostgres | GroupedRedis) -> Asked:
    async def fill(number: int) -> None:
        id, fingerprint = names_of(number)
        await grouped.insert(id, fingerprint)
        await grouped.update(id, RESPONSE)

    async def answer(number: int) -> None:
        id, _ = names_of(number)
        assert await grouped.get(id) == RESPONSE

    return Asked(fill, answer)


def _on_postgres(url: str) -> dict[str, Contender]:
    @asynccontextmanager
    async def idemkit() -> AsyncIterator[Asked]:
        await init_pg(url, table=TABLE)
        async with PostgresBackend.from_url(url, table=TABLE) as backend:
            yield _idemkit(backend)

    @asynccontextmanager
    async def floor() -> AsyncIterator[Asked]:
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


def _on_redis(url: str, port: int) -> dict[str, Contender]:
    @asynccontextmanager
    async def idemkit() -> AsyncIterator[Asked]:
        async with RedisBackend.from_url(url) as backend:
            yield _idemkit(backend)

    @asynccontextmanager
    async def floor() -> AsyncIterator[Asked]:
        grouped = await GroupedRedis.open(port)
        try:
            yield _floor(grouped)
        finally:
            await grouped.close()

    return {
        "product, redis": partial(_product, url),
        "idemkit, redis": idemkit,
        "floor, redis": floor,
    }
