"""Helpers for the tests of the MySQL store."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import pymysql
from pymysql.cursors import Cursor

from coatcheck import AsyncEngine, Engine
from coatcheck.core.record import Record, Swap, completed
from tests.stores.laws.records import ID, NOW_MS, RETENTION_MS, claim_of, id_of
from tests.support.servers.mariadb import PLAIN

MANY = [id_of(number) for number in range(1, 65)]
OVER_MS = NOW_MS + RETENTION_MS


class OtherCursor(Cursor):
    """A cursor of the tests; those of the store have the driver's own class."""


@contextmanager
def other_session(url: str, **settings: object) -> Iterator[pymysql.Connection]:
    """A session of another client in the database of *url*."""
    port, _, database = url.partition("?")[0].rpartition(":")[2].partition("/")
    settings = {"user": "root", "database": database, "autocommit": True, **PLAIN, **settings}
    place = {"host": "127.0.0.1", "port": int(port), "cursorclass": OtherCursor}
    with closing(pymysql.connect(**place, **settings)) as connection:
        query(connection, "set session transaction isolation level read committed")
        yield connection


def query(connection: pymysql.Connection, statement: str) -> Sequence[tuple]:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall()


def waiting_for_locks(connection: pymysql.Connection) -> int:
    ((_, number),) = query(connection, "show global status like 'innodb_row_lock_current_waits'")
    return int(number)


def sessions_beside(*connections: pymysql.Connection) -> list[int]:
    """The numbers of all sessions in this database but those of *connections*."""
    listed = "select id from information_schema.processlist where db = database()"
    ours = [connection.thread_id() for connection in connections]
    return sorted(id for (id,) in query(connections[0], listed) if id not in ours)


def kill_sessions_beside(*connections: pymysql.Connection) -> None:
    for number in sessions_beside(*connections):
        query(connections[0], f"kill connection {number}")


def claim(id: bytes = ID, nonce: int = 1) -> Swap:
    return Swap(id, 0, claim_of(id, nonce=nonce))


def complete(record: Record, response: bytes = b"done") -> Swap:
    return Swap(record.id, record.version, completed(record, response))


@contextmanager
def packets_of(url: str, bytes_max: int) -> Iterator[None]:
    """Have the server of *url* accept no larger packets."""
    with other_session(url, database="mysql") as root:
        query(root, f"set global max_allowed_packet = {bytes_max}")
        try:
            yield
        finally:
            query(root, "set global max_allowed_packet = 16777216")


def in_every_mode(
    url: str,
    key: str,
    result: str | None = None,
    connect: tuple[Callable[[], object], Callable[[], object]] | None = None,
) -> list[object]:
    """What an operation returns, in both modes, sync and async; transactions use *connect*."""
    result = result or key
    source = {} if connect is None else {"connection": connect[0]}
    async_source = {} if connect is None else {"connection": connect[1]}

    async def work() -> str:
        return result

    async def on_loop() -> list[object]:
        async with AsyncEngine(url) as engine:
            ran = await engine.run(key, work, scope="async-run")
            done = await engine.transaction(key, work, scope="async", **async_source)
            return [ran, done]

    with Engine(url) as engine:
        ran = engine.run(key, lambda: result, scope="run")
        done = engine.transaction(key, lambda: result, scope="sync", **source)
    return [ran, done, *asyncio.run(on_loop())]
