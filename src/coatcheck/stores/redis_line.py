"""Lines to a Redis server: one connection each, one caller at a time.

Between the places (`redis_places.py`), which know whom to ask, and the driver, of which only
connections are used: it opens and authenticates them, sends what we have packed and parses what
comes back. This is the only file that imports it.

Invariants: after an error no connection stays that may have something unread; no connection
crosses a fork; nothing of the driver's leaves here, neither its errors (`StoreUnavailable`) nor the
server's refusals (`Refusal`).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from redis import connection as driver
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.redis_dangers import QUESTIONS, Watch
from coatcheck.stores.redis_flow import NO_WAIT, Wait
from coatcheck.stores.redis_replies import Refusal, Reply, refusal_of
from coatcheck.stores.redis_url import Address, Target
from coatcheck.stores.redis_values import Command, packed

Connection: TypeAlias = Any  # the driver's, which says little of its types


class Denied(StoreUnavailable):
    """The server does not take our name or password."""


class Line:
    """
    One connection to one server, opened at first use and again when it was lost.

    Args:
        connect: makes a connection that is ready to be asked.
        name: the server, for people.
        is_writer: what is sent may change something, so that losing its answer matters.
        wait: how many replicas must have acknowledged what was written.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        name: str,
        *,
        is_writer: bool = False,
        wait: Wait = NO_WAIT,
    ) -> None:
        self.name = name
        self.is_writer = is_writer
        self._connect = connect
        self._wait = wait
        self._wait_command = wait.command()
        self._connection: Connection | None = None
        self._closed = False
        self._inherited: list[Connection] = []
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        """Begin anew in a child, which must neither use nor close what is the parent's."""
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        if self._connection is not None:
            self._inherited.append(self._connection)
            self._connection = None

    def ask(self, *words: bytes | str | int) -> Reply:
        """Send one command, and wait for its answer."""
        spelt = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        self.send(packed(*spelt))
        return self.receive(1)[0]

    def ask_all(self, commands: Sequence[Command]) -> list[Reply]:
        """Send *commands* in one go, and wait for their answers."""
        self.send(b"".join(command.packed for command in commands))
        return self.receive(len(commands))

    def send(self, commands: bytes) -> None:
        """Send *commands*; the line is then the caller's until `receive` or `abandon`."""
        if self._pid != os.getpid():  # forked in a way that Python was not told about
            self._renew()
        self._mutex.acquire()
        try:
            connection = self._ready()
            try:
                connection.send_packed_command([commands], check_health=False)
                if self._wait.replicas:
                    connection.send_packed_command([self._wait_command], check_health=False)
            except (exceptions.RedisError, OSError) as error:
                raise lost(self.name, error, is_ambiguous=self.is_writer) from error
        except BaseException:
            self.abandon()
            raise

    def receive(self, count: int) -> list[Reply]:
        """Wait for the answers to *count* commands, and leave the line to others."""
        assert self._connection is not None
        replies: list[Reply] = []
        try:
            for _ in range(count):
                replies.append(_reply(self._connection))  # noqa: PERF401 - we look at it if that fails
            waited = _reply(self._connection) if self._wait.replicas else 0
        except (exceptions.RedisError, OSError) as error:
            self.abandon()
            # The driver reads no further. So only of a command that was alone we know that nothing
            # was done; others may have been let in before it, or after it.
            is_refused = isinstance(error, _AT_THE_DOOR) and count == 1 and not replies
            is_ambiguous = self.is_writer and not is_refused
            raise lost(self.name, error, is_ambiguous=is_ambiguous) from error
        except BaseException:
            self.abandon()
            raise
        self._mutex.release()
        return self._wait.judged(self.name, replies, waited) if self._wait.replicas else replies

    def _ready(self) -> Connection:
        """A connection on which nothing is unread."""
        self.refuse_if_closed()
        connection = self._connection
        if connection is not None:
            try:
                # Nothing was asked, so what could be read is the end, or none of ours.
                if not connection.can_read():
                    return connection
            except (exceptions.RedisError, OSError):
                pass
            self._drop()
        self._connection = connected(self._connect, self.name)
        return self._connection

    def abandon(self) -> None:
        """Leave the line to others without waiting for an answer."""
        self._drop()
        self._mutex.release()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    def hang_up(self) -> None:
        """Let go of the connection until the next use."""
        with self._mutex:
            self._drop()

    def refuse_if_closed(self) -> None:
        """Raise, if nothing can be asked any more."""
        if self._closed:
            raise StoreUnavailable(f"{self.name}: the store is closed")

    def close(self) -> None:
        """Let go of the connection for good."""
        self._closed = True
        if self._pid == os.getpid():  # else it is the parent's, and the parent's to close
            self.hang_up()


