"""L9 on connections of psycopg: settings of the application, and states in which no end can be sent."""

import asyncio
from contextlib import closing

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from coatcheck import AsyncEngine, Engine, Policy, current_operation
from coatcheck.core.lifecycle import ClaimRequest, first_attempt
from coatcheck.core.record import GONE, Swap, completed
from coatcheck.errors import Misconfigured, NotCommitted
from coatcheck.stores import open_store
from coatcheck.stores.transaction_statements import transaction_statements_of
from coatcheck.transactions import adapter_for
from coatcheck.transactions.contract import call, call_async
from tests.support.servers import until
from tests.transactions.idioms import SHOPS


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


async def insert_async(number):
    await current_operation().connection.execute("insert into orders values (%s)", (number,))
    return number


@pytest.mark.parametrize("autocommit", [False, True])
def test_a_transaction_takes_one_commit_and_few_round_trips(
    shop, connection, engine, tmp_path, autocommit
):
    """L9: begin, claim, the handler's statement, end, commit; psycopg sends each by itself."""
    trace = tmp_path / "trace"
    connection.autocommit = autocommit
    with trace.open("w") as file:
        engine.transaction("first", insert, 1, scope="orders")
        connection.pgconn.trace(file.fileno())
        engine.transaction("second", insert, 2, scope="orders")
        connection.pgconn.untrace()
    lines = [line.split("\t") for line in trace.read_text().splitlines()]
    sent = [what for _, who, _, what, *_ in lines if who == "F"]
    assert shop.orders() == [1, 2]
    assert sum(what in ("Query", "Sync") for what in sent) == 5


def test_a_large_response_is_written_with_the_end(shop):
    """L12: it does not fit into the socket's buffer, so it is sent while the server reads."""
    ticket = ClaimRequest(b"i" * 16, b"f" * 16, 1_800_000_000_000, 1)
    claim = first_attempt(ticket, Policy(), GONE, ticket.now_ms)
    end = completed(claim, b"x" * 32_000_000)

    async def write(statements):
        async with await psycopg.AsyncConnection.connect(shop.place) as connection:
            adapter = adapter_for(connection)
            assert await call_async(
                adapter.begin(statements.claim(Swap(claim.id, 0, claim), 1_000))
            )
            change = statements.change(Swap(claim.id, claim.version, end))
            await call_async(adapter.end(change))

    with closing(open_store(shop.store)) as store:
        asyncio.run(write(transaction_statements_of(store)))
        assert store.get((claim.id,)) == [end]


WORDS = ["plain", "", "'", "\\", "\\'; drop table orders; --", "%s $1", "größe", "\N{COAT}\0\ud800"]


@pytest.mark.parametrize("encoding", ["utf8", "latin1"])
@pytest.mark.parametrize("word", WORDS)
def test_a_record_is_stored_as_it_is_whatever_its_key_contains(shop, connection, word, encoding):
    """L9: also where the session's encoding lacks the letters."""
    connection.execute(f"set client_encoding = {encoding}")
    connection.commit()
    ticket = ClaimRequest(b"\0'\\i" * 4, b"f" * 16, 1_800_000_000_000, 2**63 - 1, word, word, word)
    claim = first_attempt(ticket, Policy(), GONE, ticket.now_ms)
    end = completed(claim, b"\\x00'")
    with closing(open_store(shop.store)) as store:
        statements = transaction_statements_of(store)
        adapter = adapter_for(connection)
        assert call(adapter.begin(statements.claim(Swap(claim.id, 0, claim), 1_000)))
        call(adapter.end(statements.change(Swap(claim.id, claim.version, end))))
        assert store.get((claim.id,)) == [end]


# --- savepoints and prepared statements -------------------------------------------------------


def test_nothing_is_prepared_where_the_application_has_switched_that_off(shop, connection, engine):
    """As behind a pooler, where the next transaction meets another session."""
    connection.prepare_threshold = None
    for number in range(8):
        engine.transaction(f"{number}", insert, number, scope="orders")
    assert shop.orders() == list(range(8))
    assert connection.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)


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


def test_a_handler_that_has_rolled_back_by_itself_commits_nothing(shop, connection, engine):
    """L9: what it wrote after that would have no record."""

    def rolls_back(number):
        connection.rollback()
        insert(number)

    with pytest.raises(NotCommitted, match="rolled back by itself"):
        engine.transaction("key", rolls_back, 1, scope="orders")
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert shop.orders() == []
    assert shop.records() == 0


