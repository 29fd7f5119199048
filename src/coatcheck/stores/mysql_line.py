"""Lines to a MySQL server: one connection each, one caller at a time.

Between `mysql.py`, which says what to do on a line, and the driver, which connects, encrypts and
logs in, and which only this file knows.

Invariants: after an error no transaction stays open, and no connection that may be out of step;
none is used on both sides of a fork.
"""

from __future__ import annotations

import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pymysql
from pymysql.constants import CLIENT

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.mysql_faults import (
    READ_ONLY,
    SERVER_GONE,
    SERVER_LOST,
    UNPREPARED,
    UNREACHABLE,
    explained,
)
from coatcheck.stores.mysql_flow import Terms, Work, conversation
from coatcheck.stores.mysql_packets import (
    Answer,
    Hearing,
    Preparation,
    Refusal,
    Reply,
    framed,
    preparation,
    query,
)
from coatcheck.stores.mysql_rows import WRITABLE

R = TypeVar("R")

# 2: while the server writes one batch, we make and read the other. More would be smaller ones.
LANES = 2
# 64 KiB: what a batch of answers takes, and more than a record of TLS, whose rest would lie where
# nobody sees it.
READ_BYTES = 1 << 16

# Whatever the server's own settings are: what does not fit is an error, assignments are made from
# left to right, and nothing is taken for null.
SQL_MODE = "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION"
_TERMS = b"select @@max_allowed_packet, @@read_only, @@innodb_read_only"

# The greatest limit that there is, which is none.
_ROWS_MAX = (1 << 64) - 1

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
    """
    A connection that is logged in, and what is known about it.

    *keeps*: the statements that are prepared on it. *is_opening*: a store is just being opened, so
    what could never work is a wrong setting and not an outage.
    """

    def __init__(self, address: Address, keeps: Sequence[bytes], *, is_opening: bool) -> None:
        self.is_fit = True  # everything was answered, and no transaction is open
        self.is_opening = is_opening
        self.where = str(address)
        self.timeout_s = address.timeout_s
        self.lock_timeout_s = address.lock_timeout_s
        self._connection = _unconnected(address)
        try:
            self.socket = _connected(self._connection, address)
            self._selector = _Selector()
            self._selector.register(self.socket.fileno(), selectors.EVENT_READ)
            self.terms = self._agreed(address, keeps)
        except BaseException:
            self.close()
            raise

    def _agreed(self, address: Address, keeps: Sequence[bytes]) -> Terms:
        """Make it a session as we need it."""
        self._told(query(_settings(address).encode()))
        self._told(query(b"set session transaction isolation level read committed"))
        ((packet_bytes_max, *read_only),) = self._told(query(_TERMS)).rows
        if any(setting not in WRITABLE for setting in read_only):
            raise Refusal(READ_ONLY, "read_only is on")
        # Who sends a longer statement is cut off without a word, so it must be known before.
        bytes_max = int(packet_bytes_max) - _ENVELOPE_BYTES
        try:
            prepared = [self._told(preparation(text), Preparation) for text in keeps]
        except Refusal as refusal:
            if refusal.code not in UNPREPARED:
                raise
            prepared = []
        kept = tuple(answer.affected for answer in prepared)
        return Terms(bytes_max, kept, isinstance(self.socket, ssl.SSLSocket))

    def _told(self, command: bytes, kind: type[Hearing] = Hearing) -> Answer:
        reply = self.ask(framed(command), kind)
        if isinstance(reply, Refusal):
            raise reply
        return reply

    def converse(self, work: Work[R]) -> R:
        """Do *work*, and wait for each reply."""
        talk, reply = conversation(self, work), None
        try:
            while True:
                told = talk.send(reply)
                if isinstance(told, bytes):
                    reply = self.ask(told)
                else:
                    time.sleep(told)
                    reply = None
        except StopIteration as done:
            value: R = done.value
            return value

    def ask(self, sent: bytes, kind: type[Hearing] = Hearing) -> Reply:
        """The reply to what is *sent*; that there is none is a refusal, too."""
        try:
            self.socket.sendall(sent)
        except OSError as error:
            return Refusal(SERVER_GONE, str(error))
        hearing = kind(sent)
        try:
            while (reply := hearing.feed(self.heard())) is None:
                pass
        except (OSError, ValueError) as error:
            return Refusal(SERVER_LOST, str(error))
        return reply

    def heard(self) -> bytes:
        """What has come; that nothing ever will is an error."""
        if data := self.socket.recv(READ_BYTES):
            return data
        raise ConnectionError("the server has closed the connection")

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
        client_flag=CLIENT.MULTI_STATEMENTS,
        read_timeout=address.timeout_s,
        write_timeout=address.timeout_s,
        ssl=address.tls if isinstance(address.tls, ssl.SSLContext) else None,
        ssl_disabled=address.tls is False,
        program_name="coatcheck",
    )


