"""What an error of psycopg or asyncpg means for the caller of a store.

Both drivers carry the server's SQLSTATE, so one table serves both. An error of the network or of
the driver itself has none.
"""

from __future__ import annotations

import asyncpg  # type: ignore[import-untyped] # it has no types
import psycopg

from coatcheck.errors import Misconfigured, StoreUnavailable

# Each attempt fails only because another transaction went through, so 10 are far more than enough.
ATTEMPTS_MAX = 10

_DRIVER_ERRORS = (
    psycopg.Error,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)
# The record itself is at fault (data, constraint, size), not the server: the caller gets the
# driver's error as it is.
_OF_THE_RECORD = ("22", "23", "54000")
# The server has certainly not written: it is read-only, refused the login or the right, is full,
# or the table is missing.
_NOT_WRITTEN = ("25", "28", "3D", "3F", "42", "53")
# The server rolled the statement back (deadlock, serialization failure), and asks to retry it.
_ROLLED_BACK = frozenset({"40000", "40001", "40P01"})
# The session is of no use any more: the server is read-only now (another one was promoted), or a
# prepared statement is gone or no longer fits a table that was altered.
_SESSION_IS_STALE = frozenset({"25006", "26000", "0A000"})
# asyncpg had the statement prepared and then refused to send its values. That leaves an implicit
# transaction open, with locks, until the next statement. (The server's own errors are subclasses.)
_PREPARED_BUT_NOT_SENT = (asyncpg.DataError, asyncpg.InterfaceError)
_UNTRANSLATABLE_CHARACTER = "22P05"
_INVALID_COLUMN_REFERENCE = "42P10"

NO_PRIMARY_KEY = (
    "has no primary key, as during an unfinished restore; no key can be claimed until it has one: "
    "`alter table … add primary key (id)`"
)
_NOT_UTF8 = (
    "postgresql: the encoding of the database is not UTF8, and it cannot store some character of "
    "this key, scope or label; use a UTF8 database, or compact=1, which stores no key"
)
_READ_ONLY = "every server of the URL is read-only (a standby, or default_transaction_read_only)"


class NoAnswer(StoreUnavailable):
    """The server took too long; the connection is closed, and the answer will never be read."""


def sqlstate_of(error: BaseException | None) -> str:
    """Return the server's code for *error*, or an empty string."""
    return getattr(error, "sqlstate", None) or ""


def is_rolled_back(error: BaseException) -> bool:
    """Whether the server rolled the statement back and a retry may succeed."""
    return sqlstate_of(error) in _ROLLED_BACK


def is_session_stale(error: BaseException) -> bool:
    """Whether the session that raised *error*, or its cause, must not be used again."""
    if not isinstance(error, Exception):  # interrupted or cancelled in the middle of a statement
        return True
    errors = (error, error.__cause__)
    if any(type(error) in _PREPARED_BUT_NOT_SENT for error in errors):
        return True
    return any(sqlstate_of(error) in _SESSION_IS_STALE for error in errors)


def to_store_error(error: Exception, *, writes: bool, committed: bool = False) -> Exception:
    """
    Return what to raise for *error*: `StoreUnavailable`, unless the caller's record is at fault.

    If the statement *writes*, a lost answer is ambiguous; if an earlier statement of the same call
    was *committed*, any failure is.
    """
    if isinstance(error, StoreUnavailable):
        error.is_ambiguous |= committed or (writes and isinstance(error, NoAnswer))
        return error
    code = sqlstate_of(error)
    if code == _UNTRANSLATABLE_CHARACTER:
        return Misconfigured(_NOT_UTF8)
    if isinstance(error, psycopg.DataError) or code.startswith(_OF_THE_RECORD):
        return error
    if not isinstance(error, _DRIVER_ERRORS):
        return error
    is_ambiguous = committed or (
        writes and not is_rolled_back(error) and not code.startswith(_NOT_WRITTEN)
    )
    outage = StoreUnavailable(_message_of(error, code), is_ambiguous=is_ambiguous)
    outage.__cause__ = error
    return outage


def _message_of(error: Exception, code: str) -> str:
    if is_rolled_back(error):
        return f"gave up after {ATTEMPTS_MAX} deadlocks or serialization failures"
    if code == _INVALID_COLUMN_REFERENCE:  # a claim names the key, and there is none
        return f"the table {NO_PRIMARY_KEY}"
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return _READ_ONLY
    return one_line(error)


def one_line(error: BaseException) -> str:
    """Return the message of *error* without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
