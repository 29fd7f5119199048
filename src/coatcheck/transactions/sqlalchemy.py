"""SQLAlchemy: connections of the Core and sessions of the ORM, sync and async.

Our statements go to the driver unchanged, with the driver's own placeholders. A session is
committed as a whole, so that it flushes what the handler has added to it. Of a `scoped_session` we
use the session in its registry, and keep that open until our end: web frameworks call `remove()`
when the handler has returned, and we commit after that.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

from coatcheck.errors import Misconfigured
from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.async_dbapi import numbered
from coatcheck.transactions.contract import (
    AsyncStatementByStatement,
    InTransaction,
    StatementByStatement,
)

_AUTOCOMMIT = (
    "the connection is in AUTOCOMMIT mode, so record and effect cannot be committed together; pass "
    "one with another isolation level"
)
_NO_BIND = (
    "the session has no database of its own, so the record cannot be written in it; create it with "
    "bind=, with or without binds="
)
_SCOPED_SESSION = (
    "a scoped_session belongs to its thread, and an operation on an event loop uses several; pass "
    "its sessionmaker, or use an Engine"
)


class _Alchemy:
    """What both have in common; SQLAlchemy may not be installed, so its types are `Any`."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - see above
        self._scoped: Any = handle if hasattr(handle, "registry") else None
        # Without us the scope would have no session, so we remove it at the end.
        self._is_scope_ours = self._scoped is not None and not handle.registry.has()
        self.handle = handle if self._scoped is None else handle()
        self._is_session = hasattr(handle, "get_bind")
        try:
            bind = self.handle.get_bind() if self._is_session else handle
        except Exception as error:
            raise Misconfigured(_NO_BIND) from error
        name = "mysql" if bind.dialect.name == "mariadb" else bind.dialect.name
        self.dialect = cast("Dialect", name)
        self._paramstyle: str = bind.dialect.paramstyle

    def is_closed(self) -> bool:
        """The handler has closed it; a closed session goes on in another transaction."""
        return not self._is_session and self.handle.closed

    def _text_of(self, statement: Statement) -> str:
        text = statement.text
        return numbered(text) if self._paramstyle == "numeric_dollar" else text

    def _check_idle(self) -> None:
        if self.handle.in_transaction():
            raise InTransaction

    def _must_begin(self, pooled: Any) -> bool:  # noqa: ANN401 - see above
        """
        Whether we send `begin` on *pooled*, the connection as SQLAlchemy's pool returns it.

        Only on SQLite, unless the application does so in an event listener, which has run by now.
        """
        driver = pooled.driver_connection
        if any(_is_autocommit(connection) for connection in (pooled.dbapi_connection, driver)):
            raise Misconfigured(_AUTOCOMMIT)
        return self.dialect == "sqlite" and not driver.in_transaction

    # --- scoped sessions ----------------------------------------------------------------------

    def _is_in_scope(self) -> bool:
        """The scoped session returns our session in this scope."""
        return self._scoped.registry.has() and self._scoped() is self.handle

    def _clear_scope(self) -> None:
        self._scoped.registry.clear()

    def _leave_scope(self) -> bool:
        """Remove our session from its scope if we put it there; whether it is to be closed."""
        if self._scoped is None:
            return False
        vars(self.handle).pop("close", None)
        is_in_scope = self._is_in_scope()
        if is_in_scope and self._is_scope_ours:
            self._clear_scope()
        return self._is_scope_ours or not is_in_scope


def _is_autocommit(connection: Any) -> bool:  # noqa: ANN401 - see above
    """*connection* is the driver's, or SQLAlchemy's wrapper of it."""
    get_autocommit = getattr(connection, "get_autocommit", None)  # drivers of MySQL
    if get_autocommit is not None:
        return bool(get_autocommit())
    level = getattr(connection, "isolation_level", None)
    is_on = getattr(connection, "autocommit", False) is True
    return is_on or level in ("autocommit", "AUTOCOMMIT")


class AlchemyConnection(_Alchemy, StatementByStatement):
    """A `Connection`, `Session` or `scoped_session`."""

    def start(self) -> None:
        """Begin; on SQLite with the write lock."""
        self._check_idle()
        if self._scoped is not None:
            if not self._is_in_scope():
                raise Misconfigured(_SCOPED_SESSION)
            self.handle.close = _stay_open
        self.handle.begin()
        connection = self._connection()
        if self._must_begin(connection.connection):
            connection.exec_driver_sql("begin immediate")

    def _connection(self) -> Any:  # noqa: ANN401 - see above
        """The current connection: a session that was rolled back takes another one."""
        return self.handle.connection() if self._is_session else self.handle

    def write(self, statement: Statement) -> int:
        """Execute *statement* and return the number of affected rows."""
        result = self._connection().exec_driver_sql(
            self._text_of(statement), tuple(statement.values)
        )
        affected: int = result.rowcount
        return affected

    def end(self, statement: Statement) -> bool:
        """
        Execute *statement*, commit if it affected one row, and return whether it did.

        Commits the session's open savepoints first: they are inside ours, and releasing ours would
        release them without the session's knowledge.
        """
        while self._is_session and (nested := self.handle.get_nested_transaction()):
            nested.commit()
        return super().end(statement)

    def commit(self) -> None:
        """Commit; a session flushes first."""
        self.handle.commit()
        self._release()

    def rollback(self) -> None:
        """Roll back."""
        try:
            self.handle.rollback()
        finally:
            self._release()

    def _release(self) -> None:
        if self._leave_scope():
            with suppress(Exception):  # the transaction is over, whatever becomes of the session
                self.handle.close()


class AsyncAlchemyConnection(_Alchemy, AsyncStatementByStatement):
    """An `AsyncConnection`, `AsyncSession` or `async_scoped_session`."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - see above
        super().__init__(handle)
        # Usually the current task; the rollback may run in another one.
        self._scope = None if self._scoped is None else handle.registry.scopefunc()

    def _is_in_scope(self) -> bool:
        return self._scoped.registry.registry.get(self._scope) is self.handle

    def _clear_scope(self) -> None:
        del self._scoped.registry.registry[self._scope]

    async def start(self) -> None:
        """Begin; on SQLite with the write lock."""
        self._check_idle()
        if self._scoped is not None:
            self.handle.close = _stay_open_async
        await self.handle.begin()
        connection = await self._connection()
        if self._must_begin(await connection.get_raw_connection()):
            await connection.exec_driver_sql("begin immediate")

    async def _connection(self) -> Any:  # noqa: ANN401 - see above
        """The current connection: a session that was rolled back takes another one."""
        return await self.handle.connection() if self._is_session else self.handle

    async def write(self, statement: Statement) -> int:
        """Execute *statement* and return the number of affected rows."""
        connection = await self._connection()
        result = await connection.exec_driver_sql(self._text_of(statement), tuple(statement.values))
        affected: int = result.rowcount
        return affected

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, commit if it affected one row, and return whether it did."""
        while self._is_session and (nested := self.handle.get_nested_transaction()):
            await nested.commit()
        return await super().end(statement)

    async def commit(self) -> None:
        """Commit; a session flushes first."""
        await self.handle.commit()
        await self._release()

    async def rollback(self) -> None:
        """Roll back."""
        try:
            await self.handle.rollback()
        finally:
            await self._release()

    async def _release(self) -> None:
        if self._leave_scope():
            with suppress(Exception):  # the transaction is over, whatever becomes of the session
                await self.handle.close()


def _stay_open() -> None:
    """Replaces `close()` of a session in a scope while our transaction is open."""


async def _stay_open_async() -> None:
    """The same for async code."""
