"""L9: a cancelled caller leaves no open transaction and no lost connection, at whatever await."""

import asyncio
import sqlite3
import threading
from contextlib import asynccontextmanager, closing, contextmanager

import aiosqlite
import asyncmy
import asyncpg
import psycopg
import pymysql
import pytest

from coatcheck import AsyncEngine, Policy, current_operation
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import Executed, Replay
from coatcheck.engine import transactions
from coatcheck.errors import StoreUnavailable
from tests.support.servers import until
from tests.transactions.idioms import IDIOMS, SHOPS, WAITING, Shop, settled

WAIT_S_MAX = 20.0


class Cancelled:
    """*Work* that is cancelled at its wait number *at*; where *again*, at each later one, too."""

    def __init__(self, work, at, *, again):
        self.work = work
        self.at = at
        self.again = again
        self.waits = 0

    def __await__(self):
        steps = self.work.__await__()
        step, value = steps.send, None
        while True:
            try:
                waits_for = step(value)
            except StopIteration as done:
                return done.value
            self.waits += 1
            if self.waits == self.at or (self.again and self.waits > self.at):
                asyncio.current_task().cancel()  # ends what is waited for, as for any other task
            try:
                step, value = steps.send, (yield waits_for)
            except asyncio.CancelledError as error:
                step, value = steps.throw, error


async def cancelled(work, at, *, again):
    """
    Whether *work* waits so often that it was cancelled.

    It may have its result all the same: `asyncio.wait_for` of Python 3.11 loses a cancellation.
    """
    watched = Cancelled(work, at, again=again)

    async def awaited():
        return await watched

    task = asyncio.ensure_future(awaited())
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return watched.waits >= at


AGAIN = pytest.mark.parametrize("again", [False, True], ids=["once", "again and again"])


# --- in every idiom ---------------------------------------------------------------------------


@pytest.fixture(params=[idiom for idiom in IDIOMS if idiom.is_async], ids=lambda idiom: idiom.name)
def idiom(request):
    return request.param


@AGAIN
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a driver's, for what it drops itself
def test_a_caller_cancelled_at_any_await_leaves_the_key_and_the_connection_free(harness, again):
    """L9: record and effect agree, and the same key can be used at once."""

    async def place(number):
        assert await harness.placing(f"k{number}", number) == {"number": number}

    at = harness.done(cancelled_at_each_wait(harness, place, again=again))
    assert harness.shop.orders() == list(range(1, at + 1))
    assert harness.shop.records() == at


@AGAIN
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_refusal_cancelled_at_any_await_leaves_the_key_and_the_connection_free(harness, again):
    """L9: at the savepoint and at the way back to it, too."""
    engine, answers = harness.engine, {}

    async def refuse(number):
        id = number.to_bytes(16)
        request = engine.attempts.new_request(id, id, key="k", caller="c", label="orders")
        operation = answers[number] = await engine.begin(request, Policy(mode="transaction"))
        if not isinstance(operation, Replay):
            try:
                await settled(harness.idiom.write(operation.connection, number))
            except BaseException as error:
                await engine.fail(operation, error)
                raise
            refusal = Outcome(OutcomeKind.COMPLETE, b"refused", 402)
            answers[number] = await engine.complete(operation, refusal, status=402)

    at = harness.done(cancelled_at_each_wait(harness, refuse, again=again))
    assert {type(answer) for answer in answers.values()} == {Executed, Replay}
    assert (harness.shop.orders(), harness.shop.records()) == ([], at)


async def cancelled_at_each_wait(harness, work, *, again):
    """Cancel *work* once at each of its waits, and then let it do the same; how many waits."""
    await settled(harness.engine.ensure_started())
    at, is_cancelled = 0, True
    while is_cancelled:
        at += 1
        is_cancelled = await cancelled(work(at), at, again=again)
        assert not harness.engine.attempts.in_transaction
        await work(at)
    return at


# --- one connection, which is its owner's -----------------------------------------------------


