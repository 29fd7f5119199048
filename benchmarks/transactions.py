"""Question: what does it cost to commit the record with the write, on PostgreSQL with `fsync`?

Everybody writes an order on a pool of psycopg's, the store's own driver. By hand: the same claim,
write and completion in one transaction, by statements as lean as they can be. In three commits: the
same without a transaction, as record mode does it. Unprotected: the write alone. And ours and by
hand once more on a pool of asyncpg's, which takes one statement at a time from everybody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import asyncpg
import psycopg
from psycopg_pool import AsyncConnectionPool
from servers.postgres import Postgres

from benchmarks.contest import (
    AT_A_TIME,
    EXPIRES_MS,
    RESPONSE,
    Contender,
    Operation,
    alone,
    names_of,
    place,
    together,
)
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target
from coatcheck import AsyncEngine, current_operation

# As many sessions as two processors can use, for everybody.
SESSIONS = 16

_NUMBERS = count()


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    server = Postgres(on_disk=True, fsync="on", shared_buffers="128MB")
    contenders: dict[str, Contender] = {
        "product": partial(_product, server.url),
        "by hand": partial(_by_hand, server.url),
        "three commits": partial(_three_commits, server.url),
        "unprotected": partial(_unprotected, server.url),
        "product on asyncpg": partial(_product_on_asyncpg, server.url),
        "by hand on asyncpg": partial(_by_hand_on_asyncpg, server.url),
    }
    alone_here = {name: contenders[name] for name in ("product", "by hand", "three commits")}
    try:
        rows = [*_rows(together(contenders, quick=quick)), *_alone(alone(alone_here, quick=quick))]
    finally:
        server.remove()
    return Table(
        name="transactions",
        question="a keyed order and its record in one transaction of PostgreSQL's, with fsync",
        rows=rows,
        notes=[
            f"all on pools of {SESSIONS} sessions; psycopg's unless another is named",
            "by hand: begin, claim, write, completion and commit; no limit for how long it waits",
        ],
    )


def _rows(found: dict[str, Samples]) -> list[Row]:
    ours = found["product"]
    faster = ours.over(found["three commits"])
    return [
        _by_hand_row(ours, found["by hand"], f"{AT_A_TIME} at a time, operations/s"),
        Row(
            what=f"{AT_A_TIME} at a time, operations/s; floor: three commits",
            product=ours,
            floor=found["three commits"],
            ratios=[(f"{TIMES} three commits", faster)],
            targets=[Target(measured=faster, bound="≥", limit=1, unit=f"{TIMES} three commits")],
        ),
        Row(
            what=f"{AT_A_TIME} at a time, operations/s; floor: unprotected",
            product=ours,
            floor=found["unprotected"],
            ratios=[
                ("of unprotected", ours.over(found["unprotected"])),
                ("by hand", found["by hand"].over(found["unprotected"])),
            ],
        ),
        _by_hand_row(
            found["product on asyncpg"],
            found["by hand on asyncpg"],
            f"{AT_A_TIME} at a time, asyncpg, operations/s",
        ),
    ]


def _by_hand_row(ours: Samples, by_hand: Samples, what: str) -> Row:
    share = ours.over(by_hand)
    return Row(
        what=f"{what}; floor: by hand",
        product=ours,
        floor=by_hand,
        ratios=[("of by hand", share)],
        targets=[Target(measured=share, bound="≥", limit=0.9, unit="of by hand")],
    )


def _alone(found: dict[str, Samples]) -> list[Row]:
    ours = found["product"]
    return [
        Row(
            what=f"1 at a time, µs; floor: {name}",
            product=ours,
            floor=found[name],
            ratios=[(f"{TIMES} {name}", ours.over(found[name]))],
        )
        for name in ("by hand", "three commits")
    ]


# --- the contenders on psycopg ----------------------------------------------------------------

_INSERT = "insert into orders values (%s, 'placed', 1999)"
_CLAIM = f"insert into floor values (%s, 0, %s, {EXPIRES_MS}, null) on conflict do nothing"
_COMPLETE = "update floor set state = 1, response = %s where id = %s"


async def _new_shop(url: str) -> str:
    """An empty schema with a table of orders."""
    schema = f"shop_{next(_NUMBERS)}"
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
    async with connection:
        await connection.execute(f"create schema {schema}")
        await connection.execute(
            f"create table {schema}.orders (number bigint primary key, state text, amount bigint)"
        )
        await connection.execute(
            f"create table {schema}.floor (id bytea primary key, state smallint not null,"
            " fingerprint bytea not null, expires_ms bigint not null, response bytea)"
            " with (fillfactor = 50)"
        )
    return schema


@asynccontextmanager
async def _shop(url: str, *, autocommit: bool = False) -> AsyncIterator[tuple[Any, str]]:
    """A pool of psycopg's to an empty shop, and the URL of the store beside it."""
    store = f"{url}?options=-c%20search_path%3D{await _new_shop(url)}"
    pool = AsyncConnectionPool(
        store, min_size=SESSIONS, max_size=SESSIONS, kwargs={"autocommit": autocommit}, open=False
    )
    async with pool:
        yield pool, store


