"""L9 on psycopg's connections: in how many journeys, what is kept there, and what goes wrong."""

import asyncio
from contextlib import closing

import psycopg
import pytest
from idioms import SHOPS
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from servers import until

from coatcheck import AsyncEngine, Engine, Policy, current_operation
from coatcheck.core.record import GONE, Swap, completed
from coatcheck.core.serve import Ticket, first_attempt
from coatcheck.errors import Misconfigured, NotCommitted
from coatcheck.lent import lent_by
from coatcheck.stores import open_store
from coatcheck.stores.ledger import ledger_of

# As an application may connect, with or without what a session keeps.
THRESHOLDS = pytest.mark.parametrize("threshold", [5, None])
KEPT = "select count(*) from pg_prepared_statements where name like 'coatcheck%'"


@pytest.fixture
def shop(tmp_path):
    """A shop on PostgreSQL."""
    return SHOPS["postgres"](tmp_path)


@pytest.fixture
def connection(shop):
    """A connection of the application's."""
    with closing(psycopg.connect(shop.place)) as connection:
        yield connection


@pytest.fixture
def engine(shop, connection):
    """An engine, and who lends to it."""
    with closing(Engine(shop.store, transactions=connection)) as engine:
        yield engine


def insert(number):
    current_operation().connection.execute("insert into orders values (%s)", (number,))
    return number


async def insert_async(number):
    await current_operation().connection.execute("insert into orders values (%s)", (number,))
    return number


def kept_by(connection):
    """How many statements of ours its session keeps."""
    ((number,),) = connection.execute(KEPT).fetchall()
    connection.rollback()
    return number


# --- journeys ---------------------------------------------------------------------------------


def journeys(trace):
    """How often something was sent that waits for an answer; a line is time, who, length, what."""
    lines = [line.split("\t") for line in trace.read_text().splitlines()]
    return sum(who == "F" and what in ("Query", "Sync") for _, who, _, what, *_ in lines)


@pytest.mark.parametrize("autocommit", [False, True])
def test_a_transaction_is_begun_with_its_claim_and_committed_with_its_end(
    shop, connection, engine, tmp_path, autocommit
):
    """Three journeys with the handler's own statement; the driver alone would make five."""
    trace = tmp_path / "trace"
    connection.autocommit = autocommit
    with trace.open("w") as file:
        engine.transaction("first", insert, 1, scope="orders")
        connection.pgconn.trace(file.fileno())
        engine.transaction("second", insert, 2, scope="orders")
        connection.pgconn.untrace()
    assert shop.orders() == [1, 2]
    assert journeys(trace) == 3


def test_an_async_transaction_makes_no_more_journeys(shop, tmp_path):
    trace = tmp_path / "trace"

    async def both():
        connection = await psycopg.AsyncConnection.connect(shop.place)
        async with connection, AsyncEngine(shop.store, transactions=connection) as engine:
            await engine.transaction("first", insert_async, 1, scope="orders")
            with trace.open("w") as file:
                connection.pgconn.trace(file.fileno())
                await engine.transaction("second", insert_async, 2, scope="orders")
                connection.pgconn.untrace()

    asyncio.run(both())
    assert shop.orders() == [1, 2]
    assert journeys(trace) == 3


def test_an_end_that_is_too_long_to_be_sent_at_once_is_sent_all_the_same(shop):
    """What does not fit into the socket's buffer is sent while the server reads."""
    ticket = Ticket(b"i" * 16, b"f" * 16, 1_800_000_000_000, 1)
    claim = first_attempt(ticket, Policy(), GONE, ticket.now_ms)
    end = completed(claim, b"x" * 32_000_000)

    async def written(ledger):
        connection = await psycopg.AsyncConnection.connect(shop.place)
        async with connection:
            lent = lent_by(connection)
            assert await lent.begin(next(ledger.claim(Swap(claim.id, 0, claim), 1_000))) == 1
            assert await lent.end(ledger.change(Swap(claim.id, claim.version, end)))

    with closing(open_store(shop.store)) as store:
        asyncio.run(written(ledger_of(store)))
        assert store.get((claim.id,)) == [end]


# --- what a session keeps ---------------------------------------------------------------------