class Ask(NamedTuple):
    """Some commands for one server."""

    line: Line
    commands: bytes
    replies: int


def exchange(asks: Sequence[Ask]) -> list[list[Reply] | StoreUnavailable]:
    """
    Ask several servers at once: all have been sent to before any is waited for.

    One that is away is no reason to say nothing of the others: its error is in the place of its
    replies. Who asks several must name them in an order that all agree on, or two could wait for
    each other.
    """
    told: list[list[Reply] | StoreUnavailable] = [[] for _ in asks]
    waited_for: deque[int] = deque()
    try:
        for number, ask in enumerate(asks):
            try:
                ask.line.send(ask.commands)
            except StoreUnavailable as error:
                told[number] = error
            else:
                waited_for.append(number)
        while waited_for:
            number = waited_for.popleft()
            try:
                told[number] = asks[number].line.receive(asks[number].replies)
            except StoreUnavailable as error:
                told[number] = error
    except BaseException:
        for number in waited_for:
            asks[number].line.abandon()
        raise
    return told


def connected(connect: Callable[[], Connection], name: str) -> Connection:
    """What *connect* makes; also for event loops, which then use its socket by themselves."""
    try:
        return connect()
    except (exceptions.RedisError, OSError) as error:
        raise lost(name, error) from error


def lost(name: str, error: BaseException, *, is_ambiguous: bool = False) -> StoreUnavailable:
    """What to raise for an *error* of the driver's, or of a socket."""
    kind = Denied if isinstance(error, exceptions.AuthenticationError) else StoreUnavailable
    text = str(error).rstrip(".") or type(error).__name__
    return kind(f"{name}: {text}", is_ambiguous=is_ambiguous)


def _reply(connection: Connection) -> Reply:
    try:
        return connection.read_response(disable_decoding=True)
    except exceptions.ResponseError as error:
        code = _CODES.get(type(error))
        if code is not None:
            return Refusal(code, str(error))
        return refusal_of(str(error))


# The driver takes the code off the errors that it has a class for.
_CODES: dict[type[Exception], str] = {
    exceptions.AskError: "ASK",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.MovedError: "MOVED",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.NoScriptError: "NOSCRIPT",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.TryAgainError: "TRYAGAIN",
}
_AT_THE_DOOR = (exceptions.AuthenticationError, exceptions.BusyLoadingError)


def checked(connect: Callable[[], Connection], name: str, watch: Watch) -> Callable[[], Connection]:
    """What connects as *connect* does, and asks whoever answers whether it could forget."""

    def connect_and_ask() -> Connection:
        connection = connect()
        try:
            questions = b"".join(question.packed for question in QUESTIONS)
            connection.send_packed_command([questions], check_health=False)
            told = [_reply(connection) for _ in QUESTIONS]
            watch.meet(name, watch.health_of(name, told))
        except BaseException:
            connection.disconnect()
            raise
        return connection

    return connect_and_ask


def connector(target: Target, address: Address, timeout_s: float) -> Callable[[], Connection]:
    """What connects to the server at *address*, in *timeout_s* at most for each step."""

    def connect() -> Connection:
        return _connected(target, address, timeout_s)

    return connect


def master_connector(target: Target, timeout_s: float) -> Callable[[], Connection]:
    """What connects to the server that the Sentinels call the master, at that moment."""

    def connect() -> Connection:
        login = {"username": target.sentinel_username, "password": target.sentinel_password}
        options = {**_options(target, timeout_s), **login, "ssl": target.is_tls}
        # Made each time: to keep these connections would only mean to have them break.
        make: Any = Sentinel
        sentinel = make(target.addresses, sentinel_kwargs=options)
        try:
            host, port = sentinel.discover_master(target.service)
        finally:
            for client in sentinel.sentinels:
                client.close()
        return _connected(target, Address(host, port), timeout_s)

    return connect


def _connected(target: Target, address: Address, timeout_s: float) -> Connection:
    options = _options(target, timeout_s)
    options |= {"db": target.database, "username": target.username, "password": target.password}
    kind = driver.SSLConnection if target.is_tls else driver.Connection
    connection: Connection = kind(host=address.host, port=address.port, **options)
    connection.connect()
    return connection


def _options(target: Target, timeout_s: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),  # the engine knows how long a request may still wait
        "protocol": 2,  # nothing is gained by the other, and nobody may speak unasked in this
    }
    if target.is_tls and target.tls_ca:
        options["ssl_ca_certs"] = target.tls_ca
    return options
