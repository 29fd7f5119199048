"""L9 on connections of psycopg: settings of the application, and states in which no end can be sent."""

import asyncio
from contextlib import asynccontextmanager, closing

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool

import coatcheck.transactions.psycopg
from coatcheck import AsyncEngine, Engine, Policy, current_operation
from coatcheck.errors import Misconfigured, NotCommitted
from coatcheck.stores import Query, open_store
from tests.transactions.idioms import CODES, SHOPS, settled
from tests.transactions.sites import WsgiSite

EITHER = pytest.mark.parametrize("code", CODES.values(), ids=CODES)


@pytest.fixture
def shop(tmp_path):
    """A shop on PostgreSQL."""
    return SHOPS["postgres"](tmp_path)


@pytest.fixture
def connection(shop):
    """A connection of the application."""
    with closing(psycopg.connect(shop.place)) as connection:
        yield connection


@pytest.fixture
def engine(shop, connection):
    """An engine that uses this connection."""
    with closing(Engine(shop.store, transactions=connection)) as engine:
        yield engine


def insert(number):
    current_operation().connection.execute("insert into orders values (%s)", (number,))
    return number


async def insert_either(number):
    connection = current_operation().connection
    await settled(connection.execute("insert into orders values (%s)", (number,)))
    return number


ROUND_TRIPS = {
    "of a function": ("success", None, 5),
    "that commits all answers": ("kept", 201, 5),
    "that succeeds": ("success", 201, 6),
    "that is refused": ("success", 402, 7),
}


@pytest.mark.parametrize("which", ROUND_TRIPS)
@pytest.mark.parametrize("autocommit", [False, True])
def test_a_transaction_takes_one_commit_and_few_round_trips(
    shop, connection, tmp_path, autocommit, which
):
    """
    L9: begin, claim, the handler's statement, end, commit; psycopg sends each by itself.

    A request may be refused, so it sets a savepoint, and a refusal rolls back to it.
    """
    commit, status, round_trips = ROUND_TRIPS[which]
    trace, policy = tmp_path / "trace", Policy(mode="transaction", commit=commit)
    connection.autocommit = autocommit

    async def place(number):
        return insert(number), status

    with closing(Engine(shop.store, policy, transactions=connection)) as engine:
        site = WsgiSite(engine, place, None)
        with trace.open("w") as file:
            engine.transaction("first", insert, 1, scope="orders")
            connection.pgconn.trace(file.fileno())
            if status is None:
                engine.transaction("second", insert, 2, scope="orders")
            else:
                assert site.post(2)[0].status == status
            connection.pgconn.untrace()
    lines = [line.split("\t") for line in trace.read_text().splitlines()]
    sent = [what for _, who, _, what, *_ in lines if who == "F"]
    assert shop.orders() == ([1] if status == 402 else [1, 2])
    assert sum(what in ("Query", "Sync") for what in sent) == round_trips


@pytest.mark.parametrize("encoding", ["latin1", "sql_ascii"])
def test_a_key_is_stored_as_it_is_where_the_sessions_encoding_lacks_its_letters(
    shop, connection, engine, encoding
):
    """L9: they are sent as bytes, which the server decodes."""
    connection.execute(f"set client_encoding = {encoding}")
    connection.commit()
    key = "\\'größe\N{COAT}"
    engine.transaction(key, insert, 1, scope="orders")
    with closing(open_store(shop.store)) as store:
        assert [record.key for record in store.find(Query()).records] == [key]


def test_a_handler_may_roll_back_a_savepoint_which_drops_prepared_statements(
    shop, connection, engine
):
    """L9: psycopg then deallocates everything; what was claimed and written stays."""

    def undo_a_part(number):
        insert(number)
        with connection.transaction():
            connection.execute("insert into orders values (%s)", (-number,))
            raise psycopg.Rollback
        return number

    connection.prepare_threshold = 0  # so that psycopg prepares everything
    for number in (1, 2, 3):
        assert engine.transaction(f"{number}", undo_a_part, number, scope="orders") == number
    assert shop.orders() == [1, 2, 3]
    assert shop.records() == 3


# --- settings of the application, and errors --------------------------------------------------


def test_a_connection_begins_at_its_own_isolation_level(shop, connection, engine):
    """L9: the application has set it on its connection."""

    def level(number):
        (name,) = connection.execute("show transaction_isolation").fetchone()
        return insert(number) and name

    connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
    assert engine.transaction("key", level, 1, scope="orders") == "serializable"
    assert shop.orders() == [1]


def test_an_end_that_the_server_refuses_is_not_ambiguous(shop, connection, engine):
    """L9: the handler has made its transaction read-only, and every retry would do so, too."""

    def only_reads(number):
        insert(number)
        connection.execute("set transaction read only")

    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        engine.transaction("key", only_reads, 1, scope="orders")
    assert (shop.orders(), shop.records()) == ([], 0)
    assert engine.transaction("key", insert, 1, scope="orders") == 1


# --- what a handler leaves behind ---------------------------------------------------------------

LEFT = []  # references, because garbage collection closes pipelines and streams


async def insert_in_pipeline(number):
    """Write *number*, in a pipeline that stays open."""
    pipeline = current_operation().connection.pipeline()
    LEFT.append(pipeline)
    enter = getattr(pipeline, "__aenter__", None) or pipeline.__enter__
    await settled(enter())
    return await insert_either(number)


