"""L9: what a transaction on the application's connection must withstand, on real databases."""

import asyncio
import os
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from psycopg_pool import ConnectionPool
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import AsyncSession

from coatcheck import AsyncEngine, Engine, KeyRing, Policy, current_operation
from coatcheck.core.lifecycle import ClaimRequest, first_attempt
from coatcheck.core.record import GONE, IN_DOUBT, STATE_NAMES, Swap
from coatcheck.engine.transactions import OperationTransaction, ThreadAccess
from coatcheck.errors import (
    KeyBusy,
    Misconfigured,
    NotCommitted,
    OutcomeUnknown,
    StoreUnavailable,
)
from coatcheck.stores import Query, open_store
from tests.support.servers.pgbouncer import Pgbouncer
from tests.support.servers.postgres import Postgres, postgres
from tests.transactions.idioms import (
    SHOPS,
    Harness,
    Order,
    Shop,
    alchemy_url,
    async_engine,
    idiom_called,
)

WAIT_S_MAX = 20.0
PATIENT = Policy(mode="transaction", wait="20s")
HASTY = Policy(mode="transaction", wait="1s")
PROMPT = Policy(mode="transaction", wait="0s")
TICKET = ClaimRequest(b"i" * 16, b"f" * 16, 1_800_000_000_000, 7)


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


def until(condition):
    """Wait until *condition* holds, which it soon does."""
    deadline = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


WAITING = {
    "postgres": "select count(*) from pg_locks where not granted",
    # Not `innodb_trx`: whoever reads that more often than ten times a second reads the same again.
    "mysql": "select variable_value + 0 from information_schema.global_status"
    " where variable_name = 'innodb_row_lock_current_waits'",
}


# --- duplicates -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_a_duplicate_elsewhere_waits_on_the_row_and_then_replays(kind, tmp_path, open_engine):
    """L9, L1: two nodes at once; the database itself keeps the second one waiting."""
    shop = SHOPS[kind](tmp_path)
    first, second = open_engine(shop, PATIENT), open_engine(shop, PATIENT)
    began, may_end = threading.Event(), threading.Event()

    def slow(number):
        began.set()
        assert may_end.wait(WAIT_S_MAX)
        return place(number)

    with ThreadPoolExecutor() as threads:
        one = threads.submit(first.transaction, "a", slow, 1, scope="orders")
        assert began.wait(WAIT_S_MAX)
        two = threads.submit(second.transaction, "a", place, 1, scope="orders")
        until(lambda: shop.ask(WAITING[kind])[0][0] > 0)
        may_end.set()
        assert one.result() == two.result() == 1
    assert shop.orders() == [1]


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_a_duplicate_elsewhere_runs_after_the_first_was_undone(kind, tmp_path, open_engine):
    """L9: what waits on a row that goes away again may claim it."""
    shop = SHOPS[kind](tmp_path)
    first, second = open_engine(shop, PATIENT), open_engine(shop, PATIENT)
    began, may_end = threading.Event(), threading.Event()

    def fail(number):
        place(number)
        began.set()
        assert may_end.wait(WAIT_S_MAX)
        raise ValueError("no")

    with ThreadPoolExecutor() as threads:
        one = threads.submit(first.transaction, "a", fail, 1, scope="orders")
        assert began.wait(WAIT_S_MAX)
        two = threads.submit(second.transaction, "a", place, 1, scope="orders")
        until(lambda: shop.ask(WAITING[kind])[0][0] > 0)
        may_end.set()
        with pytest.raises(ValueError, match="no"):
            one.result()
        assert two.result() == 1
    assert shop.orders() == [1]


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_a_duplicate_that_has_waited_long_enough_is_refused_as_busy(kind, tmp_path, open_engine):
    """L4: it waits for the row no longer than the policy says."""
    shop = SHOPS[kind](tmp_path)
    first, second = open_engine(shop, PATIENT), open_engine(shop, HASTY)
    began, may_end = threading.Event(), threading.Event()

    def slow(number):
        place(number)
        began.set()
        assert may_end.wait(WAIT_S_MAX)
        return number

    with ThreadPoolExecutor() as threads:
        one = threads.submit(first.transaction, "a", slow, 1, scope="orders")
        assert began.wait(WAIT_S_MAX)
        try:
            with pytest.raises(KeyBusy):
                second.transaction("a", place, 1, scope="orders")
        finally:
            may_end.set()
        assert one.result() == 1
    assert second.transaction("a", place, 1, scope="orders") == 1
    assert shop.orders() == [1]