def _connected(connection: pymysql.Connection[Any], address: Address) -> socket.socket:
    """The socket of *connection*, when it is logged in."""
    sock = socket.create_connection((address.host, address.port), address.timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.connect(sock)
    # TLS has put another one around it, and the driver has no public word for either.
    connected: socket.socket = vars(connection)["_sock"]
    return connected


def _settings(address: Address) -> str:
    """Makes a session differ from the server's own settings."""
    return "set " + ", ".join(
        (
            f"session sql_mode = '{SQL_MODE}'",
            # For rows, and for the table as a whole while somebody alters it.
            f"session innodb_lock_wait_timeout = {address.lock_timeout_s}",
            f"session lock_wait_timeout = {address.lock_timeout_s}",
            # What keeps people from changing or reading too many rows by mistake.
            "session sql_safe_updates = 0",
            f"session sql_select_limit = {_ROWS_MAX:d}",
            "session sql_big_selects = 1",
        )
    )


def opened(address: Address, keeps: Sequence[bytes] = (), *, is_opening: bool = False) -> Session:
    """A new session; see there."""
    where = str(address)
    try:
        return Session(address, keeps, is_opening=is_opening)
    except OSError as error:
        raise explained(UNREACHABLE, str(error), where) from error
    except pymysql.MySQLError as error:
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        raise explained(code, str(error.args[-1]), where, opening=is_opening) from error
    except Refusal as error:
        raise explained(error.code, error.text, where, opening=is_opening) from error
    except Exception as error:
        # The driver stumbles over what is no MySQL; or lacks what a login needs.
        message = f"{where}: it was not possible to log in: {error!r}"
        raise StoreUnavailable(message) from error


class Line:
    """
    One connection, for one caller at a time.

    Opened at first use, and again after it was lost or a fork; *keeps* and *is_opening* as in
    `Session`. *reply_s*: how long to wait for the server once it is open, if not as long as always.
    """

    def __init__(
        self,
        address: Address,
        keeps: Sequence[bytes] = (),
        *,
        is_opening: bool = False,
        reply_s: float | None = None,
    ) -> None:
        self._address = address
        self._keeps = keeps
        self._is_opening = is_opening
        self._reply_s = reply_s
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

    def run(self, work: Work[R]) -> R:
        """Do *work*, again where it collides with somebody else's."""
        if self._pid != os.getpid():  # a fork that Python was not told about
            self._renew()
        try:
            with self._mutex:
                session = self._opened()
                try:
                    return session.converse(work)
                finally:
                    if not session.is_fit:
                        self._drop()
        finally:
            if self._closed:  # by somebody who did not wait for us
                self.close(patience_s=0)

    def _opened(self) -> Session:
        if self._closed:
            raise StoreUnavailable(f"{self._address}: the store is closed")
        if self._session is not None and (self._session.is_stale() or self._is_dead(self._session)):
            self._drop()
        if self._session is None:
            self._session = opened(self._address, self._keeps, is_opening=self._is_opening)
        if self._reply_s is not None:
            self._session.socket.settimeout(self._reply_s)
        return self._session

    def _is_dead(self, session: Session) -> bool:
        """Nobody answers any more; looked for where the answer to something else may take long."""
        if self._reply_s is None:
            return False
        session.socket.settimeout(self._address.timeout_s)
        return isinstance(session.ask(framed(query(b"select 1"))), Refusal)

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self, patience_s: float = -1) -> None:
        """
        Hang up for good.

        Who is on it is waited for, for *patience_s* at most (-1: as long as it takes); after that
        it hangs up itself.
        """
        self._closed = True
        if self._pid == os.getpid() and self._mutex.acquire(timeout=patience_s):
            try:  # in another process it would be the parent's
                self._drop()
            finally:
                self._mutex.release()


class Lines:
    """Some lines, for as many callers at a time; one who is alone always gets the first."""

    def __init__(self, address: Address, keeps: Sequence[bytes]) -> None:
        self._lines = [Line(address, keeps) for _ in range(LANES)]

    def run(self, work: Work[R]) -> R:
        """Do *work* on a line that is free; see `Line.run`. Two may find the same: one waits."""
        free = (line for line in self._lines if not line.is_busy())
        return next(free, self._lines[0]).run(work)

    def close(self) -> None:
        """Hang up for good."""
        for line in self._lines:
            line.close()