async def insert_and_stream(number):
    """Write *number*, and leave a stream half read, as for a response that is yet to be sent."""
    await insert_either(number)
    rows = current_operation().connection.cursor().stream("select generate_series(1, 100000)")
    LEFT.append(rows)
    return await settled(anext(rows) if hasattr(rows, "__anext__") else next(rows))


async def insert_and_close(number):
    await insert_either(number)
    await settled(current_operation().connection.close())
    return number


@asynccontextmanager
async def pool_of_one(shop, code, **options):
    """A pool of the application with one connection, and an engine that uses it."""
    make = AsyncConnectionPool if code.is_async else ConnectionPool
    pool = make(shop.place, min_size=1, max_size=1, open=False, **options)
    await settled(pool.open())
    try:
        async with code.engine(shop, transactions=pool) as engine:
            yield pool, engine
    finally:
        for stream in LEFT:
            if hasattr(stream, "aclose"):
                await stream.aclose()
        LEFT.clear()
        await settled(pool.close())


@EITHER
def test_a_pipeline_that_the_handler_leaves_open_is_not_committed(shop, code):
    """L9: the results of its statements are not known yet; its connection is closed."""

    async def main():
        async with pool_of_one(shop, code) as (_, engine):
            with pytest.raises(NotCommitted, match="pipeline"):
                await engine.transaction("a", insert_in_pipeline, 1, scope="orders")
            assert await engine.transaction("a", insert_either, 1, scope="orders") == 1

    code.run(main())
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_a_connection_that_is_in_a_pipeline_is_refused_and_not_changed(connection, engine):
    """L9: there psycopg could not say whether a claim affected a row."""
    with connection.pipeline(), pytest.raises(Misconfigured, match="in a pipeline"):
        engine.transaction("a", insert, 1, scope="orders")
    assert engine.transaction("a", insert, 1, scope="orders") == 1


def test_a_pipeline_that_the_handler_has_left_is_committed_with_the_rest(shop, connection, engine):
    """L9."""

    def work(number):
        with connection.pipeline():
            return insert(number)

    assert engine.transaction("a", work, 1, scope="orders") == 1
    assert (shop.orders(), shop.records()) == ([1], 1)


@EITHER
def test_a_connection_that_the_handler_closes_does_not_go_back_to_its_pool_at_once(shop, code):
    """L9: with `close_returns` the pool would hand it out while our transaction is open."""

    async def main():
        async with pool_of_one(shop, code, close_returns=True) as (pool, engine):
            with pytest.raises(NotCommitted, match="closed"):
                await engine.transaction("a", insert_and_close, 1, scope="orders")
            for _ in range(2):
                assert await engine.transaction("a", insert_either, 1, scope="orders") == 1
            connection = await settled(pool.getconn())
            assert "close" not in vars(connection)
            await settled(pool.putconn(connection))

    code.run(main())
    assert (shop.orders(), shop.records()) == ([1], 1)


@EITHER
def test_a_stream_that_the_handler_leaves_half_read_does_not_block_the_end(shop, code, monkeypatch):
    """L9: it holds the connection's lock, so the connection is closed; nothing is committed."""
    monkeypatch.setattr(coatcheck.transactions.psycopg, "_BUSY_S_MAX", 0.1)

    async def raises(number):
        await insert_and_stream(number)
        raise KeyError

    async def main():
        async with pool_of_one(shop, code) as (_, engine):
            for handler, error in ((insert_and_stream, NotCommitted), (raises, KeyError)):
                with pytest.raises(error):
                    await engine.transaction("a", handler, 1, scope="orders")
            assert await engine.transaction("a", insert_either, 1, scope="orders") == 1

    code.run(main())
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_a_statement_that_an_async_handler_leaves_running_is_awaited(shop):
    """L9: for a second; if it has ended by then, all is committed."""
    tasks = []

    async def leaves_a_task(number):
        await insert_either(number)
        connection = current_operation().connection
        tasks.append(asyncio.ensure_future(connection.execute("select pg_sleep(0.1)")))
        await asyncio.sleep(0)  # it is sent
        return number

    async def main():
        connection = await psycopg.AsyncConnection.connect(shop.place)
        async with connection, AsyncEngine(shop.store, transactions=connection) as engine:
            assert await engine.transaction("a", leaves_a_task, 1, scope="orders") == 1
            await asyncio.gather(*tasks)

    asyncio.run(main())
    assert (shop.orders(), shop.records()) == ([1], 1)


# --- other cursors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "factory"),
    [
        (CODES["sync"], psycopg.RawCursor),
        (CODES["sync"], psycopg.ClientCursor),
        (CODES["async"], psycopg.AsyncRawCursor),
    ],
)
def test_the_application_may_use_other_cursors(shop, code, factory):
    """L9: with other placeholders than ours."""

    async def connect_async():
        return await psycopg.AsyncConnection.connect(shop.place, cursor_factory=factory)

    def connect():
        return psycopg.connect(shop.place, cursor_factory=factory)

    async def work(number):
        text = f"insert into orders values ({number:d})"
        await settled(current_operation().connection.execute(text))
        return number

    async def main():
        source = connect_async if code.is_async else connect
        for _ in range(2):
            async with code.engine(shop, transactions=source) as engine:
                assert await engine.transaction("a", work, 1, scope="orders") == 1

    code.run(main())
    assert (shop.orders(), shop.records()) == ([1], 1)