def test_a_commit_that_fails_writes_nothing(shop, engine):
    """L9: a constraint that is checked at the commit; nothing is written and nothing is kept."""
    shop.ask("create table lines (number integer references orders deferrable initially deferred)")

    def breaks():
        current_operation().connection.execute("insert into lines values (7)")

    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        engine.transaction("key", breaks, scope="orders")
    assert engine.transaction("key", insert, 1, scope="orders") == 1
    assert shop.ask("select count(*) from lines") == [(0,)]


def test_an_end_that_the_server_refuses_is_not_ambiguous(shop, connection, engine):
    """L9: the handler has made its transaction read-only, and every retry would do so, too."""

    def only_reads(number):
        insert(number)
        connection.execute("set transaction read only")

    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        engine.transaction("key", only_reads, 1, scope="orders")
    assert (shop.orders(), shop.records()) == ([], 0)
    assert engine.transaction("key", insert, 1, scope="orders") == 1


# --- pipelines that a handler leaves open ------------------------------------------------------

PIPELINES = []  # references, because garbage collection closes a pipeline


def insert_in_pipeline(number):
    """Write *number*, in a pipeline that stays open."""
    pipeline = current_operation().connection.pipeline()
    PIPELINES.append(pipeline)
    pipeline.__enter__()
    return insert(number)


async def insert_in_async_pipeline(number):
    pipeline = current_operation().connection.pipeline()
    PIPELINES.append(pipeline)
    await pipeline.__aenter__()
    return await insert_async(number)


def test_a_pipeline_that_the_handler_leaves_open_is_not_committed(shop, connection, engine):
    """L9: the results of its statements are not known yet; its connection is closed."""
    with pytest.raises(NotCommitted, match="pipeline"):
        engine.transaction("a", insert_in_pipeline, 1, scope="orders")
    PIPELINES.clear()
    assert connection.closed
    with closing(Engine(shop.store)) as other:
        assert other.transaction("a", insert, 1, scope="orders") == 1
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_an_async_pipeline_that_the_handler_leaves_open_is_not_committed_either(shop):
    """L9."""

    async def main():
        connection = await psycopg.AsyncConnection.connect(shop.place)
        async with AsyncEngine(shop.store, transactions=connection) as engine:
            with pytest.raises(NotCommitted, match="pipeline"):
                await engine.transaction("a", insert_in_async_pipeline, 1, scope="orders")
        assert connection.closed
        async with AsyncEngine(shop.store) as other:
            assert await other.transaction("a", insert_async, 1, scope="orders") == 1

    asyncio.run(main())
    PIPELINES.clear()
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


def test_a_connection_that_the_handler_closes_does_not_go_back_to_its_pool_at_once(shop):
    """L9: with `close_returns` the pool would hand it out while our transaction is open."""
    options = {"min_size": 1, "max_size": 1, "close_returns": True}
    with ConnectionPool(shop.place, **options) as pool:
        with closing(Engine(shop.store, transactions=pool)) as engine:
            with pytest.raises(NotCommitted, match="closed"):
                engine.transaction("a", closes, 1, scope="orders")
            for _ in range(2):
                assert engine.transaction("a", insert, 1, scope="orders") == 1
        with pool.connection() as connection:
            assert "close" not in vars(connection)
    assert (shop.orders(), shop.records()) == ([1], 1)


def closes(number):
    insert(number)
    current_operation().connection.close()
    return number


def test_neither_does_one_that_an_async_handler_closes(shop):
    """L9."""

    async def closes_async(number):
        await insert_async(number)
        await current_operation().connection.close()
        return number

    async def main():
        options = {"min_size": 1, "max_size": 1, "close_returns": True, "open": False}
        pool = AsyncConnectionPool(shop.place, **options)
        async with pool, AsyncEngine(shop.store, transactions=pool) as engine:
            with pytest.raises(NotCommitted, match="closed"):
                await engine.transaction("a", closes_async, 1, scope="orders")
            for _ in range(2):
                assert await engine.transaction("a", insert_async, 1, scope="orders") == 1
            async with pool.connection() as connection:
                assert "close" not in vars(connection)

    asyncio.run(main())
    assert (shop.orders(), shop.records()) == ([1], 1)


STREAMS = []


def streams(number):
    insert(number)
    rows = current_operation().connection.cursor().stream("select generate_series(1, 100000)")
    STREAMS.append(rows)  # as in a response that is still to be streamed
    return next(rows)


async def streams_async(number):
    await insert_async(number)
    rows = current_operation().connection.cursor().stream("select generate_series(1, 100000)")
    STREAMS.append(rows)
    return await anext(rows)


def raises_in(work):
    def streams_and_raises(number):
        work(number)
        raise KeyError

    return streams_and_raises