def test_nothing_is_kept_where_the_application_lets_nothing_be_kept(shop, connection, engine):
    """As behind a pooler, where the next transaction meets another session."""
    connection.prepare_threshold = None
    for number in range(8):
        engine.transaction(f"{number}", insert, number, scope="orders")
    assert shop.orders() == list(range(8))
    assert kept_by(connection) == 0


@pytest.mark.parametrize("forget", ["discard all", "deallocate all"])
def test_a_session_may_forget_what_it_kept_between_two_transactions(
    shop, connection, engine, forget
):
    """A pool may clean what comes back, and the driver does so when something is rolled back."""
    engine.transaction("first", insert, 1, scope="orders")
    assert kept_by(connection) > 0
    connection.autocommit = True
    connection.execute(forget)
    connection.autocommit = False
    assert kept_by(connection) == 0
    for number in (2, 3):
        engine.transaction(f"{number}", insert, number, scope="orders")
    assert shop.orders() == [1, 2, 3]
    assert kept_by(connection) > 0


OURS = (
    "select name from pg_prepared_statements where name like 'coatcheck%' and statement like '{}'"
)


@pytest.mark.parametrize("what", ["begin", "insert%", "with ended%", "commit"])
def test_a_session_may_forget_a_part_of_what_it_kept(shop, connection, engine, what):
    """L9: also where it has begun already, and only then finds that it knows the claim no more."""
    engine.transaction("first", insert, 1, scope="orders")
    ((name,),) = connection.execute(OURS.format(what)).fetchall()
    connection.execute(f"deallocate {name}")
    connection.commit()
    for number in (2, 3):
        assert engine.transaction(f"{number}", insert, number, scope="orders") == number
    assert shop.orders() == [1, 2, 3]


def test_a_handler_may_roll_back_a_savepoint_though_the_session_then_forgets(
    shop, connection, engine
):
    """The driver has the session forget everything then; what was claimed and written stays."""
    forgot = []

    def undoes_a_part(number):
        insert(number)
        with connection.transaction():
            connection.execute("insert into orders values (%s)", (-number,))
            raise psycopg.Rollback
        forgot.append(connection.execute(KEPT).fetchall() == [(0,)])
        return number

    connection.prepare_threshold = 0  # so that the driver keeps something itself
    engine.transaction("first", insert, 0, scope="orders")  # so that our end is kept
    for number in (1, 2, 3):
        assert engine.transaction(f"{number}", undoes_a_part, number, scope="orders") == number
    assert forgot == [True] * 3
    assert shop.orders() == [0, 1, 2, 3]
    assert shop.records() == 4


WORDS = ["plain", "", "'", "\\", "\\'; drop table orders; --", "%s $1", "größe", "\N{COAT}\0\ud800"]


@pytest.mark.parametrize("encoding", ["utf8", "latin1"])
@pytest.mark.parametrize("word", WORDS)
def test_the_same_is_written_in_both_ways(shop, connection, word, encoding):
    """Ours, in which the session keeps it, and the driver's."""
    connection.execute(f"set client_encoding = {encoding}")
    connection.commit()
    ticket = Ticket(b"\0'\\i" * 4, b"f" * 16, 1_800_000_000_000, 2**63 - 1, word, word, word)
    claim = first_attempt(ticket, Policy(), GONE, ticket.now_ms)
    end = completed(claim, b"\\x00'")
    written = []
    with closing(open_store(shop.store)) as store:
        ledger = ledger_of(store)
        for threshold in (5, None):
            connection.prepare_threshold = threshold
            lent = lent_by(connection)
            assert lent.begin(next(ledger.claim(Swap(claim.id, 0, claim), 1_000))) == 1
            assert lent.end(ledger.change(Swap(claim.id, claim.version, end)))
            assert store.get((claim.id,)) == [end]
            written.append(shop.ask("select * from coatcheck_records"))
            shop.ask("delete from coatcheck_records")
    assert written[0] == written[1]


# --- what the application has set, and what goes wrong ----------------------------------------


def test_a_connection_begins_at_its_own_isolation_level(shop, connection, engine):
    """What the application has set on its connection holds in our transactions, too."""

    def level(number):
        (name,) = connection.execute("show transaction_isolation").fetchone()
        return insert(number) and name

    connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
    assert engine.transaction("key", level, 1, scope="orders") == "serializable"
    assert shop.orders() == [1]


