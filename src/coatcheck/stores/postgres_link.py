"""Links to a PostgreSQL server: one connection each, one caller at a time.

Between `postgres.py`, which says what to do, and the driver.

Invariants: whatever server and network do leaves as `StoreUnavailable`, within a time that is set;
a connection that may be hurt is dropped, and the next caller opens a new one; no connection
crosses a fork.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

import psycopg
from psycopg import errors

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.postgres_arrays import register

T = TypeVar("T")

# The fault of what was to be written, not of the server: whoever asked gets it as it is.
_OF_THE_RECORD = (errors.DataError, errors.IntegrityError, errors.ProgramLimitExceeded)
# How the codes begin with which the server says that it has certainly not written: it only reads,
# it refuses us, something is full, our table or its rights are gone.
_UNWRITTEN = frozenset({"25", "28", "3D", "3F", "42", "53"})
# Nothing was done, and the same again will do.
_ONCE_MORE = (
    errors.DeadlockDetected,
    errors.SerializationFailure,
    errors.TransactionRollback,
)
_LEAVES_AS_IT_IS = (*_OF_THE_RECORD, *_ONCE_MORE)
# What is prepared is planned once, perhaps while the table is empty; and its plan, which must hold
# for millions of rows, is not made anew before the next vacuum.
_BY_INDEX = b"set enable_seqscan = off; set enable_hashjoin = off; set enable_mergejoin = off"
# Each time somebody else got on, so this many times is far more than enough.
TRIES = 10


class Connection(psycopg.Connection[Any]):
    """A connection on which nothing takes longer than *timeout_s*, even if the server is frozen."""

    timeout_s = 5.0

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as in the driver
        """Do what *gen* does, for a while."""
        deadline = time.monotonic() + self.timeout_s
        return super().wait(_until(gen, deadline), *args, **kwargs)


def _until(gen: Generator[Any, Any, Any], deadline: float) -> Generator[Any, Any, Any]:
    """*gen*, but it fails where nothing has come when *deadline* has: every tenth of a second."""
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > deadline:
                raise psycopg.OperationalError("the server does not answer")
            wanted = gen.send(ready)
    except StopIteration as done:
        return done.value


class Link:
    """
    One connection, for one caller at a time: `link.run(lambda connection: …)`.

    Args:
        conninfo: where to, in the driver's words.
        timeout_s: how long connecting may take, and each statement.
        writes: what goes over it changes records, so that an answer may be lost.
        prepares: a few statements go over it all the time, which find their rows by an index.
    """

    def __init__(
        self, conninfo: str, timeout_s: float, *, writes: bool = False, prepares: bool = False
    ) -> None:
        self._conninfo = conninfo
        self._timeout_s = timeout_s
        self._writes = writes
        self._prepares = prepares
        self._connection: Connection | None = None
        self._inherited: list[Connection | None] = []
        self._closed = False
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        # Kept, because letting go of it would say goodbye in the parent's name.
        self._inherited.append(self._connection)
        self._connection = None
        self._mutex = threading.Lock()

    def run(self, work: Callable[[Connection], T]) -> T:
        """Do *work* on the connection; again, if its server has undone it for no fault of ours."""
        for _ in range(TRIES):
            try:
                with self as connection:
                    return work(connection)
            except _ONCE_MORE:
                continue
        raise StoreUnavailable(f"others were in the way {TRIES} times in a row")

    def __enter__(self) -> Connection:
        self._mutex.acquire()
        try:
            return self._connection or self._opened()
        except BaseException:
            self._mutex.release()
            raise

    def _opened(self) -> Connection:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        try:
            connection = Connection.connect(self._conninfo, autocommit=True, prepare_threshold=None)
            connection.timeout_s = self._timeout_s
            self._connection = connection
            if self._prepares and _is_direct(connection):
                connection.execute(_BY_INDEX)
                connection.prepare_threshold = 0
        except psycopg.Error as error:
            self._drop()
            raise StoreUnavailable(_sentence(error)) from error
        register(connection)
        return connection

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        try:
            is_lost = error is not None and self._connection is not None and self._is_hurt(error)
            if is_lost:
                self._drop()
        finally:
            self._mutex.release()
        if isinstance(error, psycopg.Error) and not isinstance(error, _LEAVES_AS_IT_IS):
            is_ambiguous = self._writes and (error.sqlstate or "")[:2] not in _UNWRITTEN
            raise StoreUnavailable(_sentence(error), is_ambiguous=is_ambiguous) from error

    def _is_hurt(self, error: BaseException) -> bool:
        # A server that only reads was the one that writes, before somebody else was promoted.
        if isinstance(error, errors.ReadOnlySqlTransaction) or not isinstance(error, Exception):
            return True
        assert self._connection is not None
        status = self._connection.info.transaction_status
        return self._connection.closed or status != psycopg.pq.TransactionStatus.IDLE

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    def close(self) -> None:
        """Let go of the connection for good."""
        with self._mutex:
            self._closed = True
            self._drop()


def _is_direct(connection: Connection) -> bool:
    """
    Who answers is who greeted us: there is nobody like PgBouncer in between.

    Behind one, the next statement may meet another session, in which the name of what we have
    prepared stands for a statement of somebody else's. So nothing is prepared there.
    """
    (pid,) = connection.execute(b"select pg_backend_pid()").fetchone() or (None,)
    return bool(pid == connection.info.backend_pid)


def _sentence(error: psycopg.Error) -> str:
    return " ".join(str(error).split()) or type(error).__name__
