"""Connections of the DB-API and of async drivers that resemble it, to SQLite and MySQL."""

from __future__ import annotations

import sqlite3

from coatcheck.core.flow import Call, Flow
from coatcheck.errors import Misconfigured
from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.contract import InTransaction, TransactionConnection

_OTHER_THREAD = (
    "this sqlite3 connection may only be used in the thread that opened it, and an event loop uses "
    "several; open it with sqlite3.connect(…, check_same_thread=False)"
)
_MYSQL_IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS


class SqliteConnection(TransactionConnection):
    """
    A connection of sqlite3 or aiosqlite.

    Commit and rollback are statements: since Python 3.12, `commit()` does nothing in autocommit
    mode.
    """

    dialect: Dialect = "sqlite"

    def start(self) -> Flow[None]:
        """Begin with the write lock: a transaction that first only reads may not get it later."""
        if self.handle.in_transaction:
            raise InTransaction
        try:
            yield from self._execute("begin immediate")
        except sqlite3.ProgrammingError as error:
            if "same thread" in str(error):
                raise Misconfigured(_OTHER_THREAD) from error
            raise

    def write(self, statement: Statement) -> Flow[int]:
        """Execute *statement* and return the number of affected rows."""
        cursor = yield from Call(self.handle.execute, (statement.text, statement.values))
        affected: int = cursor.rowcount
        yield from Call(cursor.close)
        return affected

    def _execute(self, text: str) -> Flow[None]:
        yield from self.write(Statement(text, ()))

    def is_closed(self) -> bool:
        """The handler has closed it: reading any of its properties then raises."""
        try:
            self.handle.in_transaction  # noqa: B018 - a property that raises
        except (sqlite3.ProgrammingError, ValueError):
            return True
        return False

    def commit(self) -> Flow[None]:
        """Commit."""
        yield from self._execute("commit")

    def rollback(self) -> Flow[None]:
        """
        Roll back; SQLite may have done so by itself.

        aiosqlite's thread first executes what a cancelled caller has left in its queue, so asking
        for `in_transaction` before that would be too early.
        """
        try:
            yield from self._execute("rollback")
        except sqlite3.OperationalError:
            if self.handle.in_transaction:
                raise


class MysqlConnection(TransactionConnection):
    """A connection of PyMySQL, mysqlclient, asyncmy or aiomysql."""

    dialect: Dialect = "mysql"
    _was_closed = False

    def start(self) -> Flow[None]:
        """Begin; a connection that is closed still reports its last transaction status."""
        status = getattr(self.handle, "server_status", 0)
        if status & _MYSQL_IN_TRANSACTION and not self.is_closed():
            raise InTransaction
        # asyncmy does not show that it was closed, so we note it.
        self.handle.close = self._close
        yield from self.write(Statement("begin", ()))

    def _close(self) -> None:
        self._was_closed = True
        self._restore_close()
        self.handle.close()

    def _restore_close(self) -> None:
        vars(self.handle).pop("close", None)

    def write(self, statement: Statement) -> Flow[int]:
        """Execute *statement* and return the number of affected rows."""
        cursor = yield from Call(self.handle.cursor)
        yield from Call(cursor.execute, (statement.text, statement.values))
        affected: int = cursor.rowcount
        yield from Call(cursor.close)
        return affected

    def is_closed(self) -> bool:
        """It was closed; if by its driver after an error, nothing was sent since."""
        handle = self.handle
        is_open = getattr(handle, "open", True) and getattr(handle, "connected", True)
        return self._was_closed or not is_open or getattr(handle, "closed", False)

    def commit(self) -> Flow[None]:
        """Commit."""
        yield from Call(self.handle.commit)
        self._restore_close()

    def rollback(self) -> Flow[None]:
        """Roll back."""
        self._restore_close()
        yield from Call(self.handle.rollback)
