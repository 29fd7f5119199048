"""What an error of a driver means for a transaction.

Errors are classified by the codes that the databases give, wherever a driver or a layer above it
keeps them, so that no driver has to be imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from coatcheck.stores.transaction_statements import Dialect


class ErrorKind(Enum):
    """What an error means for a claim or an end."""

    LOCKED = "another transaction holds the row for longer than we wait"
    DUPLICATE = "a row with this id exists already"
    SERIALIZATION = "deadlock or serialization failure: the transaction may be run again"
    UNREACHABLE = "the database is unreachable or accepts no writes"


_POSTGRES = {
    "55P03": ErrorKind.LOCKED,
    "57014": ErrorKind.LOCKED,  # statement_timeout
    "23505": ErrorKind.DUPLICATE,
    "40001": ErrorKind.SERIALIZATION,
    "40P01": ErrorKind.SERIALIZATION,
    "57P01": ErrorKind.UNREACHABLE,  # shut down
    "57P02": ErrorKind.UNREACHABLE,
    "57P03": ErrorKind.UNREACHABLE,  # starting up
    "57P05": ErrorKind.UNREACHABLE,  # idle_session_timeout
    "25P03": ErrorKind.UNREACHABLE,  # idle_in_transaction_session_timeout
    "25006": ErrorKind.UNREACHABLE,  # read-only: a standby
    "53300": ErrorKind.UNREACHABLE,  # too many connections
}
_MYSQL = {
    1205: ErrorKind.LOCKED,
    1969: ErrorKind.LOCKED,  # MariaDB: max_statement_time
    1062: ErrorKind.DUPLICATE,
    1213: ErrorKind.SERIALIZATION,
    1020: ErrorKind.SERIALIZATION,  # MariaDB: the row changed since it was read
    0: ErrorKind.UNREACHABLE,  # PyMySQL: the connection is closed
    1040: ErrorKind.UNREACHABLE,  # too many connections
    1053: ErrorKind.UNREACHABLE,  # shutting down
    1290: ErrorKind.UNREACHABLE,  # read-only server
    1792: ErrorKind.UNREACHABLE,  # read-only transaction
    1927: ErrorKind.UNREACHABLE,  # the connection was killed
    2002: ErrorKind.UNREACHABLE,
    2003: ErrorKind.UNREACHABLE,
    2006: ErrorKind.UNREACHABLE,
    2013: ErrorKind.UNREACHABLE,
    2055: ErrorKind.UNREACHABLE,
}
# PostgreSQL: there is no such savepoint, or no transaction at all. MySQL: no such savepoint.
_NO_SAVEPOINT = ("3B001", "25P01", 1305)
_NO_TABLE = ("42P01", 1146)
# Read-only. For a claim that means a standby, so the server counts as unreachable. For an end it
# means that the handler has made its transaction read-only, because the claim was written before.
_READ_ONLY = ("25006", 1792)
_SQLITE_BUSY, _SQLITE_LOCKED, _SQLITE_BUSY_SNAPSHOT = 5, 6, 517

# What drivers raise without a code when a connection is lost. Time-outs of pools are not in here:
# the pool has waited already, so the claim is not tried again.
_CONNECTION_LOST = frozenset({"ConnectionDoesNotExistError", "InterfaceError", "OperationalError"})

_BUSY = "another operation is in progress"  # asyncpg has no error class for it


def error_kind_of(error: BaseException, dialect: Dialect) -> ErrorKind | None:
    """Return what *error* or its cause means on *dialect*; None if it is none of these."""
    causes = list(_causes(error))
    for cause in causes:
        if (code := _code_of(cause, dialect)) is not None:
            return _kind_of_code(code, dialect)
    is_lost = any(isinstance(c, OSError) or type(c).__name__ in _CONNECTION_LOST for c in causes)
    return ErrorKind.UNREACHABLE if is_lost else None


def is_savepoint_gone(error: BaseException, dialect: Dialect) -> bool:
    """The savepoint does not exist any more, so the transaction in which it was set is over."""
    return any(
        _code_of(cause, dialect) in _NO_SAVEPOINT
        or str(cause).startswith("no such savepoint")  # SQLite has no code for it
        or type(cause).__name__ == "ResourceClosedError"  # a session of SQLAlchemy has closed it
        for cause in _causes(error)
    )


def is_table_missing(error: BaseException, dialect: Dialect) -> bool:
    """The table of a statement does not exist."""
    return any(
        _code_of(cause, dialect) in _NO_TABLE or str(cause).startswith("no such table")  # SQLite
        for cause in _causes(error)
    )


def is_busy(error: BaseException) -> bool:
    """The statement was not sent, because another one is still running on the connection."""
    return any(_BUSY in str(cause) for cause in _causes(error))


def is_refused(error: BaseException, dialect: Dialect) -> bool:
    """The transaction is read-only, so the statement wrote nothing."""
    return any(_code_of(cause, dialect) in _READ_ONLY for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield *error* and its causes; SQLAlchemy keeps the driver's error as `orig`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        original = getattr(error, "orig", None)
        error = original if isinstance(original, BaseException) else error.__cause__


def _code_of(error: BaseException, dialect: Dialect) -> str | int | None:
    """Return the database's code of *error*, where its driver keeps it."""
    if dialect == "postgresql":
        code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        return code if isinstance(code, str) else None
    if dialect == "mysql":
        number = error.args[0] if error.args else None
        return number if isinstance(number, int) else None
    number = getattr(error, "sqlite_errorcode", None)
    return number if isinstance(number, int) else None


def _kind_of_code(code: str | int, dialect: Dialect) -> ErrorKind | None:
    if isinstance(code, str):
        # Class 08: connection exceptions.
        return ErrorKind.UNREACHABLE if code.startswith("08") else _POSTGRES.get(code)
    if dialect == "mysql":
        return _MYSQL.get(code)
    if code == _SQLITE_BUSY_SNAPSHOT:
        return ErrorKind.SERIALIZATION
    return ErrorKind.UNREACHABLE if code & 0xFF in (_SQLITE_BUSY, _SQLITE_LOCKED) else None