# What cuts a statement off long before anybody here has waited enough.
CUT_OFF = {
    "postgres": "set session statement_timeout = '200ms'",
    "mysql": "set session max_statement_time = 0.2",
}


@pytest.mark.parametrize("kind", CUT_OFF)
def test_who_may_not_wait_in_one_statement_waits_all_the_same(kind, tmp_path, open_engine):
    """L3: the row was held until then, and that is no outage."""
    shop = SHOPS[kind](tmp_path)

    def hurried():
        connection = shop.connect()
        with closing(connection.cursor()) as cursor:
            cursor.execute(CUT_OFF[kind])
        connection.commit()
        return connection

    first = open_engine(shop, PATIENT)
    patient, hasty = (open_engine(shop, p, transactions=hurried) for p in (PATIENT, HASTY))
    began, may_end = threading.Event(), threading.Event()

    def slow(number):
        began.set()
        assert may_end.wait(WAIT_S_MAX)
        return place(number)

    with ThreadPoolExecutor() as threads:
        one = threads.submit(first.transaction, "a", slow, 1, scope="orders")
        assert began.wait(WAIT_S_MAX)
        two = threads.submit(patient.transaction, "a", place, 1, scope="orders")
        try:
            with pytest.raises(KeyBusy):
                hasty.transaction("a", place, 1, scope="orders")
            assert not two.done()
        finally:
            may_end.set()
        assert one.result() == two.result() == 1
    assert shop.orders() == [1]


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_nobody_waits_too_long_for_who_has_waited_itself(kind, tmp_path, open_engine):
    """L4: whoever claims after a wait is waited for like one who did not have to."""
    shop = SHOPS[kind](tmp_path)
    first, second, third = (open_engine(shop, policy) for policy in (PATIENT, PATIENT, HASTY))
    began = [threading.Event(), threading.Event()]
    may_end = [threading.Event(), threading.Event()]

    def fail(number):
        began[0].set()
        assert may_end[0].wait(WAIT_S_MAX)
        raise ValueError("no")

    def slow(number):
        began[1].set()
        assert may_end[1].wait(WAIT_S_MAX)
        return place(number)

    with ThreadPoolExecutor() as threads:
        one = threads.submit(first.transaction, "a", fail, 1, scope="orders")
        assert began[0].wait(WAIT_S_MAX)
        two = threads.submit(second.transaction, "a", slow, 1, scope="orders")
        until(lambda: shop.ask(WAITING[kind])[0][0] > 0)
        may_end[0].set()
        assert began[1].wait(WAIT_S_MAX)
        three = threads.submit(third.transaction, "a", place, 1, scope="orders")
        try:
            with pytest.raises(KeyBusy):
                three.result(WAIT_S_MAX / 2)
        finally:
            may_end[1].set()
        with pytest.raises(ValueError, match="no"):
            one.result()
        assert two.result() == 1
    assert shop.orders() == [1]


def test_two_tables_of_one_database_do_not_wait_for_each_other(shop, open_engine):
    """S1: records of the same name in two stores are two operations."""
    shop.ask("create schema other")
    elsewhere = f"{shop.store}{'&' if '?' in shop.store else '?'}schema=other"
    first, second = open_engine(shop, PATIENT), Engine(elsewhere, HASTY)
    began, may_end = threading.Event(), threading.Event()

    def slow(number):
        began.set()
        assert may_end.wait(WAIT_S_MAX)
        return place(number)

    with closing(second), ThreadPoolExecutor() as threads:
        one = threads.submit(first.transaction, "a", slow, 1, scope="orders")
        assert began.wait(WAIT_S_MAX)
        try:
            assert second.transaction("a", lambda: 2, scope="orders") == 2
        finally:
            may_end.set()
        assert one.result() == 1


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
    """L9: who waits in line holds nothing that the first one may need."""
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


def test_who_stood_in_line_runs_when_the_first_was_undone(anywhere, open_engine):
    """L9: nothing remains of the first, so the next in line is the first."""
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
    """L5: it holds its row for as long as it is open; nobody here goes round and round for it."""

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


