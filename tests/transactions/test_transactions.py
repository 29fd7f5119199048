"""L9: what a transaction on the application's connection must withstand, on real databases."""

import asyncio
import os
import signal
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from psycopg_pool import ConnectionPool
from sqlalchemy import orm

from coatcheck import AsyncEngine, Engine, KeyRing, Policy, current_operation
from coatcheck.core.record import IN_DOUBT, STATE_NAMES, Swap
from coatcheck.errors import (
    KeyBusy,
    Misconfigured,
    NotCommitted,
    OutcomeUnknown,
    StoreUnavailable,
)
from coatcheck.stores import Query, open_store
from tests.support.servers import until
from tests.support.servers.pgbouncer import Pgbouncer
from tests.support.servers.postgres import Postgres, postgres
from tests.transactions.idioms import (
    CODES,
    SHOPS,
    WAITING,
    Order,
    Shop,
    alchemy_url,
    settled,
)

WAIT_S_MAX = 20.0
EITHER = pytest.mark.parametrize("code", CODES.values(), ids=CODES)
PATIENT = Policy(mode="transaction", wait="20s")
HASTY = Policy(mode="transaction", wait="1s")
PROMPT = Policy(mode="transaction", wait="0s")


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def anywhere(request, tmp_path):
    """A shop on each database."""
    return SHOPS[request.param](tmp_path)


@pytest.fixture
def shop(tmp_path):
    """A shop on PostgreSQL."""
    return SHOPS["postgres"](tmp_path)


