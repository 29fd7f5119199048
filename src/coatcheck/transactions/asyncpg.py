"""Connections of asyncpg.

The transaction is begun with asyncpg's own `connection.transaction()`, so that the handler's
`connection.transaction()` nests in it as a savepoint.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

from asyncpg import InterfaceError  # type: ignore[import-untyped]  # ships no types

from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.async_dbapi import numbered
from coatcheck.transactions.contract import AsyncStatementByStatement, InTransaction
from coatcheck.transactions.errors import is_busy

# 1 s: a statement that the handler left running is usually short, and the client waits for us.
# asyncpg has no way to wait for its end, so the rollback is tried again and again.
_BUSY_S_MAX = 1.0
_BUSY_POLL_S = 0.01


class AsyncpgConnection(AsyncStatementByStatement):
    """An `asyncpg.Connection`, also one of a pool."""

    dialect: Dialect = "postgresql"

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - a connection, or the proxy that a pool returns
        self.handle = handle
        self._transaction: Any = None  # while it is open
        self._start: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """
        Begin.

        A cancelled caller does not interrupt this: asyncpg would take the transaction for open
        until `reset()`, which also resets the session's settings. `rollback` waits for the end.
        """
        if self.handle.is_in_transaction():
            raise InTransaction
        self._transaction = self.handle.transaction()
        start: asyncio.Future[None] = asyncio.ensure_future(self._transaction.start())
        self._start = start
        await asyncio.shield(start)

    async def write(self, statement: Statement) -> int:
        """
        Execute *statement* and return the number of affected rows.

        A claim may wait for a row for longer than the application's `command_timeout`.
        """
        limit_s = None if statement.timeout_s == inf else statement.timeout_s
        status: str = await self.handle.execute(
            numbered(statement.text), *statement.values, timeout=limit_s
        )
        return int(status.rpartition(" ")[2])  # such as "INSERT 0 1", "UPDATE 1"

    def is_closed(self) -> bool:
        """It was closed, or went back to its pool; asyncpg does not show who did that."""
        try:
            return bool(self.handle.is_closed())
        except InterfaceError:  # it is back in its pool
            return True

    async def commit(self) -> None:
        """Commit."""
        transaction, self._transaction = self._transaction, None
        await transaction.commit()

    async def rollback(self) -> None:
        """
        Roll back, also after a `start` or `commit` that failed or was cancelled.

        If the handler left a statement running, this waits for it, and closes the connection if it
        does not end: otherwise the transaction would stay open and keep its claim.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _BUSY_S_MAX
        while True:
            try:
                await self._roll_back()
            except InterfaceError as error:
                if not is_busy(error):
                    raise
                if loop.time() >= deadline_s:
                    self.handle.terminate()
                    raise
                await asyncio.sleep(_BUSY_POLL_S)
            else:
                return

    async def _roll_back(self) -> None:
        if self._start is not None and not await _has_succeeded(self._start):
            await self.handle.reset()  # see `start`
            return
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            await transaction.rollback()
        else:  # after a commit, or in a second try: asyncpg accepts no other call on its object
            await self.handle.execute("rollback")


async def _has_succeeded(work: asyncio.Future[None]) -> bool:
    await asyncio.wait((work,))
    return not work.cancelled() and work.exception() is None
