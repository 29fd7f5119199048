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
from tests.transactions.idioms import (
    CODES,
    SHOPS,
    Base,
    Order,
    alchemy_url,
    async_engine,
    drive,
    settled,
)
from tests.transactions.sites import AsgiSite, WsgiSite

DRIVERS = {"sqlite": "pysqlite", "postgres": "psycopg", "mysql": "pymysql"}
ASYNC_DRIVERS = {"sqlite": "aiosqlite", "postgres": "asyncpg", "mysql": "asyncmy"}
EITHER = pytest.mark.parametrize("code", CODES.values(), ids=CODES)
SYNC = CODES["sync"]


@pytest.fixture(params=DRIVERS)
def shop(request, tmp_path):
    return SHOPS[request.param](tmp_path)


@pytest.fixture
def alchemy(shop):
    """An engine of SQLAlchemy's for sync code."""
    engine = sa.create_engine(alchemy_url(shop, DRIVERS[shop.kind]))
    yield engine
    engine.dispose()


def engine_of_alchemy(shop, code, **options):
    if code.is_async:
        return async_engine(shop, ASYNC_DRIVERS[shop.kind], **options)
    return sa.create_engine(alchemy_url(shop, DRIVERS[shop.kind]), **options)


def sessionmaker(code):
    return async_sessionmaker if code.is_async else orm.sessionmaker


async def put(number):
    current_operation().connection.add(Order(number=number))
    return number


async def write(number):
    await settled(current_operation().connection.execute(sa.insert(Order).values(number=number)))
    return number


def run(shop, code, source, work=put):
    """The results of *work* on connections of *source*, first and as a replay on another node."""

    async def main():
        ends = []
        for _ in range(2):
            async with code.engine(shop, transactions=source) as engine:
                ends.append(await engine.transaction("a", work, 1, scope="orders"))
        return ends

    return main()


def check(shop, code, make, work=put, orders=(1,), **options):
    """*work* commits once on what *make* makes of an engine of SQLAlchemy's, which is idle then."""

    async def main():
        engine = engine_of_alchemy(shop, code, **options)
        try:
            assert await run(shop, code, make(engine), work) == [orders[-1]] * 2
            assert engine.pool.checkedout() == 0
        finally:
            await settled(engine.dispose())

    code.run(main())
    assert (shop.orders(), shop.records()) == ([*orders], 1)


# --- connections that commit by themselves ------------------------------------------------------

AUTOCOMMIT = {
    "as an isolation level": {"isolation_level": "AUTOCOMMIT"},
    "as the driver has it": {"connect_args": {"autocommit": True}},
}


@pytest.mark.parametrize(
    ("code", "way"),
    [*((SYNC, way) for way in AUTOCOMMIT), (CODES["async"], "as an isolation level")],
)
@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_a_connection_in_autocommit_mode_is_refused_and_writes_nothing(kind, code, way, tmp_path):
    """L9: what the handler writes there is committed before its record."""
    shop = SHOPS[kind](tmp_path)

    async def main():
        engine = engine_of_alchemy(shop, code, **AUTOCOMMIT[way])
        for source in (engine, sessionmaker(code)(engine)):
            with pytest.raises(Misconfigured, match="in AUTOCOMMIT mode"):
                await run(shop, code, source, write)
        await settled(engine.dispose())

    code.run(main())
    assert (shop.orders(), shop.records()) == ([], 0)


@EITHER
@pytest.mark.parametrize("word", ["BEGIN", "BEGIN IMMEDIATE"])
@pytest.mark.parametrize("is_session", [False, True], ids=["core", "orm"])
def test_sqlite_may_begin_as_sqlalchemy_recommends_it(tmp_path, code, word, is_session):
    """L9: by an event of its own, with the driver's transactions switched off, and only once."""

    def make(engine):
        core = engine.sync_engine if code.is_async else engine
        sa.event.listen(core, "connect", lambda dbapi, _: setattr(dbapi, "isolation_level", None))
        sa.event.listen(core, "begin", lambda connection: connection.exec_driver_sql(word))
        return sessionmaker(code)(engine) if is_session else engine

    check(SHOPS["sqlite"](tmp_path), code, make, write)


# --- sessions of a thread or a task -----------------------------------------------------------


@EITHER
def test_of_a_scoped_session_the_session_in_its_scope_is_used(shop, code):
    """L9: it is in its scope while the handler runs, and removed at the end."""
    made = []

    def make(engine):
        maker = sessionmaker(code)(engine)
        if code.is_async:
            made.append(async_scoped_session(maker, asyncio.current_task))
        else:
            made.append(orm.scoped_session(maker))
        return made[0]

    async def work(number):
        assert made[0]() is current_operation().connection
        made[0].add(Order(number=number))
        return number

    check(shop, code, make, work)
    assert code.is_async or not made[0].registry.has()


def test_a_scoped_session_that_was_there_before_stays_as_it_was(shop, alchemy):
    """L9: it may hold objects of the application, which can use and close it."""
    sessions = orm.scoped_session(orm.sessionmaker(alchemy))
    with closing(sessions()) as session:
        assert SYNC.run(run(shop, SYNC, sessions)) == [1, 1]
        assert sessions() is session
        assert "close" not in vars(session)
    sessions.remove()


def test_a_site_may_remove_its_scoped_session_after_each_request(shop):
    """L9: as Flask's own handbook has it, before the response has left; so before our commit."""
    engine = engine_of_alchemy(shop, SYNC, pool_size=1, max_overflow=0)
    sessions = orm.scoped_session(orm.sessionmaker(engine))
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
    engine.dispose()
    assert [answer.status_code for answer in answers] == [500, 201, 201]
    assert (runs, shop.orders(), shop.records()) == ([1, 1], [1], 1)


