"""The SQLite file of an outbox."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from coatcheck.client.outbox_store import SCHEMA, Execute, Rows
from coatcheck.errors import Misconfigured, StoreUnavailable

# 10 s: a commit takes milliseconds, also with a hundred processes.
_BUSY_S = 10.0


class SqliteDatabase:
    """The file that *url* names: `sqlite:///outbox.db`."""

    table = "coatcheck_outbox"
    skips_locked = ""

    def __init__(self, url: str, *, must_exist: bool = False) -> None:
        # Absolute: the process may change its directory before the next transaction.
        self._path = Path(_path_of(url)).absolute()
        if must_exist and not self._path.is_file():
            raise Misconfigured(f"there is no outbox {self._path}")
        schema = SCHEMA.format(
            table=self.table, index=self.table, id="integer primary key autoincrement", blob="blob"
        )
        with self._connection() as connection:
            if must_exist:
                tables = connection.execute("select name from sqlite_master").fetchall()
                if (self.table,) not in tables:
                    raise Misconfigured(f"there is no outbox in {self._path}")
                return
            connection.execute("pragma journal_mode = wal")
            connection.executescript(schema)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        # One for each transaction: threads and forked processes then share nothing.
        try:
            connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
            try:
                connection.execute("pragma synchronous = full")
                yield connection
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise StoreUnavailable(f"the outbox {self._path} cannot be used: {error}") from error

    @contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[Execute]:
        """Locks the file if it *writes*: there is one writer at a time, beside any readers."""
        with self._connection() as connection:

            def execute(statement: str, **values: object) -> Rows:
                cursor = connection.execute(statement, values)
                return Rows(cursor.fetchall(), cursor.rowcount)

            connection.execute("begin immediate" if writes else "begin")
            yield execute
            connection.execute("commit")

    def lock_lane(self, execute: Execute, lane: str) -> None:
        """The file is locked."""

    def close(self) -> None:
        """No connection is open."""


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or parts.query or not path:
        raise Misconfigured(f"the outbox is a file: write sqlite:///outbox.db, not {url!r}")
    return path
