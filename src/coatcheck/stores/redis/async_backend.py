"""The Redis store on an event loop: redis.asyncio, without a thread between.

The counterpart of `client.py`; both execute the flows of `swap.py`. The batcher
(`stores/async_batching.py`) groups the calls and limits their time.

There is no timeout around a call of the driver: asyncio would cancel it also if the event loop was
blocked and the answer has arrived. The batcher cancels a call that takes too long, and the
connection that the call was using is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis.asyncio.sentinel
from redis import exceptions

from coatcheck.core.flow import Effect, run_async
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.redis.client import open_pool, sentinels_of
from coatcheck.stores.redis.errors import Reply, is_demoted, is_refusal, to_store_error
from coatcheck.stores.redis.records import KEYS_MAX
from coatcheck.stores.redis.safety import QUESTIONS
from coatcheck.stores.redis.swap import Flows, Send, Wait
from coatcheck.stores.redis.url import RedisConfig

# 1 s: to close a socket takes a turn of the loop; a cancelled caller does not wait longer.
CLOSE_S = 1.0


class RedisBackend:
    """One event loop's connections to one server, or to the current master."""

    batch_max = KEYS_MAX  # one script call
    # 2: the server works on one batch while we decode the replies to the other.
    in_flight = 2

    def __init__(self, config: RedisConfig, flows: Flows) -> None:
        self.timeout_s: float | None = config.timeout_s
        self._name = flows.name
        self._flows = flows
        self._wait = Wait(config.wait, config.timeout_s)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        # Limited for Sentinels only: a dead one would keep us from asking the next one.
        self._pool = open_pool(
            redis.asyncio,
            config,
            address=config.addresses[0],
            is_limited=False,
            on_connect=self._check,
        )

    async def swap(self, swaps: Sequence[Swap], /) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one; see `Store.swap`."""
        return await run_async(self._flows.swap(swaps), self._perform)

    async def get(self, ids: Sequence[bytes], /) -> Sequence[Record | None]:
        """Read records; see `Store.get`."""
        return await run_async(self._flows.get(ids), self._perform)

    async def _perform(self, effect: Effect[list[Reply]]) -> list[Reply]:
        """Send the commands of *effect*; the same steps as `Client.send`."""
        assert isinstance(effect, Send)
        if self._closed:
            raise StoreUnavailable(f"{self._name}: the store is closed")
        sent = [command.words for command in effect.commands]
        if effect.is_write:
            sent += self._wait.commands()
        try:
            connection = await self._pool.get_connection()
        except (exceptions.RedisError, OSError) as error:
            raise to_store_error(self._name, error) from error
        try:
            await connection.send_packed_command(connection.pack_commands(sent))
            replies = [await _read(connection) for _ in sent]
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if not isinstance(error, exceptions.RedisError | OSError):
                raise
            is_ambiguous = effect.is_write and (len(sent) > 1 or not is_refusal(error))
            raise to_store_error(self._name, error, is_ambiguous=is_ambiguous) from error
        finally:
            await self._pool.release(connection)
        if is_demoted(replies):
            await self._pool.disconnect(inuse_connections=False)
        return self._wait.checked(self._name, replies) if effect.is_write else replies

    async def _check(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's
        """Log in on a new connection, and check the server behind it."""
        try:
            await connection.on_connect()
            await connection.send_packed_command(connection.pack_commands(QUESTIONS))
            replies = [await _read(connection) for _ in QUESTIONS]
            self._flows.monitor.on_connect(self._name, replies)
        except BaseException:
            await connection.disconnect(nowait=True)  # redis-py does so only for its own errors
            raise

    async def close(self) -> None:
        """Close all connections, also if this is cancelled meanwhile."""
        self._closed = True
        closing = asyncio.ensure_future(self._close_connections())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing}, timeout=CLOSE_S)
            raise

    async def _close_connections(self) -> None:
        """If the loop is closed already, without waiting."""
        for opened in (self._pool, *sentinels_of(self._pool)):
            # asyncio cannot close a socket of a closed loop.
            with suppress(*[RuntimeError] if self._loop.is_closed() else []):
                await opened.aclose()


async def _read(connection: Any) -> Reply:  # noqa: ANN401 - redis-py's
    try:
        return await connection.read_response()
    except exceptions.ResponseError as error:
        return error