def test_what_nobody_has_committed_yet_is_nothing_to_go_by(shop, open_engine):
    """L9: a request that waits for a claim that waited in vain reads the store itself."""
    engine = open_engine(shop, PATIENT)
    told = []
    claim = first_attempt(TICKET, PATIENT, GONE, TICKET.now_ms)
    transaction = OperationTransaction(engine.attempts, engine.database(), ThreadAccess())
    assert transaction._enter(claim) is None
    engine.attempts.waiters.join(claim.id, told.append, 1)
    transaction._leave(claim._replace(nonce=-1))
    assert [record.version for record in told] == [0]


# --- commits that fail ------------------------------------------------------------------------


def test_a_constraint_that_fails_at_the_commit_is_no_success(shop, open_engine):
    """L9: the driver's own error, and nothing is there."""
    shop.ask("create table lines (number integer references orders deferrable initially deferred)")
    engine = open_engine(shop)

    def line(number):
        current_operation().connection.execute(f"insert into lines values ({number:d})")

    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        engine.transaction("a", line, 5)
    assert shop.records() == 0
    assert shop.ask("select * from lines") == []
    engine.transaction("b", place, 5)
    engine.transaction("a", line, 5)
    assert shop.records() == 2


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


async def session_pid_async():
    """The same for event loops."""
    return session_pid()


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


def test_a_server_that_falls_silent_is_not_waited_for_for_ever(own, open_engine):
    """D2: nothing has run yet, so the claim is refused as it is in record mode."""
    engine = open_engine(Shop("postgres", own, own), HASTY)
    pid = engine.transaction("a", session_pid, scope="orders")
    with ThreadPoolExecutor(1) as threads, silent(pid):  # the session that is idle in the pool
        asked = threads.submit(engine.transaction, "b", session_pid, scope="orders")
        error = asked.exception(WAIT_S_MAX / 2)  # raises, where it still waits
    assert isinstance(error, StoreUnavailable)
    assert engine.transaction("b", session_pid, scope="orders") != pid


def test_an_event_loop_does_not_wait_for_a_silent_server_either(own):
    """D2."""

    async def story():
        async with AsyncEngine(own, HASTY) as engine:
            pid = await engine.transaction("a", session_pid_async, scope="orders")
            with silent(pid):
                asked = engine.transaction("b", session_pid_async, scope="orders")
                with pytest.raises(StoreUnavailable):
                    await asyncio.wait_for(asked, WAIT_S_MAX / 2)
            assert await engine.transaction("b", session_pid_async, scope="orders") != pid

    asyncio.run(story())


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
    shop.ask(f"alter role {role} set idle_session_timeout = '100ms'")
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


def test_what_a_handler_has_committed_by_itself_does_not_run_again_by_itself(anywhere, open_engine):
    """L9: its claim stands without an end, and nobody can tell whether all of it is done."""
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


@pytest.mark.parametrize("is_async", [False, True])
def test_psycopgs_own_block_in_a_handler_is_the_handlers_own_commit(shop, open_engine, is_async):
    """L9: `with connection` commits and closes, so there is no outage, and nothing runs again."""
    runs = []

    def place_in_block(number):
        runs.append(number)
        with current_operation().connection as connection:
            connection.execute("insert into orders values (%s)", (number,))

    async def place_in_async_block(number):
        runs.append(number)
        async with current_operation().connection as connection:
            await connection.execute("insert into orders values (%s)", (number,))

    async def connect():
        return await psycopg.AsyncConnection.connect(shop.place)

    async def twice():
        async with AsyncEngine(shop.store, transactions=connect) as engine:
            with pytest.raises(NotCommitted, match="closed"):
                await engine.transaction("a", place_in_async_block, 1, scope="orders")
            with pytest.raises(OutcomeUnknown):
                await engine.transaction("a", place_in_async_block, 1, scope="orders")

    if is_async:
        asyncio.run(twice())
    else:
        engine = open_engine(shop, transactions=lambda: psycopg.connect(shop.place))
        with pytest.raises(NotCommitted, match="closed"):
            engine.transaction("a", place_in_block, 1, scope="orders")
        with pytest.raises(OutcomeUnknown):
            engine.transaction("a", place_in_block, 1, scope="orders")
    assert runs == shop.orders() == [1]


