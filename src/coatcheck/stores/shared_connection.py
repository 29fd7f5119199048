"""One connection that the threads of a process take turns on; for the stores in SQL databases.

It opens on first use. A connection that may be broken is closed, and the next caller opens another.

Invariants: one thread at a time; no connection is used on both sides of a fork.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Generic, TypeVar

from coatcheck.errors import StoreUnavailable

C = TypeVar("C")


class SharedConnection(ABC, Generic[C]):
    """A connection for one thread at a time: `with shared as connection`; *where* is for errors."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._is_closed = False
        self._connection: C | None = None
        self._mutex = threading.Lock()
        self._pid = os.getpid()

    @abstractmethod
    def _open(self) -> C:
        """Connect; raise what the store raises."""

    @abstractmethod
    def _close(self, connection: C) -> None:
        """Close *connection*, whatever its state."""

    @abstractmethod
    def _is_usable(self, connection: C, error: BaseException | None) -> bool:
        """Return whether the next caller may use *connection*, after the *error* of this one."""

    def _is_stale(self, connection: C) -> bool:
        """Return whether the server has closed the idle *connection*."""
        del connection
        return False

    def _raise_store_error(self, error: Exception) -> None:
        """Raise what the store raises for *error*; return to raise the error itself."""

    def _renew(self) -> None:
        """Start without a connection, in a forked child; another thread may have held the lock."""
        self._connection = None
        self._mutex = threading.Lock()
        self._pid = os.getpid()

    def __enter__(self) -> C:
        if self._pid != os.getpid():  # the fork bypassed Python's hooks
            self._renew()
        self._mutex.acquire()
        try:
            if self._connection is not None and self._is_stale(self._connection):
                self._discard()
            if self._connection is None:
                if self._is_closed:
                    raise StoreUnavailable(f"{self._where}: the store is closed")
                self._connection = self._open()
        except BaseException:
            self._mutex.release()
            raise
        return self._connection

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        try:
            if self._connection is not None and not self._is_usable(self._connection, error):
                self._discard()
        finally:
            self._mutex.release()
            if self._is_closed:  # `close` did not wait for this caller
                self.close()
        if isinstance(error, Exception):
            self._raise_store_error(error)

    def _discard(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._close(connection)

    def is_busy(self) -> bool:
        """Return whether another thread is using it at this moment."""
        return self._mutex.locked()

    def close(self) -> None:
        """Close it for good; if a thread is using it, that thread does so when it has finished."""
        self._is_closed = True
        # In a forked child the connection belongs to the parent process.
        if self._pid == os.getpid() and self._mutex.acquire(blocking=False):
            try:
                self._discard()
            finally:
                self._mutex.release()
