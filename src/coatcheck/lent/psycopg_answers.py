"""Waiting for what psycopg's server says, on an event loop.

The driver's own `wait` has the loop look at the socket anew for each answer, and sets a timer, so
that it wakes up every tenth of a second, which only those need who have a limit. What is saved
without both is written in `readable.py`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, TypeVar

from psycopg import AsyncConnection
from psycopg.abc import PQGen
from psycopg.errors import Error
from psycopg.generators import fetch_many
from psycopg.pq import TransactionStatus
from psycopg.waiting import Ready, Wait

from coatcheck.errors import StoreUnavailable
from coatcheck.lent.ending import to_the_end
from coatcheck.lent.readable import readable
from coatcheck.stores.postgres_ledger import OwnAsyncConnection, in_time

T = TypeVar("T")

# 5 s: as long as the driver waits for that.
_CANCEL_S = 5.0


async def answered(connection: AsyncConnection[Any], gen: PQGen[T]) -> T:
    """What *gen* comes to, which says and hears something on *connection*."""
    if isinstance(connection, OwnAsyncConnection):  # it may have a limit
        own: T = await connection.wait(gen)
        return own
    try:
        wanted = next(gen)
        while wanted == Wait.R:
            await readable(connection.pgconn.socket)
            wanted = gen.send(Ready.R)
        # It is too long to be sent at once.
        return await connection.wait(_resumed(gen, wanted))
    except StopIteration as done:
        value: T = done.value
        return value
    except asyncio.CancelledError:
        await to_the_end(_cancel(connection, gen), 2 * _CANCEL_S)
        raise


def _resumed(gen: PQGen[T], wanted: Wait) -> PQGen[T]:
    """What is left of *gen*, which has said what it waits for."""
    try:
        while True:
            wanted = gen.send((yield wanted))
    except StopIteration as done:
        value: T = done.value
        return value


async def heard_out(connection: AsyncConnection[Any]) -> None:
    """Wait for the end of what somebody has left who was cancelled again while it was stopped."""
    if connection.pgconn.transaction_status == TransactionStatus.ACTIVE:
        with suppress(Error):
            await connection.cancel_safe(timeout=_CANCEL_S)
        await connection.wait(in_time(connection, fetch_many(connection.pgconn), _CANCEL_S))


async def _cancel(connection: AsyncConnection[Any], gen: PQGen[T]) -> None:
    """As the driver does it: the server is asked to stop, and what it says to that is read."""
    if connection.pgconn.transaction_status == TransactionStatus.ACTIVE:
        with suppress(Error):
            await connection.cancel_safe(timeout=_CANCEL_S)
        with suppress(Error, StoreUnavailable):
            await connection.wait(in_time(connection, _resumed(gen, Wait.R), _CANCEL_S))
