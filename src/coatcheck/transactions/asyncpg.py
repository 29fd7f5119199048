"""Connections of asyncpg.

The transaction is begun with asyncpg's own `connection.transaction()`, so that the handler's
`connection.transaction()` nests in it as a savepoint.
"""

from __future__ import annotations

import asyncio
from functools import partial
from math import inf
from typing import Any

from asyncpg import InterfaceError  # type: ignore[import-untyped]  # ships no types

from coatcheck.core.flow import Call, Flow
from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.contract import InTransaction, TransactionConnection, numbered
from coatcheck.transactions.errors import is_busy

# 1 s: a statement that the handler left running is usually short, and the client waits for us.
# asyncpg has no way to wait for its end, so the rollback is tried again and again.
_BUSY_S_MAX = 1.0
_BUSY_POLL_S = 0.01


class AsyncpgConnection(TransactionConnection):
    """An `asyncpg.Connection`, also one of a pool."""

    dialect: Dialect = "postgresql"

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - a connection, or the proxy that a pool returns
        super().__init__(handle)
        self._transaction: Any = None  # while it is open
        self._start: asyncio.Future[None] | None = None

    def start(self) -> Flow[None]:
        """
        Begin.

        A cancelled caller does not interrupt this: asyncpg would take the transaction for open
        until `reset()`, which also resets the session's settings. `rollback` waits for the end.
        """
        if self.handle.is_in_transaction():
            raise InTransaction
        self._transaction = self.handle.transaction()
        self._start = asyncio.ensure_future(self._transaction.start())
        yield from Call(asyncio.shield, (self._start,))

    def write(self, statement: Statement) -> Flow[int]:
        """
        Execute *statement* and return the number of affected rows.

        A claim may wait for a row for longer than the application's `command_timeout`.
        """
        limit_s = None if statement.timeout_s == inf else statement.timeout_s
        execute = partial(self.handle.execute, timeout=limit_s)
        status: str = yield from Call(execute, (numbered(statement.text), *statement.values))
        affected = status.rpartition(" ")[2]  # such as "INSERT 0 1", "UPDATE 1", "SAVEPOINT"
        return int(affected) if affected.isdecimal() else 0

    def is_closed(self) -> bool:
        """It was closed, or went back to its pool; asyncpg does not show who did that."""
        try:
            return bool(self.handle.is_closed())
        except InterfaceError:  # it is back in its pool
            return True

    def commit(self) -> Flow[None]:
        """Commit."""
        transaction, self._transaction = self._transaction, None
        yield from Call(transaction.commit)

    def rollback(self) -> Flow[None]:
        """
        Roll back, also after a `start` or `commit` that failed or was cancelled.

        If the handler left a statement running, this waits for it, and closes the connection if it
        does not end: otherwise the transaction would stay open and keep its claim.
        """
        yield from Call(self._roll_back_when_idle)

    async def _roll_back_when_idle(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _BUSY_S_MAX
        while True:
            try:
                return await self._roll_back()
            except InterfaceError as error:
                if not is_busy(error):
                    raise
                if loop.time() >= deadline_s:
                    self.handle.terminate()
                    raise
                await asyncio.sleep(_BUSY_POLL_S)

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
