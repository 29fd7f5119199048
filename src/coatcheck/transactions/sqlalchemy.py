"""SQLAlchemy: connections of the Core and sessions of the ORM, sync and async.

Our statements go to the driver unchanged, with the driver's own placeholders. A session is
committed as a whole, so that it flushes what the handler has added to it. Its savepoint is one of
its own, so that it forgets what the handler has added or changed when that is undone, and so that a
flush that fails rolls back to this savepoint and not the claim. Of a `scoped_session` we
use the session in its registry, and keep that open until our end: web frameworks call `remove()`
when the handler has returned, and we commit after that.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

from coatcheck.core.flow import Call, Flow
from coatcheck.errors import Misconfigured
from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.contract import InTransaction, TransactionConnection, numbered

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


class AlchemyConnection(TransactionConnection):
    """
    A `Connection`, `Session` or `scoped_session`, or its async counterpart.

    SQLAlchemy may not be installed, so its types are `Any`.
    """

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - see above
        self._scope = _Scope(handle) if hasattr(handle, "registry") else None
        super().__init__(handle if self._scope is None else self._scope.session)
        self._is_session = hasattr(handle, "get_bind")
        self._nested: Any = None  # the savepoint of a session, if the handler's work can be undone
        try:
            bind = self.handle.get_bind() if self._is_session else handle
        except Exception as error:
            raise Misconfigured(_NO_BIND) from error
        name = "mysql" if bind.dialect.name == "mariadb" else bind.dialect.name
        self.dialect = cast("Dialect", name)
        self._is_numbered = bind.dialect.paramstyle == "numeric_dollar"

    def start(self) -> Flow[None]:
        """Begin; on SQLite with the write lock."""
        if self.handle.in_transaction():
            raise InTransaction
        if self._scope is not None:
            self._scope.keep_open()
        yield from Call(self.handle.begin)
        connection = yield from self._connection()
        if hasattr(connection, "get_raw_connection"):
            pooled = yield from Call(connection.get_raw_connection)
        else:
            pooled = connection.connection
        driver = pooled.driver_connection
        if _is_autocommit(pooled.dbapi_connection) or _is_autocommit(driver):
            raise Misconfigured(_AUTOCOMMIT)
        # An event listener of the application may have begun.
        if self.dialect == "sqlite" and not driver.in_transaction:
            yield from Call(connection.exec_driver_sql, ("begin immediate",))

    def _connection(self) -> Flow[Any]:
        """Return the current connection: a session that was rolled back takes another one."""
        return (yield from Call(self.handle.connection)) if self._is_session else self.handle

    def write(self, statement: Statement) -> Flow[int]:
        """Execute *statement* and return the number of affected rows."""
        connection = yield from self._connection()
        text = numbered(statement.text) if self._is_numbered else statement.text
        result = yield from Call(connection.exec_driver_sql, (text, tuple(statement.values)))
        affected: int = result.rowcount
        return affected

    def is_closed(self) -> bool:
        """The handler has closed it; a closed session goes on in another transaction."""
        return not self._is_session and self.handle.closed

    def set_savepoint(self, *, can_undo: bool) -> Flow[None]:
        """Set a savepoint after the claim."""
        if can_undo and self._is_session:
            self._nested = yield from Call(self.handle.begin_nested)
        else:
            yield from super().set_savepoint(can_undo=can_undo)

    def release_savepoint(self) -> Flow[None]:
        """
        Release the savepoint.

        Commits the handler's open savepoints of a session first: they are inside ours, and
        releasing ours would release them without the session's knowledge.
        """
        if self._nested is not None:
            yield from Call(self._nested.commit)  # with those inside it
            return
        while self._is_session and (nested := self.handle.get_nested_transaction()):
            yield from Call(nested.commit)
        yield from super().release_savepoint()

    def undo(self) -> Flow[None]:
        """Undo what the handler has written or added to the session."""
        if self._nested is not None:
            yield from Call(self._nested.rollback)
        else:
            yield from super().undo()

    def commit(self) -> Flow[None]:
        """Commit; a session flushes first."""
        yield from Call(self.handle.commit)
        yield from self._release()

    def rollback(self) -> Flow[None]:
        """Roll back."""
        try:
            yield from Call(self.handle.rollback)
        finally:
            yield from self._release()

    def _release(self) -> Flow[None]:
        if self._scope is not None and self._scope.leave():
            with suppress(Exception):  # the transaction is over, whatever becomes of the session
                yield from Call(self.handle.close)


class _Scope:
    """The scope of a `scoped_session` or `async_scoped_session`, and our session in it."""

    def __init__(self, scoped: Any) -> None:  # noqa: ANN401 - see above
        self._registry = scoped.registry
        # Without us the scope would have no session, so we remove it at the end.
        self._is_ours = not self._registry.has()
        self.session: Any = scoped()
        self._is_async = hasattr(type(self.session), "__aenter__")
        # Usually the current task; the rollback may run in another one.
        self._key = self._registry.scopefunc() if self._is_async else None

    def keep_open(self) -> None:
        """Replace the session's `close()` until `leave`."""
        if not self._has_session():
            raise Misconfigured(_SCOPED_SESSION)
        self.session.close = _stay_open_async if self._is_async else _stay_open

    def leave(self) -> bool:
        """Remove the session if it is there because of us; return whether to close it."""
        vars(self.session).pop("close", None)
        if not self._has_session():
            return True
        if self._is_ours and self._is_async:
            del self._registry.registry[self._key]
        elif self._is_ours:
            self._registry.clear()
        return self._is_ours

    def _has_session(self) -> bool:
        if self._is_async:
            return self._registry.registry.get(self._key) is self.session
        return self._registry.has() and self._registry() is self.session


def _is_autocommit(connection: Any) -> bool:  # noqa: ANN401 - see above
    """*connection* is the driver's, or SQLAlchemy's wrapper of it."""
    get_autocommit = getattr(connection, "get_autocommit", None)  # drivers of MySQL
    if get_autocommit is not None:
        return bool(get_autocommit())
    level = getattr(connection, "isolation_level", None)
    is_on = getattr(connection, "autocommit", False) is True
    return is_on or level in ("autocommit", "AUTOCOMMIT")


def _stay_open() -> None:
    """Replaces `close()` of a session in a scope while our transaction is open."""


async def _stay_open_async() -> None:
    """The same for async code."""
