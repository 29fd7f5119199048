"""psycopg connections for threads.

`Connection` bounds every wait for the server. `SharedConnection` is one connection that threads use
one at a time; it is replaced when it is broken.

Invariants: every failure of server and network is raised as `StoreUnavailable` within the timeout;
a connection that may be broken is closed, and the next caller opens a new one; a connection is
never used or closed in a forked child.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import Any, TypeVar

import psycopg
from psycopg import BaseConnection, RawCursor, errors

from coatcheck.core.flow import Flow, run
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.postgres.errors import (
    ATTEMPTS_MAX,
    NoAnswer,
    is_rolled_back,
    is_session_stale,
    to_store_error,
)
from coatcheck.stores.postgres.statements import Row
from coatcheck.stores.postgres.swap import Execute, with_store_errors
from coatcheck.stores.search_timeout import took_too_long

T = TypeVar("T")

# A prepared statement is planned once, perhaps while the table is empty, and PostgreSQL keeps that
# plan until the next vacuum. It must use the index, because the table may soon have a million rows.
# Left to itself, PostgreSQL would plan a batch of one again each time, which takes a millisecond.
PLAN_WITH_INDEX = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}

_SET = "select set_config(n, v, false) from unnest($1::text[], $2::text[]) as s (n, v)"


class BoundedConnection(BaseConnection[Any]):
    """
    Bounds how long psycopg waits for an answer.

    After that the connection is closed, and `NoAnswer` raised. libpq has no read timeout, and
    `tcp_user_timeout` does not help against a frozen process whose machine still acknowledges
    packets. Hence the override of `wait` in the two subclasses.
    """

    timeout_s: float = inf  # for each call
    next_timeout_s: float | None = None  # for the next call only

    def bounded(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """
        Run *gen* within the time limit.

        While psycopg waits for the socket, it resumes *gen* with nothing every tenth of a second.
        """
        limit_s = self.timeout_s if self.next_timeout_s is None else self.next_timeout_s
        self.next_timeout_s = None
        deadline = time.monotonic() + limit_s
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()
                    raise NoAnswer(f"the server does not answer (waited {limit_s:g} s)")
                wanted = gen.send(ready)
        except StopIteration as done:
            return done.value


class Connection(BoundedConnection, psycopg.Connection[Any]):
    """A bounded psycopg connection, for threads."""

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as in the driver
        """Wait for *gen*, within the time limit."""
        return super().wait(self.bounded(gen), *args, **kwargs)

    def fetch(self, statement: str, *values: object) -> list[Row]:
        """Execute *statement* and return its rows."""
        return self.execute(statement.encode(), values, binary=True).fetchall()

    def run(self, flow: Flow[T]) -> T:
        """Execute the statements of *flow*; errors are psycopg's own."""
        return run(flow, self._perform)

    def _perform(self, effect: object) -> list[Row]:
        assert isinstance(effect, Execute)
        return self.fetch(effect.statement, *effect.values)


class AsyncConnection(BoundedConnection, psycopg.AsyncConnection[Any]):
    """The same for event loops."""

    async def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as in the driver
        """Wait for *gen*, within the time limit."""
        return await super().wait(self.bounded(gen), *args, **kwargs)


