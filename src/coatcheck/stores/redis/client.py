"""Connections to one Redis server, or to the master that Sentinels name, for threads.

redis-py's pool connects, logs in, keeps connections and replaces those that the server closed. This
module sends commands on them, checks the server behind each new connection, and makes a new pool
after a fork.

Invariants: a command is sent at most once; an error is ambiguous if a write may have been applied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import redis.sentinel
from redis import exceptions
from redis.backoff import NoBackoff

from coatcheck.core.identity import ID_BYTES
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.redis.errors import Reply, is_demoted, is_refusal, to_store_error
from coatcheck.stores.redis.records import Command, Words
from coatcheck.stores.redis.safety import QUESTIONS, SafetyMonitor
from coatcheck.stores.redis.swap import Wait
from coatcheck.stores.redis.url import Address, RedisConfig


def open_pool(
    driver: ModuleType,
    config: RedisConfig,
    *,
    address: Address,
    is_limited: bool = True,
    on_connect: Callable[..., Any] | None = None,
) -> Any:  # noqa: ANN401 - a pool of *driver*
    """
    Make a pool for the server at *address*, or for the master if *config* names Sentinels.

    *driver* is `redis`, or `redis.asyncio`, which has the same names. Nothing is connected yet.
    The timeout limits connecting and each answer; with *is_limited* False only those of Sentinels.
    *on_connect* is called with each new connection.
    """
    options = _options(driver, config, config.timeout_s if is_limited else None)
    options |= {"db": config.database, "username": config.username, "password": config.password}
    if on_connect is not None:
        options["redis_connect_func"] = on_connect
    if config.shape == "sentinel":
        login = {"username": config.sentinel_username, "password": config.sentinel_password}
        own = {**_options(driver, config, config.timeout_s), **login, "ssl": config.is_tls}
        sentinel = driver.sentinel.Sentinel(config.addresses, sentinel_kwargs=own)
        pool = driver.sentinel.SentinelConnectionPool
        return pool(config.service, sentinel, ssl=config.is_tls, **options)
    module = driver.connection
    kind = module.SSLConnection if config.is_tls else module.Connection
    return module.ConnectionPool(kind, host=address.host, port=address.port, **options)


def _options(driver: ModuleType, config: RedisConfig, timeout_s: float | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        # No retries: the engine retries, and knows how long the request may still wait.
        "retry": driver.retry.Retry(NoBackoff(), 0),
        "protocol": 2,  # in RESP3 a server may send messages that nothing here asked for
    }
    if config.is_tls and config.tls_ca:
        options["ssl_ca_certs"] = config.tls_ca
    return options


def sentinels_of(pool: Any) -> Sequence[Any]:  # noqa: ANN401 - redis-py's
    """Return the clients of the Sentinels that *pool* asks for the master."""
    sentinel = getattr(pool, "sentinel_manager", None)
    return sentinel.sentinels if sentinel is not None else ()


class Client:
    """
    The connections of one server, used by any number of threads.

    *address* is not used if *config* names Sentinels. *name* is the server, for error messages.
    *monitor* checks the server behind each new connection; None: it is not checked.
    """

    def __init__(
        self, config: RedisConfig, address: Address, name: str, monitor: SafetyMonitor | None
    ) -> None:
        self._config = config
        self._address = address
        self.name = name
        self._wait = Wait(config.wait, config.timeout_s)
        self._monitor = monitor
        self._closed = False
        self._inherited: list[Any] = []
        self._pool = self._open()
        renew_after_fork(self)

    def _open(self) -> Any:  # noqa: ANN401 - redis-py's
        on_connect = self._check if self._monitor else None
        return open_pool(redis, self._config, address=self._address, on_connect=on_connect)

    def _renew(self) -> None:
        """
        Take a new pool in a forked child, which must not use the parent's connections.

        redis-py's pool would notice the fork, too, but keeps a lock that another thread of the
        parent may have held in that moment.
        """
        self._inherited.append(self._pool)
        self._pool = self._open()

    def send(self, commands: Sequence[Words], *, is_write: bool = False) -> list[Reply]:
        """Send *commands* in one round trip and return their replies."""
        self.check_open()
        sent = [*commands, *self._wait.commands()] if is_write else commands
        pool = self._pool
        try:
            connection = pool.get_connection()
        except (exceptions.RedisError, OSError) as error:
            raise to_store_error(self.name, error) from error
        try:
            connection.send_packed_command(connection.pack_commands(sent))
            replies = [_read(connection) for _ in sent]
        except BaseException as error:  # Control-C, too: the next call must not read these replies
            connection.disconnect()
            if not isinstance(error, exceptions.RedisError | OSError):
                raise
            # Of several commands the server may have accepted others.
            is_ambiguous = is_write and (len(sent) > 1 or not is_refusal(error))
            raise to_store_error(self.name, error, is_ambiguous=is_ambiguous) from error
        finally:
            pool.release(connection)
        return self._wait.checked(self.name, replies) if is_write else replies

    def _check(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's
        """Log in on a new connection, and check the server behind it."""
        assert self._monitor is not None
        try:
            connection.on_connect()
            connection.send_packed_command(connection.pack_commands(QUESTIONS))
            self._monitor.on_connect(self.name, [_read(connection) for _ in QUESTIONS])
        except BaseException:
            connection.disconnect()  # redis-py does so only for its own errors
            raise

    def ask(self, *words: bytes | str | int) -> Reply:
        """Send one command and return its reply."""
        return self.send([words])[0]

    def disconnect_idle(self) -> None:
        """Close the idle connections; the next command connects again."""
        self._pool.disconnect(inuse_connections=False)

    def check_open(self) -> None:
        """Raise if the client was closed."""
        if self._closed:
            raise StoreUnavailable(f"{self.name}: the store is closed")

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._pool.disconnect()
        for sentinel in sentinels_of(self._pool):
            sentinel.close()


def _read(connection: Any) -> Reply:  # noqa: ANN401 - redis-py's
    try:
        return connection.read_response()
    except exceptions.ResponseError as error:
        return error


class Server(Client):
    """
    One server, or the current master if *config* names Sentinels, as the store uses it.

    The connections of operators (searches, doctor) skip the safety check: the store calls it
    itself and reports all findings, not only the first.
    """

    is_cluster = False

    def __init__(
        self, config: RedisConfig, address: Address, name: str, monitor: SafetyMonitor
    ) -> None:
        super().__init__(config, address, name, monitor)
        self.operators = Client(config, address, name, None)

    def write(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands that may change records; return their replies."""
        try:
            replies = self.send([command.words for command in commands], is_write=True)
        except StoreUnavailable:
            self.disconnect_idle()  # after a failover they may lead to the old master
            raise
        if is_demoted(replies):
            self.disconnect_idle()
        return replies

    def read(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands that change nothing; return their replies."""
        return self.send([command.words for command in commands])

    def servers(self) -> Iterable[Server]:
        """Return each server that holds records."""
        return (self,)

    def id_per_server(self) -> Sequence[bytes]:
        """Return a new id for each server, whose record it would hold."""
        return (os.urandom(ID_BYTES),)

    def disconnect_idle(self) -> None:
        """Close the idle connections."""
        super().disconnect_idle()
        self.operators.disconnect_idle()

    def close(self) -> None:
        """Close all connections."""
        super().close()
        self.operators.close()
