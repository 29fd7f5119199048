"""What SQLite's errors mean.

Every error of SQLite leaves the store as `StoreUnavailable`, or as `Misconfigured` if opening the
same file again cannot work either. Errors about the values of one record are raised unchanged.
"""

from __future__ import annotations

import sqlite3

from coatcheck.errors import CoatcheckError, Misconfigured, StoreUnavailable

# SQLite's own message follows in parentheses; a code that is not here has only that.
_MEANINGS = {
    sqlite3.SQLITE_BUSY: "another process holds the write lock",
    sqlite3.SQLITE_LOCKED: "another connection of this process holds the lock",
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "the file is read-only; make it and its directory writable",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened; check that its directory exists and is "
    "writable",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore a backup, or try `sqlite3 FILE .recover`",
    sqlite3.SQLITE_NOTADB: "the file is not an SQLite database",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write the file",
}
_PERMANENT = {
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
}
# After these the connection is still usable. After these and the permanent ones nothing was
# written. Any other error of a commit is ambiguous: the write-ahead log may already contain it.
_TEMPORARY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL}

_RECORD_ERRORS = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
)


def to_store_error(error: sqlite3.Error, path: str, *, opening: bool = False) -> CoatcheckError:
    """Return the exception to raise for *error*; *opening*: while the store is being opened."""
    code = code_of(error)
    message = f"{path}: {_MEANINGS.get(code, 'SQLite failed')} ({error})"
    if opening and code in _PERMANENT:
        return Misconfigured(message)
    return StoreUnavailable(message, is_ambiguous=code not in _TEMPORARY | _PERMANENT)


def is_file_error(error: BaseException) -> bool:
    """Return whether *error* is about the file, not about the values of one record."""
    return isinstance(error, sqlite3.Error) and not isinstance(error, _RECORD_ERRORS)


def is_temporary(error: BaseException) -> bool:
    """Return whether the connection is still usable after *error*."""
    return code_of(error) in _TEMPORARY


def damage(details: str) -> str:
    """Return the message for a damaged file; *details* come from SQLite."""
    return f"{_MEANINGS[sqlite3.SQLITE_CORRUPT]} ({details})"


def code_of(error: BaseException) -> int:
    """Return SQLite's primary result code; 0 if *error* is not from SQLite."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF  # the higher bits name the failed system call
