"""Lines to a MySQL server: one connection each, one caller at a time.

Between `mysql.py`, which says what to do on a line, and the driver, which only this file knows.

Invariants: work that collided with somebody else's is undone and done again; after an error no
transaction stays open, and no connection that may be out of step; none is used on both sides of a
fork.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import pymysql

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.mysql_faults import (
    COLLISIONS,
    MADE_ALREADY,
    PASSING,
    UNREACHABLE,
    explained,
)

R = TypeVar("R")
Row: TypeAlias = tuple[Any, ...]

# 10 times: enough for a crowd, of which one comes through each time.
_TRIES_MAX = 10
# Up to 10 ms before the next try, some commits long, so that the same two do not meet again.
_PAUSE_MS_MAX = 10

# Whatever the server's own settings are: what does not fit is an error, and a backslash escapes.
_SQL_MODE = "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION"

# What the protocol puts around a statement, generously.
_ENVELOPE_BYTES = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the server is, who we are there, and how long we wait for it."""

    host: str
    port: int
    user: str | None
    password: str = field(repr=False)
    database: str
    timeout_s: float
    tls: ssl.SSLContext | bool | None  # None: where the server offers it, and unverified

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        return f"mysql://{user}{self.host}:{self.port}/{self.database}"

    @property
    def lock_timeout_s(self) -> int:
        """
        How long the server lets us wait for a lock, in its whole seconds.

        Less than we wait for the server, so that it can still say that nothing was written.
        """
        return max(1, int(self.timeout_s / 2))


class Session:
    """A connection, and what is on its way over it."""

    def __init__(self, address: Address) -> None:
        self.is_unsure = False  # what was sent last commits, and has not been answered
        self.is_clean = True  # everything was answered, and no transaction is open
        self.has_committed = False  # in the work that is being done
        self._is_in_transaction = False
        self._connection = _unconnected(address)
        sock = socket.create_connection((address.host, address.port), address.timeout_s)
        number = sock.fileno()  # which stays the same where TLS puts another object around it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection.connect(sock)
        self._selector = _Selector()
        self._selector.register(number, selectors.EVENT_READ)
        self._connection.query(f"set {_settings(address)}")
        self._connection.query("set session transaction isolation level read committed")
        # Who sends a longer statement is cut off without a word, so it must be known before.
        ((packet_bytes_max,),) = self.read("select @@max_allowed_packet")
        self.statement_bytes_max = int(packet_bytes_max) - _ENVELOPE_BYTES

    def read(self, statement: str) -> Sequence[Row]:
        """The rows of a query."""
        was_clean, self.is_clean = self.is_clean, False
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            rows: Sequence[Row] = cursor.fetchall()
        self.is_clean = was_clean
        return rows

    def write(self, *statements: bytes) -> int:
        """How many rows were affected; where no transaction is open, that is committed."""
        self.refuse_if_too_large(*statements)
        affected = 0
        self.is_clean, self.is_unsure = False, not self._is_in_transaction
        for statement in statements:
            affected += self._connection.query(statement)
        self.is_clean, self.is_unsure = not self._is_in_transaction, False
        self.has_committed |= affected > 0 and not self._is_in_transaction
        return affected

    def write_once(self, statement: bytes) -> None:
        """A change of a table, unless somebody has made it and was cut off before saying so."""
        try:
            self.write(statement)
        except pymysql.MySQLError as error:
            if _code_of(error) not in MADE_ALREADY:
                raise
            self.undo()

    def refuse_if_too_large(self, *statements: bytes) -> None:
        """Raise, before anything is sent, where the server would hang up on one of them."""
        longest = max(map(len, statements), default=0)
        if longest > self.statement_bytes_max:
            raise ValueError(
                f"a record takes a statement of {longest} bytes, and the server takes at most "
                f"{self.statement_bytes_max}; raise its max_allowed_packet, or lower "
                "response_bytes_max"
            )

    def begin(self) -> None:
        """Open a transaction."""
        self.is_clean, self._is_in_transaction = False, True
        self._connection.begin()

    def commit(self) -> None:
        """Commit what was written since."""
        self.is_unsure = True
        self._connection.commit()
        self.is_clean, self.is_unsure, self._is_in_transaction = True, False, False
        self.has_committed = True

    def undo(self) -> None:
        """Be as before, after an error that hurts nobody."""
        if self._is_in_transaction:
            self._connection.rollback()
        self.is_clean, self.is_unsure, self._is_in_transaction = True, False, False

    def is_stale(self) -> bool:
        """The server has said something unasked, which is always that it has hung up."""
        return bool(self._selector.select(0))

    def close(self) -> None:
        """Say goodbye."""
        with suppress(pymysql.MySQLError):
            self._connection.close()


# Not `select`, which knows no descriptor above 1 023; not `epoll`, which is one more of them.
_Selector: type[selectors.BaseSelector] = getattr(
    selectors, "PollSelector", selectors.SelectSelector
)