# Not asyncmy: see below.
KEPT = {
    "psycopg": ("postgres", lambda shop: psycopg.AsyncConnection.connect(shop.place)),
    "asyncpg": ("postgres", lambda shop: asyncpg.connect(shop.place)),
    "aiosqlite": ("sqlite", lambda shop: aiosqlite.connect(shop.place)),
    "threads-sqlite": ("sqlite", Shop.connect),
    "threads-postgres": ("postgres", Shop.connect),
    "threads-mysql": ("mysql", Shop.connect),
}


async def seven():
    return 7


async def order(number):
    await current_operation().connection.execute(f"insert into orders values ({number:d})")
    return number


async def place_one(number):
    with closing(current_operation().connection.cursor()) as cursor:
        cursor.execute(f"insert into orders values ({number:d})")
    return number


@AGAIN
@pytest.mark.parametrize("driver", KEPT)
def test_a_connection_that_stays_its_owners_is_idle_afterwards(driver, again, tmp_path):
    """L9: it can be used again at once, whatever we were doing on it."""
    kind, connect = KEPT[driver]
    shop = SHOPS[kind](tmp_path)
    handler = place_one if driver.startswith("threads") else order

    async def story():
        connection = await settled(connect(shop))
        async with AsyncEngine(shop.store, transactions=connection) as engine:
            at, is_cancelled = 0, True
            while is_cancelled:
                at += 1
                work = engine.transaction(f"k{at}", handler, at, scope="s")
                is_cancelled = await cancelled(work, at, again=again)
                assert await engine.transaction(f"p{at}", handler, -at, scope="s") == -at
                assert await engine.transaction(f"k{at}", handler, at, scope="s") == at
        await settled(connection.close())
        return at

    at = asyncio.run(story())
    assert shop.orders() == [*range(-at, 0), *range(1, at + 1)]
    assert shop.records() == 2 * at


def test_a_connection_that_its_driver_has_closed_is_not_said_to_be_in_a_transaction(tmp_path):
    """D2: asyncmy closes one on which it is cancelled, and that is an outage."""
    shop = SHOPS["mysql"](tmp_path)
    place = dict(shop.place)
    place["db"] = place.pop("database")

    async def story():
        async with AsyncEngine(shop.store) as engine:
            at, is_cancelled, lost = 0, True, 0
            while is_cancelled:
                at += 1
                connection = await asyncmy.connect(**place)
                work = engine.transaction(f"k{at}", seven, scope="s", connection=connection)
                is_cancelled = await cancelled(work, at, again=False)
                try:
                    again = engine.transaction(f"p{at}", seven, scope="s", connection=connection)
                    assert await again == 7
                except StoreUnavailable:
                    lost += 1
                connection.close()
            return lost

    assert asyncio.run(story()) > 0


def test_a_caller_cancelled_while_it_waits_for_a_file_does_not_lock_it_later(tmp_path):
    """L9: aiosqlite's thread goes on waiting, and gets the lock when its caller is gone."""
    shop = SHOPS["sqlite"](tmp_path)

    async def story():
        connection = await aiosqlite.connect(shop.place, timeout=WAIT_S_MAX)
        async with AsyncEngine(shop.store, transactions=connection) as engine:
            await engine.transaction("a", seven, scope="s")
            began = asyncio.Event()
            await connection.set_trace_callback(lambda _: loop.call_soon_threadsafe(began.set))
            with closing(sqlite3.connect(shop.place, isolation_level=None)) as other:
                loop = asyncio.get_running_loop()
                other.execute("begin immediate")
                task = asyncio.ensure_future(engine.transaction("b", seven, scope="s"))
                await began.wait()
                task.cancel()
                await asyncio.sleep(0)
                other.execute("rollback")
                await asyncio.wait([task])
                assert task.cancelled()
                assert not connection.in_transaction
                other.execute("begin immediate")
                other.execute("rollback")
            assert await engine.transaction("b", seven, scope="s") == 7
        await connection.close()

    asyncio.run(story())


