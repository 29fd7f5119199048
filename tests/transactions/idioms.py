"""Every driver and library whose connections transaction mode supports, behind one interface.

An idiom has a source of connections (passed to the engine as `transactions=`) and a function with
which its handler writes a row. Tests check the result over a connection of their own.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiosqlite
import asyncmy
import asyncpg
import psycopg
import pymysql
import sqlalchemy as sa
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)

from coatcheck import AsyncEngine, Engine, current_operation
from tests.support.django_project import add_database
from tests.support.servers.mariadb import PLAIN, mariadb
from tests.support.servers.postgres import postgres

_NUMBERS = count()
_ORDERS = sa.table("orders", sa.column("number"))


class Base(orm.DeclarativeBase):
    """Of the test's only mapped class."""


class Order(Base):
    """A row of the handler's, as the ORM writes it."""

    __tablename__ = "orders"
    number: orm.Mapped[int] = orm.mapped_column(primary_key=True, autoincrement=False)


# ------------------------------------------------------------------------------------ databases


@dataclass
class Shop:
    """A database with a table of the application's own, which is also the store's."""

    kind: str
    store: str  # the store's URL
    place: Any  # a path, a conninfo, or arguments for PyMySQL

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        """Execute *statement* on another connection."""
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            rows = list(cursor.fetchall()) if cursor.description else []
            connection.commit()
            return rows

    def connect(self) -> Any:
        """A connection of the plain driver."""
        if self.kind == "sqlite":
            return sqlite3.connect(self.place, check_same_thread=False)
        if self.kind == "postgres":
            return psycopg.connect(self.place)
        return pymysql.connect(**self.place, **PLAIN)

    def orders(self) -> list[int]:
        """The rows that handlers have written."""
        return [number for (number,) in self.ask("select number from orders order by number")]

    def records(self) -> int:
        """The number of records in any state."""
        return self.ask(f"select count(*) from {self.table}")[0][0]

    @property
    def table(self) -> str:
        """The table of the records."""
        return "coatcheck_records"


def sqlite_shop(directory: Path) -> Shop:
    """A file."""
    path = f"{directory}/shop-{next(_NUMBERS)}.db"
    shop = Shop("sqlite", f"sqlite:///{path}", path)
    shop.ask("create table orders (number integer primary key)")
    return shop


def postgres_shop(_directory: Path) -> Shop:
    """A schema of its own on the server of this process."""
    schema = f"shop_{next(_NUMBERS)}"
    server = postgres()
    conninfo = f"{server.url}?options=-c%20search_path%3D{schema}"
    with psycopg.connect(server.url) as connection:
        connection.execute(f"create schema {schema}")
        connection.execute(f"create table {schema}.orders (number integer primary key)")
    return Shop("postgres", conninfo, conninfo)


def mysql_shop(_directory: Path) -> Shop:
    """A database of its own on the server of this process."""
    url = mariadb().fresh_url()
    port, _, database = url.partition("?")[0].rpartition(":")[2].partition("/")
    place = {"host": "127.0.0.1", "port": int(port), "user": "root", "database": database}
    shop = Shop("mysql", url, place)
    shop.ask("create table orders (number integer primary key) engine = innodb")
    return shop


SHOPS = {"sqlite": sqlite_shop, "postgres": postgres_shop, "mysql": mysql_shop}

# How many transactions wait for a row; SQLite locks the file.
WAITING = {
    "postgres": "select count(*) from pg_locks where not granted",
    # Not `innodb_trx`: it is refreshed only ten times a second.
    "mysql": "select variable_value + 0 from information_schema.global_status"
    " where variable_name = 'innodb_row_lock_current_waits'",
}


def alchemy_url(shop: Shop, driver: str) -> sa.URL:
    """The shop as SQLAlchemy names it."""
    if shop.kind == "sqlite":
        return sa.URL.create(f"sqlite+{driver}", database=shop.place)
    if shop.kind == "postgres":
        url = sa.make_url(shop.place).set(drivername=f"postgresql+{driver}")
        return url if driver == "psycopg" else url.set(query={})
    place = dict(shop.place)
    place["username"] = place.pop("user")
    query = dict.fromkeys(PLAIN, "1") if driver == "pymysql" else {}
    return sa.URL.create(f"mysql+{driver}", **place, query=query)


# --------------------------------------------------------------------------------------- idioms


