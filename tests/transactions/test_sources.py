"""L9: sources of an async engine that may block are called in a thread, and no others."""

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial

import aiosqlite
import asyncmy
import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from psycopg_pool import AsyncConnectionPool
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import async_sessionmaker

from coatcheck import AsyncEngine
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.transactions.sources import connection_source
from tests.transactions.idioms import SHOPS, alchemy_url, async_engine

WHO = ContextVar("WHO", default="no caller")


@pytest.fixture
def shop(tmp_path):
    """A shop on PostgreSQL."""
    return SHOPS["postgres"](tmp_path)


async def seven():
    return 7


async def served(shop, source, times=2):
    """Run operations on connections of *source*."""
    async with AsyncEngine(shop.store, transactions=source) as engine:
        for number in range(times):
            assert await engine.transaction(f"{number}", seven, scope="s") == 7


class Calls:
    """Records the threads of its calls."""

    def __init__(self):
        self.threads = []

    def note(self, *_):
        self.threads.append(threading.current_thread())

    def on_loop(self):
        return [thread is threading.main_thread() for thread in self.threads]


# --- sync -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_manager", [False, True])
def test_a_function_that_connects_is_called_in_a_thread(shop, is_manager):
    """D2: a slow server does not block the event loop."""
    calls = Calls()

    def connect():
        calls.note()
        return shop.connect()

    @contextmanager
    def acquiring():
        with connect() as connection:
            yield connection

    asyncio.run(served(shop, acquiring if is_manager else connect))
    assert calls.on_loop() == [False, False]


@pytest.mark.parametrize("make", [lambda engine: engine, orm.sessionmaker, orm.Session])
def test_an_engine_of_sqlalchemys_is_asked_in_a_thread(shop, make):
    """D2: it may wait for a free connection."""
    calls = Calls()
    alchemy = sa.create_engine(alchemy_url(shop, "psycopg"), pool_size=1, max_overflow=0)
    sa.event.listen(alchemy, "checkout", calls.note)
    asyncio.run(served(shop, make(alchemy)))
    assert calls.on_loop() == [False, False]
    alchemy.dispose()


def test_an_empty_pool_does_not_hold_up_the_event_loop(shop):
    """D2: the operation that has the connection can finish and give it back."""
    url = alchemy_url(shop, "psycopg")
    alchemy = sa.create_engine(url, pool_size=1, max_overflow=0, pool_timeout=60)

    async def slow():
        for _ in range(100):  # the other one stands before the pool by then
            await asyncio.sleep(0)
        return 7

    async def main():
        async with AsyncEngine(shop.store, transactions=alchemy) as engine:
            both = (engine.transaction(key, slow, scope="s") for key in "ab")
            assert await asyncio.gather(*both) == [7, 7]

    asyncio.run(main())
    alchemy.dispose()


def test_a_source_runs_in_the_context_of_its_caller(shop):
    """L9: it may look up the connection of the current request there."""
    seen = []

    def connect():
        seen.append(WHO.get())
        return shop.connect()

    async def main():
        WHO.set("Ada")
        await served(shop, connect)

    asyncio.run(main())
    assert seen == ["Ada", "Ada"]


def test_errors_of_a_source_in_a_thread_reach_the_caller(shop):
    """D2: with their own message."""

    def connect():
        raise RuntimeError("the pool is closed")

    with pytest.raises(StoreUnavailable, match="the pool is closed"):
        asyncio.run(served(shop, connect))
    with pytest.raises(Misconfigured, match="is not a supported connection"):
        asyncio.run(served(shop, lambda: "a string"))


# --- async ------------------------------------------------------------------------------------


async def connect_later():
    """A coroutine function."""


@asynccontextmanager
async def connect_managed():
    """The same with an end."""
    yield


class Manager:
    """A context manager."""

    async def __aenter__(self):
        """Enter."""

    async def __aexit__(self, *_):
        """Leave."""


class HomemadePool:
    """A pool of the application."""

    async def acquire(self):
        """Connect."""


class Callee:
    """Can be called."""

    async def __call__(self):
        """Connect."""


@pytest.mark.parametrize(
    "given",
    [
        *(
            connect_later,
            connect_managed,
            Manager,
            HomemadePool(),
            Callee(),
            HomemadePool().acquire,
        ),
        *(partial(connect_later), partial(connect_managed), psycopg.AsyncConnection.connect),
        *(partial(asyncpg.connect, "somewhere"), async_sessionmaker()),
    ],
)
def test_what_is_async_by_its_declaration_is_called_on_the_event_loop(given):
    """L9: that is known before the call."""
    assert connection_source(given).is_async


def test_pools_of_async_drivers_are_called_on_the_event_loop(shop, tmp_path):
    """L9: by their types, also where only their method is given."""
    other = SHOPS["mysql"](tmp_path)

    async def main():
        place = dict(other.place)
        pools = [
            await asyncpg.create_pool(shop.place, min_size=0),
            AsyncConnectionPool(shop.place, min_size=0, max_size=1, open=False),
            async_engine(shop, "asyncpg"),
            await asyncmy.create_pool(**{**place, "db": place.pop("database")}, minsize=0),
        ]
        assert [connection_source(pool).is_async for pool in pools] == [True] * 4
        assert connection_source(pools[0].acquire).is_async
        assert connection_source(pools[1].connection).is_async
        await pools[0].close()
        pools[3].close()
        await pools[3].wait_closed()

    asyncio.run(main())


def test_a_plain_function_may_return_something_async(shop):
    """L9: it is called in a thread like any other, and its result is awaited on the event loop."""
    calls = Calls()

    async def main():
        async with asyncpg.create_pool(shop.place, min_size=1, max_size=1) as pool:

            def connect():
                calls.note()
                return pool.acquire()

            await served(shop, connect)

    asyncio.run(main())
    assert calls.on_loop() == [False, False]


def test_a_function_that_needs_the_event_loop_must_be_async(shop):
    """S3: as in an application with one pool per event loop; a plain one is refused."""

    async def main():
        async with asyncpg.create_pool(shop.place, min_size=1, max_size=1) as pool:
            pools = {asyncio.get_running_loop(): pool}

            def connect():
                return pools[asyncio.get_running_loop()].acquire()

            async def connect_async():
                return connect()

            with pytest.raises(Misconfigured, match="declare it with `async def`"):
                await served(shop, connect)
            await served(shop, connect_async)

    asyncio.run(main())
    assert shop.records() == 2


def test_what_an_async_function_makes_may_be_sync(tmp_path):
    """L9: it is used in threads, like any other."""
    shop = SHOPS["sqlite"](tmp_path)

    async def connect():
        return shop.connect()

    asyncio.run(served(shop, connect))
    assert shop.records() == 2


def test_a_connection_of_no_known_kind_goes_back(shop):
    """L9: an object that is no connection is refused and given back."""
    left = []

    @asynccontextmanager
    async def connect():
        try:
            yield "a string"
        finally:
            left.append(1)

    with pytest.raises(Misconfigured, match="is not a supported connection"):
        asyncio.run(served(shop, connect))
    assert left == [1]


def test_a_connection_that_is_not_open_yet_is_opened(tmp_path):
    """L9: aiosqlite gives it at once, and opens it when it is awaited."""
    shop = SHOPS["sqlite"](tmp_path)
    asyncio.run(served(shop, partial(aiosqlite.connect, shop.place)))
    assert shop.records() == 2
