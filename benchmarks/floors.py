"""The floors: the least that any implementation on SQLite has to do, written by hand.

`GroupedWriter` is a bare group-commit loop: one thread that takes whatever has gathered, inserts
and updates it in one transaction, and wakes the event loop once. `OneByOne` commits every
statement by itself. Neither reads, compares versions, renews or replays anything.
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

# A day, as a published window would be.
EXPIRES_MS = 1_800_000_000_000


def connect(path: Path) -> sqlite3.Connection:
    """Durable in the same way as our own store: a log, synced at every commit."""
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=60, cached_statements=16
    )
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = full")
    connection.execute(SCHEMA)
    return connection


class OneByOne:
    """Every statement is its own transaction, on a connection of one thread."""

    def __init__(self, path: Path) -> None:
        self._connection = connect(path)

    def insert(self, id: bytes, fingerprint: bytes) -> None:
        """Claim, durably."""
        self._connection.execute(INSERT, (id, fingerprint, EXPIRES_MS))

    def update(self, id: bytes, response: bytes) -> None:
        """Complete, durably."""
        self._connection.execute(UPDATE, (response, id))

    def begin(self) -> None:
        """Make one transaction of what follows."""
        self._connection.execute("begin immediate")

    def commit(self) -> None:
        """End that transaction."""
        self._connection.execute("commit")

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()


class _Write(NamedTuple):
    sql: str
    values: tuple[object, ...]
    future: asyncio.Future[None]


class GroupedWriter:
    """What has gathered while the last group was committed is the next group."""

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
        """End the thread and let go of the file."""
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