@dataclass(frozen=True)
class Idiom:
    """One driver or library: where its connections come from, and how a handler writes."""

    name: str
    kind: str
    is_async: bool
    connect: Callable[[Shop], Any]  # or a coroutine function; returns a source, and how to close it
    write: Callable[[Any, int], Any]  # or a coroutine function

    def undo(self, connection: Any) -> Any:
        """Roll back, as a handler might do."""
        if self.name.startswith("django"):
            connection.set_rollback(True)
            return None
        is_asyncpg = self.name == "asyncpg"
        return connection.execute("rollback") if is_asyncpg else connection.rollback()

    def commit(self, connection: Any) -> Any:
        """Commit, as a handler might do."""
        return connection.execute("commit") if self.name == "asyncpg" else connection.commit()


def plain_source(shop: Shop) -> Any:
    return shop.connect, None


def psycopg_pool_source(shop: Shop) -> Any:
    pool = ConnectionPool(shop.place, min_size=1, max_size=8, open=True)
    return pool, pool.close


def psycopg_autocommit_source(shop: Shop) -> Any:
    return lambda: psycopg.connect(shop.place, autocommit=True), None


def dbapi_writes(connection: Any, number: int) -> None:
    cursor = connection.cursor()
    cursor.execute(f"insert into orders values ({number:d})")
    cursor.close()


def core_source(driver: str) -> Callable[[Shop], Any]:
    def connect(shop: Shop) -> Any:
        engine = sa.create_engine(alchemy_url(shop, driver))
        return engine, engine.dispose

    return connect


def core_writes(connection: Any, number: int) -> None:
    connection.execute(sa.insert(_ORDERS).values(number=number))


def orm_source(driver: str) -> Callable[[Shop], Any]:
    def connect(shop: Shop) -> Any:
        engine = sa.create_engine(alchemy_url(shop, driver))
        return orm.sessionmaker(engine), engine.dispose

    return connect


def scoped_source(driver: str) -> Callable[[Shop], Any]:
    def connect(shop: Shop) -> Any:
        maker, end = orm_source(driver)(shop)
        return orm.scoped_session(maker), end

    return connect


def orm_writes(session: Any, number: int) -> None:
    session.add(Order(number=number))  # written by the flush at the commit


def django_source(shop: Shop) -> Any:
    from django.db import connections

    alias = add_database(django_settings(shop))
    return connections[alias], connections[alias].close


def django_settings(shop: Shop) -> dict[str, Any]:
    if shop.kind == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": shop.place}
    if shop.kind == "mysql":
        return _django_settings_of_mysql(shop.place)
    info = psycopg.conninfo.conninfo_to_dict(shop.place)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": info["dbname"],
        "USER": info["user"],
        "HOST": info["host"],
        "PORT": info["port"],
        "OPTIONS": {"options": info["options"]},
    }


def _django_settings_of_mysql(place: dict[str, Any]) -> dict[str, Any]:
    pymysql.version_info = (2, 2, 1, "final", 0)  # that of mysqlclient, which Django asks for
    pymysql.install_as_MySQLdb()
    return {
        "ENGINE": "django.db.backends.mysql",
        "NAME": place["database"],
        "USER": place["user"],
        "HOST": place["host"],
        "PORT": place["port"],
        "OPTIONS": {"ssl_disabled": True},
    }


