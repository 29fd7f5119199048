"""How fast are claims on Redis, with an append-only file that is synced every second?

The floor sends `SET … NX` and `SET` for each operation, in pipelines of redis.asyncio with all
waiting commands. One at a time, each engine is compared with redis-py or redis.asyncio.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from itertools import count
from typing import Any

import redis
import redis.asyncio
from idemkit import MethodConfig, idempotent
from idemkit.backends.redis import RedisBackend

from benchmarks.comparison import (
    AT_A_TIME,
    DAY_MS,
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
from benchmarks.grouped_floors import GroupedRedis
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target
from tests.support.servers.redis import Redis

_NUMBERS = count()


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    logging.getLogger("idemkit").setLevel(logging.ERROR)
    server = Redis()
    contenders: dict[str, Contender] = {
        "product": lambda: product(_fresh(server.url)),
        "idemkit": partial(_idemkit, server.url),
        "grouped": partial(_grouped, server.url),
    }
    one_at_a_time: dict[str, Contender] = {
        "product, thread": lambda: product_sync(_fresh(server.url)),
        "product, event loop": lambda: product(_fresh(server.url)),
        "redis-py": partial(_redis_py, server.url),
        "redis.asyncio": partial(_redis_asyncio, server.url),
    }
    try:
        row = _row(measure_rates(contenders, quick=quick))
        found = measure_times(one_at_a_time, quick=quick)
    finally:
        server.remove()
    return Table(
        name="redis",
        question="keyed operations on Redis with appendfsync everysec: two writes each",
        rows=[row, *rows_of_times(found, {"thread": "redis-py", "event loop": "redis.asyncio"})],
        notes=[
            "bare grouped: redis.asyncio, one pipeline for all waiting commands",
            "1 at a time: contenders alternate after every operation",
        ],
    )


def _fresh(url: str) -> str:
    return f"{url}?prefix=bench{next(_NUMBERS)}:"


def _row(found: dict[str, Samples]) -> Row:
    ours, idemkit, grouped = found["product"], found["idemkit"], found["grouped"]
    faster, share = ours.over(idemkit), ours.over(grouped)
    return Row(
        what=f"{AT_A_TIME} at a time, operations/s; floor: bare grouped",
        product=ours,
        idemkit=idemkit,
        floor=grouped,
        ratios=[(f"{TIMES} idemkit", faster), ("of bare grouped", share)],
        targets=[Target(measured=faster, bound="≥", limit=4, unit=f"{TIMES} idemkit")],
    )


# --- the contenders ---------------------------------------------------------------------------


@asynccontextmanager
async def _idemkit(url: str) -> AsyncIterator[Operation]:
    async with RedisBackend.from_url(url, namespace=f"bench{next(_NUMBERS)}") as backend:
        guarded = idempotent(backend=backend, config=MethodConfig(scope=lambda _: "orders"))(place)
        yield lambda number: guarded(number, idempotency_key=f"order-{number}")


@asynccontextmanager
async def _redis_py(url: str) -> AsyncIterator[Operation]:
    prefix = f"driver{next(_NUMBERS)}:"
    with closing(redis.Redis.from_url(url)) as client:

        async def operation(number: int) -> None:
            id = f"{prefix}order-{number}"
            client.set(id, b"fingerprint", nx=True, px=DAY_MS)
            place_sync(number)
            client.set(id, RESPONSE, px=DAY_MS)

        yield operation


@asynccontextmanager
async def _redis_asyncio(url: str) -> AsyncIterator[Operation]:
    client: Any = redis.asyncio.Redis.from_url(url)
    prefix = f"driver{next(_NUMBERS)}:"

    async def operation(number: int) -> None:
        id = f"{prefix}order-{number}"
        await client.set(id, b"fingerprint", nx=True, px=DAY_MS)
        await place(number)
        await client.set(id, RESPONSE, px=DAY_MS)

    try:
        yield operation
    finally:
        await client.aclose()


@asynccontextmanager
async def _grouped(url: str) -> AsyncIterator[Operation]:
    writer = GroupedRedis(url)
    prefix = b"floor%d:" % next(_NUMBERS)

    async def operation(number: int) -> None:
        id, fingerprint = names_of(number)
        await writer.insert(prefix + id, fingerprint)
        await place(number)
        await writer.update(prefix + id, fingerprint + RESPONSE)

    try:
        yield operation
    finally:
        await writer.close()
