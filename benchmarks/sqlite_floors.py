"""The floors on SQLite: the least that any implementation has to do.

`GroupedWriter` is a bare group-commit loop: a thread writes all waiting rows in one transaction and
wakes the event loop once. `OneByOne` commits every statement. Neither reads, compares versions,
renews or replays anything.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

SCHEMA = """
    create table if not exists record (
        id blob primary key, state integer not null, fingerprint blob not null,
        expires_ms integer not null, response blob
    ) without rowid
"""
INSERT = "insert into record values (?, 0, ?, ?, null)"
UPDATE = "update record set state = 1, response = ? where id = ?"

# The end of a window.
EXPIRES_MS = 1_800_000_000_000


def connect(path: Path) -> sqlite3.Connection:
    """Open a file as durable as the store's: a write-ahead log, synced at every commit."""
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=60, cached_statements=16
    )
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = full")
    connection.execute(SCHEMA)
    return connection


class OneByOne:
    """Every statement is its own transaction."""

    def __init__(self, path: Path) -> None:
        self._connection = connect(path)

    def insert(self, id: bytes, fingerprint: bytes) -> None:
        """Claim, durably."""
        self._connection.execute(INSERT, (id, fingerprint, EXPIRES_MS))

    def update(self, id: bytes, response: bytes) -> None:
        """Complete, durably."""
        self._connection.execute(UPDATE, (response, id))

    def begin(self) -> None:
        """Begin a transaction for the following statements."""
        self._connection.execute("begin immediate")

    def commit(self) -> None:
        """Commit that transaction."""
        self._connection.execute("commit")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


class _Write(NamedTuple):
    sql: str
    values: tuple[object, ...]
    future: asyncio.Future[None]


class GroupedWriter:
    """Writes that arrive during a commit are the next group."""

    def __init__(self, path: Path) -> None:
        self._connection = connect(path)
        self._writes: SimpleQueue[_Write | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def insert(self, id: bytes, fingerprint: bytes) -> asyncio.Future[None]:
        """Claim; durable when the future is done."""
        return self._write(INSERT, (id, fingerprint, EXPIRES_MS))

    def update(self, id: bytes, response: bytes) -> asyncio.Future[None]:
        """Complete; durable when the future is done."""
        return self._write(UPDATE, (response, id))

    def close(self) -> None:
        """End the thread and close the file."""
        self._writes.put(None)
        self._thread.join()
        self._connection.close()

    def _write(self, sql: str, values: tuple[object, ...]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._writes.put(_Write(sql, values, future))
        return future

    def _work(self) -> None:
        while (first := self._writes.get()) is not None:
            group = [first]
            try:
                while (write := self._writes.get_nowait()) is not None:
                    group.append(write)
            except Empty:
                pass
            else:
                self._writes.put(None)
            self._commit(group)
            self._loop.call_soon_threadsafe(_wake, group)

    def _commit(self, group: list[_Write]) -> None:
        execute, executemany = self._connection.execute, self._connection.executemany
        execute("begin immediate")
        for sql in (INSERT, UPDATE):
            rows = [write.values for write in group if write.sql is sql]
            if rows:
                executemany(sql, rows)
        execute("commit")


def _wake(group: list[_Write]) -> None:
    for write in group:
        if not write.future.done():
            write.future.set_result(None)