LOCKS = {
    "the claim": "lock table coatcheck_records in exclusive mode",
    "the commit": "select pg_advisory_lock(7)",
}


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("step", LOCKS)
def test_a_caller_cancelled_during_a_round_trip_leaves_its_connection_usable(
    driver, step, tmp_path
):
    """L9: while the server executes the claim, or the commit."""
    shop = SHOPS["postgres"](tmp_path)
    shop.ask(
        "create function wait() returns trigger language plpgsql as"
        " 'begin perform pg_advisory_xact_lock(7); return null; end'"
    )
    shop.ask(
        "create constraint trigger waits after insert on orders deferrable initially deferred"
        " for each row execute function wait()"
    )

    async def story():
        connection = await KEPT[driver][1](shop)
        async with AsyncEngine(shop.store, transactions=connection) as engine:
            await engine.ensure_started()
            with closing(psycopg.connect(shop.place)) as other:
                other.execute(LOCKS[step])
                task = asyncio.ensure_future(engine.transaction("a", order, 1, scope="s"))
                await asyncio.to_thread(until, lambda: shop.ask(WAITING["postgres"]) == [(1,)])
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (shop.orders(), shop.records()) == ([], 0)
            assert await engine.transaction("a", order, 1, scope="s") == 1
        await connection.close()

    asyncio.run(story())
    assert shop.orders() == [1]


# --- when it goes back ------------------------------------------------------------------------


@AGAIN
def test_a_caller_cancelled_while_its_connection_goes_back_leaves_the_key_free(tmp_path, again):
    """L9: the handler has failed, and the pool takes its time."""
    shop = SHOPS["postgres"](tmp_path)

    async def fail():
        raise ValueError("no")

    async def story():
        returning, may_return = asyncio.Event(), asyncio.Event()
        async with asyncpg.create_pool(shop.place, min_size=1, max_size=1) as pool:

            @asynccontextmanager
            async def acquiring():
                async with pool.acquire() as connection:
                    try:
                        yield connection
                    finally:
                        returning.set()
                        await may_return.wait()

            async with AsyncEngine(shop.store, transactions=acquiring) as engine:
                task = asyncio.ensure_future(engine.transaction("a", fail, scope="s"))
                await returning.wait()
                for _ in range(3 if again else 1):
                    task.cancel()
                    await asyncio.sleep(0)
                may_return.set()
                await asyncio.wait([task])
                assert task.cancelled()
                assert not engine.attempts.in_transaction
                assert await engine.transaction("a", seven, scope="s") == 7

    asyncio.run(asyncio.wait_for(story(), WAIT_S_MAX))


# --- threads ----------------------------------------------------------------------------------


class Far(pymysql.Connection):
    """A server that is so far away that one can act before its commit is there."""

    def __init__(self, **place):
        super().__init__(**place)
        self.commits, self.may_commit = threading.Event(), threading.Event()

    def commit(self):
        self.commits.set()
        assert self.may_commit.wait(WAIT_S_MAX)
        super().commit()


class OneOnly:
    """A pool of one connection, as many have written."""

    def __init__(self, connection):
        self.kept = connection
        self.room = threading.Semaphore(1)

    @contextmanager
    def connection(self):
        with self.room:
            yield self.kept

    def is_back(self):
        is_there = self.room.acquire(blocking=False)
        if is_there:
            self.room.release()
        return is_there


async def place_two(number):
    """Two orders, with a wait in between."""
    connection = current_operation().connection
    for each in (number, number + 1):
        await asyncio.to_thread(insert, connection, each)
    return number


def insert(connection, number):
    with connection.cursor() as cursor:
        cursor.execute("insert into orders values (%s)", (number,))


