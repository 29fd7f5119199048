"""Connections of the MySQL store's own for transactions on event loops.

As in `mysql_own.py`, with a driver that may not be here. It does not encrypt by itself where the
server offers that, so it is told.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asyncmy.connection import Connection
from asyncmy.errors import OperationalError

from coatcheck.stores.mysql_faults import SERVER_LOST
from coatcheck.stores.mysql_line import Address
from coatcheck.stores.mysql_own import Ours, options


class _AsyncOwn(Connection):
    """A connection that does not wait for ever."""

    def __init__(self, ours: Ours, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call] # the driver's
        self._ours = ours

    async def query(self, sql: str, unbuffered: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 - the driver's
        """Perform *sql*."""
        async with _answered_within(self._ours.limit_s(sql)):
            return await super().query(sql, unbuffered)  # type: ignore[no-untyped-call] # as above

    async def begin(self) -> None:
        """Begin."""
        async with _answered_within(self._ours.timeout_s):
            await super().begin()

    async def commit(self) -> None:
        """Commit."""
        async with _answered_within(self._ours.timeout_s):
            await super().commit()

    async def rollback(self) -> None:
        """Undo."""
        async with _answered_within(self._ours.timeout_s):
            await super().rollback()


@asynccontextmanager
async def _answered_within(limit_s: float | None) -> AsyncIterator[None]:
    """Who is cut off in the middle closes its connection, so the driver says."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise OperationalError(SERVER_LOST, "there was no answer in time") from error


async def connected(address: Address, ours: Ours, *, is_encrypted: bool) -> Connection:
    """A connection for the running event loop."""
    context = address.tls if isinstance(address.tls, ssl.SSLContext) else None
    if context is None and is_encrypted:
        context = _unverified()
    connection = _AsyncOwn(ours, **options(address), ssl=context)
    async with _answered_within(ours.timeout_s):
        await connection.connect()
    return connection


def _unverified() -> ssl.SSLContext:
    """What PyMySQL does by itself: nobody reads along, whoever it is that we talk to."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
