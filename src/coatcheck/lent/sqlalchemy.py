"""SQLAlchemy: connections of the Core and sessions of the ORM, sync and async.

A statement goes to the driver as it is, in the driver's own marks. A session is what is committed,
so that it writes what it has gathered before. Of a scoped session the one behind it is lent, and
stays open until our end, whoever removes it meanwhile: a site does that when its handler has
returned, and we commit after that.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

from coatcheck.errors import Misconfigured
from coatcheck.lent.asynchronous import with_dollars
from coatcheck.lent.contract import AsyncOneByOne, InTransaction, OneByOne
from coatcheck.stores.ledger import Dialect, Statement

_BY_ITSELF = "the connection that was lent commits by itself (AUTOCOMMIT); lend one that does not"
_UNBOUND = (
    "the session that was lent does not tell which database is its own; give it bind=, with or "
    "without binds="
)
_OF_A_THREAD = (
    "a scoped_session belongs to its thread, and on an event loop a transaction has no thread of "
    "its own; lend its session maker, or use an Engine"
)


class _Alchemy:
    """What both have in common; of a package that may not be here, so all of it is `Any`."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - see above
        self._scoped: Any = handle if hasattr(handle, "registry") else None
        self._is_ours = self._scoped is not None and not handle.registry.has()
        self.handle = handle if self._scoped is None else handle()
        self._is_session = hasattr(handle, "get_bind")
        try:
            bind = self.handle.get_bind() if self._is_session else handle
        except Exception as error:
            raise Misconfigured(_UNBOUND) from error
        name = "mysql" if bind.dialect.name == "mariadb" else bind.dialect.name
        self.dialect = cast("Dialect", name)
        self._paramstyle: str = bind.dialect.paramstyle

    def _spelt(self, text: str) -> str:
        return with_dollars(text) if self._paramstyle == "numeric_dollar" else text

    def _check_idle(self) -> None:
        if self.handle.in_transaction():
            raise InTransaction

    def is_closed(self) -> bool:
        """Its handler has closed it; a session goes on after that, in another transaction."""
        return not self._is_session and self.handle.closed

    def _must_begin(self, lent: Any) -> bool:  # noqa: ANN401 - see above
        """
        We begin on *lent*, what the pool has given: only SQLite, unless that is done already.

        It is done where the application begins by an event of SQLAlchemy's, which is over by now.
        """
        driver = lent.driver_connection
        if any(_commits_by_itself(connection) for connection in (lent.dbapi_connection, driver)):
            raise Misconfigured(_BY_ITSELF)
        return self.dialect == "sqlite" and not driver.in_transaction

    # --- scoped sessions ----------------------------------------------------------------------

    def _is_in_scope(self) -> bool:
        """Who asks the scoped session here gets the one that was lent."""
        return self._scoped.registry.has() and self._scoped() is self.handle

    def _clear_scope(self) -> None:
        self._scoped.registry.clear()

    def _is_removed(self) -> bool:
        """Take the session out of its scope, unless its owner had it before; then close it."""
        if self._scoped is None:
            return False
        vars(self.handle).pop("close", None)
        is_in_scope = self._is_in_scope()
        if is_in_scope and self._is_ours:
            self._clear_scope()
        return self._is_ours or not is_in_scope


def _commits_by_itself(connection: Any) -> bool:  # noqa: ANN401 - see above
    """*connection* is the driver's, or what SQLAlchemy has made of it."""
    ask = getattr(connection, "get_autocommit", None)  # MySQL's have it as a method
    if ask is not None:
        return bool(ask())
    level = getattr(connection, "isolation_level", None)
    is_on = getattr(connection, "autocommit", False) is True
    return is_on or level in ("autocommit", "AUTOCOMMIT")


class AlchemyLent(_Alchemy, OneByOne):
    """A `Connection`, `Session` or `scoped_session`."""

    def start(self) -> None:
        """Begin; SQLite by taking the right to write."""
        self._check_idle()
        if self._scoped is not None:
            if not self._is_in_scope():
                raise Misconfigured(_OF_A_THREAD)
            self.handle.close = _stay_open
        self.handle.begin()
        connection = self._connection()
        if self._must_begin(connection.connection):
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

    def end(self, statement: Statement) -> bool:
        """
        Execute *statement*, and commit where it affected one row; whether it did.

        A session's open savepoints go first: they are within ours, and it would miss them.
        """
        while self._is_session and (nested := self.handle.get_nested_transaction()):
            nested.commit()
        return super().end(statement)

    def commit(self) -> None:
        """Commit; a session writes first what it has gathered."""
        self.handle.commit()
        self._let_go()

    def rollback(self) -> None:
        """Undo."""
        try:
            self.handle.rollback()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._is_removed():
            with suppress(Exception):  # as with all that is given back
                self.handle.close()


class AsyncAlchemyLent(_Alchemy, AsyncOneByOne):
    """An `AsyncConnection`, `AsyncSession` or `async_scoped_session`."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - see above
        super().__init__(handle)
        # Mostly a task, and it may be another one that undoes.
        self._scope = None if self._scoped is None else handle.registry.scopefunc()

    def _is_in_scope(self) -> bool:
        return self._scoped.registry.registry.get(self._scope) is self.handle

    def _clear_scope(self) -> None:
        del self._scoped.registry.registry[self._scope]

    async def start(self) -> None:
        """Begin; SQLite by taking the right to write."""
        self._check_idle()
        if self._scoped is not None:
            self.handle.close = _stay_open_async
        await self.handle.begin()
        connection = await self._connection()
        if self._must_begin(await connection.get_raw_connection()):
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

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, and commit where it affected one row; whether it did."""
        while self._is_session and (nested := self.handle.get_nested_transaction()):
            await nested.commit()
        return await super().end(statement)

    async def commit(self) -> None:
        """Commit; a session writes first what it has gathered."""
        await self.handle.commit()
        await self._let_go()

    async def rollback(self) -> None:
        """Undo."""
        try:
            await self.handle.rollback()
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        if self._is_removed():
            with suppress(Exception):  # as above
                await self.handle.close()


def _stay_open() -> None:
    """In place of what would close a session that is in our transaction."""


async def _stay_open_async() -> None:
    """The same for async code."""
