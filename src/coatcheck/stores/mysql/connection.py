"""Connections to a MySQL server, through PyMySQL.

A `Session` is one login: a PyMySQL connection with the session settings that the store relies on,
which also keeps track of what may have been committed. A `Connection` is what the store holds: one
session that threads share, and that repeats work after a deadlock.

Invariant: a session with an open transaction or an unread answer is never used again.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias, TypeVar

import pymysql
from pymysql.constants import CLIENT

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.mysql.errors import (
    CONNECTION_SURVIVES,
    READ_ONLY,
    RETRYABLE,
    SERVER_LOST,
    code_of,
    to_store_error,
)
from coatcheck.stores.shared_connection import SharedConnection

R = TypeVar("R")
Row: TypeAlias = tuple[Any, ...]

# 10: of several transactions that deadlock, at least one gets through each time.
_ATTEMPTS_MAX = 10
# Up to 10 ms, a few commits long, so that the same two transactions do not meet again.
_PAUSE_MS_MAX = 10

# Values that do not fit are errors, whatever the server's own `sql_mode` is.
SQL_MODE = "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION"
_LIMITS = "select @@max_allowed_packet, @@read_only, @@innodb_read_only"
# `read_only` on a primary: 0, or OFF on newer versions of MariaDB.
_WRITABLE = (0, "OFF")

# The greatest limit there is, which means no limit.
_ROWS_MAX = (1 << 64) - 1

# What the protocol and a transaction add to the statements; a few bytes, counted generously.
_ENVELOPE_BYTES = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where the server is, how to log in, and how long to wait for it."""

    host: str
    port: int
    user: str | None
    password: str = field(repr=False)
    database: str
    # None: use TLS if the server offers it, unverified; False: do not use it.
    tls: ssl.SSLContext | bool | None
    # For each statement. 5 s: hundreds of commits; after that an error serves the caller better.
    timeout_s: float = 5.0
    # For each statement on a connection that the store opens for transaction mode. 60 s: those of
    # the handler may take long, and MySQL lets them wait 50 s for a lock.
    transaction_timeout_s: float = 60.0

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        return f"mysql://{user}{self.host}:{self.port}/{self.database}"

    @property
    def lock_timeout_s(self) -> int:
        """How long a statement may wait for a lock: the server must still answer in time."""
        return max(1, int(self.timeout_s / 2))

    @property
    def tls_options(self) -> dict[str, Any]:
        """The arguments for PyMySQL."""
        context = self.tls if isinstance(self.tls, ssl.SSLContext) else None
        return {"ssl": context, "ssl_disabled": self.tls is False}


class Session:
    """One login at the server; *on_connect* is a statement that must succeed on it, or empty."""

    statement_bytes_max: int  # the longest statement that the server accepts

    def __init__(self, server: Server, read_timeout_s: float, on_connect: str) -> None:
        self.server = server
        self.is_committing = False  # the last statement commits by itself
        self.has_committed = False  # a statement has committed a change since `start_work`
        self._is_broken = False
        self._in_transaction = False
        self._connection = _unconnected(server, read_timeout_s)
        sock = _connected_socket(server)
        self._selector = _Selector()
        # The descriptor stays the same when PyMySQL wraps the socket in TLS.
        self._selector.register(sock.fileno(), selectors.EVENT_READ)
        self._connection.connect(sock)
        try:
            self._configure()
            if on_connect:
                self.read(on_connect)
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        self.write(_settings(self.server))
        self.write("set session transaction isolation level read committed")
        ((packet_bytes_max, *read_only),) = self.read(_LIMITS)
        for setting in read_only:
            _refuse_replica(setting)
        # The server closes the connection on a longer statement, often without an error.
        self.statement_bytes_max = int(packet_bytes_max) - _ENVELOPE_BYTES

    def read(self, statement: str) -> Sequence[Row]:
        """Return the rows that *statement* selects."""
        rows, _ = self._execute(statement)
        return rows

    def read_records(self, statement: str) -> Sequence[Row]:
        """Return rows whose last column is `@@read_only`; raise if the server is a replica now."""
        rows = self.read(statement)
        if rows:
            _refuse_replica(rows[0][-1])
        return rows

    def write(self, command: str) -> list[int]:
        """
        Execute *command*, statements separated by semicolons; return how many rows each affected.

        Outside of `begin` and `rollback` the changes are committed with it.
        """
        commits = not self._in_transaction
        _, affected = self._execute(command, commits=commits)
        self.has_committed |= commits and any(affected)
        return affected

    def begin(self) -> None:
        """Open a transaction."""
        self._in_transaction = True
        self._execute("begin")

    def rollback(self) -> None:
        """Roll back the transaction, if one is open."""
        self._execute("rollback")
        self._in_transaction = False

    def _execute(self, command: str, *, commits: bool = False) -> tuple[Sequence[Row], list[int]]:
        """Return the rows of the first statement, and how many rows each statement affected."""
        self._is_broken, self.is_committing = True, commits  # until it is answered
        try:
            with self._connection.cursor() as cursor:
                affected = [cursor.execute(command)]
                rows: Sequence[Row] = cursor.fetchall()
                while cursor.nextset():
                    affected.append(cursor.rowcount)
        except pymysql.MySQLError:
            raise
        except Exception as error:
            # PyMySQL fails in many ways on bytes that are no valid answer.
            raise pymysql.OperationalError(SERVER_LOST, f"no valid answer: {error!r}") from error
        self._is_broken = False
        return rows, affected

    def is_encrypted(self) -> bool:
        """The connection uses TLS."""
        ((_, cipher),) = self.read("show session status like 'Ssl_cipher'")
        return bool(cipher)

    def start_work(self) -> None:
        """Forget what earlier work has committed."""
        self.is_committing = self.has_committed = False

    def recover(self, error: pymysql.MySQLError) -> None:
        """Roll back if the connection has survived *error*; if not, it is unusable from now on."""
        self._is_broken = True
        if code_of(error) in CONNECTION_SURVIVES:
            with suppress(pymysql.MySQLError):
                self.rollback()

    @property
    def is_usable(self) -> bool:
        """Every statement was answered, and no transaction is open."""
        return not self._is_broken and not self._in_transaction

    def is_stale(self) -> bool:
        """Data without a statement to answer: the server has closed the connection."""
        return not self._connection.open or bool(self._selector.select(0))

    def close(self) -> None:
        """Log out."""
        with suppress(pymysql.MySQLError):
            self._connection.close()


