"""Every idiom in which an application may lend us a connection, under the same words.

An idiom knows how to lend (what is given to the engine) and how its handler writes a row. What
became of it is looked at over a connection of the test's own.
"""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
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
from servers.mariadb import PLAIN, mariadb
from servers.postgres import postgres
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)

from coatcheck import AsyncEngine, Engine, current_operation

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
        """What somebody else sees."""
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
        """What handlers have written."""
        return [number for (number,) in self.ask("select number from orders order by number")]

    def records(self) -> int:
        """How many records there are, of whatever state."""
        return self.ask(f"select count(*) from {self.table}")[0][0]

    @property
    def table(self) -> str:
        """Where the records are."""
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
    """One way to lend, and to write in it."""

    name: str
    kind: str
    is_async: bool
    lend: Callable[[Shop], Any]  # or a coroutine function; gives what is lent, and how to end it
    write: Callable[[Any, int], Any]  # or a coroutine function

    def undo(self, connection: Any) -> Any:
        """What a handler says that rolls back by itself."""
        if self.name.startswith("django"):
            connection.set_rollback(True)
            return None
        is_asyncpg = self.name == "asyncpg"
        return connection.execute("rollback") if is_asyncpg else connection.rollback()


def sqlite3_lends(shop: Shop) -> Any:
    return shop.connect, None


def psycopg_lends(shop: Shop) -> Any:
    return shop.connect, None


def psycopg_pool_lends(shop: Shop) -> Any:
    pool = ConnectionPool(shop.place, min_size=1, max_size=8, open=True)
    return pool, pool.close


def psycopg_autocommit_lends(shop: Shop) -> Any:
    return lambda: psycopg.connect(shop.place, autocommit=True), None


def pymysql_lends(shop: Shop) -> Any:
    return shop.connect, None


def dbapi_writes(connection: Any, number: int) -> None:
    cursor = connection.cursor()
    cursor.execute(f"insert into orders values ({number:d})")
    cursor.close()


def core_lends(driver: str) -> Callable[[Shop], Any]:
    def lend(shop: Shop) -> Any:
        engine = sa.create_engine(alchemy_url(shop, driver))
        return engine, engine.dispose

    return lend


def core_writes(connection: Any, number: int) -> None:
    connection.execute(sa.insert(_ORDERS).values(number=number))


def orm_lends(driver: str) -> Callable[[Shop], Any]:
    def lend(shop: Shop) -> Any:
        engine = sa.create_engine(alchemy_url(shop, driver))
        return orm.sessionmaker(engine), engine.dispose

    return lend


def scoped_lends(driver: str) -> Callable[[Shop], Any]:
    def lend(shop: Shop) -> Any:
        maker, end = orm_lends(driver)(shop)
        return orm.scoped_session(maker), end

    return lend


def orm_writes(session: Any, number: int) -> None:
    session.add(Order(number=number))  # written by nobody but the commit


def django_lends(shop: Shop) -> Any:
    from django.db import connections

    _set_up_django()
    alias = f"shop_{next(_NUMBERS)}"
    connections.settings[alias] = connections.configure_settings(
        {"default": {}, alias: django_settings(shop)}
    )[alias]
    return connections[alias], connections[alias].close


@cache
def _set_up_django() -> None:
    import django
    from django.conf import settings

    settings.configure(DATABASES={"default": {}})
    django.setup()


def django_settings(shop: Shop) -> dict[str, Any]:
    if shop.kind == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": shop.place}
    info = psycopg.conninfo.conninfo_to_dict(shop.place)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": info["dbname"],
        "USER": info["user"],
        "HOST": info["host"],
        "PORT": info["port"],
        "OPTIONS": {"options": info["options"]},
    }


