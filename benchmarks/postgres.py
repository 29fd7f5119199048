"""How fast are durable claims on PostgreSQL, with `fsync` on?

Floors: one statement for each call, and a bare loop that writes all waiting rows through `unnest`,
both on asyncpg. One at a time, each engine is compared with its driver: psycopg or asyncpg. Server
and client share the machine.
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

from benchmarks.comparison import (
    AT_A_TIME,
    EXPIRES_MS,
    RESPONSE,
    Contender,
    Operation,
    measure_rates,
    measure_times,
    names_of,
    on_free_session,
    place,
    place_sync,
    product,
    product_sync,
    rows_of_times,
)
from benchmarks.grouped_floors import GroupedPostgres, table_of
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target
from benchmarks.servers import durable_postgres, server_for

# For the floor: the best of 8, 16, 32 and 64.
SESSIONS = 32

_NUMBERS = count()


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    logging.getLogger("idemkit").setLevel(logging.ERROR)
    with server_for(durable_postgres, quick=quick) as server:
        contenders: dict[str, Contender] = {
            "product": lambda: product(_fresh(server.url)),
            "idemkit": partial(_idemkit, server.url),
            "one by one": partial(_one_by_one, server.url, SESSIONS),
            "grouped": partial(_grouped, server.url),
        }
        one_at_a_time: dict[str, Contender] = {
            "product, thread": lambda: product_sync(_fresh(server.url)),
            "product, event loop": lambda: product(_fresh(server.url)),
            "psycopg": partial(_psycopg, server.url),
            "asyncpg": partial(_one_by_one, server.url, 1),
        }
        rows = _rows(measure_rates(contenders, quick=quick))
        found = measure_times(one_at_a_time, quick=quick)
    return Table(
        name="postgres",
        question="keyed operations on PostgreSQL with fsync: two durable writes each",
        rows=[*rows, *rows_of_times(found, {"thread": "psycopg", "event loop": "asyncpg"})],
        notes=[
            f"one by one: asyncpg, a statement for each call, {SESSIONS} sessions",
            "bare grouped: asyncpg, one statement through unnest for all waiting rows",
            "1 at a time: contenders alternate after every operation",
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
            targets=[Target(measured=than_idemkit, bound="≥", limit=8, unit=f"{TIMES} idemkit")],
        ),
        Row(
            what=f"{AT_A_TIME} at a time, operations/s; floor: bare grouped",
            product=ours,
            floor=found["grouped"],
            ratios=[("of bare grouped", share)],
            targets=[Target(measured=share, bound="≥", limit=0.55, unit="of bare grouped")],
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
            place_sync(number)
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