def test_an_async_scoped_session_leaves_its_scope_whichever_task_rolls_back(shop):
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
    sessions = orm.scoped_session(orm.sessionmaker(alchemy))

    async def main():
        async with AsyncEngine(shop.store, transactions=sessions) as engine:
            await engine.transaction("a", put, 1, scope="orders")

    with pytest.raises(Misconfigured, match="scoped_session belongs to its thread"):
        asyncio.run(main())
    assert (shop.orders(), shop.records()) == ([], 0)


# --- sessions that begin, end or are bound in other ways --------------------------------------


@EITHER
def test_a_session_that_does_not_begin_by_itself_is_begun(shop, code):
    """L9."""
    check(shop, code, lambda engine: sessionmaker(code)(engine, autobegin=False))


def test_a_session_with_several_databases_is_refused_unless_one_is_its_own(shop, alchemy):
    """S3: we cannot know which of them has the records."""
    with pytest.raises(Misconfigured, match="create it with bind="):
        SYNC.run(run(shop, SYNC, orm.sessionmaker(binds={Base: alchemy})))
    assert SYNC.run(run(shop, SYNC, orm.sessionmaker(alchemy, binds={Base: alchemy}))) == [1, 1]
    assert (shop.orders(), shop.records()) == ([1], 1)


@EITHER
@pytest.mark.parametrize("is_session", [False, True])
def test_a_savepoint_that_is_left_open_is_committed_with_the_rest(shop, code, is_session):
    """L9: it is inside ours when that is released."""

    async def nested(number):
        connection = current_operation().connection
        await settled(connection.begin_nested())
        await write(number)
        await settled(connection.begin_nested())
        return await write(number + 1)

    def make(engine):
        return sessionmaker(code)(engine) if is_session else engine

    check(shop, code, make, nested, orders=(1, 2))


def test_a_savepoint_that_was_left_open_and_broken_undoes_everything(shop, alchemy):
    """L9: a session that has failed to write commits nothing."""
    shop.ask("insert into orders values (1)")

    async def broken(number):
        connection = current_operation().connection
        connection.begin_nested()
        connection.add(Order(number=number))
        return number

    with pytest.raises(sa.exc.IntegrityError):
        SYNC.run(run(shop, SYNC, orm.sessionmaker(alchemy), broken))
    assert (shop.orders(), shop.records()) == ([1], 0)


# --- refusals -----------------------------------------------------------------------------------


@EITHER
def test_a_session_forgets_what_a_refused_handler_has_added_changed_and_deleted(shop, code):
    """L9: flushed or not, and also in a savepoint that the handler left open."""
    shop.ask("insert into orders values (1), (2), (3)")

    async def decline(_number):
        session = current_operation().connection
        changed, deleted, flushed = [await settled(session.get(Order, n)) for n in (1, 2, 3)]
        await settled(session.delete(flushed))
        session.add(Order(number=5))
        await settled(session.flush())
        await settled(session.begin_nested())
        changed.number = 11
        await settled(session.delete(deleted))
        session.add(Order(number=6))
        return {"error": "declined"}, 402

    async def main():
        alchemy = engine_of_alchemy(shop, code)
        policy, source = Policy(mode="transaction"), sessionmaker(code)(alchemy)
        engine = (AsyncEngine if code.is_async else Engine)(shop.store, policy, transactions=source)
        if code.is_async:
            answers = [await AsgiSite(engine, decline, None).posted(1) for _ in range(2)]
        else:
            answers = WsgiSite(engine, decline, None).post(1, 1)
        await settled(engine.close())
        assert alchemy.pool.checkedout() == 0
        await settled(alchemy.dispose())
        return answers

    first, second = code.run(main())
    assert [first.status, second.status, second.is_replayed] == [402, 402, True]
    assert (shop.orders(), shop.records()) == ([1, 2, 3], 1)


def test_a_session_that_was_there_before_a_refusal_can_be_used_after_it(shop, alchemy):
    """L9: its own objects are in it, and those of the handler are not."""
    shop.ask("insert into orders values (1)")

    async def decline(number):
        kept.number = 11
        session.add(Order(number=number))
        return {"error": "declined"}, 402

    with orm.Session(alchemy) as session:
        kept = session.get(Order, 1)
        session.commit()
        policy = Policy(mode="transaction")
        with closing(Engine(shop.store, policy, transactions=session)) as engine:
            (answer,) = WsgiSite(engine, decline, None).post(2)
        assert answer.status == 402
        assert (kept.number, kept in session, list(session.new)) == (1, True, [])
        session.add(Order(number=3))
        session.commit()
    assert shop.orders() == [1, 3]


@pytest.mark.parametrize(("commit", "has_savepoint"), [("success", True), ("kept", False)])
def test_a_session_has_a_savepoint_only_where_its_work_may_be_undone(
    shop, alchemy, commit, has_savepoint
):
    """L9: it is one more round trip, which functions and commit="kept" do not pay."""
    found = []

    async def look(number):
        found.append(current_operation().connection.in_nested_transaction())
        return {"number": number}, 402

    policy, source = Policy(mode="transaction", commit=commit), orm.sessionmaker(alchemy)
    with closing(Engine(shop.store, policy, transactions=source)) as engine:
        WsgiSite(engine, look, None).post(1)
        engine.run("a", lambda: drive(look(1)), scope="orders")
    assert found == [has_savepoint, False]