@asynccontextmanager
async def _product(url: str) -> AsyncIterator[Operation]:
    async with _shop(url) as (pool, store), AsyncEngine(store, transactions=pool) as engine:

        async def order(number: int) -> dict[str, object]:
            operation = current_operation()
            assert operation is not None
            await operation.connection.execute(_INSERT, (number,))
            return await place(number)

        yield lambda number: engine.transaction(f"order-{number}", order, number, scope="orders")


async def _claim_order_complete(connection: psycopg.AsyncConnection[Any], number: int) -> None:
    id, fingerprint = names_of(number)
    await connection.execute(_CLAIM, (id, fingerprint))
    await connection.execute(_INSERT, (number,))
    await place(number)
    await connection.execute(_COMPLETE, (RESPONSE, id))


@asynccontextmanager
async def _by_hand(url: str, *, autocommit: bool = False) -> AsyncIterator[Operation]:
    async with _shop(url, autocommit=autocommit) as (pool, _):

        async def operation(number: int) -> None:
            async with pool.connection() as connection:
                await _claim_order_complete(connection, number)

        yield operation


# Where every statement commits by itself, the same three statements are three commits.
_three_commits = partial(_by_hand, autocommit=True)


@asynccontextmanager
async def _unprotected(url: str) -> AsyncIterator[Operation]:
    async with _shop(url, autocommit=True) as (pool, _):

        async def operation(number: int) -> None:
            async with pool.connection() as connection:
                await connection.execute(_INSERT, (number,))
            await place(number)

        yield operation


# --- and on asyncpg ---------------------------------------------------------------------------

_INSERT_2 = "insert into orders values ($1, 'placed', 1999)"
_CLAIM_2 = f"insert into floor values ($1, 0, $2, {EXPIRES_MS}, null) on conflict do nothing"
_COMPLETE_2 = "update floor set state = 1, response = $1 where id = $2"


@asynccontextmanager
async def _asyncpg_shop(url: str) -> AsyncIterator[tuple[Any, str]]:
    schema = await _new_shop(url)
    sizes = {"min_size": SESSIONS, "max_size": SESSIONS}
    async with asyncpg.create_pool(url, server_settings={"search_path": schema}, **sizes) as pool:
        yield pool, f"{url}?options=-c%20search_path%3D{schema}"


@asynccontextmanager
async def _product_on_asyncpg(url: str) -> AsyncIterator[Operation]:
    async with _asyncpg_shop(url) as (pool, store), AsyncEngine(store, transactions=pool) as engine:

        async def order(number: int) -> dict[str, object]:
            operation = current_operation()
            assert operation is not None
            await operation.connection.execute(_INSERT_2, number)
            return await place(number)

        yield lambda number: engine.transaction(f"order-{number}", order, number, scope="orders")


@asynccontextmanager
async def _by_hand_on_asyncpg(url: str) -> AsyncIterator[Operation]:
    async with _asyncpg_shop(url) as (pool, _):

        async def operation(number: int) -> None:
            id, fingerprint = names_of(number)
            async with pool.acquire() as connection, connection.transaction():
                await connection.execute(_CLAIM_2, id, fingerprint)
                await connection.execute(_INSERT_2, number)
                await place(number)
                await connection.execute(_COMPLETE_2, RESPONSE, id)

        yield operation
