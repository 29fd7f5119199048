"""Connections to one Redis server, or to the master that Sentinels name, for threads.

redis-py's client and pool do the work: they connect, log in, keep connections and replace those
that the server closed. This module adds what they do not know: whether a failed write may have
been applied, a safety check for each new connection, and a new client after a fork.

Invariants: nothing of redis-py's leaves this package except a server's `ResponseError` as a reply;
a command is sent at most once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from redis import Redis, exceptions
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from coatcheck.core.identity import ID_BYTES
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.redis.records import Command, Words
from coatcheck.stores.redis.safety import QUESTIONS, SafetyMonitor
from coatcheck.stores.redis.swap import Reply, Wait, is_demoted
from coatcheck.stores.redis.url import Address, Target

RedisClient: TypeAlias = Any  # redis-py's; its types say little


class LoginRefused(StoreUnavailable):
    """The server refuses the user or the password."""


class ConnectFailed(exceptions.ConnectionError):
    """No connection could be made, so nothing was sent; the driver's error is `__cause__`."""


class ConnectFailedPool(ConnectionPool):
    """
    Raises `ConnectFailed` if it cannot connect.

    redis-py raises the same `ConnectionError` for that and for a reply that was lost; but after a
    lost reply the write may have been applied.
    """

    def get_connection(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - redis-py's
        """Return an open connection."""
        try:
            return super().get_connection(*args, **options)
        except (exceptions.RedisError, OSError) as error:
            raise ConnectFailed(str(error)) from error


class ConnectFailedSentinelPool(ConnectFailedPool, SentinelConnectionPool):
    """The same for connections to the master that Sentinels name."""


class Driver(NamedTuple):
    """The classes of redis-py for threads, or those for event loops."""

    client: Any
    pool: Any
    connection: Any
    tls_connection: Any
    sentinel: Any
    sentinel_pool: Any
    retry: Any


THREADS = Driver(
    client=Redis,
    pool=ConnectFailedPool,
    connection=Connection,
    tls_connection=SSLConnection,
    sentinel=Sentinel,
    sentinel_pool=ConnectFailedSentinelPool,
    retry=Retry,
)


def open_client(
    driver: Driver,
    target: Target,
    *,
    address: Address,
    timeout_s: float | None,
    sentinel_timeout_s: float,
    on_connect: Callable[..., Any] | None = None,
) -> RedisClient:
    """
    Make a client for the server at *address*, or for the master if *target* names Sentinels.

    Nothing is connected yet. *timeout_s* limits connecting and each answer (None: no limit), and
    *sentinel_timeout_s* the same for Sentinels. *on_connect* is called with each new connection.
    """
    options = _options(driver, target, timeout_s)
    options |= {"db": target.database, "username": target.username, "password": target.password}
    if on_connect is not None:
        options["redis_connect_func"] = on_connect
    if target.shape == "sentinel":
        login = {"username": target.sentinel_username, "password": target.sentinel_password}
        own = {**_options(driver, target, sentinel_timeout_s), **login, "ssl": target.is_tls}
        sentinel = driver.sentinel(target.addresses, sentinel_kwargs=own)
        options |= {"ssl": target.is_tls, "connection_pool_class": driver.sentinel_pool}
        client = sentinel.master_for(target.service, **options)
    else:
        kind = driver.tls_connection if target.is_tls else driver.connection
        pool = driver.pool(kind, host=address.host, port=address.port, **options)
        client = driver.client.from_pool(pool)
    # As the server sent it: `on_connect` reads the same reply without a client.
    client.set_response_callback("INFO", lambda reply, **_options: reply)
    return client


def _options(driver: Driver, target: Target, timeout_s: float | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        # No retries: the engine retries, and knows how long the request may still wait.
        "retry": driver.retry(NoBackoff(), 0),
        "protocol": 2,  # in RESP3 a server may send messages that nothing here asked for
    }
    if target.is_tls and target.tls_ca:
        options["ssl_ca_certs"] = target.tls_ca
    return options


def sentinels_of(client: RedisClient) -> Sequence[RedisClient]:
    """Return the clients of the Sentinels that *client* asks for the master."""
    sentinel = getattr(client.connection_pool, "sentinel_manager", None)
    return sentinel.sentinels if sentinel is not None else ()


def to_store_error(name: str, error: Exception, *, is_ambiguous: bool = False) -> StoreUnavailable:
    """Return what to raise for an *error* of redis-py's or of a socket."""
    cause = error.__cause__ if isinstance(error, ConnectFailed) else error
    kind = LoginRefused if isinstance(cause, exceptions.AuthenticationError) else StoreUnavailable
    text = str(cause).rstrip(".") or type(cause).__name__
    return kind(f"{name}: {text}", is_ambiguous=is_ambiguous)


def may_have_written(error: Exception, commands_count: int) -> bool:
    """Return whether commands that failed with *error* may have been applied."""
    if isinstance(error, ConnectFailed):
        return False
    # redis-py raises these as connection errors, but the server refused the command: NOAUTH,
    # LOADING and, from a master that Sentinels have demoted, READONLY.
    refusals = (exceptions.AuthenticationError, exceptions.BusyLoadingError)
    is_refused = isinstance(error, refusals) or type(error.__context__) is exceptions.ReadOnlyError
    # Of several commands the server may have accepted others.
    return commands_count > 1 or not is_refused


class Client:
    """
    One server's client, used by any number of threads.

    Args:
        make: makes redis-py's client.
        name: the server, for error messages.
        wait: how many replicas must acknowledge a write.
    """

    def __init__(self, make: Callable[[], RedisClient], name: str, wait: Wait) -> None:
        self.name = name
        self._make = make
        self._wait = wait
        self._closed = False
        self._inherited: list[RedisClient] = []
        self._client = make()
        renew_after_fork(self)

    def _renew(self) -> None:
        """
        Take a new client in a forked child, which must not use the parent's connections.

        redis-py's pool would notice the fork, too, but keeps a lock that another thread of the
        parent may have held in that moment.
        """
        self._inherited.append(self._client)
        self._client = self._make()

    def send(self, commands: Sequence[Words], *, is_write: bool = False) -> list[Reply]:
        """Send *commands* in one round trip and return their replies."""
        self.check_open()
        sent = [*commands, *self._wait.commands()] if is_write else commands
        try:
            replies = self._execute(sent)
        except (exceptions.RedisError, OSError) as error:
            is_ambiguous = is_write and may_have_written(error, len(sent))
            raise to_store_error(self.name, error, is_ambiguous=is_ambiguous) from error
        except StoreUnavailable:  # the safety check of a new connection
            raise
        except BaseException:  # Control-C: the next caller must not read the reply to this call
            self.disconnect_idle()
            raise
        return self._wait.checked(self.name, replies) if is_write else replies

    def _execute(self, commands: Sequence[Words]) -> list[Reply]:
        if len(commands) == 1:
            try:
                return [self._client.execute_command(*commands[0])]
            except exceptions.ResponseError as error:
                return [error]
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Reply] = pipeline.execute(raise_on_error=False)
        return replies

    def ask(self, *words: bytes | str | int) -> Reply:
        """Send one command and return its reply."""
        return self.send([words])[0]

    def disconnect_idle(self) -> None:
        """Close the idle connections; the next command connects again."""
        self._client.connection_pool.disconnect(inuse_connections=False)

    def check_open(self) -> None:
        """Raise if the client was closed."""
        if self._closed:
            raise StoreUnavailable(f"{self.name}: the store is closed")

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        for client in (self._client, *sentinels_of(self._client)):
            client.close()


