"""Question: what do claims cost on Redis, with an append-only file synced every second?

The floor is a client that speaks the bare protocol and sends whatever has gathered: `SET … NX` and
`SET` for each operation, compared with nothing. Alone, each engine stands beside redis-py in its
own world.
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

from benchmarks.contest import (
    AT_A_TIME,
    DAY_MS,
    RESPONSE,
    Contender,
    Operation,
    alone,
    names_of,
    place,
    place_here,
    product,
    product_here,
    rows_alone,
    together,
)
from benchmarks.grouped import GroupedRedis
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target
from tests.support.servers.redis import Redis

_NUMBERS = count()
# What is asked of us where half of the raw client would be more.
ENOUGH = 10_000


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    logging.getLogger("idemkit").setLevel(logging.ERROR)
    server = Redis()
    contenders: dict[str, Contender] = {
        "product": lambda: product(_fresh(server.url)),
        "idemkit": partial(_idemkit, server.url),
        "raw": partial(_raw, server.port),
    }
    alone_here: dict[str, Contender] = {
        "product, thread": lambda: product_here(_fresh(server.url)),
        "product, event loop": lambda: product(_fresh(server.url)),
        "redis-py": partial(_redis_py, server.url),
        "redis.asyncio": partial(_redis_asyncio, server.url),
    }
    try:
        row = _row(together(contenders, quick=quick))
        found = alone(alone_here, quick=quick)
    finally:
        server.remove()
    return Table(
        name="redis",
        question="keyed operations on Redis with appendfsync everysec: two writes each",
        rows=[row, *rows_alone(found, {"thread": "redis-py", "event loop": "redis.asyncio"})],
        notes=[
            "raw: the bare protocol on asyncio streams, whatever has gathered at once",
            "1 at a time: after every operation it is another contender's turn",
        ],
    )


def _fresh(url: str) -> str:
    return f"{url}?prefix=bench{next(_NUMBERS)}:"


def _row(found: dict[str, Samples]) -> Row:
    ours, idemkit, raw = found["product"], found["idemkit"], found["raw"]
    faster, share = ours.over(idemkit), ours.over(raw)
    enough = min(ENOUGH, raw.median / 2)
    return Row(
        what=f"{AT_A_TIME} at a time, operations/s; floor: raw",
        product=ours,
        idemkit=idemkit,
        floor=raw,
        ratios=[(f"{TIMES} idemkit", faster), ("of the raw client", share)],
        targets=[
            Target(measured=faster, bound="≥", limit=4, unit=f"{TIMES} idemkit"),
            Target(measured=ours, bound="≥", limit=enough, unit="operations/s"),
        ],
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
            place_here(number)
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
async def _raw(port: int) -> AsyncIterator[Operation]:
    writer = await GroupedRedis.open(port)
    prefix = b"raw%d:" % next(_NUMBERS)

    async def operation(number: int) -> None:
        id, fingerprint = names_of(number)
        await writer.insert(prefix + id, fingerprint)
        await place(number)
        await writer.update(prefix + id, fingerprint + RESPONSE)

    try:
        yield operation
    finally:
        await writer.close()
