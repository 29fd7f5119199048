"""Connections of the DB-API: sqlite3, PyMySQL, mysqlclient.

They differ in how a transaction begins, and in whether `commit()` always commits.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from coatcheck.errors import Misconfigured
from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.contract import InTransaction, StatementByStatement

_OTHER_THREAD = (
    "this sqlite3 connection may only be used in the thread that opened it, and an event loop uses "
    "several; open it with sqlite3.connect(…, check_same_thread=False)"
)
_MYSQL_IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS


class _Dbapi(StatementByStatement):
    """What they have in common."""

    dialect: Dialect

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of a driver that may not be installed
        self.handle = handle

    def write(self, statement: Statement) -> int:
        """Execute *statement* and return the number of affected rows."""
        cursor = self.handle.cursor()
        try:
            cursor.execute(statement.text, statement.values)
            affected: int = cursor.rowcount
            return affected
        finally:
            cursor.close()

    def _execute(self, text: str) -> None:
        self.write(Statement(text, ()))

    def commit(self) -> None:
        """Commit."""
        self.handle.commit()

    def rollback(self) -> None:
        """Roll back."""
        self.handle.rollback()


class SqliteConnection(_Dbapi):
    """A `sqlite3.Connection`."""

    dialect: Dialect = "sqlite"

    def start(self) -> None:
        """Begin with the write lock: a transaction that first only reads may not get it later."""
        if self.handle.in_transaction:
            raise InTransaction
        try:
            self._execute("begin immediate")
        except sqlite3.ProgrammingError as error:
            if "same thread" in str(error):
                raise Misconfigured(_OTHER_THREAD) from error
            raise

    def is_closed(self) -> bool:
        """The handler has closed it."""
        return is_sqlite_closed(self.handle)

    def commit(self) -> None:
        """Commit by a statement: since Python 3.12, `commit()` does nothing in autocommit mode."""
        self._execute("commit")

    def rollback(self) -> None:
        """Roll back; SQLite may have done so by itself."""
        if self.handle.in_transaction:
            self._execute("rollback")


class PymysqlConnection(_Dbapi):
    """A `pymysql.Connection` or `MySQLdb.Connection`."""

    dialect: Dialect = "mysql"

    def start(self) -> None:
        """Begin."""
        if getattr(self.handle, "server_status", 0) & _MYSQL_IN_TRANSACTION:
            raise InTransaction
        self._execute("begin")

    def is_closed(self) -> bool:
        """It was closed; if by its driver after an error, nothing was sent since."""
        return not self.handle.open


def is_sqlite_closed(handle: Any) -> bool:  # noqa: ANN401 - of sqlite3 or aiosqlite
    """*handle* is closed: reading any of its properties then raises."""
    try:
        handle.in_transaction  # noqa: B018 - a property that raises
    except (sqlite3.ProgrammingError, ValueError):
        return True
    return False
