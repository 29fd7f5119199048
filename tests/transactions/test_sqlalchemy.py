"""L9 on SQLAlchemy's connections and sessions, as applications set them up."""

import asyncio
from contextlib import closing

import pytest
import sqlalchemy as sa
from flask import Flask, jsonify
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker

from coatcheck import AsyncEngine, Engine, Policy, current_operation
from coatcheck.errors import Misconfigured
from coatcheck.server.wsgi import IdempotencyMiddleware
from coatcheck.transactions import adapter_for
from coatcheck.transactions.contract import call_async
from tests.transactions.idioms import SHOPS, Base, Order, alchemy_url, async_engine

DRIVERS = {"sqlite": "pysqlite", "postgres": "psycopg", "mysql": "pymysql"}
ASYNC_DRIVERS = {"sqlite": "aiosqlite", "postgres": "asyncpg", "mysql": "asyncmy"}


@pytest.fixture(params=DRIVERS)
def shop(request, tmp_path):
    return SHOPS[request.param](tmp_path)


@pytest.fixture
def alchemy(shop):
    """Makes engines of SQLAlchemy's for the shop, and disposes of them."""
    made = []

    def make(**options):
        made.append(sa.create_engine(alchemy_url(shop, DRIVERS[shop.kind]), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.dispose()


def put(number):
    current_operation().connection.add(Order(number=number))
    return number


async def put_async(number):
    return put(number)


def write(number):
    current_operation().connection.execute(sa.insert(Order).values(number=number))
    return number


async def write_async(number):
    await current_operation().connection.execute(sa.insert(Order).values(number=number))
    return number


def run(shop, transactions, work=put, number=1):
    """The results of *work* on connections of *transactions*, first and as a replay on another node."""
    ends = []
    for _ in range(2):
        with Engine(shop.store, transactions=transactions) as engine:
            ends.append(engine.transaction("a", work, number, scope="orders"))
    return ends


def run_async(shop, make, work=put_async):
    """The same for event loops; *make* makes the source from an engine of SQLAlchemy."""

    async def main():
        engine, ends = async_engine(shop, ASYNC_DRIVERS[shop.kind]), []
        try:
            for _ in range(2):
                async with AsyncEngine(shop.store, transactions=make(engine)) as guard:
                    ends.append(await guard.transaction("a", work, 1, scope="orders"))
            return ends, engine.pool.checkedout()
        finally:
            await engine.dispose()

    return asyncio.run(main())


# --- those that commit by themselves ----------------------------------------------------------

BY_THEMSELVES = {
    "as an isolation level": {"isolation_level": "AUTOCOMMIT"},
    "as the driver has it": {"connect_args": {"autocommit": True}},
}


@pytest.mark.parametrize("way", BY_THEMSELVES)
@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_what_commits_by_itself_is_refused_and_writes_nothing(kind, way, tmp_path):
    """L9: what the handler writes there is committed before its record."""
    shop = SHOPS[kind](tmp_path)
    engine = sa.create_engine(alchemy_url(shop, DRIVERS[kind]), **BY_THEMSELVES[way])
    for source in (engine, orm.sessionmaker(engine)):
        with pytest.raises(Misconfigured, match="in AUTOCOMMIT mode"):
            run(shop, source, write)
    engine.dispose()
    assert (shop.orders(), shop.records()) == ([], 0)


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_an_event_loop_is_refused_what_commits_by_itself_too(kind, tmp_path):
    """L9."""
    shop = SHOPS[kind](tmp_path)
    with pytest.raises(Misconfigured, match="in AUTOCOMMIT mode"):
        run_async(shop, lambda engine: engine.execution_options(isolation_level="AUTOCOMMIT"))
    assert (shop.orders(), shop.records()) == ([], 0)


def begins_by_event(engine, word):
    """As SQLAlchemy recommends it for SQLite, with the driver's transactions switched off."""
    sa.event.listen(engine, "connect", lambda dbapi, _: setattr(dbapi, "isolation_level", None))
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(word))


WORDS = pytest.mark.parametrize("word", ["BEGIN", "BEGIN IMMEDIATE"])


@WORDS
@pytest.mark.parametrize("make", [lambda engine: engine, orm.sessionmaker], ids=["core", "orm"])
def test_sqlite_may_begin_as_sqlalchemy_recommends_it(tmp_path, word, make):
    """L9: by an event of its own, and only once."""
    shop = SHOPS["sqlite"](tmp_path)
    engine = sa.create_engine(alchemy_url(shop, "pysqlite"))
    begins_by_event(engine, word)
    assert run(shop, make(engine), write) == [1, 1]
    engine.dispose()
    assert (shop.orders(), shop.records()) == ([1], 1)


@WORDS
@pytest.mark.parametrize("make", [lambda engine: engine, async_sessionmaker], ids=["core", "orm"])
def test_an_event_loop_may_begin_as_sqlalchemy_recommends_it_too(tmp_path, word, make):
    """L9."""
    shop = SHOPS["sqlite"](tmp_path)

    heard = []

    def begun(engine):
        if engine not in heard:
            begins_by_event(engine.sync_engine, word)
            heard.append(engine)
        return make(engine)

    assert run_async(shop, begun, write_async) == ([1, 1], 0)
    assert (shop.orders(), shop.records()) == ([1], 1)


# --- sessions of a thread or a task -----------------------------------------------------------


def test_of_a_scoped_session_the_session_in_its_scope_is_used(shop, alchemy):
    """L9: it is in its scope while the handler runs, and removed at the end."""
    sessions = orm.scoped_session(orm.sessionmaker(alchemy()))

    def work(number):
        assert sessions() is current_operation().connection
        sessions.add(Order(number=number))
        return number

    assert run(shop, sessions, work) == [1, 1]
    assert not sessions.registry.has()
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_a_scoped_session_that_was_there_before_stays(shop, alchemy):
    """L9: it may hold objects of the application."""
    sessions = orm.scoped_session(orm.sessionmaker(alchemy()))
    session = sessions()
    assert run(shop, sessions) == [1, 1]
    assert sessions() is session
    sessions.remove()


def test_a_site_may_remove_its_scoped_session_after_each_request(shop, alchemy):
    """L9: as Flask's own handbook has it, before the response has left; so before our commit."""
    sessions = orm.scoped_session(orm.sessionmaker(alchemy(pool_size=1, max_overflow=0)))
    app, runs = Flask(__name__), []
    app.teardown_appcontext(lambda _error: sessions.remove())

    @app.post("/orders/<int:number>")
    def place(number):
        runs.append(number)
        sessions.add(Order(number=number))
        return jsonify(number=number), 500 if len(runs) == 1 else 201

    bare, answers = app.wsgi_app, []
    for _ in range(3):
        app.wsgi_app = IdempotencyMiddleware(
            bare, store=shop.store, policy=Policy(mode="transaction"), transactions=sessions
        )
        answers.append(app.test_client().post("/orders/1", headers={"Idempotency-Key": "a"}))
        app.wsgi_app.engine.close()
    assert [answer.status_code for answer in answers] == [500, 201, 201]
    assert (runs, shop.orders(), shop.records()) == ([1, 1], [1], 1)


def test_of_an_async_scoped_session_the_session_in_its_scope_is_used(shop):
    """L9."""

    def make(engine):
        return async_scoped_session(async_sessionmaker(engine), asyncio.current_task)

    assert run_async(shop, make) == ([1, 1], 0)
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_an_async_scoped_session_is_gone_whoever_undoes_it(shop):
    """L9: a task that is cancelled leaves that to another one."""

    async def main():
        engine = async_engine(shop, ASYNC_DRIVERS[shop.kind])
        scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
        adapter = adapter_for(scoped)
        try:
            await call_async(adapter.start())
            await asyncio.create_task(call_async(adapter.rollback()))
            return scoped.registry.registry, engine.pool.checkedout()
        finally:
            await engine.dispose()

    assert asyncio.run(main()) == ({}, 0)


def test_a_scoped_session_of_threads_is_refused_on_an_event_loop(shop, alchemy):
    """S3: there a transaction goes from thread to thread."""
    sessions = orm.scoped_session(orm.sessionmaker(alchemy()))

    async def main():
        async with AsyncEngine(shop.store, transactions=sessions) as engine:
            await engine.transaction("a", put_async, 1, scope="orders")

    with pytest.raises(Misconfigured, match="scoped_session belongs to its thread"):
        asyncio.run(main())
    assert (shop.orders(), shop.records()) == ([], 0)


# --- sessions that begin, end or are bound in other ways --------------------------------------


def test_a_session_that_does_not_begin_by_itself_is_begun(shop, alchemy):
    """L9."""
    assert run(shop, orm.sessionmaker(alchemy(), autobegin=False)) == [1, 1]
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_an_async_session_that_does_not_begin_by_itself_is_begun(shop):
    """L9."""
    ends = run_async(shop, lambda engine: async_sessionmaker(engine, autobegin=False))
    assert ends == ([1, 1], 0)
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_a_session_with_several_databases_is_refused_unless_one_is_its_own(shop, alchemy):
    """S3: we cannot know which of them has the records."""
    engine = alchemy()
    with pytest.raises(Misconfigured, match="create it with bind="):
        run(shop, orm.sessionmaker(binds={Base: engine}))
    assert run(shop, orm.sessionmaker(engine, binds={Base: engine})) == [1, 1]
    assert (shop.orders(), shop.records()) == ([1], 1)


@pytest.mark.parametrize("is_session", [False, True])
def test_a_savepoint_that_is_left_open_is_committed_with_the_rest(shop, alchemy, is_session):
    """L9: it is in front of ours when that is released."""
    engine = alchemy()

    def nested(number):
        connection = current_operation().connection
        connection.begin_nested()
        write(number)
        connection.begin_nested()
        return write(number + 1)

    source = orm.sessionmaker(engine) if is_session else engine
    assert run(shop, source, nested) == [2, 2]
    assert (shop.orders(), shop.records()) == ([1, 2], 1)


def test_a_savepoint_of_an_async_session_may_be_left_open_too(shop):
    """L9."""

    async def nested(number):
        session = current_operation().connection
        await session.begin_nested()
        session.add(Order(number=number))
        return number

    assert run_async(shop, async_sessionmaker, nested) == ([1, 1], 0)
    assert (shop.orders(), shop.records()) == ([1], 1)


def test_a_savepoint_that_was_left_open_and_broken_undoes_everything(shop, alchemy):
    """L9: a session that has failed to write commits nothing."""
    shop.ask("insert into orders values (1)")

    def broken(number):
        connection = current_operation().connection
        connection.begin_nested()
        connection.add(Order(number=number))
        return number

    with pytest.raises(sa.exc.IntegrityError):
        run(shop, orm.sessionmaker(alchemy()), broken)
    assert (shop.orders(), shop.records()) == ([1], 0)


def test_a_session_is_left_as_it_was_before(shop, alchemy):
    """A session that stays its owner's can be closed by him, and used again."""
    sessions = orm.scoped_session(orm.sessionmaker(alchemy()))
    with closing(sessions()) as session:
        assert run(shop, sessions) == [1, 1]
        assert "close" not in vars(session)
    sessions.remove()