def test_a_handler_that_has_rolled_back_by_itself_commits_nothing(shop, connection, engine):
    """Else what it wrote after that would be there without a record."""

    def rolls_back(number):
        connection.rollback()
        insert(number)

    with pytest.raises(NotCommitted, match="rolled back by itself"):
        engine.transaction("key", rolls_back, 1, scope="orders")
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert shop.orders() == []
    assert shop.records() == 0


def test_a_commit_that_fails_is_no_success(shop, engine):
    """A constraint that is checked at the commit: nothing of it is there, and nothing is kept."""
    shop.ask("create table lines (number integer references orders deferrable initially deferred)")

    def breaks():
        current_operation().connection.execute("insert into lines values (7)")

    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        engine.transaction("key", breaks, scope="orders")
    assert engine.transaction("key", insert, 1, scope="orders") == 1
    assert shop.ask("select count(*) from lines") == [(0,)]


def test_what_divides_by_zero_at_the_commit_is_not_taken_for_a_missing_claim(shop, engine):
    """Our end fails in the same way where its claim is gone, but before the commit."""
    shop.ask(
        "create function divide() returns trigger language plpgsql as"
        " 'begin perform 1 / 0; return null; end'"
    )
    shop.ask(
        "create constraint trigger divides after insert on orders deferrable initially deferred"
        " for each row execute function divide()"
    )
    with pytest.raises(psycopg.errors.DivisionByZero):
        engine.transaction("key", insert, 1, scope="orders")
    assert shop.orders() == []
    assert shop.records() == 0


@THRESHOLDS
def test_what_the_server_has_refused_is_in_no_doubt(shop, connection, engine, threshold):
    """L9: the handler has made its transaction one that only reads, and every retry would too."""
    connection.prepare_threshold = threshold

    def only_reads(number):
        insert(number)
        connection.execute("set transaction read only")

    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        engine.transaction("key", only_reads, 1, scope="orders")
    assert (shop.orders(), shop.records()) == ([], 0)
    assert engine.transaction("key", insert, 1, scope="orders") == 1


# --- pipelines that a handler leaves open ------------------------------------------------------

PIPELINES = []  # because one that nobody knows of is closed: at once, or by an event loop later


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
    """L9: nobody knows yet what became of what was said there; it ends with its connection."""
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


def test_a_connection_in_a_pipeline_of_its_owners_is_refused_and_left_as_it_is(connection, engine):
    """L9: in there nobody could tell whether a claim is won."""
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


@THRESHOLDS
def test_a_connection_that_the_handler_closes_is_not_lent_to_somebody_else_meanwhile(
    shop, threshold
):
    """L9: a pool may take `close` for giving back; we have to roll back what was lent to us."""
    options = {"min_size": 1, "max_size": 1, "close_returns": True}
    kept = {"prepare_threshold": threshold}
    with ConnectionPool(shop.place, kwargs=kept, **options) as pool:
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


@THRESHOLDS
def test_neither_is_one_that_an_async_handler_closes(shop, threshold):
    """L9."""

    async def closes_async(number):
        await insert_async(number)
        await current_operation().connection.close()
        return number

    async def main():
        options = {"min_size": 1, "max_size": 1, "close_returns": True, "open": False}
        kept = {"prepare_threshold": threshold}
        pool = AsyncConnectionPool(shop.place, kwargs=kept, **options)
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
    STREAMS.append(rows)  # such as in a response that is still to be sent
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


@THRESHOLDS
@pytest.mark.parametrize(
    ("work", "error"), [(streams, NotCommitted), (raises_in(streams), KeyError)]
)
def test_a_stream_that_the_handler_leaves_half_read_does_not_hold_up_its_end(
    shop, threshold, work, error
):
    """L9: it keeps its connection to itself, so that is ended; nothing is committed."""
    options = {"prepare_threshold": threshold}
    with ConnectionPool(shop.place, kwargs=options, min_size=1, max_size=1) as pool:
        with closing(Engine(shop.store, transactions=pool)) as engine:
            with pytest.raises(error):
                engine.transaction("a", work, 1, scope="orders")
            assert engine.transaction("a", insert, 1, scope="orders") == 1
        STREAMS.clear()
    assert (shop.orders(), shop.records()) == ([1], 1)


