"""Question: what does it cost to commit the record with the write, on PostgreSQL with `fsync`?

Everybody writes an order on a pool of asyncpg's, the quickest driver. By hand: the same claim, write
and completion in one transaction, by statements as lean as they can be. In three commits: the same
without a transaction, as record mode does it. Unprotected: the write alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import asyncpg
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
INSERT = "insert into orders values ($1, 'placed', 1999)"

_NUMBERS = count()


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    server = Postgres(on_disk=True, fsync="on", shared_buffers="128MB")
    contenders: dict[str, Contender] = {
        "product": partial(_product, server.url),
        "by hand": partial(_by_hand, server.url),
        "three commits": partial(_three_commits, server.url),
        "unprotected": partial(_unprotected, server.url),
    }
    alone_here = {name: contenders[name] for name in ("product", "by hand")}
    try:
        rows = [*_rows(together(contenders, quick=quick)), _alone(alone(alone_here, quick=quick))]
    finally:
        server.remove()
    return Table(
        name="transactions",
        question="a keyed order and its record in one transaction of PostgreSQL's, with fsync",
        rows=rows,
        notes=[
            f"all on a pool of asyncpg's with {SESSIONS} sessions",
            "by hand: begin, claim, write, completion and commit; no limit for how long it waits",
        ],
    )


def _rows(found: dict[str, Samples]) -> list[Row]:
    ours = found["product"]
    share, faster = ours.over(found["by hand"]), ours.over(found["three commits"])
    return [
        Row(
            what=f"{AT_A_TIME} at a time, operations/s; floor: by hand",
            product=ours,
            floor=found["by hand"],
            ratios=[("of by hand", share)],
            targets=[Target(measured=share, bound="≥", limit=0.9, unit="of by hand")],
        ),
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
    ]


def _alone(found: dict[str, Samples]) -> Row:
    slower = found["product"].over(found["by hand"])
    return Row(
        what="1 at a time, µs; floor: by hand",
        product=found["product"],
        floor=found["by hand"],
        ratios=[(f"{TIMES} by hand", slower)],
    )


# --- the contenders ---------------------------------------------------------------------------


@asynccontextmanager
async def _shop(url: str) -> AsyncIterator[tuple[Any, str]]:
    """A pool to an empty schema with a table of orders."""
    schema = f"shop_{next(_NUMBERS)}"
    settings = {"search_path": schema}
    sizes = {"min_size": SESSIONS, "max_size": SESSIONS}
    bare = await asyncpg.connect(url)
    await bare.execute(
        f"create schema {schema};"
        f"create table {schema}.orders (number bigint primary key, state text, amount bigint);"
        f"create table {schema}.floor (id bytea primary key, state smallint not null,"
        " fingerprint bytea not null, expires_ms bigint not null, response bytea)"
        " with (fillfactor = 50)"
    )
    await bare.close()
    async with asyncpg.create_pool(url, server_settings=settings, **sizes) as pool:
        yield pool, f"{url}?options=-c%20search_path%3D{schema}"


@asynccontextmanager
async def _product(url: str) -> AsyncIterator[Operation]:
    async with _shop(url) as (pool, store), AsyncEngine(store, transactions=pool) as engine:

        async def order(number: int) -> dict[str, object]:
            operation = current_operation()
            assert operation is not None
            await operation.connection.execute(INSERT, number)
            return await place(number)

        yield lambda number: engine.transaction(f"order-{number}", order, number, scope="orders")


_CLAIM = f"insert into floor values ($1, 0, $2, {EXPIRES_MS}, null) on conflict do nothing"
_COMPLETE = "update floor set state = 1, response = $1 where id = $2"


@asynccontextmanager
async def _by_hand(url: str) -> AsyncIterator[Operation]:
    async with _shop(url) as (pool, _):

        async def operation(number: int) -> None:
            id, fingerprint = names_of(number)
            async with pool.acquire() as connection, connection.transaction():
                await connection.execute(_CLAIM, id, fingerprint)
                await connection.execute(INSERT, number)
                await place(number)
                await connection.execute(_COMPLETE, RESPONSE, id)

        yield operation


@asynccontextmanager
async def _three_commits(url: str) -> AsyncIterator[Operation]:
    async with _shop(url) as (pool, _):

        async def operation(number: int) -> None:
            id, fingerprint = names_of(number)
            async with pool.acquire() as connection:
                await connection.execute(_CLAIM, id, fingerprint)
                await connection.execute(INSERT, number)
                await place(number)
                await connection.execute(_COMPLETE, RESPONSE, id)

        yield operation


@asynccontextmanager
async def _unprotected(url: str) -> AsyncIterator[Operation]:
    async with _shop(url) as (pool, _):

        async def operation(number: int) -> None:
            await pool.execute(INSERT, number)
            await place(number)

        yield operation
