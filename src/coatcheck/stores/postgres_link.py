"""Links to a PostgreSQL server: one connection each, one caller at a time.

Between `postgres.py`, which says what to do, and the driver.

Invariants: whatever server and network do leaves as `StoreUnavailable`, within a time that is set;
a connection that may be hurt is dropped, and the next caller opens a new one; no connection
crosses a fork.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.generators import execute
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult

from coatcheck.core.flow import Flow
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.postgres_schema import NO_KEY
from coatcheck.stores.postgres_talk import TRIES, Say
from coatcheck.stores.searching import took_too_long

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
_OVER = (
    errors.ReadOnlySqlTransaction,
    errors.InvalidSqlStatementName,
    errors.FeatureNotSupported,
)
# What is prepared is planned once, perhaps while the table is empty; and its plan, which must hold
# for millions of rows, is not made anew before the next vacuum.
_BY_INDEX = b"set enable_seqscan = off; set enable_hashjoin = off; set enable_mergejoin = off"
_NOT_UTF8 = (
    "postgresql: the encoding of the database is not UTF8 and has no place for some character of "
    "this key, scope or label; use a database in UTF8, or compact=1, which keeps only digests"
)
NO_ANSWER = "the server does not answer"


class NoAnswer(psycopg.OperationalError):
    """It has taken too long, and whatever comes after that is not read."""


class Connection(psycopg.Connection[Any]):
    """A connection on which nothing takes longer than *timeout_s*, even if the server is frozen."""

    timeout_s = 5.0
    # Whether it keeps what is said to it all the time; and what it keeps.
    prepares = False
    kept: set[bytes]

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as in the driver
        """Do what *gen* does, for a while."""
        deadline = time.monotonic() + self.timeout_s
        return super().wait(until(gen, deadline), *args, **kwargs)

    @contextmanager
    def patient_for(self, longer_s: float) -> Iterator[None]:
        """Wait so much longer for what is said now."""
        before_s = self.timeout_s
        self.timeout_s = before_s + longer_s
        try:
            yield
        finally:
            self.timeout_s = before_s

    def converse(self, flow: Flow[T]) -> T:
        """Say what *flow* yields, and wait for each answer."""
        dialogue, results = conversation(self, flow), None
        try:
            while True:
                dialogue.send(results)
                results = self.wait(execute(self.pgconn))
        except StopIteration as done:
            value: T = done.value
            return value


def conversation(
    connection: Connection, flow: Flow[T]
) -> Generator[None, Sequence[PGresult] | None, T]:
    """
    Say what *flow* yields; whenever something was sent, yield, and be sent the answer.

    Each statement is committed by itself. So once one was answered, whatever is said of a later
    one, nobody knows that nothing was written.
    """
    is_answered = False
    try:
        effect = next(flow)
        while True:
            assert isinstance(effect, Say)
            answer = yield from _said(connection, effect)
            is_answered = True
            effect = flow.send(answer)
    except StopIteration as done:
        value: T = done.value
        return value
    except (psycopg.Error, StoreUnavailable) as error:
        outage = outage_of(error, writes=True)
        if not is_answered or not isinstance(outage, StoreUnavailable):
            raise
        outage.is_ambiguous = True
        raise outage from outage.__cause__


def _said(connection: Connection, say: Say) -> Generator[None, Sequence[PGresult] | None, PGresult]:
    """The answer to *say*; said again, if the server has undone it for no fault of ours."""
    name, text = say.statement
    if connection.prepares and name not in connection.kept:
        connection.pgconn.send_prepare(name, text)
        answer_of((yield))
        connection.kept.add(name)
    for left in reversed(range(TRIES)):
        _send(connection, say)
        try:
            return answer_of((yield))
        except _ONCE_MORE as error:
            if not left:
                raise outage_of(error, writes=True) from error
    raise AssertionError


def _send(connection: Connection, say: Say) -> None:
    """Through the protocol itself: the driver's cursors would take as long as the server."""
    (name, text), values = say.statement, say.values
    formats = [Format.BINARY] * len(values)
    if connection.prepares:
        connection.pgconn.send_query_prepared(name, values, formats, Format.BINARY)
    else:
        connection.pgconn.send_query_params(text, values, None, formats, Format.BINARY)


def answer_of(results: Sequence[PGresult] | None) -> PGresult:
    """What the server has answered to one step; raised, where it is an error."""
    assert results
    result = results[0]
    if result.status not in _DONE:
        raise errors.error_from_result(result)
    return result


_DONE = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)


