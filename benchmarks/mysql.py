"""How fast are durable claims on MariaDB, with a log that is flushed at each commit?

The floor is asyncmy, the fastest driver, with one statement for each call. One at a time, each
engine is compared with a driver of its kind: PyMySQL or asyncmy. idemkit has no such backend.
Server and client share the machine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count

import asyncmy
import pymysql

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
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target
from benchmarks.servers import durable_mariadb, server_for

DATABASE = "floors"

# For the floor: the best of 8, 16, 32 and 64.
SESSIONS = 64

_NUMBERS = count()


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    with server_for(durable_mariadb, quick=quick) as server:
        server.ask(f"create database {DATABASE}")
        contenders: dict[str, Contender] = {
            "product": lambda: product(server.fresh_url()),
            "one by one": partial(_one_by_one, server.port, SESSIONS),
        }
        one_at_a_time: dict[str, Contender] = {
            "product, thread": lambda: product_sync(server.fresh_url()),
            "product, event loop": lambda: product(server.fresh_url()),
            "PyMySQL": partial(_pymysql, server.port),
            "asyncmy": partial(_one_by_one, server.port, 1),
        }
        row = _row(measure_rates(contenders, quick=quick))
        found = measure_times(one_at_a_time, quick=quick)
    return Table(
        name="mysql",
        question="keyed operations on MariaDB, flushed at each commit: two durable writes each",
        rows=[row, *rows_of_times(found, {"thread": "PyMySQL", "event loop": "asyncmy"})],
        notes=[
            "innodb_flush_log_at_trx_commit = 1; no binary log, which is the default",
            f"one by one: asyncmy, a statement for each call, {SESSIONS} sessions",
            "1 at a time: contenders alternate after every operation",
        ],
    )


def _row(found: dict[str, Samples]) -> Row:
    ours, floor = found["product"], found["one by one"]
    faster = ours.over(floor)
    return Row(
        what=f"{AT_A_TIME} at a time, operations/s; floor: one by one",
        product=ours,
        floor=floor,
        ratios=[(f"{TIMES} one by one", faster)],
        targets=[Target(measured=faster, bound="≥", limit=1.5, unit=f"{TIMES} one by one")],
    )


# --- the floors -------------------------------------------------------------------------------


def _statements() -> tuple[str, str, str]:
    table = f"floor_{next(_NUMBERS)}"
    columns = (
        "id binary(16) primary key, state tinyint not null, fingerprint binary(16) not null,"
        " expires_ms bigint not null, response blob"
    )
    return (
        f"create table {table} ({columns})",
        f"insert ignore into {table} values (%s, 0, %s, {EXPIRES_MS}, null)",
        f"update {table} set state = 1, response = %s where id = %s",
    )


@asynccontextmanager
async def _one_by_one(port: int, sessions: int) -> AsyncIterator[Operation]:
    create, insert, update = _statements()
    async with AsyncExitStack() as stack:
        cursors = []
        for _ in range(sessions):
            connection = await asyncmy.connect(
                host="127.0.0.1", port=port, user="root", db=DATABASE, autocommit=True
            )
            stack.callback(connection.close)
            cursors.append(connection.cursor())
        execute = on_free_session([cursor.execute for cursor in cursors])
        await execute(create)

        async def operation(number: int) -> None:
            id, fingerprint = names_of(number)
            await execute(insert, (id, fingerprint))
            await place(number)
            await execute(update, (RESPONSE, id))

        yield operation


@asynccontextmanager
async def _pymysql(port: int) -> AsyncIterator[Operation]:
    create, insert, update = _statements()
    with pymysql.connect(
        host="127.0.0.1", port=port, user="root", database=DATABASE, autocommit=True
    ) as connection:
        cursor = connection.cursor()
        cursor.execute(create)

        async def operation(number: int) -> None:
            id, fingerprint = names_of(number)
            cursor.execute(insert, (id, fingerprint))
            place_sync(number)
            cursor.execute(update, (RESPONSE, id))

        yield operation
