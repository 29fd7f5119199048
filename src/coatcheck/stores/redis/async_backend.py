"""The Redis store on an event loop: redis.asyncio, without a thread between.

The counterpart of `client.py`; both execute the flows of `swap.py`. The batcher
(`stores/async_batching.py`) groups the calls and limits their time.

There is no timeout around a call of the driver: asyncio would cancel it also if the event loop was
blocked and the answer has arrived. The batcher cancels a call that takes too long, and redis-py
then closes the connection that the call was using.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

from coatcheck.core.flow import Effect, run_async
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.redis.client import (
    ConnectFailed,
    Driver,
    may_have_written,
    open_client,
    sentinels_of,
    to_store_error,
)
from coatcheck.stores.redis.records import KEYS_MAX, Words
from coatcheck.stores.redis.safety import QUESTIONS, SafetyMonitor
from coatcheck.stores.redis.swap import Flows, Reply, Send, Wait, is_demoted
from coatcheck.stores.redis.url import Target


class ConnectFailedPool(ConnectionPool):
    """Raises `ConnectFailed` if it cannot connect; see `client.ConnectFailedPool`."""

    async def get_connection(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - redis-py's
        """Return an open connection."""
        try:
            return await super().get_connection(*args, **options)  # type: ignore[no-untyped-call] # redis-py's
        except (exceptions.RedisError, OSError) as error:
            raise ConnectFailed(str(error)) from error


class ConnectFailedSentinelPool(ConnectFailedPool, SentinelConnectionPool):
    """The same for connections to the master that Sentinels name."""


EVENT_LOOPS = Driver(
    client=Redis,
    pool=ConnectFailedPool,
    connection=Connection,
    tls_connection=SSLConnection,
    sentinel=Sentinel,
    sentinel_pool=ConnectFailedSentinelPool,
    retry=Retry,
)


class RedisBackend:
    """
    One event loop's connections to one server, or to the current master.

    Args:
        target: which server.
        flows: what to send, and what the replies mean.
        wait: how many replicas must acknowledge a write.
    """

    batch_max = KEYS_MAX  # one script call
    # 2: the server works on one batch while we decode the replies to the other.
    in_flight = 2

    def __init__(self, target: Target, flows: Flows, wait: Wait) -> None:
        self.timeout_s: float | None = wait.timeout_s
        self._name = flows.name
        self._flows = flows
        self._wait = wait
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._client = open_client(
            EVENT_LOOPS,
            target,
            address=target.addresses[0],
            timeout_s=None,
            # With a limit, or a dead Sentinel would keep us from asking the next one.
            sentinel_timeout_s=wait.timeout_s,
            on_connect=_safety_check(flows.name, flows.monitor),
        )

    async def swap(self, swaps: Sequence[Swap], /) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one; see `Store.swap`."""
        return await run_async(self._flows.swap(swaps), self._perform)

    async def get(self, ids: Sequence[bytes], /) -> Sequence[Record | None]:
        """Read records; see `Store.get`."""
        return await run_async(self._flows.get(ids), self._perform)

    async def _perform(self, effect: Effect[list[Reply]]) -> list[Reply]:
        assert isinstance(effect, Send)
        if self._closed:
            raise StoreUnavailable(f"{self._name}: the store is closed")
        sent = [command.words for command in effect.commands]
        if effect.is_write:
            sent += self._wait.commands()
        try:
            replies = await self._execute(sent)
        except (exceptions.RedisError, OSError) as error:
            is_ambiguous = effect.is_write and may_have_written(error, len(sent))
            raise to_store_error(self._name, error, is_ambiguous=is_ambiguous) from error
        if is_demoted(replies):
            await self._client.connection_pool.disconnect(inuse_connections=False)
        return self._wait.checked(self._name, replies) if effect.is_write else replies

    async def _execute(self, commands: Sequence[Words]) -> list[Reply]:
        if len(commands) == 1:
            try:
                return [await self._client.execute_command(*commands[0])]
            except exceptions.ResponseError as error:
                return [error]
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Reply] = await pipeline.execute(raise_on_error=False)
        return replies

    async def close(self) -> None:
        """Close all connections; if the loop is closed already, without waiting."""
        self._closed = True
        for client in (self._client, *sentinels_of(self._client)):
            if self._loop.is_closed():
                with suppress(RuntimeError):  # asyncio cannot close a socket of a closed loop
                    await client.aclose()
            else:
                await client.aclose()


def _safety_check(name: str, monitor: SafetyMonitor) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Return a function that logs in on a new connection and checks the server behind it."""

    async def check(connection: Any) -> None:  # noqa: ANN401 - redis-py's
        try:
            await connection.on_connect()
            for question in QUESTIONS:
                await connection.send_command(*question.words)
            replies = [await _read(connection) for _ in QUESTIONS]
            monitor.on_connect(name, monitor.health_of(name, replies))
        except BaseException:
            await connection.disconnect(nowait=True)  # redis-py does so only for its own errors
            raise

    return check


async def _read(connection: Any) -> Reply:  # noqa: ANN401 - redis-py's
    try:
        return await connection.read_response()
    except exceptions.ResponseError as error:
        return error