def _unconnected(address: Address) -> pymysql.Connection[pymysql.cursors.Cursor]:
    return pymysql.Connection(
        defer_connect=True,
        host=address.host,  # for the certificate, and for messages
        user=address.user,
        password=address.password.encode(),
        database=address.database,
        charset="utf8mb4",
        autocommit=True,
        read_timeout=address.timeout_s,
        write_timeout=address.timeout_s,
        ssl=address.tls if isinstance(address.tls, ssl.SSLContext) else None,
        ssl_disabled=address.tls is False,
        program_name="coatcheck",
    )


def _settings(address: Address) -> str:
    """How a session differs from the server's own settings."""
    return ", ".join(
        (
            f"session sql_mode = '{_SQL_MODE}'",
            # For rows, and for the table as a whole while somebody alters it.
            f"session innodb_lock_wait_timeout = {address.lock_timeout_s}",
            f"session lock_wait_timeout = {address.lock_timeout_s}",
        )
    )


class Line:
    """
    One connection, for one caller at a time.

    Opened at first use, and again after it was lost or a fork. *opening*: a store is just being
    opened, so what could never work is a wrong setting and not an outage.
    """

    def __init__(self, address: Address, *, opening: bool = False) -> None:
        self._address = address
        self._opening = opening
        self._closed = False
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        """
        Begin anew in a child.

        What is forgotten here is closed without a goodbye, which would end the parent's session;
        kept open, it would keep that session, and its locks, beyond the parent's end.
        """
        self._mutex = threading.Lock()
        self._session: Session | None = None
        self._pid = os.getpid()

    def is_busy(self) -> bool:
        """Somebody is on it at this moment."""
        return self._mutex.locked()

    def run(self, work: Callable[[Session], R]) -> R:
        """Do *work*, again where it collides with somebody else's."""
        if self._pid != os.getpid():  # a fork that Python was not told about
            self._renew()
        with self._mutex:
            # The server has waited for a lock already; after the last time we have, too.
            deadline_s = time.monotonic() + self._address.timeout_s - self._address.lock_timeout_s
            tries = 0
            while True:
                tries += 1
                try:
                    return work(self._opened())
                except pymysql.MySQLError as error:
                    failure = self._fault(error)
                    is_last = tries == _TRIES_MAX or time.monotonic() > deadline_s
                    if _code_of(error) not in COLLISIONS or is_last:
                        raise failure from error
                except BaseException:
                    self._leave()
                    raise
                time.sleep(secrets.randbelow(_PAUSE_MS_MAX) / 1_000)

    def _opened(self) -> Session:
        if self._closed:
            raise StoreUnavailable(f"{self._address}: the store is closed")
        if self._session is not None and self._session.is_stale():
            self._drop()
        if self._session is None:
            try:
                self._session = Session(self._address)
            except OSError as error:
                raise explained(UNREACHABLE, str(error), str(self._address)) from error
            except (pymysql.MySQLError, StoreUnavailable):
                raise
            except Exception as error:
                # The driver stumbles over what is no MySQL; or lacks what a login needs.
                message = f"{self._address}: it was not possible to log in: {error!r}"
                raise StoreUnavailable(message) from error
        self._session.has_committed = False
        return self._session

    def _fault(self, error: pymysql.MySQLError) -> Exception:
        """What *error* means; the connection is left as good as it can be."""
        code, session = _code_of(error), self._session
        is_unsure = has_committed = False
        if session is not None:
            is_unsure, has_committed = session.is_unsure, session.has_committed
            if code in PASSING:
                with suppress(pymysql.MySQLError):
                    session.undo()
        self._leave()
        text, where = str(error.args[-1]), str(self._address)
        failure = explained(code, text, where, opening=self._opening, is_unsure=is_unsure)
        if has_committed:  # and what came after it failed
            failure = StoreUnavailable(str(failure), is_ambiguous=True)
        return failure

    def _leave(self) -> None:
        """Let go of a connection on which something is unfinished."""
        if self._session is not None and not self._session.is_clean:
            self._drop()

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """Hang up for good."""
        self._closed = True
        if self._pid == os.getpid():  # else it is the parent's
            with self._mutex:
                self._drop()


class Lines:
    """Some lines, for as many callers at a time; one who is alone always gets the first."""

    def __init__(self, address: Address, count: int) -> None:
        self._lines = [Line(address) for _ in range(count)]

    def run(self, work: Callable[[Session], R]) -> R:
        """Do *work* on a line that is free; see `Line.run`. Two may find the same: one waits."""
        free = (line for line in self._lines if not line.is_busy())
        return next(free, self._lines[0]).run(work)

    def close(self) -> None:
        """Hang up for good."""
        for line in self._lines:
            line.close()


def _code_of(error: pymysql.MySQLError) -> int:
    """What kind of error it is; 0 where the driver does not say."""
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


def new_stamp() -> int:
    """A number that nobody else has; of 62 bits, and not 0."""
    return secrets.randbits(62) + 1