def django_writes(connection: Any, number: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("insert into orders values (%s)", (number,))


async def psycopg_async_lends(shop: Shop) -> Any:
    pool = AsyncConnectionPool(shop.place, min_size=1, max_size=8, open=False)
    await pool.open()
    return pool.connection, pool.close


async def psycopg_async_writes(connection: Any, number: int) -> None:
    await connection.execute("insert into orders values (%s)", (number,))


async def asyncpg_lends(shop: Shop) -> Any:
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


async def aiosqlite_lends(shop: Shop) -> Any:
    return lambda: aiosqlite.connect(shop.place), None


async def aiosqlite_writes(connection: Any, number: int) -> None:
    await connection.execute("insert into orders values (?)", (number,))


async def asyncmy_lends(shop: Shop) -> Any:
    place = dict(shop.place)
    pool = await asyncmy.create_pool(**{**place, "db": place.pop("database")}, maxsize=8)

    async def end() -> None:
        pool.close()
        await pool.wait_closed()

    return pool, end


async def asyncmy_writes(connection: Any, number: int) -> None:
    async with connection.cursor() as cursor:
        await cursor.execute("insert into orders values (%s)", (number,))


def async_engine(shop: Shop, driver: str) -> Any:
    arguments: dict[str, Any] = {}
    if driver == "asyncpg":
        _, _, schema = psycopg.conninfo.conninfo_to_dict(shop.place)["options"].partition("=")
        arguments["server_settings"] = {"search_path": schema}
    return create_async_engine(alchemy_url(shop, driver), connect_args=arguments)


def async_core_lends(driver: str) -> Callable[[Shop], Any]:
    async def lend(shop: Shop) -> Any:
        engine = async_engine(shop, driver)
        return engine, engine.dispose

    return lend


async def async_core_writes(connection: Any, number: int) -> None:
    await connection.execute(sa.insert(_ORDERS).values(number=number))


def async_orm_lends(driver: str) -> Callable[[Shop], Any]:
    async def lend(shop: Shop) -> Any:
        engine = async_engine(shop, driver)
        return async_sessionmaker(engine, class_=AsyncSession), engine.dispose

    return lend


def async_scoped_lends(driver: str) -> Callable[[Shop], Any]:
    async def lend(shop: Shop) -> Any:
        maker, end = await async_orm_lends(driver)(shop)
        return async_scoped_session(maker, asyncio.current_task), end

    return lend


async def async_orm_writes(session: Any, number: int) -> None:
    session.add(Order(number=number))


def _nothing_lends(_shop: Shop) -> Any:
    return None, None


async def _nothing_lends_async(_shop: Shop) -> Any:
    return None, None


_WRITES = {"sqlite": aiosqlite_writes, "postgres": psycopg_async_writes, "mysql": asyncmy_writes}

IDIOMS = (
    *(Idiom(f"own-{kind}", kind, False, _nothing_lends, dbapi_writes) for kind in SHOPS),
    *(Idiom(f"own-async-{k}", k, True, _nothing_lends_async, _WRITES[k]) for k in SHOPS),
    Idiom("sqlite3", "sqlite", False, sqlite3_lends, dbapi_writes),
    Idiom("psycopg", "postgres", False, psycopg_lends, dbapi_writes),
    Idiom("psycopg-pool", "postgres", False, psycopg_pool_lends, dbapi_writes),
    Idiom("psycopg-autocommit", "postgres", False, psycopg_autocommit_lends, dbapi_writes),
    Idiom("pymysql", "mysql", False, pymysql_lends, dbapi_writes),
    Idiom("core-sqlite", "sqlite", False, core_lends("pysqlite"), core_writes),
    Idiom("core-psycopg", "postgres", False, core_lends("psycopg"), core_writes),
    Idiom("core-pymysql", "mysql", False, core_lends("pymysql"), core_writes),
    Idiom("orm-sqlite", "sqlite", False, orm_lends("pysqlite"), orm_writes),
    Idiom("orm-psycopg", "postgres", False, orm_lends("psycopg"), orm_writes),
    Idiom("orm-pymysql", "mysql", False, orm_lends("pymysql"), orm_writes),
    Idiom("scoped-sqlite", "sqlite", False, scoped_lends("pysqlite"), orm_writes),
    Idiom("scoped-psycopg", "postgres", False, scoped_lends("psycopg"), orm_writes),
    Idiom("django-sqlite", "sqlite", False, django_lends, django_writes),
    Idiom("django-postgres", "postgres", False, django_lends, django_writes),
    Idiom("psycopg-async", "postgres", True, psycopg_async_lends, psycopg_async_writes),
    Idiom("asyncpg", "postgres", True, asyncpg_lends, asyncpg_writes),
    Idiom("aiosqlite", "sqlite", True, aiosqlite_lends, aiosqlite_writes),
    Idiom("asyncmy", "mysql", True, asyncmy_lends, asyncmy_writes),
    Idiom("core-asyncpg", "postgres", True, async_core_lends("asyncpg"), async_core_writes),
    Idiom("core-aiosqlite", "sqlite", True, async_core_lends("aiosqlite"), async_core_writes),
    Idiom("core-asyncmy", "mysql", True, async_core_lends("asyncmy"), async_core_writes),
    Idiom("orm-asyncpg", "postgres", True, async_orm_lends("asyncpg"), async_orm_writes),
    Idiom("orm-psycopg-async", "postgres", True, async_orm_lends("psycopg"), async_orm_writes),
    Idiom("orm-aiosqlite", "sqlite", True, async_orm_lends("aiosqlite"), async_orm_writes),
    Idiom("scoped-aiosqlite", "sqlite", True, async_scoped_lends("aiosqlite"), async_orm_writes),
    Idiom("scoped-asyncpg", "postgres", True, async_scoped_lends("asyncpg"), async_orm_writes),
    # Sync connections on an event loop, as handlers in a framework's threads use them.
    Idiom("threads-psycopg", "postgres", True, psycopg_pool_lends, dbapi_writes),
    Idiom("threads-orm", "postgres", True, orm_lends("psycopg"), orm_writes),
    Idiom("threads-sqlite3", "sqlite", True, sqlite3_lends, dbapi_writes),
)


# --------------------------------------------------------------------------------------- in use


class Till:
    """An engine, and who lends to it, of one idiom; sync and async under the same words."""

    def __init__(self, idiom: Idiom, shop: Shop, **options: Any) -> None:
        self.idiom = idiom
        self.shop = shop
        self.runs: list[int] = []
        self._runner = asyncio.Runner() if idiom.is_async else None
        self.lent, self._end = self.done(idiom.lend(shop))
        make = AsyncEngine if idiom.is_async else Engine
        self.engine: Any = make(shop.store, transactions=self.lent, **options)

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
        """Close the engine, and who lends."""
        self.done(self.engine.close())
        if self._end is not None:
            self.done(self._end())
        if self._runner is not None:
            self._runner.close()


@cache
def idiom_called(name: str) -> Idiom:
    """By its name."""
    return next(idiom for idiom in IDIOMS if idiom.name == name)