class SharedConnection:
    """
    One connection for many threads, one at a time: `with shared as connection`.

    It connects on first use. *writes*: statements on it change records, so a lost answer is
    ambiguous. *prepares*: prepare every statement, for a plan that uses an index; not behind a
    pooler.
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
        # The reference is kept: closing it would end the session of the parent process.
        self._inherited.append(self._connection)
        self._connection = None
        self._mutex = threading.Lock()

    def run_flow(self, flow: Flow[T]) -> T:
        """Execute the statements of *flow*."""
        with self as connection:
            return connection.run(with_store_errors(flow, writes=self._writes))

    def run(self, work: Callable[[Connection], T]) -> T:
        """Call *work* with the connection; again, if the server rolled it back."""
        for attempts_left in reversed(range(ATTEMPTS_MAX)):
            try:
                with self as connection:
                    return work(connection)
            except psycopg.Error as error:
                if not is_rolled_back(error):
                    raise
                if not attempts_left:
                    raise to_store_error(error, writes=self._writes) from error
        raise AssertionError

    def __enter__(self) -> Connection:
        self._mutex.acquire()
        try:
            if self._connection is not None and _was_closed_by_server(self._connection):
                self._discard()
            if self._connection is None:
                if self._closed:
                    raise StoreUnavailable("the store is closed")
                self._connection = connect(self._conninfo, self._timeout_s, prepares=self._prepares)
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
            if error and self._connection and _is_broken(self._connection, error):
                self._discard()
        finally:
            self._mutex.release()
            if self._closed:  # `close` did not wait for this caller
                self.close(wait_s=0)
        if isinstance(error, Exception) and not is_rolled_back(error):
            store_error = to_store_error(error, writes=self._writes)
            if store_error is not error:
                raise store_error from error

    def _discard(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            close_quietly(connection)

    def close(self, wait_s: float = -1) -> None:
        """
        Close the connection for good.

        Waits for a caller that is using it, but at most *wait_s* (-1: as long as it takes). A
        caller that is not waited for closes the connection when it has finished.
        """
        self._closed = True
        if self._mutex.acquire(timeout=wait_s):
            try:
                self._discard()
            finally:
                self._mutex.release()


def connect(conninfo: str, timeout_s: float, *, prepares: bool) -> Connection:
    """Open a connection; *prepares* as in `SharedConnection`."""
    try:
        connection = Connection.connect(
            conninfo, autocommit=True, prepare_threshold=None, cursor_factory=RawCursor
        )
        connection.timeout_s = timeout_s
        if prepares:
            connection.prepare_threshold = 0  # from the first execution on
            try:
                connection.fetch(_SET, [*PLAN_WITH_INDEX], [*PLAN_WITH_INDEX.values()])
            except BaseException:
                close_quietly(connection)
                raise
    except Exception as error:
        raise to_store_error(error, writes=False) from error
    return connection


def is_direct(connection: Connection) -> bool:
    """
    Whether no pooler such as PgBouncer is between us and the server.

    Behind one, the next statement may reach another session, where the name of a statement that we
    prepared belongs to another client's statement. So nothing is prepared there.
    """
    return connection.fetch("select pg_backend_pid()") == [(connection.info.backend_pid,)]


def _was_closed_by_server(connection: Connection) -> bool:
    """Whether an idle connection has something to read, which is nearly always its end."""
    if not hasattr(select, "poll"):  # on Windows the next statement fails instead
        return False
    try:
        idle = select.poll()
        idle.register(connection.fileno(), select.POLLIN)
        return bool(idle.poll(0))
    except (psycopg.OperationalError, OSError):  # it is closed already
        return True


def _is_broken(connection: Connection, error: BaseException) -> bool:
    if is_session_stale(error) or connection.closed:
        return True
    return connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE


def close_quietly(connection: Connection) -> None:
    """Close *connection*, whatever its state."""
    with suppress(psycopg.Error):
        connection.close()


def search(
    connection: Connection, statement: str, values: Sequence[object], limit_s: float
) -> list[Row]:
    """Return the rows of *statement*; the server itself ends it after *limit_s*."""
    started_s = time.monotonic()
    try:
        with connection.transaction():  # behind a pooler, too, the limit is for this search alone
            # The usual timeout applies to this one, so a frozen server is noticed soon.
            connection.execute(b"set local statement_timeout = %d" % round(limit_s * 1_000))
            # Longer than the limit, so that the server gives up first.
            connection.next_timeout_s = limit_s + connection.timeout_s
            return connection.fetch(statement, *values)
    except errors.QueryCanceled as error:
        if time.monotonic() - started_s < limit_s:  # an operator cancelled it
            raise
        raise took_too_long(limit_s) from error