@pytest.fixture
def open_engine():
    """Makes engines, and closes them."""
    made = []

    def make(shop, policy=None, **options):
        made.append(Engine(shop.store, policy, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def place(number):
    cursor = current_operation().connection.cursor()
    cursor.execute(f"insert into orders values ({number:d})")
    cursor.close()
    return number


async def nothing():
    pass


# --- duplicates -------------------------------------------------------------------------------


@contextmanager
def held(engine, end=place, key="a"):
    """An operation of *engine* whose handler waits until the block is over; its future result."""
    began, may_end = threading.Event(), threading.Event()

    def wait(number):
        began.set()
        assert may_end.wait(WAIT_S_MAX)
        return end(number)

    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(engine.transaction, key, wait, 1, scope="orders")
        assert began.wait(WAIT_S_MAX)
        try:
            yield result
        finally:
            may_end.set()


def fail(number):
    place(number)
    raise ValueError("no")


ROW_LOCKS = pytest.mark.parametrize("kind", ["postgres", "mysql"])  # SQLite locks the file


@pytest.fixture
def threads():
    with ThreadPoolExecutor() as threads:
        yield threads


@ROW_LOCKS
@pytest.mark.parametrize("end", [place, fail])
def test_a_duplicate_elsewhere_waits_on_the_row(kind, end, tmp_path, open_engine, threads):
    """L9, L1: two nodes at once; the second replays, or runs if the first was undone."""
    shop = SHOPS[kind](tmp_path)
    with held(open_engine(shop, PATIENT), end) as first:
        second = threads.submit(
            open_engine(shop, PATIENT).transaction, "a", place, 1, scope="orders"
        )
        until(lambda: shop.ask(WAITING[kind])[0][0] > 0)
    assert str(first.exception()) == ("no" if end is fail else "None")
    assert second.result() == 1
    assert shop.orders() == [1]


@ROW_LOCKS
def test_a_duplicate_that_has_waited_long_enough_is_refused_as_busy(kind, tmp_path, open_engine):
    """L4: it waits for the row no longer than the policy says."""
    shop = SHOPS[kind](tmp_path)
    second = open_engine(shop, HASTY)
    with held(open_engine(shop, PATIENT)), pytest.raises(KeyBusy):
        second.transaction("a", place, 1, scope="orders")
    assert second.transaction("a", place, 1, scope="orders") == 1
    assert shop.orders() == [1]


# What ends a statement long before the policy's wait is over.
STATEMENT_TIMEOUT = {
    "postgres": "set session statement_timeout = '200ms'",
    "mysql": "set session max_statement_time = 0.2",
}


@ROW_LOCKS
def test_a_statement_timeout_of_the_application_does_not_shorten_the_wait(
    kind, tmp_path, open_engine, threads
):
    """L3: the row was held until then, and that is no outage."""
    shop = SHOPS[kind](tmp_path)

    def connect():
        connection = shop.connect()
        with closing(connection.cursor()) as cursor:
            cursor.execute(STATEMENT_TIMEOUT[kind])
        connection.commit()
        return connection

    patient, hasty = (open_engine(shop, p, transactions=connect) for p in (PATIENT, HASTY))
    with held(open_engine(shop, PATIENT)) as first:
        second = threads.submit(patient.transaction, "a", place, 1, scope="orders")
        with pytest.raises(KeyBusy):
            hasty.transaction("a", place, 1, scope="orders")
        assert not second.done()
    assert first.result() == second.result() == 1
    assert shop.orders() == [1]


@ROW_LOCKS
def test_a_claim_that_has_waited_is_itself_waited_for_no_longer_than_any(
    kind, tmp_path, open_engine, threads
):
    """L4: the limit that it had for its own wait is gone when it has its row."""
    shop = SHOPS[kind](tmp_path)
    with ExitStack() as stack:
        with held(open_engine(shop, PATIENT), fail) as first:
            entered = threads.submit(stack.enter_context, held(open_engine(shop, PATIENT)))
            until(lambda: shop.ask(WAITING[kind])[0][0] > 0)
        second = entered.result(WAIT_S_MAX)
        third = threads.submit(open_engine(shop, HASTY).transaction, "a", place, 1, scope="orders")
        with pytest.raises(KeyBusy):
            third.result(WAIT_S_MAX / 2)
    assert isinstance(first.exception(), ValueError)
    assert second.result() == 1
    assert shop.orders() == [1]


def test_two_tables_of_one_database_do_not_wait_for_each_other(shop, open_engine):
    """S1: records of the same name in two stores are two operations."""
    shop.ask("create schema other")
    elsewhere = f"{shop.store}{'&' if '?' in shop.store else '?'}schema=other"
    with closing(Engine(elsewhere, HASTY)) as second, held(open_engine(shop, PATIENT)) as first:
        assert second.transaction("a", lambda: 2, scope="orders") == 2
    assert first.result() == 1


def test_the_handlers_own_statements_wait_as_they_always_did(shop, open_engine):
    """The limit for the claim's row is taken back by the statement that made the claim."""

    def lock_timeout():
        return current_operation().connection.execute("show lock_timeout").fetchone()[0]

    def hurried():
        connection = psycopg.connect(shop.place)
        connection.execute("set lock_timeout = '7s'")
        connection.commit()
        return connection

    assert open_engine(shop, HASTY).transaction("a", lock_timeout) == "0"
    engine = open_engine(shop, HASTY, transactions=hurried)
    assert engine.transaction("b", lock_timeout) == "7s"


def test_duplicates_in_one_process_take_one_connection_in_all(shop, open_engine):
    """L9: a waiting duplicate holds no connection, which the first one may need."""
    with ConnectionPool(shop.place, min_size=1, max_size=1, timeout=1) as pool:
        engine = open_engine(shop, PATIENT, transactions=pool)
        may_end = threading.Event()

        def slow(number):
            assert may_end.wait(WAIT_S_MAX)
            return place(number)

        with ThreadPoolExecutor(max_workers=8) as threads:
            all_of_them = [
                threads.submit(engine.transaction, "a", slow, 1, scope="orders") for _ in range(8)
            ]
            until(lambda: any(map(engine.attempts.waiters.count, engine.attempts.in_transaction)))
            may_end.set()
            assert [one.result() for one in all_of_them] == [1] * 8
    assert shop.orders() == [1]


def test_a_waiting_duplicate_runs_when_the_first_was_undone(anywhere, open_engine):
    """L9: nothing remains of the first, so one of the others executes."""
    engine = open_engine(anywhere, PATIENT)
    may_end = threading.Event()
    runs = []

    def fail_once(number):
        runs.append(number)
        if len(runs) == 1:
            assert may_end.wait(WAIT_S_MAX)
            raise ValueError("no")
        return place(number)

    with ThreadPoolExecutor(max_workers=4) as threads:
        all_of_them = [
            threads.submit(engine.transaction, "a", fail_once, 1, scope="orders") for _ in range(4)
        ]
        until(
            lambda: any(
                engine.attempts.waiters.count(id) == 3 for id in engine.attempts.in_transaction
            )
        )
        may_end.set()
        ends = [one.exception() or one.result() for one in all_of_them]
    assert sorted(map(str, ends)) == ["1", "1", "1", "no"]
    assert anywhere.orders() == [1]


def test_a_transaction_longer_than_its_lease_is_waited_for(shop):
    """L5: it holds its row for as long as it is open; duplicates in this process wait and do not poll."""

    async def main():
        policy = Policy(mode="transaction", lease="50ms", wait="10s")
        async with AsyncEngine(shop.store, policy) as engine:

            async def slow(number):
                connection = current_operation().connection
                await connection.execute("insert into orders values (%s)", (number,))
                await connection.execute("select pg_sleep(0.3)")
                return number

            two = (engine.transaction("a", slow, 1, scope="s") for _ in range(2))
            return await asyncio.wait_for(asyncio.gather(*two), WAIT_S_MAX)

    assert asyncio.run(main()) == [1, 1]
    assert shop.orders() == [1]


# --- commits that fail ------------------------------------------------------------------------


def test_a_server_that_ends_the_session_is_an_outage_and_no_more(shop, open_engine):
    """D2: the next one has another connection, although the pool did not know of it."""
    engine = open_engine(shop)

    def lose(number):
        place(number)
        pid = current_operation().connection.info.backend_pid
        shop.ask(f"select pg_terminate_backend({pid})")
        return number

    with pytest.raises(StoreUnavailable, match="at the commit"):
        engine.transaction("a", lose, 1, scope="orders")
    assert shop.orders() == []
    assert engine.transaction("a", place, 1, scope="orders") == 1
    # A connection that dies while it is idle in the pool is replaced when it is used.
    own = "application_name = 'coatcheck' and state = 'idle'"
    shop.ask(f"select pg_terminate_backend(pid) from pg_stat_activity where {own}")
    assert engine.transaction("b", place, 2, scope="orders") == 2
    assert shop.orders() == [1, 2]


def test_waiting_for_a_sync_connection_does_not_block_giving_one_back(shop):
    """D2: an event loop with a pool of four, and more at a time than there are threads."""

    async def put(number):
        await asyncio.to_thread(place, number)
        return number

    async def many(engine):
        asked = (engine.transaction(f"key-{n}", put, n, scope="orders") for n in range(64))
        return await asyncio.gather(*asked, return_exceptions=True)

    async def story(pool):
        async with AsyncEngine(shop.store, transactions=pool) as engine:
            return await many(engine)

    with ConnectionPool(shop.place, min_size=4, max_size=4, timeout=4) as pool:
        assert asyncio.run(story(pool)) == list(range(64))


def test_waiting_for_a_lock_in_a_thread_does_not_block_the_commit_of_its_holder(tmp_path):
    """L9, D2: one file, more claims at a time than there are threads, and all of them commit."""
    shop = SHOPS["sqlite"](tmp_path)

    async def story():
        async with AsyncEngine(shop.store, PATIENT, transactions=shop.connect) as engine:
            asked = (engine.transaction(f"{n}", place, n, scope="orders") for n in range(60))
            return await asyncio.gather(*asked, return_exceptions=True)

    assert asyncio.run(story()) == list(range(60))
    assert shop.orders() == list(range(60))


def session_pid():
    """The process id of this session's server process."""
    return current_operation().connection.info.backend_pid


@contextmanager
def silent(pid):
    """The session of *pid* says nothing for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def own():
    """A server of the test's own, which is waited for for a second; its URL."""
    server = Postgres()
    yield f"{server.url}?timeout=1s"
    server.remove()


@EITHER
def test_a_claim_gives_up_on_a_server_that_does_not_answer(own, code):
    """D2: nothing has run yet, so the claim is refused as it is in record mode."""

    async def pid_of_session():
        return session_pid()

    async def main():
        async with code.engine(Shop("postgres", own, own), HASTY) as engine:
            pid = await engine.transaction("a", pid_of_session, scope="orders")
            with silent(pid), pytest.raises(StoreUnavailable):  # it is idle in the pool
                await engine.transaction("b", pid_of_session, scope="orders")
            assert await engine.transaction("b", pid_of_session, scope="orders") != pid

    code.run(main())


def test_statements_of_the_handler_have_no_time_limit_of_ours(shop, open_engine):
    """L9: the limit is for our own statements."""
    engine = open_engine(Shop(shop.kind, f"{shop.store}&timeout=200ms", shop.place), PROMPT)

    def slow(number):
        current_operation().connection.execute("select pg_sleep(0.5)")
        return place(number)

    for number in (1, 2):
        assert engine.transaction(f"{number}", slow, number, scope="orders") == number


def test_a_session_that_was_idle_for_too_long_is_exchanged(shop, open_engine):
    """D2: the server has ended it by `idle_session_timeout`; no operation fails."""
    role = f"idler_{shop.store.rpartition('_')[2]}"
    shop.ask(f"create role {role} login superuser")
    shop.ask(f"alter role {role} set idle_session_timeout = '1s'")
    url = shop.store.replace("postgres@", f"{role}@")
    engine = open_engine(Shop(shop.kind, url, url))
    pid = engine.transaction("a", session_pid, scope="orders")
    there = f"select count(*) from pg_stat_activity where pid = {pid:d}"
    until(lambda: shop.ask(there) == [(0,)])
    assert engine.transaction("b", place, 2, scope="orders") == 2


def test_a_session_that_was_idle_in_a_transaction_for_too_long_is_an_outage(shop, open_engine):
    """D2, L9: `idle_in_transaction_session_timeout` undoes it; the next one gets another."""
    engine = open_engine(shop)

    def dawdle(number):
        there = f"select count(*) from pg_stat_activity where pid = {session_pid():d}"
        limit = "set local idle_in_transaction_session_timeout = '50ms'"
        current_operation().connection.execute(limit)
        until(lambda: shop.ask(there) == [(0,)])
        return number

    with pytest.raises(StoreUnavailable):
        engine.transaction("a", dawdle, 1, scope="orders")
    assert shop.records() == 0
    assert engine.transaction("a", place, 1, scope="orders") == 1


def test_a_session_within_a_transaction_of_its_tests_claims_in_a_savepoint(shop):
    """L9: as SQLAlchemy has it for test suites, which undo everything in the end."""
    alchemy = sa.create_engine(alchemy_url(shop, "psycopg"))

    def put(number):
        current_operation().connection.add(Order(number=number))
        return number

    with closing(Engine(shop.store)) as engine, alchemy.connect() as outer:
        session = orm.Session(outer, join_transaction_mode="create_savepoint")
        with outer.begin() as whole:
            outer.execute(sa.text("insert into orders values (1)"))
            with session:
                assert engine.transaction("a", put, 2, scope="orders", connection=session) == 2
            assert outer.execute(sa.text("select count(*) from orders")).scalar() == 2
            whole.rollback()
    alchemy.dispose()
    assert (shop.orders(), shop.records()) == ([], 0)


BY_THE_WAY = {
    "sqlite": lambda connection: connection.executescript("select 1"),
    "mysql": lambda connection: connection.cursor().execute("create table more (number integer)"),
}


@pytest.mark.parametrize("kind", BY_THE_WAY)
def test_an_implicit_commit_is_noticed(kind, tmp_path, open_engine):
    """L9: the handler has not said so, but its claim and what it wrote are there without an end."""
    shop = SHOPS[kind](tmp_path)

    def commit(number):
        place(number)
        BY_THE_WAY[kind](current_operation().connection)
        return place(number + 1)

    with pytest.raises(NotCommitted, match="has committed"):
        open_engine(shop).transaction("a", commit, 1, scope="orders")


def test_what_a_handler_has_committed_by_itself_does_not_run_again_by_itself(
    anywhere, open_engine, caplog
):
    """L9: its claim is stored without a completion, and part of its work may be missing."""
    engine = open_engine(anywhere, Policy(lease="1s"))

    def commit(number):
        place(number)
        current_operation().connection.commit()
        return number

    with pytest.raises(NotCommitted, match="has committed"):
        engine.transaction("a", commit, 1, scope="orders")
    with pytest.raises(OutcomeUnknown):
        engine.transaction("a", commit, 1, scope="orders")
    assert anywhere.orders() == [1]
    assert anywhere.ask("select state from coatcheck_records") == [(IN_DOUBT,)]
    assert caplog.text.count("is in doubt: its handler committed by itself; see coatcheck") == 1


@EITHER
def test_psycopgs_own_block_in_a_handler_is_the_handlers_own_commit(shop, code):
    """L9: `with connection` commits and closes, so there is no outage, and nothing runs again."""
    runs = []

    async def place_in_block(number):
        runs.append(number)
        connection = current_operation().connection
        await settled(connection.execute("insert into orders values (%s)", (number,)))
        leave = connection.__aexit__ if code.is_async else connection.__exit__
        await settled(leave(None, None, None))

    async def connect_async():
        return await psycopg.AsyncConnection.connect(shop.place)

    async def main():
        connect = connect_async if code.is_async else shop.connect
        async with code.engine(shop, transactions=connect) as engine:
            with pytest.raises(NotCommitted, match="closed"):
                await engine.transaction("a", place_in_block, 1, scope="orders")
            with pytest.raises(OutcomeUnknown):
                await engine.transaction("a", place_in_block, 1, scope="orders")

    code.run(main())
    assert runs == shop.orders() == [1]


# --- again from the start ---------------------------------------------------------------------


@pytest.mark.parametrize("retries", [0, 2])
def test_a_serialization_failure_is_retried_only_where_that_is_said_to_be_safe(
    shop, open_engine, retries
):
    """L9: a real one, between this transaction and another one."""
    policy = Policy(mode="transaction", transaction_retries=retries)

    def serializable():
        connection = psycopg.connect(shop.place)
        connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        return connection

    engine = open_engine(shop, policy, transactions=serializable)
    runs = []

    def count_and_add(number):
        runs.append(number)
        connection = current_operation().connection
        (found,) = connection.execute("select count(*) from orders").fetchone()
        if len(runs) == 1:
            with closing(serializable()) as rival:
                (seen,) = rival.execute("select count(*) from orders").fetchone()
                rival.execute(f"insert into orders values ({100 + seen:d})")
                rival.commit()
        return place(number + found)

    if retries:
        assert engine.transaction("a", count_and_add, 1) == 2
        assert (runs, shop.orders()) == ([1, 1], [2, 100])
    else:
        with pytest.raises(psycopg.errors.SerializationFailure):
            engine.transaction("a", count_and_add, 1)
        assert (runs, shop.orders(), shop.records()) == ([1], [100], 0)


# --- sources of connections --------------------------------------------------------------------


def test_an_operation_within_another_on_its_connection_is_refused_and_undoes_nothing(
    anywhere, open_engine
):
    """L9: the outer one goes on, and commits all that it has done, once."""
    engine = open_engine(anywhere)
    with closing(anywhere.connect()) as connection:

        def outer(number):
            place(number)
            with pytest.raises(Misconfigured, match="in a transaction already"):
                engine.transaction("inner", place, 7, connection=connection)
            return place(number + 1)

        for _ in range(2):
            assert engine.transaction("outer", outer, 1, connection=connection) == 2
    assert (anywhere.orders(), anywhere.records()) == ([1, 2], 1)


def test_one_connection_may_be_used_again_and_again(anywhere, open_engine):
    """L9: it comes back idle, whatever became of the operation."""
    engine = open_engine(anywhere)
    with closing(anywhere.connect()) as connection:
        for number in range(5):
            assert engine.transaction(f"k{number}", place, number, connection=connection) == number
            with pytest.raises(ZeroDivisionError):
                engine.transaction(f"z{number}", lambda: 1 / 0, connection=connection, scope="s")
    assert anywhere.orders() == list(range(5))


def test_a_source_without_connections_is_refused_with_a_sentence(shop, tmp_path, open_engine):
    """S3: found when it is set up, or at the first use where it cannot be known before."""
    other = SHOPS["sqlite"](tmp_path)
    with pytest.raises(Misconfigured, match="provides no connections"):
        Engine(shop.store, transactions=7).close()
    with pytest.raises(Misconfigured, match="a str provides no connections") as refused:
        Engine(shop.store, transactions="postgresql://shop:hunter2@localhost/shop").close()
    assert "hunter2" not in str(refused.value)
    with pytest.raises(Misconfigured, match="needs a store in a SQL database"):
        Engine("memory://", Policy(mode="transaction"))
    with pytest.raises(Misconfigured, match="needs a store in a SQL database"):
        Engine("memory://").transaction("a", place, 1)
    engine = open_engine(shop)
    with closing(other.connect()) as connection:
        connection.execute("insert into orders values (1)")
        for source, sentence in (
            (connection, "the store is in postgresql, and the connection leads to sqlite"),
            (lambda: "a string", "is not a supported connection"),
            (psycopg.AsyncConnection.connect, "use them with an AsyncEngine"),
        ):
            with pytest.raises(Misconfigured, match=sentence):
                engine.transaction("a", place, 1, connection=source)
        connection.commit()  # nothing was begun or rolled back on it
    assert (shop.records(), other.orders()) == (0, [1])


def test_a_connection_of_one_thread_is_refused_where_there_are_several(tmp_path, open_engine):
    """S3: on an event loop, and in another thread than the one that opened it."""
    shop = SHOPS["sqlite"](tmp_path)

    connection = sqlite3.connect(shop.place)

    async def put(number):
        return place(number)

    async def main():
        async with AsyncEngine(shop.store, transactions=lambda: connection) as engine:
            await engine.transaction("a", put, 1)

    with closing(connection), ThreadPoolExecutor() as threads:
        with pytest.raises(Misconfigured, match="check_same_thread=False"):
            asyncio.run(main())
        engine = open_engine(shop, transactions=connection)
        with pytest.raises(Misconfigured, match="check_same_thread=False"):
            threads.submit(engine.transaction, "a", place, 1).result()
        assert engine.transaction("a", place, 1) == 1
    assert shop.orders() == [1]


def test_a_connection_to_another_database_of_the_same_kind_is_noticed(tmp_path, open_engine):
    """L9: its record would be in a database where no request reads it."""
    ours, theirs = SHOPS["sqlite"](tmp_path), SHOPS["sqlite"](tmp_path)
    engine = open_engine(ours)
    open_engine(theirs).transaction("a", place, 1, scope="orders")
    sentence = "lead to the store's own database"
    with closing(theirs.connect()) as other, pytest.raises(StoreUnavailable, match=sentence):
        engine.transaction("a", place, 1, scope="orders", connection=other)


def test_an_operation_tells_whether_it_has_a_connection(anywhere, open_engine):
    """L9: none outside transaction mode, and none any more when all is over."""
    engine = open_engine(anywhere)
    kept = []
    engine.transaction("a", lambda: kept.append(current_operation()), scope="s")
    with pytest.raises(NotCommitted, match="is over"):
        _ = kept[0].connection
    with pytest.raises(Misconfigured, match="not in transaction mode"):
        engine.run("b", lambda: current_operation().connection, scope="s")


# --- beside the rest --------------------------------------------------------------------------


def test_what_is_committed_is_an_ordinary_record(anywhere, open_engine):
    """It is found, swept and replayed like any other, also in record mode."""
    engine = open_engine(anywhere)
    engine.transaction("order-7", place, 7, scope="orders")
    assert engine.run("order-7", place, 7, scope="orders") == 7
    with closing(open_store(anywhere.store)) as store:
        (record,) = store.find(Query(label="orders")).records
    assert (record.key, STATE_NAMES[record.state], record.attempt) == ("order-7", "completed", 1)


def test_an_attempt_that_was_given_back_before_is_gone_on_with(anywhere, open_engine):
    """L3: of a node that still runs in record mode, say."""
    engine = open_engine(anywhere)
    with pytest.raises(ZeroDivisionError):
        engine.run("a", lambda number: number / 0, 3, scope="orders")
    assert anywhere.records() == 1
    assert engine.transaction("a", place, 3, scope="orders") == 3
    with closing(open_store(anywhere.store)) as store:
        (record,) = store.find(Query()).records
    assert (record.attempt, STATE_NAMES[record.state]) == (2, "completed")


def test_what_is_sealed_at_rest_is_sealed_here_too(anywhere, open_engine):
    """X1: the key ring is the engine's, whatever the source of the connection."""
    engine = open_engine(anywhere, keyring=KeyRing({"one": b"k" * 32}))

    def secret(number):
        place(number)
        return "a secret"

    assert engine.transaction("a", secret, 1) == "a secret"
    (response,) = anywhere.ask(f"select response from {anywhere.table}")[0]
    assert b"secret" not in bytes(response)
    fresh = open_engine(anywhere, keyring=KeyRing({"one": b"k" * 32}))
    assert fresh.transaction("a", secret, 1) == "a secret"


def test_the_async_engines_own_connections_are_bounded_and_used_again(shop):
    """L9: sixty at once share a few, and those are closed at the end."""

    async def main():
        async with AsyncEngine(shop.store) as engine:

            async def insert(number):
                connection = current_operation().connection
                await connection.execute("insert into orders values (%s)", (number,))

            await asyncio.gather(*(engine.transaction(f"{n}", insert, n) for n in range(60)))
            return shop.ask("select count(*) from pg_stat_activity where datname is not null")

    ((connections,),) = asyncio.run(main())
    assert shop.orders() == list(range(60))
    assert connections < 30


# --- behind a pooler --------------------------------------------------------------------------


@pytest.fixture
def pooled():
    """A shop on PostgreSQL, behind a PgBouncer with fewer sessions than there are writers."""
    schema = "pooled_shop"
    server = postgres()
    with psycopg.connect(server.url) as connection:
        connection.execute(f"drop schema if exists {schema} cascade")
        connection.execute(f"create schema {schema}")
        connection.execute(f"create table {schema}.orders (number integer primary key)")
    bouncer = Pgbouncer(server, sessions=3)
    place = f"{server.url}?options=-c%20search_path%3D{schema}"
    yield Shop("postgres", f"{bouncer.url}?schema={schema}", place)
    bouncer.remove()


INSERT = "insert into pooled_shop.orders values (%s)"


def insert(number):
    current_operation().connection.execute(INSERT, (number,))
    return number


@pytest.mark.parametrize("is_own", [True, False])
def test_many_threads_commit_behind_pgbouncer(pooled, open_engine, is_own):
    """L9, D1: the next transaction meets another session, where a prepared name is not ours."""
    with ExitStack() as stack:
        pool = None
        if not is_own:  # the application switches prepared statements off, as it has to
            place, options = pooled.store.partition("?")[0], {"prepare_threshold": None}
            pool = ConnectionPool(place, min_size=6, max_size=6, kwargs=options, open=True)
            stack.enter_context(pool)
        engine = open_engine(pooled, transactions=pool)
        with ThreadPoolExecutor(6) as threads:
            done = threads.map(lambda n: engine.transaction(f"{n}", insert, n), range(200))
            assert list(done) == list(range(200))
    assert pooled.orders() == list(range(200))


@pytest.mark.parametrize("is_own", [True, False])
def test_an_event_loop_commits_behind_pgbouncer(pooled, is_own):
    """L9, D1: on connections of the store's own, and on those of asyncpg."""

    async def insert(number):
        arguments = (INSERT, (number,)) if is_own else (INSERT.replace("%s", "$1"), number)
        await current_operation().connection.execute(*arguments)
        return number

    async def main():
        async with AsyncExitStack() as stack:
            pool = None
            if not is_own:
                place, sizes = pooled.store.partition("?")[0], {"min_size": 6, "max_size": 6}
                pool = asyncpg.create_pool(place, statement_cache_size=0, **sizes)
                await stack.enter_async_context(pool)
            engine = await stack.enter_async_context(AsyncEngine(pooled.store, transactions=pool))
            runs = (engine.transaction(f"{n}", insert, n) for n in range(200))
            return await asyncio.gather(*runs)

    assert asyncio.run(main()) == list(range(200))
    assert pooled.orders() == list(range(200))


def test_without_a_pooler_statements_are_prepared(shop, open_engine):
    """L9: what is sent again and again is planned once."""

    def prepared(number):
        connection = current_operation().connection
        connection.execute("insert into orders values (%s)", (number,))
        found = connection.execute("select count(*) from pg_prepared_statements").fetchone()
        return found[0]

    engine = open_engine(shop, Policy(mode="transaction"))
    assert [engine.run(f"{n}", prepared, n, scope="orders") for n in range(8)][-1] > 0


def test_a_handler_that_committed_marks_no_later_attempt_in_doubt(tmp_path):
    """L5, L9: the record then belongs to an attempt that has taken over."""
    path = tmp_path / "shop.db"

    def connect():
        return sqlite3.connect(path, isolation_level=None)

    with (
        Engine(f"sqlite:///{path}", transactions=connect) as engine,
        closing(open_store(f"sqlite:///{path}")) as store,
    ):

        def commits():
            current_operation().connection.commit()
            (record,) = store.find(Query()).records
            change = {"version": record.version + 1, "attempt": 2, "nonce": record.nonce + 1}
            assert store.swap([Swap(record.id, record.version, record._replace(**change))]) == [
                None
            ]

        with pytest.raises(NotCommitted):
            engine.transaction("k", commits, scope="orders")
        (record,) = store.find(Query()).records
        assert (STATE_NAMES[record.state], record.attempt) == ("running", 2)