def test_a_statement_that_failed_undoes_all_whatever_the_handler_says(shop, open_engine):
    """L9: a handler that swallows an error of PostgreSQL's has an aborted transaction."""
    engine = open_engine(shop)

    def swallow(number):
        place(number)
        with pytest.raises(psycopg.errors.UndefinedTable):
            current_operation().connection.execute("select * from nowhere")
        return number

    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        engine.transaction("a", swallow, 1)
    assert (shop.orders(), shop.records()) == ([], 0)


def test_a_savepoint_is_the_handlers_own_affair(shop, open_engine):
    """L9: what is undone within it stays undone, and the rest is committed."""

    def careful(number):
        connection = current_operation().connection
        place(number)
        with pytest.raises(psycopg.errors.UniqueViolation), connection.transaction():
            place(number)
        return number

    assert open_engine(shop).transaction("a", careful, 1) == 1
    assert shop.orders() == [1]


# --- again from the start ---------------------------------------------------------------------


@pytest.mark.parametrize("retries", [0, 2])
def test_a_serialization_failure_is_retried_only_where_that_is_said_to_be_safe(
    shop, open_engine, retries
):
    """L9: a real one, between this transaction and somebody else's."""
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


def test_what_collides_again_and_again_is_given_up(shop, open_engine):
    """L9: as often as the policy says, and not once more."""
    engine = open_engine(shop, Policy(mode="transaction", transaction_retries=2))
    runs = []

    def collide():
        runs.append(1)
        raise psycopg.errors.DeadlockDetected

    with pytest.raises(psycopg.errors.DeadlockDetected):
        engine.transaction("a", collide)
    assert len(runs) == 3
    assert shop.records() == 0


# --- sources of connections --------------------------------------------------------------------


def test_a_connection_in_a_transaction_already_is_refused(anywhere, open_engine):
    """L9: losing against a duplicate rolls back, and that must not be somebody's earlier work."""
    engine = open_engine(anywhere)
    with closing(anywhere.connect()) as connection:
        cursor = connection.cursor()
        cursor.execute("insert into orders values (1)")
        with pytest.raises(Misconfigured, match="in a transaction already"):
            engine.transaction("a", place, 2, connection=connection)
        connection.commit()
        assert engine.transaction("a", place, 2, connection=connection) == 2
    assert anywhere.orders() == [1, 2]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_who_is_refused_on_an_event_loop_keeps_its_earlier_work(shop, driver):
    """L9: a session of SQLAlchemy's, and the driver's connection under it."""

    async def main():
        alchemy = async_engine(shop, driver)
        async with AsyncEngine(shop.store) as engine, AsyncSession(alchemy) as session:
            await session.execute(sa.text("insert into orders values (1)"))
            with pytest.raises(Misconfigured, match="in a transaction already"):
                await engine.transaction("a", nothing, connection=session)
            raw = await (await session.connection()).get_raw_connection()
            with pytest.raises(Misconfigured, match="in a transaction already"):
                await engine.transaction("a", nothing, connection=raw.driver_connection)
            await session.commit()
        await alchemy.dispose()

    asyncio.run(main())
    assert shop.orders() == [1]


def test_a_session_that_is_refused_keeps_its_earlier_work(anywhere, open_engine):
    """L9: the same where SQLAlchemy knows of the transaction."""
    drivers = {"sqlite": "pysqlite", "postgres": "psycopg", "mysql": "pymysql"}
    alchemy = sa.create_engine(alchemy_url(anywhere, drivers[anywhere.kind]))
    engine = open_engine(anywhere)
    with orm.Session(alchemy) as session:
        session.execute(sa.text("insert into orders values (1)"))
        with pytest.raises(Misconfigured, match="in a transaction already"):
            engine.transaction("a", place, 2, connection=session)
        session.commit()
    alchemy.dispose()
    assert anywhere.orders() == [1]


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