def until(gen: Generator[Any, Any, Any], deadline: float) -> Generator[Any, Any, Any]:
    """*gen*, but it fails where nothing has come when *deadline* has: every tenth of a second."""
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > deadline:
                raise NoAnswer(NO_ANSWER)
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

    def talk(self, flow: Flow[T]) -> T:
        """Say what *flow* yields."""
        with self as connection:
            return connection.converse(flow)

    def run(self, work: Callable[[Connection], T]) -> T:
        """Do *work* on the connection; again, if its server has undone it for no fault of ours."""
        for left in reversed(range(TRIES)):
            try:
                with self as connection:
                    return work(connection)
            except _ONCE_MORE as error:
                if not left:
                    raise outage_of(error, writes=self._writes) from error
        raise AssertionError

    def __enter__(self) -> Connection:
        self._mutex.acquire()
        try:
            if self._connection is not None and _has_ended(self._connection):
                self._drop()  # before somebody is told of an outage that is over
            return self._connection or self._opened()
        except BaseException:
            self._mutex.release()
            raise

    def _opened(self) -> Connection:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        self._connection = opened(self._conninfo, self._timeout_s, prepares=self._prepares)
        return self._connection

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        try:
            if error and self._connection and is_hurt(self._connection, error):
                self._drop()
        finally:
            self._mutex.release()
            if self._closed:  # by somebody who did not wait for us
                self.close(patience_s=0)
        if error is not None and not isinstance(error, _ONCE_MORE):
            outage = outage_of(error, writes=self._writes)
            if outage is not error:
                raise outage from error

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            let_go(connection)

    def close(self, patience_s: float = -1) -> None:
        """
        Let go of the connection for good.

        Who is on it is waited for, for *patience_s* at most (-1: as long as it takes); after that
        it lets go itself.
        """
        self._closed = True
        if self._mutex.acquire(timeout=patience_s):
            try:
                self._drop()
            finally:
                self._mutex.release()


def searched(
    connection: Connection, statement: bytes, values: Sequence[object], limit_s: float
) -> list[tuple[Any, ...]]:
    """What *statement* finds; the server ends it after *limit_s*, whatever becomes of us."""
    started_s = time.monotonic()
    try:
        with connection.transaction():  # so that it holds for this alone, behind a pooler as well
            connection.execute(b"set local statement_timeout = %d" % round(limit_s * 1_000))
            # It has just answered, so it is not dead; and it gives up before we do.
            with connection.patient_for(limit_s):
                return connection.execute(statement, values, binary=True).fetchall()
    except errors.QueryCanceled as error:
        if time.monotonic() - started_s < limit_s:  # by an operator
            raise
        raise took_too_long(limit_s) from error


def opened(conninfo: str, timeout_s: float, *, prepares: bool) -> Connection:
    """A new connection; *prepares* as in `Link`."""
    connection: Connection | None = None
    try:
        connection = Connection.connect(conninfo, autocommit=True, prepare_threshold=None)
        connection.timeout_s = timeout_s
        connection.kept = set()
        if prepares and _is_direct(connection):
            connection.execute(_BY_INDEX)
            connection.prepares = True
    except BaseException as error:  # noqa: BLE001 - raised again, perhaps as an outage
        if connection is not None:
            let_go(connection)
        raise outage_of(error, writes=False) from error.__cause__
    return connection


def _has_ended(connection: Connection) -> bool:
    """The server has said something unasked, which is nearly always goodbye."""
    if not hasattr(select, "poll"):  # on Windows whoever is first is told
        return False
    try:
        idle = select.poll()
        idle.register(connection.fileno(), select.POLLIN)
        return bool(idle.poll(0))
    except (psycopg.OperationalError, OSError):  # it is closed already
        return True


def let_go(connection: Connection) -> None:
    """Close *connection*, whatever has become of it."""
    with suppress(psycopg.Error):
        connection.close()


def is_hurt(connection: Connection, error: BaseException) -> bool:
    """*connection* is of no use after *error*."""
    # A server that only reads was the one that writes, before somebody else was promoted. And what
    # was prepared may be gone, or no longer fit a table that was changed.
    is_over = isinstance(error, _OVER) or isinstance(error.__cause__, _OVER)
    if is_over or not isinstance(error, Exception):
        return True
    status = connection.info.transaction_status
    return connection.closed or status != psycopg.pq.TransactionStatus.IDLE


def outage_of(error: BaseException, *, writes: bool) -> BaseException:
    """What *error* is to whoever asked: an outage, unless it is their own or none of ours."""
    if isinstance(error, errors.UntranslatableCharacter):
        return Misconfigured(_NOT_UTF8)
    if not isinstance(error, psycopg.Error) or isinstance(error, _OF_THE_RECORD):
        return error
    if isinstance(error, _ONCE_MORE):
        return StoreUnavailable(f"others were in the way {TRIES} times in a row")
    if isinstance(error, errors.InvalidColumnReference):  # of the table, a claim names its key
        outage = StoreUnavailable(f"the table {NO_KEY}")
        outage.__cause__ = error
        return outage
    is_ambiguous = writes and (error.sqlstate or "")[:2] not in _UNWRITTEN
    outage = StoreUnavailable(_sentence(error), is_ambiguous=is_ambiguous)
    outage.__cause__ = error
    return outage


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
