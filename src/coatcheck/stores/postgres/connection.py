"""psycopg connections for threads.

`Connection` bounds every wait for the server. `PostgresConnection` is one connection that threads
use one at a time; it is replaced when it is broken.

Invariants: every failure of server and network is raised as `StoreUnavailable` within the timeout;
a connection that may be broken is closed, and the next caller opens a new one; a connection is
never used or closed in a forked child.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from math import inf
from typing import Any, TypeVar

import psycopg
from psycopg import BaseConnection, RawCursor, errors

from coatcheck.core.flow import Flow, run
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.postgres.errors import (
    NoAnswer,
    is_session_stale,
    to_store_error,
)
from coatcheck.stores.postgres.statements import Row
from coatcheck.stores.postgres.swap import Execute, with_store_errors
from coatcheck.stores.search_timeout import took_too_long
from coatcheck.stores.shared_connection import SharedConnection

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


class PostgresConnection(SharedConnection[Connection]):
    """
    One connection for many threads, one at a time.

    *writes*: statements on it change records, so a lost answer is ambiguous. *prepares*: prepare
    every statement, for a plan that uses an index; not behind a pooler.
    """

    def __init__(
        self, conninfo: str, timeout_s: float, *, writes: bool = False, prepares: bool = False
    ) -> None:
        super().__init__("postgresql")
        self._conninfo = conninfo
        self._timeout_s = timeout_s
        self._writes = writes
        self._prepares = prepares
        self._inherited: list[Connection | None] = []
        renew_after_fork(self)

    def _renew(self) -> None:
        # The reference is kept: closing it would end the session of the parent process.
        self._inherited.append(self._connection)
        super()._renew()

    def run_flow(self, flow: Flow[T]) -> T:
        """Execute the statements of *flow*."""
        with self as connection:
            return connection.run(with_store_errors(flow, writes=self._writes))

    def run(self, work: Callable[[Connection], T]) -> T:
        """Call *work* with the connection."""
        with self as connection:
            return work(connection)

    def _open(self) -> Connection:
        return connect(self._conninfo, self._timeout_s, prepares=self._prepares)

    def _close(self, connection: Connection) -> None:
        close_quietly(connection)

    def _is_usable(self, connection: Connection, error: BaseException | None) -> bool:
        if error is None:
            return True
        if is_session_stale(error) or connection.closed:
            return False
        return connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE

    def _is_stale(self, connection: Connection) -> bool:
        """An idle connection has something to read, which is nearly always its end."""
        if not hasattr(select, "poll"):  # on Windows the next statement fails instead
            return False
        try:
            idle = select.poll()
            idle.register(connection.fileno(), select.POLLIN)
            return bool(idle.poll(0))
        except (psycopg.OperationalError, OSError):  # it is closed already
            return True

    def _raise_store_error(self, error: Exception) -> None:
        store_error = to_store_error(error, writes=self._writes)
        if store_error is not error:
            raise store_error from error


def connect(conninfo: str, timeout_s: float, *, prepares: bool) -> Connection:
    """Open a connection; *prepares* as in `PostgresConnection`."""
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
