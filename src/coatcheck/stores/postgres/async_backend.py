"""An event loop's own access to PostgreSQL, through asyncpg.

It runs the swap algorithm of `swap.py`, as `connection.py` does for threads. No call has a timeout
here: a timer of a loop that was blocked fires before the loop has read the answer, which would
look like an outage. The batcher above cancels a call that takes too long, and a cancelled call
closes its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import asyncpg  # type: ignore[import-untyped] # it has no types

from coatcheck.core.flow import Flow, run_async
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.postgres.errors import is_session_stale, to_store_error
from coatcheck.stores.postgres.statements import Row
from coatcheck.stores.postgres.swap import Execute, RecordTable, with_store_errors

T = TypeVar("T")


class PostgresBackend:
    """The connections of one event loop; *options* are the keywords of `asyncpg.connect`."""

    # 32: with larger batches, 64 callers all wait for one batch while this process is idle.
    batch_max = 32
    # 2: the server works on one batch while we encode the next one.
    in_flight = 2

    def __init__(self, table: RecordTable, options: dict[str, Any], timeout_s: float) -> None:
        self.timeout_s: float | None = timeout_s
        self._table = table
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._idle: list[asyncpg.Connection] = []
        self._closed = False

    async def swap(self, swaps: Sequence[Swap], /) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one; see `Store.swap`."""
        return await self._run(self._table.swap(swaps), writes=True)

    async def get(self, ids: Sequence[bytes], /) -> Sequence[Record | None]:
        """Read records; see `Store.get`."""
        return await self._run(self._table.get(ids), writes=False)

    async def _run(self, flow: Flow[T], *, writes: bool) -> T:
        """Execute the statements of *flow* on a connection that is idle, or on a new one."""
        connection = await self._acquire()

        async def perform(effect: object) -> Sequence[Row]:
            assert isinstance(effect, Execute)
            rows: list[Row] = await connection.fetch(effect.statement, *effect.values)
            return rows

        try:
            result = await run_async(with_store_errors(flow, writes=writes), perform)
        except BaseException as error:
            if is_session_stale(error):
                connection.terminate()
            raise
        finally:
            self._release(connection)
        return result

    async def _acquire(self) -> asyncpg.Connection:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():  # by the server, or because the network failed
                return connection
        return await self._connect()

    async def _connect(self) -> asyncpg.Connection:
        """Open a connection to a server that accepts writes."""
        options = self._options
        try:
            return await asyncpg.connect(**options)
        except BaseException as error:
            if self._options is options:  # no other attempt has failed meanwhile
                self._options = _next_host_first(options)
            if not isinstance(error, Exception):
                raise
            raise to_store_error(error, writes=False) from error

    def _release(self, connection: asyncpg.Connection) -> None:
        if connection.is_closed():
            return
        if self._closed or connection.is_in_transaction():
            connection.terminate()
        else:
            self._idle.append(connection)

    async def close(self) -> None:
        """Close the connections; see `AsyncBackend.close`."""
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            # A closed loop refuses to close a transport; its socket goes with the last reference.
            with suppress(RuntimeError):
                connection.terminate()
        if idle and not self._loop.is_closed():
            await asyncio.sleep(0)  # the turn of the loop in which the sockets are closed


def _next_host_first(options: dict[str, Any]) -> dict[str, Any]:
    """
    Return *options* with the first host last.

    asyncpg tries the hosts in order, and one that does not answer at all would use up the time of
    every attempt.
    """
    hosts, ports = options["host"], options["port"]
    if not hosts:
        return options
    if isinstance(ports, list):
        ports = [*ports[1:], ports[0]]
    return {**options, "host": [*hosts[1:], hosts[0]], "port": ports}
