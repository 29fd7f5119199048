"""Question: what do claims cost on Redis, with an append-only file synced every second?

The floor is a client that speaks the bare protocol and sends whatever has gathered: `SET … NX` and
`SET` for each operation, compared with nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, cast

import redis.asyncio
from idemkit import MethodConfig, idempotent
from idemkit.backends.redis import RedisBackend
from servers.redis import Redis

from benchmarks.contest import AT_A_TIME, RESPONSE, Group, Operation, contest, place, product
from benchmarks.report import TIMES, Row, Table, Target

_PREFIXES = count()
# What is asked of us where half of the raw client would be more.
ENOUGH = 10_000


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    logging.getLogger("idemkit").setLevel(logging.ERROR)
    server = Redis()
    contenders = {
        "product": lambda: product(f"{server.url}?prefix=bench{next(_PREFIXES)}:"),
        "idemkit": partial(_idemkit, server.url),
        "raw": partial(_raw, server.port),
        "redis-py": partial(_driver, server.url),
    }
    try:
        found = contest(contenders, "redis-py", quick=quick)
    finally:
        server.remove()
    ours, idemkit, raw = found["product"], found["idemkit"], found["raw"]
    faster, share = ours.over(idemkit), ours.over(raw)
    slower = found["redis-py, alone"].over(found["product, alone"])
    enough = min(ENOUGH, raw.median / 2)
    rows = [
        Row(
            what=f"{AT_A_TIME} at a time, operations/s",
            product=ours,
            idemkit=idemkit,
            floor=raw,
            ratios=[(f"{TIMES} idemkit", faster), ("of the raw client", share)],
            targets=[
                Target(measured=faster, bound="≥", limit=4, unit=f"{TIMES} idemkit"),
                Target(measured=ours, bound="≥", limit=enough, unit="operations/s"),
            ],
        ),
        Row(
            what="1 at a time, operations/s; floor: redis-py",
            product=found["product, alone"],
            floor=found["redis-py, alone"],
            ratios=[(f"{TIMES} its time", slower)],
            targets=[Target(measured=slower, bound="≤", limit=1.2, unit=f"{TIMES} its time")],
        ),
    ]
    return Table(
        name="redis",
        question="keyed operations on Redis with appendfsync everysec: two writes each",
        rows=rows,
        notes=["raw: the bare protocol on asyncio streams, whatever has gathered at once"],
    )


@asynccontextmanager
async def _idemkit(url: str) -> AsyncIterator[Operation]:
    client = redis.asyncio.Redis.from_url(url)
    backend = RedisBackend(client, namespace=f"bench{next(_PREFIXES)}")
    guarded = idempotent(backend=backend, config=MethodConfig(scope=lambda _: "orders"))(place)
    try:
        yield lambda number: guarded(number, idempotency_key=f"order-{number}")
    finally:
        await cast("Any", client).aclose()


@asynccontextmanager
async def _driver(url: str) -> AsyncIterator[Operation]:
    client: Any = redis.asyncio.Redis.from_url(url)
    prefix = f"driver{next(_PREFIXES)}:"

    async def operation(number: int) -> None:
        id = f"{prefix}order-{number}"
        await client.set(id, b"fingerprint", nx=True, px=86_400_000)
        await place(number)
        await client.set(id, RESPONSE, px=86_400_000)

    try:
        yield operation
    finally:
        await client.aclose()


@asynccontextmanager
async def _raw(port: int) -> AsyncIterator[Operation]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prefix = b"raw%d:" % next(_PREFIXES)
    arrived = asyncio.Event()
    group = Group(arrived)

    async def write() -> None:
        while True:
            await arrived.wait()
            arrived.clear()
            commands, futures = group.taken()
            writer.write(b"".join(cast("list[bytes]", commands)))
            for future in futures:
                assert (await reader.readline()) == b"+OK\r\n"
                future.set_result(None)

    async def operation(number: int) -> None:
        key = b"order-%d" % number
        id = prefix + hashlib.blake2b(key, digest_size=16).digest()
        fingerprint = hashlib.md5(key).digest()
        await group.add(_packed(b"SET", id, fingerprint, b"NX", b"PX", b"86400000"))
        await place(number)
        await group.add(_packed(b"SET", id, fingerprint + RESPONSE, b"PX", b"86400000"))

    writing = asyncio.create_task(write())
    try:
        yield operation
    finally:
        writing.cancel()
        writer.close()


def _packed(*words: bytes) -> bytes:
    spelt = b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
    return b"*%d\r\n%b" % (len(words), spelt)
