"""Question: what do durable claims cost on PostgreSQL, with `fsync` on?

Beside two floors on asyncpg, the quickest driver: one statement for each call, and a bare loop that
writes whatever has gathered through `unnest`. Alone, each engine stands beside the driver of its
own world. Server and client share the machine.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count

import asyncpg
import psycopg
from idemkit import MethodConfig, idempotent
from idemkit.backends.postgres import PostgresBackend, init_pg

from benchmarks.contest import (
    AT_A_TIME,
    EXPIRES_MS,
    RESPONSE,
    Contender,
    Operation,
    alone,
    names_of,
    on_free_session,
    place,
    place_here,
    product,
    product_here,
    rows_alone,
    together,
)
from benchmarks.durable import durable_postgres, lent
from benchmarks.grouped import GroupedPostgres, table_of
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target

# For the floor: of 8, 16, 32 and 64 the best.
SESSIONS = 32

_NUMBERS = count()


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    logging.getLogger("idemkit").setLevel(logging.ERROR)
    with lent(durable_postgres, quick=quick) as server:
        contenders: dict[str, Contender] = {
            "product": lambda: product(_fresh(server.url)),
            "idemkit": partial(_idemkit, server.url),
            "one by one": partial(_one_by_one, server.url, SESSIONS),
            "grouped": partial(_grouped, server.url),
        }
        alone_here: dict[str, Contender] = {
            "product, thread": lambda: product_here(_fresh(server.url)),
            "product, event loop": lambda: product(_fresh(server.url)),
            "psycopg": partial(_psycopg, server.url),
            "asyncpg": partial(_one_by_one, server.url, 1),
        }
        rows = _rows(together(contenders, quick=quick))
        found = alone(alone_here, quick=quick)
    return Table(
        name="postgres",
        question="keyed operations on PostgreSQL with fsync: two durable writes each",
        rows=[*rows, *rows_alone(found, {"thread": "psycopg", "event loop": "asyncpg"})],
        notes=[
            f"one by one: asyncpg, a statement for each call, {SESSIONS} sessions",
            "grouped: asyncpg, a bare loop that writes what has gathered through unnest",
            "1 at a time: after every operation it is another contender's turn",
        ],
    )


def _fresh(url: str) -> str:
    return f"{url}?schema=bench_{next(_NUMBERS)}"


def _rows(found: dict[str, Samples]) -> list[Row]:
    ours, idemkit = found["product"], found["idemkit"]
    faster, share = ours.over(found["one by one"]), ours.over(found["grouped"])
    than_idemkit = ours.over(idemkit)
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
    ]


# --- the contenders ---------------------------------------------------------------------------


@asynccontextmanager
async def _idemkit(url: str) -> AsyncIterator[Operation]:
    table = f"idemkit_{next(_NUMBERS)}"
    await init_pg(url, table=table)
    async with PostgresBackend.from_url(url, table=table) as backend:
        guarded = idempotent(backend=backend, config=MethodConfig(scope=lambda _: "orders"))(place)
        yield lambda number: guarded(number, idempotency_key=f"order-{number}")


def _statements(table: str, placeholders: tuple[str, str]) -> tuple[str, str]:
    id, value = placeholders
    return (
        f"insert into {table} values ({id}, 0, {value}, {EXPIRES_MS}, null) on conflict do nothing",
        f"update {table} set state = 1, response = {value} where id = {id}",
    )


@asynccontextmanager
async def _one_by_one(url: str, sessions: int) -> AsyncIterator[Operation]:
    table = f"floor_{next(_NUMBERS)}"
    insert, update = _statements(table, ("$1", "$2"))
    async with AsyncExitStack() as stack:
        connections = [await asyncpg.connect(url) for _ in range(sessions)]
        for connection in connections:
            stack.push_async_callback(connection.close)
        execute = on_free_session([connection.execute for connection in connections])
        await execute(table_of(table))

        async def operation(number: int) -> None:
            id, fingerprint = names_of(number)
            await execute(insert, id, fingerprint)
            await place(number)
            await execute(update, id, RESPONSE)

        yield operation


@asynccontextmanager
async def _psycopg(url: str) -> AsyncIterator[Operation]:
    table = f"floor_{next(_NUMBERS)}"
    insert, update = _statements(table, ("%(id)s", "%(value)s"))
    with psycopg.connect(url, autocommit=True, prepare_threshold=0) as connection:
        connection.execute(table_of(table))

        async def operation(number: int) -> None:
            id, fingerprint = names_of(number)
            connection.execute(insert, {"id": id, "value": fingerprint})
            place_here(number)
            connection.execute(update, {"id": id, "value": RESPONSE})

        yield operation


@asynccontextmanager
async def _grouped(url: str) -> AsyncIterator[Operation]:
    writer = await GroupedPostgres.open(url, f"floor_{next(_NUMBERS)}")

    async def operation(number: int) -> None:
        id, fingerprint = names_of(number)
        await writer.insert(id, fingerprint)
        await place(number)
        await writer.update(id, RESPONSE)

    try:
        yield operation
    finally:
        await writer.close()