class Server:
    """
    One server, or the current master if *target* names Sentinels, as the store uses it.

    The connections of operators (searches, doctor) skip the safety check: the store calls it
    itself and reports all findings, not only the first.
    """

    is_cluster = False

    def __init__(
        self, target: Target, address: Address, *, name: str, wait: Wait, monitor: SafetyMonitor
    ) -> None:
        self.name = name

        def make(on_connect: Callable[..., None] | None) -> Callable[[], RedisClient]:
            return lambda: open_client(
                THREADS,
                target,
                address=address,
                timeout_s=wait.timeout_s,
                sentinel_timeout_s=wait.timeout_s,
                on_connect=on_connect,
            )

        self.requests = Client(make(safety_check(name, monitor)), name, wait)
        self.operators = Client(make(None), name, wait)

    def write(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands that may change records; return their replies."""
        try:
            replies = self.requests.send([command.words for command in commands], is_write=True)
        except StoreUnavailable:
            self.disconnect_idle()  # after a failover they may lead to the old master
            raise
        if is_demoted(replies):
            self.disconnect_idle()
        return replies

    def read(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands that change nothing; return their replies."""
        return self.requests.send([command.words for command in commands])

    def servers(self) -> Iterable[Server]:
        """Return each server that holds records."""
        return (self,)

    def id_per_server(self) -> Sequence[bytes]:
        """Return a new id for each server, whose record it would hold."""
        return (os.urandom(ID_BYTES),)

    def disconnect_idle(self) -> None:
        """Close the idle connections."""
        self.requests.disconnect_idle()
        self.operators.disconnect_idle()

    def check_open(self) -> None:
        """Raise if the store was closed."""
        self.requests.check_open()

    def close(self) -> None:
        """Close all connections."""
        self.requests.close()
        self.operators.close()


def safety_check(name: str, monitor: SafetyMonitor) -> Callable[[Any], None]:
    """Return a function that logs in on a new connection and checks the server behind it."""

    def check(connection: Any) -> None:  # noqa: ANN401 - redis-py's
        try:
            connection.on_connect()
            for question in QUESTIONS:
                connection.send_command(*question.words)
            replies = [_read(connection) for _ in QUESTIONS]
            monitor.on_connect(name, monitor.health_of(name, replies))
        except BaseException:
            connection.disconnect()  # redis-py does so only for its own errors
            raise

    return check


def _read(connection: Any) -> Reply:  # noqa: ANN401 - redis-py's
    try:
        return connection.read_response()
    except exceptions.ResponseError as error:
        return error
