"""L9 on connections of asyncpg: nesting, time-outs, cancellation, and what a handler may leave behind."""

import asyncio
from contextlib import asynccontextmanager, closing

import asyncpg
import psycopg
import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker

import coatcheck.transactions.asyncpg
from coatcheck import AsyncEngine, current_operation
from coatcheck.errors import NotCommitted
from tests.transactions.idioms import SHOPS, async_engine


@pytest.fixture
def shop(tmp_path):
    """A shop on PostgreSQL."""
    return SHOPS["postgres"](tmp_path)


@asynccontextmanager
async def acquired(shop, **options):
    """A connection of the application, and an engine that uses it."""
    connection = await asyncpg.connect(shop.place, **options)
    try:
        async with AsyncEngine(shop.store, transactions=connection) as engine:
            yield connection, engine
    finally:
        await connection.close()


async def insert(number):
    await current_operation().connection.execute("insert into orders values ($1)", number)
    return number


async def order(engine, number, handler=insert):
    return await engine.transaction(f"{number}", handler, number, scope="orders")


def test_a_handler_may_open_transactions_of_the_drivers_within_ours(shop):
    """They are savepoints, because the driver knows that one is open."""

    async def inserts_twice(number):
        async with current_operation().connection.transaction():
            await insert(-number)
            await insert(number)

    async def nests(number):
        await insert(number)
        with pytest.raises(asyncpg.UniqueViolationError):
            await inserts_twice(number)
        async with current_operation().connection.transaction():
            await insert(number + 1)
        return number

    async def main():
        async with acquired(shop) as (_, engine):
            for number in (1, 11):
                assert await order(engine, number, nests) == number

    asyncio.run(main())
    assert shop.orders() == [1, 2, 11, 12]
    assert shop.records() == 2


# --- waiting ----------------------------------------------------------------------------------


def test_a_claim_waits_for_its_row_longer_than_the_application_lets_statements_take(shop):
    """L3, L9: `command_timeout` is for its own statements; how long to wait is the policy's."""

    async def main():
        async with (
            acquired(shop, command_timeout=0.2) as (_, engine),
            AsyncEngine(shop.store) as other,
        ):

            async def lingers(number):
                statement = "insert into orders values (%s)"
                await current_operation().connection.execute(statement, (number,))
                is_held.set()
                await current_operation().connection.execute("select pg_sleep(0.4)")
                return number

            is_held = asyncio.Event()
            first = asyncio.ensure_future(order(other, 1, lingers))
            await is_held.wait()
            assert await order(engine, 1) == 1  # which is a replay
            assert await first == 1

    asyncio.run(main())
    assert (shop.orders(), shop.records()) == ([1], 1)


# --- what is written --------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["22P02", "26000", "40001", "23514"])
def test_a_commit_that_is_refused_leaves_nothing_and_says_why(shop, code):
    """L9: whatever the code is, also one that the end itself could fail with."""
    shop.ask(
        "create function refuse() returns trigger language plpgsql as $$ begin"
        f" raise 'not today' using errcode = '{code}'; end $$"
    )
    shop.ask(
        "create constraint trigger refuses after insert on orders deferrable initially deferred"
        " for each row when (new.number < 0) execute function refuse()"
    )

    async def main():
        async with acquired(shop) as (connection, engine):
            for number in (1, 2):
                with pytest.raises(asyncpg.PostgresError, match="not today"):
                    await order(engine, -number)
                assert not connection.is_in_transaction()
                assert await order(engine, number) == number

    asyncio.run(main())
    assert (shop.orders(), shop.records()) == ([1, 2], 2)


# --- what goes wrong --------------------------------------------------------------------------


LEFT = []  # because an event loop keeps only weak references to its tasks


def leaving(text):
    """A handler that leaves *text* running on its connection."""

    async def leave(number):
        connection = current_operation().connection
        await insert(number)
        LEFT.append(asyncio.create_task(connection.execute(text)))
        await asyncio.sleep(0)  # it is sent
        return number

    return leave


async def left():
    """What became of the statements that were left."""
    ends = await asyncio.gather(*LEFT, return_exceptions=True)
    LEFT.clear()
    return ends


def test_a_statement_that_the_handler_leaves_running_is_waited_for_and_undone(shop):
    """L9: the answer came before its work was done, and its transaction must not stay open."""

    async def main():
        async with acquired(shop) as (connection, engine):
            with pytest.raises(NotCommitted, match="left a statement running"):
                await order(engine, 1, leaving("select pg_sleep(0.2)"))
            assert not connection.is_in_transaction()
            assert await left() == ["SELECT 1"]
            assert await order(engine, 1) == 1

    asyncio.run(main())
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_a_statement_that_does_not_end_is_ended_with_its_connection(shop, monkeypatch):
    """L9: its claim would be held for as long as it runs, and the connection would be of no use."""
    monkeypatch.setattr(coatcheck.transactions.asyncpg, "_BUSY_S_MAX", 0.1)

    async def main():
        async with acquired(shop) as (connection, engine):
            with closing(psycopg.connect(shop.place)) as other:
                other.execute("select pg_advisory_lock(7)")
                with pytest.raises(NotCommitted, match="left a statement running"):
                    await order(engine, 1, leaving("select pg_advisory_xact_lock(7)"))
                assert connection.is_closed()
                assert isinstance((await left())[0], asyncpg.PostgresError | OSError)
        async with acquired(shop) as (_, engine):
            assert await order(engine, 1) == 1

    asyncio.run(main())
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_a_session_of_sqlalchemys_may_leave_no_statement_running_either(shop):
    """L9: the error is the same."""

    async def leave(number):
        session = current_operation().connection
        raw = await (await session.connection()).get_raw_connection()
        LEFT.append(asyncio.create_task(raw.driver_connection.execute("select pg_sleep(0.2)")))
        await asyncio.sleep(0)
        return number

    async def main():
        engine = async_engine(shop, "asyncpg")
        async with AsyncEngine(shop.store, transactions=async_sessionmaker(engine)) as guard:
            with pytest.raises(NotCommitted, match="left a statement running"):
                await guard.transaction("a", leave, 1, scope="orders")
            await left()
        await engine.dispose()

    asyncio.run(main())
    assert shop.records() == 0


def test_a_claim_that_fails_leaves_no_transaction_open(shop):
    """A table that is not there any more, and is there again."""

    async def main():
        async with acquired(shop) as (connection, engine):
            await order(engine, 1)
            shop.ask("alter table coatcheck_records rename to gone")
            with pytest.raises(Exception, match="coatcheck_records"):
                await order(engine, 2)
            assert not connection.is_in_transaction()
            shop.ask("alter table gone rename to coatcheck_records")
            assert await order(engine, 2) == 2

    asyncio.run(main())
    assert shop.orders() == [1, 2]
