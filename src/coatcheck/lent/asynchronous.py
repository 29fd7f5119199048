"""Connections of async drivers: aiosqlite, asyncmy and their like."""

from __future__ import annotations

import sqlite3
from functools import lru_cache
from typing import Any

from coatcheck.lent.contract import AsyncOneByOne, InTransaction
from coatcheck.lent.dbapi import is_sqlite_closed
from coatcheck.stores.ledger import Dialect, Statement


@lru_cache(maxsize=64)
def with_dollars(text: str) -> str:
    """*text* with marks as asyncpg reads them: $1, $2 and so on."""
    start, *rest = text.split("%s")
    return start + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


class AiosqliteLent(AsyncOneByOne):
    """An `aiosqlite.Connection`."""

    dialect: Dialect = "sqlite"

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of a driver that may not be here
        self.handle = handle

    async def start(self) -> None:
        """Begin by taking the right to write: who only reads at first cannot always get it."""
        if self.handle.in_transaction:
            raise InTransaction
        await self._say("begin immediate")

    async def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        async with self.handle.execute(statement.text, statement.values) as cursor:
            affected: int = cursor.rowcount
            return affected

    def is_closed(self) -> bool:
        """Its handler has closed it."""
        return is_sqlite_closed(self.handle)

    async def _say(self, text: str) -> None:
        await self.write(Statement(text, ()))

    async def commit(self) -> None:
        """Commit by a statement: since Python 3.12 `commit()` may do nothing."""
        await self._say("commit")

    async def rollback(self) -> None:
        """
        Undo; SQLite may have done so by itself.

        What its thread still does for somebody who was cancelled comes first, so it is no use to
        ask before whether there is a transaction.
        """
        try:
            await self._say("rollback")
        except sqlite3.OperationalError:
            if self.handle.in_transaction:
                raise


class AsyncmyLent(AsyncOneByOne):
    """An `asyncmy.Connection`, or one that is like it."""

    dialect: Dialect = "mysql"

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of a driver that may not be here
        self.handle = handle

    async def start(self) -> None:
        """Begin; a connection that is closed still says what its status was."""
        if getattr(self.handle, "connected", True) and self.handle.get_transaction_status():
            raise InTransaction
        await self.handle.begin()

    def is_closed(self) -> bool:
        """It was closed, of which asyncmy does not tell who did it."""
        handle = self.handle
        is_open = getattr(handle, "connected", True) and not getattr(handle, "closed", False)
        return not is_open or getattr(handle, "_transport", handle) is None

    async def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        async with self.handle.cursor() as cursor:
            await cursor.execute(statement.text, statement.values)
            affected: int = cursor.rowcount
            return affected

    async def commit(self) -> None:
        """Commit."""
        await self.handle.commit()

    async def rollback(self) -> None:
        """Undo."""
        await self.handle.rollback()
