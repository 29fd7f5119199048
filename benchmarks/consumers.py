"""What does deduplication in the handler's transaction cost a consumer, on PostgreSQL with `fsync`?

The floor is the same loop without it: take a connection, handle the message, commit. Both handle
other messages, and no broker takes part. A handler with one statement is the hardest case, because
deduplication adds two: the claim and its completion. A usual handler reads a row, inserts one and
changes another.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

from benchmarks.comparison import Contender, Operation, measure_rates
from benchmarks.measuring import Samples
from benchmarks.report import Row, Table, Target
from benchmarks.servers import durable_postgres, server_for
from benchmarks.transactions import SESSIONS, asyncpg_shop, shop
from coatcheck.consumer import Acknowledge, Inbox
from coatcheck.consumer.message import Headers, Message
from coatcheck.core.messages.offset import PartitionOffset
from coatcheck.stores import open_store
from coatcheck.stores.offset_table import OffsetTable
from coatcheck.stores.transaction_statements import transaction_statements_of

# 10: as many as `consume` handles at one time.
AT_A_TIME = 10
SHARE_MIN = 0.8

Execute: TypeAlias = Callable[..., Awaitable[Any]]
Work: TypeAlias = Callable[[Execute, int], Awaitable[None]]


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    with server_for(durable_postgres, quick=quick) as server:
        contenders: dict[str, Contender] = {}
        for driver, opened in {"psycopg": shop, "asyncpg": asyncpg_shop}.items():
            for name, work in HANDLERS[driver].items():
                product = partial(_product, opened, server.url, work)
                contenders[f"product, {name}, {driver}"] = product
                contenders[f"floor, {name}, {driver}"] = partial(_bare, opened, server.url, work)
                if name == USUAL:
                    contenders[f"offset, {name}, {driver}"] = partial(product, has_offset=True)
        found = measure_rates(contenders, quick=quick, at_a_time=AT_A_TIME)
    rows = []
    for driver, handlers in HANDLERS.items():
        for name in handlers:
            floor = found[f"floor, {name}, {driver}"]
            rows.append(_row(f"{name}, {driver}", found[f"product, {name}, {driver}"], floor))
            if name == USUAL:
                stored = found[f"offset, {name}, {driver}"]
                rows.append(_row(f"{name} and the offset stored, {driver}", stored, floor))
    return Table(
        name="consumers",
        question=f"messages/s, {AT_A_TIME} at a time, handled in a transaction on PostgreSQL, with "
        "fsync",
        rows=rows,
        notes=[
            f"floor: the same without deduplication; all on pools of {SESSIONS} sessions",
            "three statements: a select, an insert and an update",
        ],
    )


def _row(what: str, ours: Samples, floor: Samples) -> Row:
    share = ours.over(floor)
    of = "of the loop without deduplication"
    target = Target(measured=share, bound="≥", limit=SHARE_MIN, unit=of)
    return Row(what=what, product=ours, floor=floor, ratios=[(of, share)], targets=[target])


# --- the handlers -----------------------------------------------------------------------------


async def _insert(place: str, execute: Execute, number: int) -> None:
    await execute(f"insert into orders values ({place}, 'placed', 1999)", number)


async def _settle(place: str, execute: Execute, number: int) -> None:
    await execute(f"select amount from orders where number = {place}", number)
    await _insert(place, execute, number)
    await execute(f"update orders set state = 'paid' where number = {place}", number)


USUAL = "three statements"
HANDLERS: dict[str, dict[str, Work]] = {
    driver: {"one statement": partial(_insert, place), USUAL: partial(_settle, place)}
    for driver, place in {"psycopg": "%s", "asyncpg": "$1"}.items()
}


def _execute_on(connection: Any) -> Execute:  # noqa: ANN401 - of either driver
    """A function that takes a statement and its value, for either driver."""
    if hasattr(connection, "fetchrow"):  # asyncpg
        execute: Execute = connection.execute
        return execute
    return lambda statement, value: connection.execute(statement, (value,))


def _message(number: int) -> Message:
    body = json.dumps({"order": number, "amount": 1999}).encode()
    id = f"event-{number}"
    return Message(body, Headers([("message-id", id)]), source="orders", message_id=id)


# --- the contenders ---------------------------------------------------------------------------


@asynccontextmanager
async def _product(
    opened: Callable[[str], Any], url: str, work: Work, *, has_offset: bool = False
) -> AsyncIterator[Operation]:
    async with (
        opened(url) as (pool, store),
        Inbox(store, consumer="benchmark", transactions=pool) as inbox,
    ):
        if has_offset:
            own = open_store(store)
            OffsetTable(transaction_statements_of(own)).create()
            own.close()

        @inbox.handler(mode="transaction")
        async def on_order(message: Message, operation: Any) -> None:  # noqa: ANN401 - it has types
            await work(_execute_on(operation.connection), message.json()["order"])

        async def handle(number: int) -> None:
            # As in a topic with as many partitions as are handled at one time.
            offset = PartitionOffset("benchmark", "orders", number % AT_A_TIME, number)
            message = _message(number)
            action = await on_order.handle(message, offset=offset if has_offset else None)
            assert action == Acknowledge(is_duplicate=False)

        yield handle


@asynccontextmanager
async def _bare(opened: Callable[[str], Any], url: str, work: Work) -> AsyncIterator[Operation]:
    async with opened(url) as (pool, _):
        is_asyncpg = hasattr(pool, "acquire")

        async def handle(number: int) -> None:
            message = _message(number)
            if is_asyncpg:
                async with pool.acquire() as connection, connection.transaction():
                    await work(_execute_on(connection), message.json()["order"])
            else:
                async with pool.connection() as connection:  # commits at its end
                    await work(_execute_on(connection), message.json()["order"])

        yield handle
