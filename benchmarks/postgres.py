"""Question: what do durable claims cost on PostgreSQL, with `fsync` on?

Beside two floors on asyncpg, the quickest driver: one statement for each call, and a bare loop that
writes whatever has gathered through `unnest`. Server and client share the machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import asyncpg
from idemkit import MethodConfig, idempotent
from idemkit.backends.postgres import PostgresBackend, init_pg
from servers.postgres import Postgres

from benchmarks.contest import (
    AT_A_TIME,
    RESPONSE,
    Group,
    Operation,
    contest,
    place,
    product,
)
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target

# As many sessions as two processors can use; with 64 of them everybody is slower.
SESSIONS = 16
EXPIRES_MS = 1_800_000_000_000

_TABLES = count()


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    logging.getLogger("idemkit").setLevel(logging.ERROR)
    server = Postgres(on_disk=True, fsync="on", shared_buffers="128MB")
    contenders = {
        "product": lambda: product(f"{server.url}?schema=bench_{next(_TABLES)}"),
        "idemkit": partial(_idemkit, server.url),
        "one by one": partial(_one_by_one, server.url),
        "grouped": partial(_grouped, server.url),
    }
    try:
        found = contest(contenders, "one by one", quick=quick)
    finally:
        server.remove()
    return Table(
        name="postgres",
        question="keyed operations on PostgreSQL with fsync: two durable writes each",
        rows=_rows(found),
        notes=[
            f"one by one: asyncpg, a statement for each call, {SESSIONS} sessions",
            "grouped: asyncpg, a bare loop that writes what has gathered through unnest",
        ],
    )


def _rows(found: dict[str, Samples]) -> list[Row]:
    ours, idemkit = found["product"], found["idemkit"]
    alone, bare = found["product, alone"], found["one by one, alone"]
    faster, share = ours.over(found["one by one"]), ours.over(found["grouped"])
    than_idemkit, slower = ours.over(idemkit), bare.over(alone)
    return [
        Row(
            what=f"{AT_A_TIME} at a time, operations/s; floor: one by one",
            product=ours,
            idemkit=idemkit,
            floor=found["one by one"],
            ratios=[(f"{TIMES} one by one", faster), (f"{TIMES} idemkit", than_idemkit)],
            targets=[
                Target(measured=faster, bound="≥", limit=2, unit=f"{TIMES} one by one"),
                Target(measured=than_idemkit, bound="≥", limit=8, unit=f"{TIMES} idemkit"),
            ],
        ),
        Row(
            what=f"{AT_A_TIME} at a time, operations/s; floor: bare grouped loop",
            product=ours,
            floor=found["grouped"],
            ratios=[("of bare grouped", share)],
            targets=[Target(measured=share, bound="≥", limit=0.6, unit="of bare grouped")],
        ),
        Row(
            what="1 at a time, operations/s; floor: asyncpg",
            product=alone,
            floor=bare,
            ratios=[(f"{TIMES} its time", slower)],
            targets=[Target(measured=slower, bound="≤", limit=1.2, unit=f"{TIMES} its time")],
        ),
    ]


# --- the contenders ---------------------------------------------------------------------------


@asynccontextmanager
async def _idemkit(url: str) -> AsyncIterator[Operation]:
    table = f"idemkit_{next(_TABLES)}"
    await init_pg(url, table=table)
    backend = PostgresBackend.from_url(url, table=table)
    guarded = idempotent(backend=backend, config=MethodConfig(scope=lambda _: "orders"))(place)
    try:
        yield lambda number: guarded(number, idempotency_key=f"order-{number}")
    finally:
        await backend.aclose()


def _names(number: int) -> tuple[bytes, bytes]:
    key = b"order-%d" % number
    return hashlib.blake2b(key, digest_size=16).digest(), hashlib.md5(key).digest()


async def _made(connection: asyncpg.Connection | asyncpg.Pool) -> str:
    table = f"floor_{next(_TABLES)}"
    await connection.execute(
        f"create table {table} (id bytea primary key, state smallint not null,"
        " fingerprint bytea not null, expires_ms bigint not null, response bytea)"
        " with (fillfactor = 50)"
    )
    return table


@asynccontextmanager
async def _one_by_one(url: str) -> AsyncIterator[Operation]:
    async with asyncpg.create_pool(url, min_size=SESSIONS, max_size=SESSIONS) as pool:
        table = await _made(pool)
        insert = f"insert into {table} values ($1, 0, $2, $3, null) on conflict do nothing"
        update = f"update {table} set state = 1, response = $1 where id = $2"

        async def operation(number: int) -> None:
            id, fingerprint = _names(number)
            await pool.execute(insert, id, fingerprint, EXPIRES_MS)
            await place(number)
            await pool.execute(update, RESPONSE, id)

        yield operation


@asynccontextmanager
async def _grouped(url: str) -> AsyncIterator[Operation]:
    connection = await asyncpg.connect(url)
    table = await _made(connection)
    insert = await connection.prepare(
        f"insert into {table} select id, 0, f, e, null from"
        " unnest($1::bytea[], $2::bytea[], $3::bigint[]) as g (id, f, e) on conflict do nothing"
    )
    update = await connection.prepare(
        f"update {table} as r set state = 1, response = g.response from"
        " unnest($1::bytea[], $2::bytea[]) as g (id, response) where r.id = g.id"
    )
    arrived = asyncio.Event()
    inserts, updates = Group(arrived), Group(arrived)

    async def write() -> None:
        while True:
            await arrived.wait()
            arrived.clear()
            for group, statement in ((inserts, insert), (updates, update)):
                rows, futures = group.taken()
                if rows:
                    await statement.fetch(*map(list, zip(*rows, strict=True)))
                    for future in futures:
                        future.set_result(None)

    async def operation(number: int) -> None:
        id, fingerprint = _names(number)
        await inserts.add((id, fingerprint, EXPIRES_MS))
        await place(number)
        await updates.add((id, RESPONSE))

    writing = asyncio.create_task(write())
    try:
        yield operation
    finally:
        writing.cancel()
        await connection.close()