def django_writes(connection: Any, number: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("insert into orders values (%s)", (number,))


async def psycopg_async_source(shop: Shop) -> Any:
    pool = AsyncConnectionPool(shop.place, min_size=1, max_size=8, open=False)
    await pool.open()
    return pool.connection, pool.close


async def psycopg_async_writes(connection: Any, number: int) -> None:
    await connection.execute("insert into orders values (%s)", (number,))


async def asyncpg_source(shop: Shop) -> Any:
    info = psycopg.conninfo.conninfo_to_dict(shop.place)
    _, _, schema = info["options"].partition("=")
    pool = await asyncpg.create_pool(
        host=info["host"],
        port=int(info["port"]),
        user=info["user"],
        database=info["dbname"],
        server_settings={"search_path": schema},
        min_size=1,
        max_size=8,
    )
    return pool, pool.close


async def asyncpg_writes(connection: Any, number: int) -> None:
    async with connection.transaction():  # a savepoint, in ours
        await connection.execute("insert into orders values ($1)", number)


async def aiosqlite_source(shop: Shop) -> Any:
    return lambda: aiosqlite.connect(shop.place), None


async def aiosqlite_writes(connection: Any, number: int) -> None:
    await connection.execute("insert into orders values (?)", (number,))


async def asyncmy_source(shop: Shop) -> Any:
    place = dict(shop.place)
    pool = await asyncmy.create_pool(**{**place, "db": place.pop("database")}, maxsize=8)

    async def end() -> None:
        pool.close()
        await pool.wait_closed()

    return pool, end


async def asyncmy_writes(connection: Any, number: int) -> None:
    async with connection.cursor() as cursor:
        await cursor.execute("insert into orders values (%s)", (number,))


def async_engine(shop: Shop, driver: str, **options: Any) -> Any:
    arguments: dict[str, Any] = {}
    if driver == "asyncpg":
        _, _, schema = psycopg.conninfo.conninfo_to_dict(shop.place)["options"].partition("=")
        arguments["server_settings"] = {"search_path": schema}
    return create_async_engine(alchemy_url(shop, driver), connect_args=arguments, **options)


def async_core_source(driver: str) -> Callable[[Shop], Any]:
    async def connect(shop: Shop) -> Any:
        engine = async_engine(shop, driver)
        return engine, engine.dispose

    return connect


async def async_core_writes(connection: Any, number: int) -> None:
    await connection.execute(sa.insert(_ORDERS).values(number=number))


def async_orm_source(driver: str) -> Callable[[Shop], Any]:
    async def connect(shop: Shop) -> Any:
        engine = async_engine(shop, driver)
        return async_sessionmaker(engine, class_=AsyncSession), engine.dispose

    return connect


def async_scoped_source(driver: str) -> Callable[[Shop], Any]:
    async def connect(shop: Shop) -> Any:
        maker, end = await async_orm_source(driver)(shop)
        return async_scoped_session(maker, asyncio.current_task), end

    return connect


async def async_orm_writes(session: Any, number: int) -> None:
    session.add(Order(number=number))


def _no_source(_shop: Shop) -> Any:
    return None, None


_WRITES = {"sqlite": aiosqlite_writes, "postgres": psycopg_async_writes, "mysql": asyncmy_writes}

IDIOMS = (
    *(Idiom(f"own-{kind}", kind, False, _no_source, dbapi_writes) for kind in SHOPS),
    *(Idiom(f"own-async-{k}", k, True, _no_source, _WRITES[k]) for k in SHOPS),
    Idiom("sqlite3", "sqlite", False, plain_source, dbapi_writes),
    Idiom("psycopg", "postgres", False, plain_source, dbapi_writes),
    Idiom("psycopg-pool", "postgres", False, psycopg_pool_source, dbapi_writes),
    Idiom("psycopg-autocommit", "postgres", False, psycopg_autocommit_source, dbapi_writes),
    Idiom("pymysql", "mysql", False, plain_source, dbapi_writes),
    Idiom("core-sqlite", "sqlite", False, core_source("pysqlite"), core_writes),
    Idiom("core-psycopg", "postgres", False, core_source("psycopg"), core_writes),
    Idiom("core-pymysql", "mysql", False, core_source("pymysql"), core_writes),
    Idiom("orm-sqlite", "sqlite", False, orm_source("pysqlite"), orm_writes),
    Idiom("orm-psycopg", "postgres", False, orm_source("psycopg"), orm_writes),
    Idiom("orm-pymysql", "mysql", False, orm_source("pymysql"), orm_writes),
    Idiom("scoped-sqlite", "sqlite", False, scoped_source("pysqlite"), orm_writes),
    Idiom("scoped-psycopg", "postgres", False, scoped_source("psycopg"), orm_writes),
    Idiom("django-sqlite", "sqlite", False, django_source, django_writes),
    Idiom("django-postgres", "postgres", False, django_source, django_writes),
    Idiom("psycopg-async", "postgres", True, psycopg_async_source, psycopg_async_writes),
    Idiom("asyncpg", "postgres", True, asyncpg_source, asyncpg_writes),
    Idiom("aiosqlite", "sqlite", True, aiosqlite_source, aiosqlite_writes),
    Idiom("asyncmy", "mysql", True, asyncmy_source, asyncmy_writes),
    Idiom("core-asyncpg", "postgres", True, async_core_source("asyncpg"), async_core_writes),
    Idiom("core-aiosqlite", "sqlite", True, async_core_source("aiosqlite"), async_core_writes),
    Idiom("core-asyncmy", "mysql", True, async_core_source("asyncmy"), async_core_writes),
    Idiom("orm-asyncpg", "postgres", True, async_orm_source("asyncpg"), async_orm_writes),
    Idiom("orm-psycopg-async", "postgres", True, async_orm_source("psycopg"), async_orm_writes),
    Idiom("orm-aiosqlite", "sqlite", True, async_orm_source("aiosqlite"), async_orm_writes),
    Idiom("scoped-aiosqlite", "sqlite", True, async_scoped_source("aiosqlite"), async_orm_writes),
    Idiom("scoped-asyncpg", "postgres", True, async_scoped_source("asyncpg"), async_orm_writes),
    # Sync connections on an event loop, as handlers in a framework's threads use them.
    Idiom("threads-psycopg", "postgres", True, psycopg_pool_source, dbapi_writes),
    Idiom("threads-orm", "postgres", True, orm_source("psycopg"), orm_writes),
    Idiom("threads-sqlite3", "sqlite", True, plain_source, dbapi_writes),
)


# --------------------------------------------------------------------------------------- in use


class Harness:
    """An engine with a source of one idiom; sync and async have the same methods."""

    def __init__(self, idiom: Idiom, shop: Shop, **options: Any) -> None:
        self.idiom = idiom
        self.shop = shop
        self.runs: list[int] = []
        self._runner = asyncio.Runner() if idiom.is_async else None
        self.source, self._end = self.done(idiom.connect(shop))
        make = AsyncEngine if idiom.is_async else Engine
        self.engine: Any = make(shop.store, transactions=self.source, **options)

    def done(self, result: Any) -> Any:
        """*result*, awaited where it has to be."""
        if not inspect.isawaitable(result):
            return result

        async def awaited() -> Any:
            return await result

        assert self._runner is not None
        return self._runner.run(awaited())

    def place(self, key: str, number: int, **options: Any) -> Any:
        """Write an order, once for *key*."""
        return self.done(self.placing(key, number, **options))

    def placing(self, key: str, number: int, **options: Any) -> Any:
        """The same, not awaited yet."""
        return self.engine.transaction(key, self.handler(), number, scope="orders", **options)

    def handler(self, then: Callable[[int], Any] | None = None) -> Callable[[int], Any]:
        """A handler that writes a row, and *then* does something more."""
        write = self.idiom.write

        def handle(number: int) -> Any:
            self.runs.append(number)
            write(current_operation().connection, number)
            return then(number) if then else {"number": number}

        async def handle_async(number: int) -> Any:
            self.runs.append(number)
            result = write(current_operation().connection, number)
            if inspect.isawaitable(result):
                await result
            result = then(number) if then else {"number": number}
            return await result if inspect.isawaitable(result) else result

        return handle_async if self.idiom.is_async else handle

    def close(self) -> None:
        """Close the engine and its source."""
        self.done(self.engine.close())
        if self._end is not None:
            self.done(self._end())
        if self._runner is not None:
            self._runner.close()


# --------------------------------------------------------------------------- both kinds of code


async def settled(result: Any) -> Any:
    """*result*, awaited where it has to be."""
    return await result if inspect.isawaitable(result) else result


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run *coroutine*, which never waits for an event loop, as plain code."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


@dataclass(frozen=True)
class Code:
    """Sync or async code: a test that is written once, as a coroutine, runs as either."""

    is_async: bool

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a whole test."""
        return asyncio.run(coroutine) if self.is_async else drive(coroutine)

    @asynccontextmanager
    async def engine(self, shop: Shop, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """An engine whose handlers are coroutine functions."""
        make = AsyncEngine if self.is_async else Engine
        engine = make(shop.store, *args, **options)
        try:
            yield engine if self.is_async else _Driven(engine)
        finally:
            await settled(engine.close())


class _Driven:
    """An `Engine` with the methods of an `AsyncEngine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def transaction(self, key: str, handler: Any, *args: Any, **options: Any) -> Any:
        @functools.wraps(handler)
        def handle(*args: Any) -> Any:
            return drive(handler(*args))

        return self._engine.transaction(key, handle, *args, **options)


CODES = {"sync": Code(is_async=False), "async": Code(is_async=True)}