def test_a_connection_is_not_given_back_before_its_late_commit_has_ended(tmp_path):
    """L9: otherwise it would commit half of the next operation."""
    shop = SHOPS["mysql"](tmp_path)
    pool = OneOnly(Far(**shop.place))

    async def story():
        async with AsyncEngine(shop.store, transactions=pool) as engine:
            first = asyncio.ensure_future(engine.transaction("a", place_two, 1, scope="s"))
            await asyncio.to_thread(pool.kept.commits.wait, WAIT_S_MAX)
            first.cancel()
            second = asyncio.ensure_future(engine.transaction("b", place_two, 3, scope="s"))
            await asyncio.sleep(0)
            first.cancel()
            assert not pool.is_back()
            pool.kept.may_commit.set()
            await asyncio.wait([first])
            assert first.cancelled()
            assert await second == 3
            assert await engine.transaction("a", place_two, 1, scope="s") == 1

    asyncio.run(story())
    pool.kept.close()
    assert (shop.orders(), shop.records()) == ([1, 2, 3, 4], 2)


def test_a_cancelled_caller_does_not_wait_for_ever_for_a_silent_server(tmp_path, monkeypatch):
    """D2: the key is free then, and the connection goes back when the driver is done with it."""
    monkeypatch.setattr(transactions, "ROLLBACK_S_MAX", 0.05)
    shop = SHOPS["mysql"](tmp_path)
    pool = OneOnly(Far(**shop.place))

    async def story():
        policy = Policy(mode="transaction", wait="0s")
        async with AsyncEngine(shop.store, policy, transactions=pool) as engine:
            task = asyncio.ensure_future(engine.transaction("a", place_two, 1, scope="s"))
            await asyncio.to_thread(pool.kept.commits.wait, WAIT_S_MAX)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert not engine.attempts.in_transaction
            assert not pool.is_back()
            pool.kept.may_commit.set()
            await asyncio.to_thread(until, pool.is_back)
            assert await engine.transaction("a", place_two, 1, scope="s") == 1

    asyncio.run(story())
    pool.kept.close()
    assert shop.orders() == [1, 2]


def test_a_connection_that_comes_too_late_goes_back_at_once(tmp_path):
    """L9: a caller that was cancelled while it waited does not keep it."""
    shop = SHOPS["mysql"](tmp_path)
    pool = OneOnly(shop.connect())

    async def story():
        async with AsyncEngine(shop.store, transactions=pool) as engine:
            await engine.transaction("w", seven, scope="s")
            asked = threading.Event()
            connect = pool.connection

            def acquiring():
                asked.set()
                return connect()

            with pool.room:
                work = engine.transaction("a", seven, scope="s", connection=acquiring)
                task = asyncio.ensure_future(work)
                await asyncio.to_thread(asked.wait, WAIT_S_MAX)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
                assert not engine.attempts.in_transaction
            assert await engine.transaction("a", seven, scope="s") == 7

    asyncio.run(story())
    assert pool.is_back()
    pool.kept.close()


class SlowToReport(pymysql.Connection):
    """A connection that takes its time to report whether it is in a transaction."""

    asked, may_report = threading.Event(), threading.Event()
    is_slow = False
    _status = 0

    @property
    def server_status(self):
        if self.is_slow:
            self.asked.set()
            assert self.may_report.wait(WAIT_S_MAX)
        return self._status

    @server_status.setter
    def server_status(self, status):
        self._status = status


def test_a_caller_cancelled_while_it_is_refused_rolls_nothing_back(tmp_path):
    """L9: the transaction is its owner's, also if the refusal reaches a cancelled caller."""
    shop = SHOPS["mysql"](tmp_path)
    connection = SlowToReport(**shop.place)

    async def story():
        async with AsyncEngine(shop.store, transactions=connection) as engine:
            await engine.transaction("a", seven, scope="s")
            insert(connection, 1)
            connection.is_slow = True
            task = asyncio.ensure_future(engine.transaction("b", seven, scope="s"))
            await asyncio.to_thread(connection.asked.wait, WAIT_S_MAX)
            task.cancel()
            await asyncio.sleep(0)
            connection.is_slow = False
            connection.may_report.set()
            await asyncio.wait([task])
            assert task.cancelled()

    asyncio.run(story())
    connection.commit()
    connection.close()
    assert shop.orders() == [1]
