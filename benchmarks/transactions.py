"""What does it cost to commit the record with the write, on PostgreSQL with `fsync`?

All contenders write an order through a pool. By hand: the same record in the same table, claimed
and completed in one transaction with the write. Three commits: the same without a transaction, as
record mode does it. Unprotected: only the write. psycopg is the driver; coatcheck and "by hand"
also run on asyncpg.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
from psycopg_pool import AsyncConnectionPool

from benchmarks.comparison import (
    AT_A_TIME,
    EXPIRES_MS,
    RESPONSE,
    Contender,
    Operation,
    measure_rates,
    measure_times,
    names_of,
    place,
)
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target
from benchmarks.servers import durable_postgres, server_for
from coatcheck import AsyncEngine, current_operation
from coatcheck.stores import open_store

# As many sessions as two processors can use, for all contenders.
SESSIONS = 16

_NUMBERS = count()


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    with server_for(durable_postgres, quick=quick) as server:
        contenders: dict[str, Contender] = {
            "product": partial(_product, server.url),
            "by hand": partial(_by_hand, server.url),
            "three commits": partial(_three_commits, server.url),
            "unprotected": partial(_unprotected, server.url),
            "product on asyncpg": partial(_product_on_asyncpg, server.url),
            "by hand on asyncpg": partial(_by_hand_on_asyncpg, server.url),
        }
        one_at_a_time = {name: contenders[name] for name in ("product", "by hand", "three commits")}
        rows = [
            *_rows(measure_rates(contenders, quick=quick)),
            *_alone(measure_times(one_at_a_time, quick=quick)),
        ]
    return Table(
        name="transactions",
        question="an order and its record in one transaction on PostgreSQL, with fsync",
        rows=rows,
        notes=[
            f"all on pools of {SESSIONS} sessions, of psycopg unless the row names asyncpg",
            "by hand: the same record, claimed and completed, without a limit for its wait",
            "three commits: the same statements, each committed by itself",
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
        targets=[Target(measured=share, bound="≥", limit=0.75, unit="of by hand")],
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


# The same record as the store writes, in the same table.
_CLAIM = (
    "insert into coatcheck_records (id, version, state, fingerprint, age_ms, lease_until_ms,"
    f" expires_ms, nonce, label, key) values (%(id)s, {EXPIRES_MS}, 0, %(fingerprint)s, 0,"
    f" {EXPIRES_MS}, {EXPIRES_MS}, 7, 'orders', %(key)s) on conflict do nothing"
)
_COMPLETE = (
    "update coatcheck_records set version = version + 1, state = 1, age_ms = null,"
    " lease_until_ms = null, response = %(response)s"
    f" where id = %(id)s and version = {EXPIRES_MS}"
)


async def _new_shop(url: str) -> str:
    """Create a schema with an empty table of orders and the store's table."""
    schema = f"shop_{next(_NUMBERS)}"
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
    async with connection:
        await connection.execute(f"create schema {schema}")
        await connection.execute(
            f"create table {schema}.orders (number bigint primary key, state text, amount bigint)"
        )
    open_store(f"{url}?options=-c%20search_path%3D{schema}").close()
    return schema


@asynccontextmanager
async def shop(url: str, *, autocommit: bool = False) -> AsyncIterator[tuple[Any, str]]:
    """Yield a psycopg pool for an empty shop, and the URL of its store."""
    store = f"{url}?options=-c%20search_path%3D{await _new_shop(url)}"
    pool = AsyncConnectionPool(
        store, min_size=SESSIONS, max_size=SESSIONS, kwargs={"autocommit": autocommit}, open=False
    )
    async with pool:
        yield pool, store


@asynccontextmanager
async def _product(url: str) -> AsyncIterator[Operation]:
    async with shop(url) as (pool, store), AsyncEngine(store, transactions=pool) as engine:

        async def order(number: int) -> dict[str, object]:
            operation = current_operation()
            assert operation is not None
            await operation.connection.execute(_INSERT, (number,))
            return await place(number)

        yield lambda number: engine.transaction(f"order-{number}", order, number, scope="orders")


def _values_of(number: int) -> dict[str, object]:
    id, fingerprint = names_of(number)
    return {
        "id": UUID(bytes=id),
        "fingerprint": UUID(bytes=fingerprint),
        "key": f"order-{number}",
        "response": RESPONSE,
    }


@asynccontextmanager
async def _by_hand(url: str, *, autocommit: bool = False) -> AsyncIterator[Operation]:
    async with shop(url, autocommit=autocommit) as (pool, _):

        async def operation(number: int) -> None:
            values = _values_of(number)
            async with pool.connection() as connection:
                await connection.execute(_CLAIM, values)
                await connection.execute(_INSERT, (number,))
                await place(number)
                await connection.execute(_COMPLETE, values)

        yield operation


# With autocommit, the same three statements are three commits.
_three_commits = partial(_by_hand, autocommit=True)


@asynccontextmanager
async def _unprotected(url: str) -> AsyncIterator[Operation]:
    async with shop(url, autocommit=True) as (pool, _):

        async def operation(number: int) -> None:
            async with pool.connection() as connection:
                await connection.execute(_INSERT, (number,))
            await place(number)

        yield operation


# --- the contenders on asyncpg ---------------------------------------------------------------------------

_INSERT_ASYNCPG = "insert into orders values ($1, 'placed', 1999)"
_CLAIM_ASYNCPG = (
    _CLAIM.replace("%(id)s", "$1").replace("%(fingerprint)s", "$2").replace("%(key)s", "$3")
)
_COMPLETE_ASYNCPG = _COMPLETE.replace("%(response)s", "$1").replace("%(id)s", "$2")


@asynccontextmanager
async def asyncpg_shop(url: str) -> AsyncIterator[tuple[Any, str]]:
    """The same with an asyncpg pool."""
    schema = await _new_shop(url)
    sizes = {"min_size": SESSIONS, "max_size": SESSIONS}
    async with asyncpg.create_pool(url, server_settings={"search_path": schema}, **sizes) as pool:
        yield pool, f"{url}?options=-c%20search_path%3D{schema}"


@asynccontextmanager
async def _product_on_asyncpg(url: str) -> AsyncIterator[Operation]:
    async with asyncpg_shop(url) as (pool, store), AsyncEngine(store, transactions=pool) as engine:

        async def order(number: int) -> dict[str, object]:
            operation = current_operation()
            assert operation is not None
            await operation.connection.execute(_INSERT_ASYNCPG, number)
            return await place(number)

        yield lambda number: engine.transaction(f"order-{number}", order, number, scope="orders")


@asynccontextmanager
async def _by_hand_on_asyncpg(url: str) -> AsyncIterator[Operation]:
    async with asyncpg_shop(url) as (pool, _):

        async def operation(number: int) -> None:
            id, fingerprint, key, response = _values_of(number).values()
            async with pool.acquire() as connection, connection.transaction():
                await connection.execute(_CLAIM_ASYNCPG, id, fingerprint, key)
                await connection.execute(_INSERT_ASYNCPG, number)
                await place(number)
                await connection.execute(_COMPLETE_ASYNCPG, response, id)

        yield operation
