"""Connections of the DB-API: sqlite3, PyMySQL and their like.

They differ in how a transaction begins, and in whether `commit()` means what it says.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from coatcheck.errors import Misconfigured
from coatcheck.lent.contract import InTransaction, OneByOne
from coatcheck.stores.ledger import Dialect, Statement

_OF_A_THREAD = (
    "the connection that was lent belongs to the thread that has made it, and is used in another; "
    "on an event loop there are several: make it with sqlite3.connect(…, check_same_thread=False)"
)
_MYSQL_IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS


class _Dbapi(OneByOne):
    """What they have in common."""

    dialect: Dialect

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of a driver that may not be here
        self.handle = handle

    def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        cursor = self.handle.cursor()
        try:
            cursor.execute(statement.text, statement.values)
            affected: int = cursor.rowcount
            return affected
        finally:
            cursor.close()

    def _say(self, text: str) -> None:
        self.write(Statement(text, ()))

    def commit(self) -> None:
        """Commit."""
        self.handle.commit()

    def rollback(self) -> None:
        """Undo."""
        self.handle.rollback()


class SqliteLent(_Dbapi):
    """A `sqlite3.Connection`."""

    dialect: Dialect = "sqlite"

    def start(self) -> None:
        """Begin by taking the right to write: who only reads at first cannot always get it."""
        if self.handle.in_transaction:
            raise InTransaction
        try:
            self._say("begin immediate")
        except sqlite3.ProgrammingError as error:
            if "same thread" in str(error):
                raise Misconfigured(_OF_A_THREAD) from error
            raise

    def is_closed(self) -> bool:
        """Its handler has closed it."""
        return is_sqlite_closed(self.handle)

    def commit(self) -> None:
        """Commit by a statement: since Python 3.12 `commit()` may do nothing."""
        self._say("commit")

    def rollback(self) -> None:
        """Undo; SQLite may have done so by itself."""
        if self.handle.in_transaction:
            self._say("rollback")


class PymysqlLent(_Dbapi):
    """A `pymysql.Connection`, or one that is like it."""

    dialect: Dialect = "mysql"

    def start(self) -> None:
        """Begin."""
        if getattr(self.handle, "server_status", 0) & _MYSQL_IN_TRANSACTION:
            raise InTransaction
        self._say("begin")

    def is_closed(self) -> bool:
        """Its handler has closed it; PyMySQL is not "open" either when its server is away."""
        handle = self.handle
        return bool(getattr(handle, "_closed", not getattr(handle, "open", True)))


def is_sqlite_closed(handle: Any) -> bool:  # noqa: ANN401 - of sqlite3, or of what is around it
    """*handle* is closed, of which it tells whoever asks it for anything."""
    try:
        handle.in_transaction  # noqa: B018 - a property that asks
    except (sqlite3.ProgrammingError, ValueError):
        return True
    return False
