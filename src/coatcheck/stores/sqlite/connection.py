"""Connections to the SQLite file.

`connect` opens one with the settings that a store needs, `execute_with_retry` waits for the write
lock, and `SqliteConnection` lets the threads of a process take turns on one connection.

Invariants: after an error no transaction is open and no broken connection is kept; no connection
crosses a fork, because SQLite's locks belong to a process.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import quote
from weakref import WeakSet

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.shared_connection import SharedConnection
from coatcheck.stores.sqlite.errors import code_of, is_file_error, is_temporary, to_store_error

# 8 MB per connection: the inner pages of both indexes of some million records.
_CACHE_KIB = 8_192

# 128: more than `statements.py` has, so none is compiled twice.
_STATEMENTS_MAX = 128

# 0.25 ms between attempts to get the write lock, half a commit. SQLite's own busy handler doubles
# its sleep up to 100 ms, so beside a busy process it would lose the race for seconds.
_RETRY_S = 0.000_25


def connect(
    path: str, busy_timeout_s: float, *, writes: bool = False, mode: str = "rw"
) -> sqlite3.Connection:
    """
    Open *path* in autocommit mode with durable commits.

    Mode "rw" does not create the file. If it was deleted, its records are lost, and an empty new
    file would let every retry execute again.
    """
    connection = sqlite3.connect(
        f"file:{quote(os.fsencode(path))}?mode={mode}",
        uri=True,
        timeout=busy_timeout_s,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS_MAX,
    )
    try:
        # `wal_autocheckpoint` stays at SQLite's 1,000 pages. A log that still grows takes twice as
        # long to sync as one that is overwritten, and a longer log grows longer after each start.
        connection.execute("pragma synchronous = full")
        connection.execute(f"pragma cache_size = -{_CACHE_KIB}")
        (journal_mode,) = connection.execute("pragma journal_mode").fetchone()
        # With a write-ahead log, `execute_with_retry` waits instead. Without one, a commit has to
        # wait for readers, and SQLite admits no new ones only while it waits by itself.
        if writes and journal_mode == "wal":
            connection.execute("pragma busy_timeout = 0")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def execute_with_retry(
    connection: sqlite3.Connection,
    busy_timeout_s: float,
    statement: str,
    parameters: Sequence[object] = (),
) -> sqlite3.Cursor:
    """Execute a statement that needs the write lock; retry while another process holds it."""
    deadline_s = time.monotonic() + busy_timeout_s
    while True:
        try:
            return connection.execute(statement, parameters)
        except sqlite3.OperationalError as error:
            if code_of(error) != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline_s:
                raise
        time.sleep(_RETRY_S)


class SqliteConnection(SharedConnection[sqlite3.Connection]):
    """
    One connection for one thread at a time.

    It opens on first use, and again after a fork or an error that may have broken it.
    """

    def __init__(self, path: str, busy_timeout_s: float, *, writes: bool = False) -> None:
        super().__init__(path)
        self._busy_timeout_s = busy_timeout_s
        self._writes = writes
        with _fork_mutex:
            _CONNECTIONS.add(self)

    def _renew(self) -> None:
        """Continue after a fork that did not run Python's hooks, if no connection was open."""
        if self._connection is not None:
            # A new connection beside the inherited one would trust locks that only the parent
            # holds, and could write to a log that the parent deletes.
            raise StoreUnavailable(
                f"{self._where}: this process was forked while the store was in use, without "
                "running Python's at-fork hooks; open the store after the fork"
            )
        super()._renew()

    def _open(self) -> sqlite3.Connection:
        try:
            return connect(self._where, self._busy_timeout_s, writes=self._writes)
        except sqlite3.Error as error:
            raise to_store_error(error, self._where) from error

    def _close(self, connection: sqlite3.Connection) -> None:
        with suppress(sqlite3.Error):
            connection.close()

    def _is_usable(self, connection: sqlite3.Connection, error: BaseException | None) -> bool:
        if error is None:
            return True
        try:
            if connection.in_transaction:
                connection.execute("rollback")
        except sqlite3.Error:
            return False  # closing rolls back as well
        return not is_file_error(error) or is_temporary(error)

    def _raise_store_error(self, error: Exception) -> None:
        if isinstance(error, sqlite3.Error) and is_file_error(error):
            raise to_store_error(error, self._where) from error

    def disconnect(self) -> None:
        """Close the connection and drop its page cache; the next use opens another one."""
        with self._mutex:
            self._discard()

    def pause_for_fork(self) -> None:
        """Wait for the running statement, close, and block other threads until after the fork."""
        self._mutex.acquire()
        self._discard()

    def resume_after_fork(self) -> None:
        """Continue, in the parent and in the child."""
        self._pid = os.getpid()
        self._mutex.release()


# All connections of this process: one fork hook serves them, and keeps none alive.
_CONNECTIONS: WeakSet[SqliteConnection] = WeakSet()
_paused: list[SqliteConnection] = []
# Held from before a fork until after it: no second fork and no new connection meanwhile.
_fork_mutex = threading.Lock()


def _pause_all() -> None:
    _fork_mutex.acquire()
    _paused[:] = _CONNECTIONS
    for shared in _paused:
        shared.pause_for_fork()


def _resume_all() -> None:
    while _paused:
        _paused.pop().resume_after_fork()
    if _fork_mutex.locked():  # some servers run only the hooks of the child
        _fork_mutex.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pause_all, after_in_parent=_resume_all, after_in_child=_resume_all)
