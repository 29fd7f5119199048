"""Connections of async drivers that resemble the DB-API: aiosqlite, asyncmy, aiomysql."""

from __future__ import annotations

import sqlite3
from functools import lru_cache
from typing import Any

from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.contract import AsyncStatementByStatement, InTransaction
from coatcheck.transactions.dbapi import is_sqlite_closed


@lru_cache(maxsize=64)
def numbered(text: str) -> str:
    """Return *text* with the placeholders of asyncpg ($1, $2 …) in place of %s."""
    start, *rest = text.split("%s")
    return start + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


class AiosqliteConnection(AsyncStatementByStatement):
    """An `aiosqlite.Connection`."""

    dialect: Dialect = "sqlite"

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of a driver that may not be installed
        self.handle = handle

    async def start(self) -> None:
        """Begin with the write lock: a transaction that first only reads may not get it later."""
        if self.handle.in_transaction:
            raise InTransaction
        await self._execute("begin immediate")

    async def write(self, statement: Statement) -> int:
        """Execute *statement* and return the number of affected rows."""
        async with self.handle.execute(statement.text, statement.values) as cursor:
            affected: int = cursor.rowcount
            return affected

    async def _execute(self, text: str) -> None:
        await self.write(Statement(text, ()))

    def is_closed(self) -> bool:
        """The handler has closed it."""
        return is_sqlite_closed(self.handle)

    async def commit(self) -> None:
        """Commit by a statement: since Python 3.12, `commit()` does nothing in autocommit mode."""
        await self._execute("commit")

    async def rollback(self) -> None:
        """
        Roll back; SQLite may have done so by itself.

        aiosqlite's thread first executes what a cancelled caller has left in its queue, so asking
        for `in_transaction` before that would be too early.
        """
        try:
            await self._execute("rollback")
        except sqlite3.OperationalError:
            if self.handle.in_transaction:
                raise


class AsyncmyConnection(AsyncStatementByStatement):
    """An `asyncmy.Connection` or `aiomysql.Connection`."""

    dialect: Dialect = "mysql"

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of a driver that may not be installed
        self.handle = handle
        self._was_closed = False

    async def start(self) -> None:
        """Begin; a connection that is closed still reports its last transaction status."""
        if getattr(self.handle, "connected", True) and self.handle.get_transaction_status():
            raise InTransaction
        # asyncmy does not show that it was closed, so we note it.
        self.handle.close = self._close
        await self.handle.begin()

    def _close(self) -> None:
        self._was_closed = True
        self._restore_close()
        self.handle.close()

    def _restore_close(self) -> None:
        vars(self.handle).pop("close", None)

    def is_closed(self) -> bool:
        """It was closed; if by its driver after an error, nothing was sent since."""
        is_connected = getattr(self.handle, "connected", True)
        return self._was_closed or not is_connected or getattr(self.handle, "closed", False)

    async def write(self, statement: Statement) -> int:
        """Execute *statement* and return the number of affected rows."""
        async with self.handle.cursor() as cursor:
            await cursor.execute(statement.text, statement.values)
            affected: int = cursor.rowcount
            return affected

    async def commit(self) -> None:
        """Commit."""
        await self.handle.commit()
        self._restore_close()

    async def rollback(self) -> None:
        """Roll back."""
        self._restore_close()
        await self.handle.rollback()
