"""SQLAlchemy: connections of the Core and sessions of the ORM, sync and async.

A statement goes to the driver as it is, in the driver's own marks. A session is what is committed,
so that it writes what it has gathered before.
"""

from __future__ import annotations

from typing import Any, cast

from coatcheck.errors import Misconfigured
from coatcheck.lent.asynchronous import with_dollars
from coatcheck.lent.contract import AsyncOneByOne, InTransaction, OneByOne
from coatcheck.stores.ledger import Dialect, Statement

_BY_ITSELF = "the connection that was lent commits by itself (AUTOCOMMIT); lend one that does not"


class _Alchemy:
    """What both have in common; of a package that may not be here, so all of it is `Any`."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - see above
        self.handle = handle
        self._is_session = hasattr(handle, "get_bind")
        bind = handle.get_bind() if self._is_session else handle
        name = "mysql" if bind.dialect.name == "mariadb" else bind.dialect.name
        self.dialect = cast("Dialect", name)
        self._paramstyle: str = bind.dialect.paramstyle

    def _spelt(self, text: str) -> str:
        return with_dollars(text) if self._paramstyle == "numeric_dollar" else text

    def _check_idle(self) -> None:
        if self.handle.in_transaction():
            raise InTransaction


def _check_driver(connection: Any) -> None:  # noqa: ANN401 - see above
    """*connection* is the driver's, and does not commit by itself."""
    level = getattr(connection, "isolation_level", None)
    if getattr(connection, "autocommit", False) is True or level in ("autocommit", "AUTOCOMMIT"):
        raise Misconfigured(_BY_ITSELF)


class AlchemyLent(_Alchemy, OneByOne):
    """A `Connection`, `Session` or `scoped_session`."""

    def start(self) -> None:
        """Begin; SQLite by taking the right to write."""
        self._check_idle()
        connection = self._connection()
        _check_driver(connection.connection.dbapi_connection)
        if self.dialect == "sqlite":
            connection.exec_driver_sql("begin immediate")

    def _connection(self) -> Any:  # noqa: ANN401 - see above
        """The connection of this moment: a session that was rolled back takes another."""
        return self.handle.connection() if self._is_session else self.handle

    def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        text, values = self._spelt(statement.text), tuple(statement.values)
        result = self._connection().exec_driver_sql(text, values)
        affected: int = result.rowcount
        return affected

    def commit(self) -> None:
        """Commit; a session writes first what it has gathered."""
        self.handle.commit()

    def rollback(self) -> None:
        """Undo."""
        self.handle.rollback()


class AsyncAlchemyLent(_Alchemy, AsyncOneByOne):
    """An `AsyncConnection`, `AsyncSession` or `async_scoped_session`."""

    async def start(self) -> None:
        """Begin; SQLite by taking the right to write."""
        self._check_idle()
        connection = await self._connection()
        _check_driver((await connection.get_raw_connection()).dbapi_connection)
        if self.dialect == "sqlite":
            await connection.exec_driver_sql("begin immediate")

    async def _connection(self) -> Any:  # noqa: ANN401 - see above
        """The connection of this moment: a session that was rolled back takes another."""
        return await self.handle.connection() if self._is_session else self.handle

    async def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        text, values = self._spelt(statement.text), tuple(statement.values)
        result = await (await self._connection()).exec_driver_sql(text, values)
        affected: int = result.rowcount
        return affected

    async def commit(self) -> None:
        """Commit; a session writes first what it has gathered."""
        await self.handle.commit()

    async def rollback(self) -> None:
        """Undo."""
        await self.handle.rollback()