# Not `select`, which fails on descriptors above 1,023; not `epoll`, which needs one of its own.
_Selector: type[selectors.BaseSelector] = getattr(
    selectors, "PollSelector", selectors.SelectSelector
)


def _unconnected(
    server: Server, read_timeout_s: float
) -> pymysql.Connection[pymysql.cursors.Cursor]:
    return pymysql.Connection(
        defer_connect=True,
        host=server.host,  # for the certificate and for messages; the socket is ours
        user=server.user,
        password=server.password.encode(),
        database=server.database,
        charset="utf8mb4",
        autocommit=True,
        client_flag=CLIENT.MULTI_STATEMENTS,
        read_timeout=read_timeout_s,
        write_timeout=server.timeout_s,
        program_name="coatcheck",
        **server.tls_options,
    )


def _connected_socket(server: Server) -> socket.socket:
    """Connect a socket of our own, which we can poll: PyMySQL has no public access to its own."""
    sock = socket.create_connection((server.host, server.port), server.timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


def _settings(server: Server) -> str:
    """Return the statement that overrides the server's own settings for a session."""
    settings = {
        "sql_mode": f"'{SQL_MODE}'",
        # For row locks, and for the lock of a table that is being altered.
        "innodb_lock_wait_timeout": server.lock_timeout_s,
        "lock_wait_timeout": server.lock_timeout_s,
        # These protect people from changing or reading too many rows by mistake.
        "sql_safe_updates": 0,
        "sql_select_limit": _ROWS_MAX,
        "sql_big_selects": 1,
    }
    return "set " + ", ".join(f"session {name} = {value}" for name, value in settings.items())


def _refuse_replica(read_only: object) -> None:
    if read_only not in _WRITABLE:
        raise pymysql.OperationalError(READ_ONLY, "read_only is on")


class Connection(SharedConnection[Session]):
    """
    One connection to the server, used by one thread at a time.

    *is_opening*: the store is being opened, so a permanent error is `Misconfigured`. *on_connect*:
    a statement for every new session; if it fails, the session is not used.

    A forked child drops the parent's session: that closes the child's copy of the socket without
    logging out, which would end the session for the parent. Keeping the copy open would keep the
    session and its locks alive after the parent has ended.
    """

    def __init__(
        self,
        server: Server,
        *,
        is_opening: bool = False,
        reply_timeout_s: float | None = None,
        on_connect: str = "",
    ) -> None:
        super().__init__(str(server))
        self._server = server
        self._is_opening = is_opening
        self._reply_timeout_s = reply_timeout_s or server.timeout_s
        self._on_connect = on_connect
        renew_after_fork(self)

    def run(self, work: Callable[[Session], R]) -> R:
        """Return what *work* returns; call it again after a deadlock or a lock timeout."""
        server = self._server
        # The last attempt may wait for a lock once more, and must still end in time.
        deadline_s = time.monotonic() + server.timeout_s - server.lock_timeout_s
        for attempt in count(1):
            with self as session:
                session.start_work()
                try:
                    return work(session)
                except pymysql.MySQLError as error:
                    failure = to_store_error(
                        error,
                        self._where,
                        is_opening=self._is_opening,
                        is_committing=session.is_committing,
                        has_committed=session.has_committed,
                    )
                    session.recover(error)
                    is_last = attempt == _ATTEMPTS_MAX or time.monotonic() > deadline_s
                    # Work that has committed something would conflict with its own first attempt.
                    if code_of(error) not in RETRYABLE or session.has_committed or is_last:
                        raise failure from error
            time.sleep(secrets.randbelow(_PAUSE_MS_MAX) / 1_000)
        raise AssertionError

    def _open(self) -> Session:
        try:
            return Session(self._server, self._reply_timeout_s, self._on_connect)
        except (pymysql.MySQLError, OSError) as error:
            raise to_store_error(error, self._where, is_opening=self._is_opening) from error
        except Exception as error:
            # PyMySQL fails in many ways on a server that is no MySQL, or if a package for the
            # login method is missing.
            raise StoreUnavailable(f"{self._where}: the login failed: {error!r}") from error

    def _close(self, connection: Session) -> None:
        connection.close()

    def _is_usable(self, connection: Session, error: BaseException | None) -> bool:
        del error
        return connection.is_usable

    def _is_stale(self, connection: Session) -> bool:
        return connection.is_stale()


def free_one(connections: Sequence[Connection]) -> Connection:
    """Return the first that no thread is using; if all are in use, the first of all."""
    return next((one for one in connections if not one.is_busy()), connections[0])