@pytest.mark.parametrize(
    ("work", "error"), [(streams, NotCommitted), (raises_in(streams), KeyError)]
)
def test_a_stream_that_the_handler_leaves_half_read_does_not_block_the_end(shop, work, error):
    """L9: it holds the connection's lock, so the connection is closed; nothing is committed."""
    with ConnectionPool(shop.place, min_size=1, max_size=1) as pool:
        with closing(Engine(shop.store, transactions=pool)) as engine:
            with pytest.raises(error):
                engine.transaction("a", work, 1, scope="orders")
            assert engine.transaction("a", insert, 1, scope="orders") == 1
        STREAMS.clear()
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_a_stream_that_an_async_handler_leaves_half_read_does_not_block_the_end_either(shop):
    """L9."""

    async def raises(number):
        await streams_async(number)
        raise KeyError

    async def main():
        pool = AsyncConnectionPool(shop.place, min_size=1, max_size=1, open=False)
        async with pool, AsyncEngine(shop.store, transactions=pool) as engine:
            for work, error in ((streams_async, NotCommitted), (raises, KeyError)):
                with pytest.raises(error):
                    await engine.transaction("a", work, 1, scope="orders")
            assert await engine.transaction("a", insert_async, 1, scope="orders") == 1
            for rows in STREAMS:
                await rows.aclose()
        STREAMS.clear()

    asyncio.run(main())
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_a_statement_that_an_async_handler_leaves_running_is_awaited(shop):
    """L9: for a second; if it has ended by then, all is committed."""
    tasks = []

    async def leaves_a_task(number):
        await insert_async(number)
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


LOCKS = {
    "the claim": "lock table coatcheck_records in exclusive mode",
    "the commit": "select pg_advisory_lock(7)",
}


@pytest.mark.parametrize("step", LOCKS)
def test_a_caller_cancelled_during_a_round_trip_leaves_its_connection_usable(shop, step):
    """L9: while the server executes the claim, or the commit."""
    shop.ask(
        "create function wait() returns trigger language plpgsql as"
        " 'begin perform pg_advisory_xact_lock(7); return null; end'"
    )
    shop.ask(
        "create constraint trigger waits after insert on orders deferrable initially deferred"
        " for each row execute function wait()"
    )

    def is_blocked():
        return shop.ask("select count(*) from pg_locks where not granted") == [(1,)]

    async def main():
        connection = await psycopg.AsyncConnection.connect(shop.place)
        async with connection, AsyncEngine(shop.store, transactions=connection) as engine:
            with closing(psycopg.connect(shop.place)) as other:
                other.execute(LOCKS[step])
                task = asyncio.ensure_future(engine.transaction("a", insert_async, 1))
                await asyncio.to_thread(until, is_blocked)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (shop.orders(), shop.records()) == ([], 0)
            assert await engine.transaction("a", insert_async, 1) == 1

    asyncio.run(main())
    assert shop.orders() == [1]


# --- other cursors and encodings ---------------------------------------------------------------


@pytest.mark.parametrize("factory", [psycopg.RawCursor, psycopg.ClientCursor])
def test_the_application_may_use_other_cursors(shop, factory):
    """L9: with other placeholders than ours."""

    def connect():
        return psycopg.connect(shop.place, cursor_factory=factory)

    def work(number):
        current_operation().connection.execute(f"insert into orders values ({number:d})")
        return number

    for _ in range(2):
        with closing(Engine(shop.store, transactions=connect)) as engine:
            assert engine.transaction("a", work, 1, scope="orders") == 1
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_the_application_may_use_other_cursors_on_an_event_loop(shop):
    """L9."""

    async def connect():
        factory = psycopg.AsyncRawCursor
        return await psycopg.AsyncConnection.connect(shop.place, cursor_factory=factory)

    async def work(number):
        connection = current_operation().connection
        await connection.execute("insert into orders values ($1)", (number,))
        return number

    async def main():
        for _ in range(2):
            async with AsyncEngine(shop.store, transactions=connect) as engine:
                assert await engine.transaction("a", work, 1, scope="orders") == 1

    asyncio.run(main())
    assert (shop.orders(), shop.records()) == ([1], 1)


@pytest.mark.parametrize("encoding", ["latin1", "sql_ascii", "utf8"])
def test_a_key_may_have_letters_that_the_session_encoding_lacks(shop, encoding):
    """L9: they are sent as bytes."""

    def connect():
        return psycopg.connect(shop.place, client_encoding=encoding)

    keys = ("plain", "é1", "Ž1", "鍵")
    for _ in range(2):
        with closing(Engine(shop.store, transactions=connect)) as engine:
            for number, key in enumerate(keys):
                assert engine.transaction(key, insert, number, scope="orders") == number
    assert shop.orders() == [0, 1, 2, 3]
    assert {key for (key,) in shop.ask("select key from coatcheck_records")} == {*keys}