def test_a_connection_to_another_database_is_refused_and_left_unchanged(
    shop, tmp_path, open_engine
):
    """L9: it is refused before anything is begun on it."""
    other = SHOPS["sqlite"](tmp_path)
    with closing(other.connect()) as connection:
        connection.execute("insert into orders values (1)")
        with pytest.raises(Misconfigured, match="the store is in postgresql"):
            open_engine(shop).transaction("a", place, 2, connection=connection)
        connection.commit()
    assert other.orders() == [1]


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
    with pytest.raises(Misconfigured, match="needs a store in a SQL database"):
        Engine("memory://", Policy(mode="transaction"))
    with pytest.raises(Misconfigured, match="needs a store in a SQL database"):
        Engine("memory://").transaction("a", place, 1)
    engine = open_engine(shop)
    with closing(other.connect()) as connection:
        for source, sentence in (
            (connection, "the store is in postgresql, and the connection leads to sqlite"),
            (lambda: "a string", "is not a supported connection"),
            (psycopg.AsyncConnection.connect, "use them with an AsyncEngine"),
        ):
            with pytest.raises(Misconfigured, match=sentence):
                engine.transaction("a", place, 1, connection=source)
    assert shop.records() == 0


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
    """L9: its record would be where nobody looks for it."""
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


def test_a_cancelled_operation_leaves_nothing_and_gives_its_connection_back(shop):
    """L9: a timeout of the application's own, around all of it."""
    harness = Harness(idiom_called("psycopg-async"), shop)
    began = asyncio.Event()

    async def endless():
        began.set()
        await asyncio.Event().wait()

    async def cancelled():
        task = asyncio.ensure_future(harness.engine.transaction("a", harness.handler(forever), 1))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def forever(_number):
        return endless()

    try:
        harness.done(cancelled())
        assert (shop.orders(), shop.records()) == ([], 0)
        assert harness.place("a", 1) == {"number": 1}
    finally:
        harness.close()


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


def test_many_threads_commit_behind_pgbouncer(pooled, open_engine):
    """L9, D1: the next transaction meets another session, where a prepared name is not ours."""
    engine = open_engine(pooled, Policy(mode="transaction"))

    def insert(number):
        current_operation().connection.execute(INSERT, (number,))
        return number

    with ThreadPoolExecutor(6) as threads:
        done = threads.map(lambda n: engine.run(f"{n}", insert, n, scope="orders"), range(200))
        assert list(done) == list(range(200))
    assert pooled.orders() == list(range(200))


def test_an_event_loop_commits_behind_pgbouncer(pooled):
    """L9, D1: the same without threads."""

    async def insert(number):
        await current_operation().connection.execute(INSERT, (number,))
        return number

    async def main():
        async with AsyncEngine(pooled.store, Policy(mode="transaction")) as engine:
            runs = (engine.run(f"{n}", insert, n, scope="orders") for n in range(200))
            return await asyncio.gather(*runs)

    assert asyncio.run(main()) == list(range(200))
    assert pooled.orders() == list(range(200))


def test_the_applications_own_connections_may_be_behind_pgbouncer(pooled, open_engine):
    """L9, D1: it says so as it has to for its own statements: nothing is to be prepared."""
    place = pooled.store.partition("?")[0]
    options = {"prepare_threshold": None}
    with ConnectionPool(place, min_size=6, max_size=6, kwargs=options, open=True) as pool:
        engine = open_engine(pooled, transactions=pool)

        def insert(number):
            current_operation().connection.execute(INSERT, (number,))
            return number

        with ThreadPoolExecutor(6) as threads:
            done = threads.map(lambda n: engine.transaction(f"{n}", insert, n), range(200))
            assert list(done) == list(range(200))
    assert pooled.orders() == list(range(200))


def test_connections_of_asyncpgs_may_be_behind_pgbouncer(pooled):
    """L9, D1: the same, in that driver's words."""

    async def insert(number):
        text = INSERT.replace("%s", "$1")
        await current_operation().connection.execute(text, number)
        return number

    async def main():
        place, sizes = pooled.store.partition("?")[0], {"min_size": 6, "max_size": 6}
        async with (
            asyncpg.create_pool(place, statement_cache_size=0, **sizes) as pool,
            AsyncEngine(pooled.store, transactions=pool) as engine,
        ):
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


def test_who_ends_by_itself_parks_nobody_who_has_taken_over_since(tmp_path):
    """L5, L9: what stands then is another attempt's."""
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
