"""Trouble: what an error of some driver means for a transaction.

Told from the codes that the databases give, wherever a driver or a layer above it keeps them, so
that no driver must be imported to know its errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from coatcheck.stores.ledger import Dialect


class Trouble(Enum):
    """What an error means, where it means something to us."""

    HELD = "somebody holds the row, for longer than we may wait"
    TAKEN = "there is a row with this id already"
    COLLIDED = "the database chose us to give way: all of it may be done again from the start"
    AWAY = "the database did not answer"


_POSTGRES = {
    "55P03": Trouble.HELD,
    "57014": Trouble.HELD,  # longer than a statement may take
    "23505": Trouble.TAKEN,
    "40001": Trouble.COLLIDED,
    "40P01": Trouble.COLLIDED,
    "57P01": Trouble.AWAY,  # shut down
    "57P02": Trouble.AWAY,
    "57P03": Trouble.AWAY,  # starting up
    "57P05": Trouble.AWAY,  # has ended a session that was idle for too long
    "25P03": Trouble.AWAY,  # the same in a transaction
    "25006": Trouble.AWAY,  # only reads: a standby
    "53300": Trouble.AWAY,  # has too many connections
}
_MYSQL = {
    1205: Trouble.HELD,
    1969: Trouble.HELD,  # MariaDB: longer than a statement may take
    1062: Trouble.TAKEN,
    1213: Trouble.COLLIDED,
    1020: Trouble.COLLIDED,  # MariaDB: changed since it was read
    0: Trouble.AWAY,  # PyMySQL: the connection is closed already
    1040: Trouble.AWAY,  # too many connections
    1053: Trouble.AWAY,  # shutting down
    1290: Trouble.AWAY,  # only reads
    1792: Trouble.AWAY,
    1927: Trouble.AWAY,  # killed
    2002: Trouble.AWAY,
    2003: Trouble.AWAY,
    2006: Trouble.AWAY,
    2013: Trouble.AWAY,
    2055: Trouble.AWAY,
}
_MYSQL_NO_SAVEPOINT = 1305
# Said of a claim, the server is away: it is a standby. Said of an end, the transaction has claimed
# before, so somebody in it has made it so.
_ONLY_READS = ("25006", 1792)
_SQLITE_BUSY, _SQLITE_LOCKED, _SQLITE_BUSY_SNAPSHOT = 5, 6, 517

# Where nothing has a code: what drivers raise when a connection is gone. What a pool raises when
# it has none to lend is not among them: it has waited already, and need not be asked again.
_AWAY_NAMES = frozenset({"ConnectionDoesNotExistError", "InterfaceError", "OperationalError"})

_IN_PROGRESS = "another operation is in progress"  # asyncpg, which has no name for it


def trouble_of(error: BaseException, dialect: Dialect) -> Trouble | None:
    """What *error*, or what it was caused by, means on *dialect*; None: nothing to us."""
    causes = list(_causes(error))
    for cause in causes:
        if (code := _code_of(cause, dialect)) is not None:
            return _of_code(code, dialect)
    is_away = any(isinstance(c, OSError) or type(c).__name__ in _AWAY_NAMES for c in causes)
    return Trouble.AWAY if is_away else None


def is_over(error: BaseException, dialect: Dialect) -> bool:
    """*error* says that a savepoint is gone, and so the transaction in which it was set."""
    if dialect == "mysql":
        return any(_code_of(cause, dialect) == _MYSQL_NO_SAVEPOINT for cause in _causes(error))
    return any(str(cause).startswith("no such savepoint") for cause in _causes(error))


def is_busy(error: BaseException) -> bool:
    """*error* says that nothing was sent, because a statement of somebody else's still runs."""
    return any(_IN_PROGRESS in str(cause) for cause in _causes(error))


def is_refused(error: BaseException, dialect: Dialect) -> bool:
    """*error* says that a transaction only reads, so that nothing in it was written."""
    return any(_code_of(cause, dialect) in _ONLY_READS for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """*error* and what is behind it; SQLAlchemy keeps the driver's as `orig`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        behind = getattr(error, "orig", None)
        error = behind if isinstance(behind, BaseException) else error.__cause__


def _code_of(error: BaseException, dialect: Dialect) -> str | int | None:
    """The code that the database has given *error*, where its driver keeps it."""
    if dialect == "postgresql":
        code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        return code if isinstance(code, str) else None
    if dialect == "mysql":
        number = error.args[0] if error.args else None
        return number if isinstance(number, int) else None
    number = getattr(error, "sqlite_errorcode", None)
    return number if isinstance(number, int) else None


def _of_code(code: str | int, dialect: Dialect) -> Trouble | None:
    if isinstance(code, str):
        return Trouble.AWAY if code.startswith("08") else _POSTGRES.get(code)
    if dialect == "mysql":
        return _MYSQL.get(code)
    if code == _SQLITE_BUSY_SNAPSHOT:
        return Trouble.COLLIDED
    return Trouble.AWAY if code & 0xFF in (_SQLITE_BUSY, _SQLITE_LOCKED) else None