@THRESHOLDS
def test_a_stream_that_an_async_handler_leaves_half_read_does_not_hold_up_its_end_either(
    shop, threshold
):
    """L9."""

    async def raises(number):
        await streams_async(number)
        raise KeyError

    async def main():
        options = {"prepare_threshold": threshold}
        pool = AsyncConnectionPool(shop.place, kwargs=options, min_size=1, max_size=1, open=False)
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


def test_a_statement_that_an_async_handler_has_left_to_a_task_is_waited_for(shop):
    """L9: for a second; what is over by then is committed with the rest."""
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


HOLDS_UP = {
    "the claim": "lock table coatcheck_records in exclusive mode",
    "the commit": "select pg_advisory_lock(7)",
}


@pytest.mark.parametrize("step", HOLDS_UP)
def test_who_is_cancelled_on_a_journey_gives_its_connection_back_in_order(shop, step):
    """L9: while the server is at the first of several statements, or at the last."""
    shop.ask(
        "create function wait() returns trigger language plpgsql as"
        " 'begin perform pg_advisory_xact_lock(7); return null; end'"
    )
    shop.ask(
        "create constraint trigger waits after insert on orders deferrable initially deferred"
        " for each row execute function wait()"
    )

    def is_held_up():
        return shop.ask("select count(*) from pg_locks where not granted") == [(1,)]

    async def main():
        connection = await psycopg.AsyncConnection.connect(shop.place)
        async with connection, AsyncEngine(shop.store, transactions=connection) as engine:
            with closing(psycopg.connect(shop.place)) as other:
                other.execute(HOLDS_UP[step])
                task = asyncio.ensure_future(engine.transaction("a", insert_async, 1))
                await asyncio.to_thread(until, is_held_up)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (shop.orders(), shop.records()) == ([], 0)
            assert await engine.transaction("a", insert_async, 1) == 1

    asyncio.run(main())
    assert shop.orders() == [1]


# --- connections that speak in another way ----------------------------------------------------


@THRESHOLDS
@pytest.mark.parametrize("factory", [psycopg.RawCursor, psycopg.ClientCursor])
def test_what_cursors_the_application_has_is_its_own_affair(shop, factory, threshold):
    """L9: ours have marks of their own."""

    def lend():
        return psycopg.connect(shop.place, cursor_factory=factory, prepare_threshold=threshold)

    def work(number):
        current_operation().connection.execute(f"insert into orders values ({number:d})")
        return number

    for _ in range(2):
        with closing(Engine(shop.store, transactions=lend)) as engine:
            assert engine.transaction("a", work, 1, scope="orders") == 1
    assert (shop.orders(), shop.records()) == ([1], 1)


@THRESHOLDS
def test_what_cursors_an_event_loop_has_is_its_own_affair_too(shop, threshold):
    """L9."""

    async def lend():
        return await psycopg.AsyncConnection.connect(
            shop.place, cursor_factory=psycopg.AsyncRawCursor, prepare_threshold=threshold
        )

    async def work(number):
        connection = current_operation().connection
        await connection.execute("insert into orders values ($1)", (number,))
        return number

    async def main():
        for _ in range(2):
            async with AsyncEngine(shop.store, transactions=lend) as engine:
                assert await engine.transaction("a", work, 1, scope="orders") == 1

    asyncio.run(main())
    assert (shop.orders(), shop.records()) == ([1], 1)


@THRESHOLDS
@pytest.mark.parametrize("encoding", ["latin1", "sql_ascii", "utf8"])
def test_a_key_may_have_letters_that_the_session_does_not_know(shop, threshold, encoding):
    """L9: it goes as bytes, and is kept as what it is."""

    def lend():
        return psycopg.connect(shop.place, client_encoding=encoding, prepare_threshold=threshold)

    keys = ("plain", "é1", "Ž1", "鍵")
    for _ in range(2):
        with closing(Engine(shop.store, transactions=lend)) as engine:
            for number, key in enumerate(keys):
                assert engine.transaction(key, insert, number, scope="orders") == number
    assert shop.orders() == [0, 1, 2, 3]
    assert {key for (key,) in shop.ask("select key from coatcheck_records")} == {*keys}
