"""Lines to the SQLite file: one connection each, one caller at a time.

Between `sqlite.py`, which says what to do on a line, and `sqlite_file.py`, which opens them.

Invariants: after an error no transaction stays open, and no connection that may remember something
wrong; no connection crosses a fork, because SQLite's locks do not.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import suppress
from types import TracebackType
from weakref import WeakSet

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.sqlite_file import PASSING, code_of, connect, explained

# The fault of what was to be written, not of the file: whoever asked gets it as it is.
_OF_THE_RECORD = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
)


class Line:
    """
    One connection to the file, for one caller at a time: `with line as connection`.

    Opened at first use, and again after a fault that may have hurt it, and after a fork.

    One that does not wait refuses a second caller, and never copies the log into the file, which
    is what makes a commit slow now and then.
    """

    def __init__(
        self, path: str, busy_timeout_s: float, *, writes: bool = False, waits: bool = True
    ) -> None:
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._writes = writes
        self._waits = waits
        self._mutex = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._pid = os.getpid()
        self._closed = False
        with _forking:
            _LINES.add(self)

    def __enter__(self) -> sqlite3.Connection:
        if self._pid != os.getpid():
            self._adopt()
        if not self._mutex.acquire(blocking=self._waits):
            raise StoreUnavailable(f"{self._path}: somebody else is writing")
        try:
            return self._connection or self._opened()
        except BaseException:
            self._mutex.release()
            raise

    def _adopt(self) -> None:
        """Go on in a child of a fork that Python was not told about, if nothing is inherited."""
        if self._connection is not None:
            # A connection opened beside it would trust locks that only the parent holds, and
            # could write into a log that is deleted meanwhile.
            raise StoreUnavailable(
                f"{self._path}: this process was forked while the store was in use, in a way that "
                "Python's at-fork hooks did not see; open the store after the fork"
            )
        self._mutex = threading.Lock()
        self._pid = os.getpid()

    def _opened(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreUnavailable(f"{self._path}: the store is closed")
        try:
            self._connection = connect(self._path, self._busy_timeout_s, writes=self._writes)
            if not self._waits:
                self._connection.execute("pragma wal_autocheckpoint = 0")
        except sqlite3.Error as error:
            raise explained(error, self._path) from error
        return self._connection

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._mutex.release()
            return
        is_fault = isinstance(error, sqlite3.Error) and not isinstance(error, _OF_THE_RECORD)
        try:
            self._roll_back()
            if is_fault and code_of(error) not in PASSING:
                self._drop()
        finally:
            self._mutex.release()
        if is_fault:
            assert isinstance(error, sqlite3.Error)
            raise explained(error, self._path) from error

    def _roll_back(self) -> None:
        assert self._connection is not None
        try:
            if self._connection.in_transaction:
                self._connection.execute("rollback")
        except sqlite3.Error:
            self._drop()  # closing rolls back, too

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def hang_up(self) -> None:
        """Let go of the connection, and of all it remembers of the file, until the next use."""
        with self._mutex:
            self._drop()

    def close(self) -> None:
        """Let go of the connection for good; the last one of all processes empties the log."""
        self._closed = True
        if self._pid == os.getpid():  # else it is the parent's, and the parent's to close
            with self._mutex:
                self._drop()

    def pause_for_fork(self) -> None:
        """Finish what runs and close, because neither connections nor locks survive a fork."""
        self._mutex.acquire()
        self._drop()

    def resume_after_fork(self) -> None:
        """Go on, in the parent or in the child."""
        self._pid = os.getpid()
        self._mutex.release()


# Every line of this process, so that one hook serves all of them and keeps none alive.
_LINES: WeakSet[Line] = WeakSet()
_paused: list[Line] = []
# Held from before a fork until after it: no second fork and no new line in between.
_forking = threading.Lock()


def _pause_all() -> None:
    _forking.acquire()
    _paused[:] = _LINES
    for line in _paused:
        line.pause_for_fork()


def _resume_all() -> None:
    while _paused:
        _paused.pop().resume_after_fork()
    if _forking.locked():  # not where only the child's hooks are run, as some servers do
        _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pause_all, after_in_parent=_resume_all, after_in_child=_resume_all)
