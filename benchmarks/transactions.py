"""Question: what does it cost to commit the record with the write, on PostgreSQL with `fsync`?

Everybody writes an order on a pool of psycopg's, the store's own driver. By hand: the same record
in the same table, claimed and completed in one transaction with the write. In three commits: the
same without a transaction, as record mode does it. At least: by hand, in a table of five columns
that nobody could sweep or look anything up in. Unprotected: the write alone. And ours and by hand
once more on a pool of asyncpg's, which takes one statement at a time from everybody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import psycopg
from psycopg_pool import AsyncConnectionPool

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
from benchmarks.durable import durable_postgres, lent
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target
from coatcheck import AsyncEngine, current_operation
from coatcheck.stores import open_store

# As many sessions as two processors can use, for everybody.
SESSIONS = 16

_NUMBERS = count()


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    with lent(durable_postgres, quick=quick) as server:
        contenders: dict[str, Contender] = {
            "product": partial(_product, server.url),
            "by hand": partial(_by_hand, server.url),
            "three commits": partial(_three_commits, server.url),
            "at least": partial(_by_hand, server.url, statements=_LEAST),
            "unprotected": partial(_unprotected, server.url),
            "product on asyncpg": partial(_product_on_asyncpg, server.url),
            "by hand on asyncpg": partial(_by_hand_on_asyncpg, server.url),
        }
        alone_here = {name: contenders[name] for name in ("product", "by hand", "three commits")}
        rows = [*_rows(together(contenders, quick=quick)), *_alone(alone(alone_here, quick=quick))]
    return Table(
        name="transactions",
        question="a keyed order and its record in one transaction of PostgreSQL's, with fsync",
        rows=rows,
        notes=[
            f"all on pools of {SESSIONS} sessions; psycopg's unless another is named",
            "by hand: the same record, claimed and completed; no limit for how long it waits",
            "at least: by hand, in a table of five columns without an index for sweeping",
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
        Row(
            what=f"{AT_A_TIME} at a time, operations/s; floor: at least",
            product=ours,
            floor=found["at least"],
            ratios=[("of at least", ours.over(found["at least"]))],
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


class Statements(NamedTuple):
    """A claim and a completion by hand; both take the names of an order."""

    claim: str
    complete: str


# The same record as ours, in a table like ours.
_THE_SAME = Statements(
    "insert into coatcheck_records (id, version, state, fingerprint, age_ms, lease_until_ms,"
    f" expires_ms, nonce, label, key) values (%(id)s, {EXPIRES_MS}, 0, %(fingerprint)s, 0,"
    f" {EXPIRES_MS}, {EXPIRES_MS}, 7, 'orders', %(key)s) on conflict do nothing",
    "update coatcheck_records set version = version + 1, state = 1, age_ms = null,"
    " lease_until_ms = null, response = %(response)s"
    f" where id = %(id)s and version = {EXPIRES_MS}",
)
_LEAST = Statements(
    f"insert into floor values (%(id)s, 0, %(fingerprint)s, {EXPIRES_MS}, null)"
    " on conflict do nothing",
    "update floor set state = 1, response = %(response)s where id = %(id)s",
)


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
            f"create table {schema}.floor (id uuid primary key, state smallint not null,"
            " fingerprint uuid not null, expires_ms bigint not null, response bytea)"
            " with (fillfactor = 50)"
        )
    open_store(f"{url}?options=-c%20search_path%3D{schema}").close()  # makes the store's table
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


def _values_of(number: int) -> dict[str, object]:
    id, fingerprint = names_of(number)
    return {
        "id": UUID(bytes=id),
        "fingerprint": UUID(bytes=fingerprint),
        "key": f"order-{number}",
        "response": RESPONSE,
    }


@asynccontextmanager
async def _by_hand(
    url: str, *, autocommit: bool = False, statements: Statements = _THE_SAME
) -> AsyncIterator[Operation]:
    async with _shop(url, autocommit=autocommit) as (pool, _):

        async def operation(number: int) -> None:
            values = _values_of(number)
            async with pool.connection() as connection:
                await connection.execute(statements.claim, values)
                await connection.execute(_INSERT, (number,))
                await place(number)
                await connection.execute(statements.complete, values)

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
_CLAIM_2 = _THE_SAME.claim.replace("%(id)s", "$1").replace("%(fingerprint)s", "$2")
_CLAIM_2 = _CLAIM_2.replace("%(key)s", "$3")
_COMPLETE_2 = _THE_SAME.complete.replace("%(response)s", "$1").replace("%(id)s", "$2")


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
            id, fingerprint, key, response = _values_of(number).values()
            async with pool.acquire() as connection, connection.transaction():
                await connection.execute(_CLAIM_2, id, fingerprint, key)
                await connection.execute(_INSERT_2, number)
                await place(number)
                await connection.execute(_COMPLETE_2, response, id)

        yield operation
