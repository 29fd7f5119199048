"""MySQL error numbers and what they mean for the store.

The numbers are the same on MySQL and MariaDB; those from 2000 on come from the driver.

Invariant: every error becomes `StoreUnavailable`; or `Misconfigured` if it is raised while the
store is opened and retrying cannot help; or `ValueError` if the record itself cannot be written.
"""

from __future__ import annotations

import pymysql

from coatcheck.errors import Misconfigured, StoreUnavailable

# The server has rolled back, so the transaction can simply be repeated.
_DEADLOCK, _LOCK_TIMEOUT = 1213, 1205
RETRYABLE = frozenset({_DEADLOCK, _LOCK_TIMEOUT})

# The record is at fault: a column is null (1048), not convertible (1366), out of range (1264) or
# too long (1406), or the row (1118) or the statement (1153) is too large.
_STATEMENT_TOO_LARGE = 1153
_BAD_RECORD = frozenset({1048, 1366, 1264, 1406, 1118, _STATEMENT_TOO_LARGE})

# The connection works on after these errors. After 1153 the server closes it.
CONNECTION_SURVIVES = RETRYABLE | _BAD_RECORD - {_STATEMENT_TOO_LARGE}

# A schema change was already made: the table, column or index exists.
ALREADY_EXISTS = frozenset({1050, 1060, 1061})

# From the driver: no connection; lost while sending; lost while waiting for the answer; no TLS.
UNREACHABLE, SERVER_GONE, SERVER_LOST, _NO_TLS = 2003, 2006, 2013, 2026

READ_ONLY = 1290
NO_TABLE = 1146
_ACCESS_DENIED = 1142
# No right to the table, or to a column of it.
ACCESS_DENIED = frozenset({_ACCESS_DENIED, 1143})
# A trigger raised an error (`signal`).
TRIGGER_REFUSED = 1644
# A statement exceeded its time limit: on MariaDB, on MySQL.
SEARCH_TIMED_OUT = frozenset({1969, 3024})

_READ_ONLY_TEXT = "the server is read-only; is it a replica?"
_DISK_FULL_TEXT = "the server's disk is full"
_TEXTS = {
    UNREACHABLE: "the server cannot be reached; is it running, and does it listen there?",
    SERVER_GONE: "the connection was lost",
    SERVER_LOST: "the connection was lost, or there was no answer in time",
    _NO_TLS: "the server offers no TLS; give it a certificate, or leave out ssl=1",
    1021: _DISK_FULL_TEXT,
    1040: "the server has too many connections; raise its max_connections",
    1044: "the user may not use this database; grant access to it",
    1045: "the server refuses the user or the password",
    1047: "this node has left its cluster for the moment",
    1049: "there is no such database; create it, or change the URL",
    1054: "a table of this name exists but was not made by coatcheck; set table= in the URL",
    1114: _DISK_FULL_TEXT,
    1130: "the server does not allow connections from this machine",
    _ACCESS_DENIED: "the user may not do this; grant it, or create the tables as another user",
    NO_TABLE: "a table of coatcheck is gone, and all its records with it",
    1176: "the table has lost an index; run `coatcheck doctor` to see which",
    _LOCK_TIMEOUT: "another transaction keeps the rows, or the table, locked",
    _DEADLOCK: "gave up after repeated deadlocks with other transactions",
    READ_ONLY: _READ_ONLY_TEXT,
    1665: "binlog_format is STATEMENT; set it to ROW",
    1792: _READ_ONLY_TEXT,
    1836: _READ_ONLY_TEXT,
}
# Opening the same URL again would fail again.
_PERMANENT = frozenset({_NO_TLS, 1044, 1045, 1049, 1054, 1130, _ACCESS_DENIED, 1665})
# The server refused, or did not receive the whole statement. Any other error of a statement that
# commits is ambiguous: it may have come after the commit.
_NOTHING_WRITTEN = frozenset(_TEXTS) - {SERVER_LOST}


def code_of(error: pymysql.MySQLError | OSError) -> int:
    """Return the number of *error*; 0 if the driver gives none."""
    if isinstance(error, OSError):  # raised while we connect our socket
        return UNREACHABLE
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


def to_store_error(
    error: pymysql.MySQLError | OSError,
    where: str,
    *,
    is_opening: bool = False,
    is_committing: bool = False,
    has_committed: bool = False,
) -> Exception:
    """
    Translate *error*, of the driver or of its socket, into one of ours; *where* is the server.

    *is_committing*: the statement that failed commits by itself. *has_committed*: an earlier
    statement of the same call has committed already.
    """
    code = code_of(error)
    text = str(error.args[-1] if error.args else error)
    if code in _BAD_RECORD and not has_committed:
        return ValueError(f"{where}: a record cannot be written: {text}")
    message = f"{where}: {_TEXTS.get(code, 'the server failed')} ({text})"
    if is_opening and code in _PERMANENT:
        return Misconfigured(message)
    is_ambiguous = has_committed or (is_committing and code not in _NOTHING_WRITTEN)
    return StoreUnavailable(message, is_ambiguous=is_ambiguous)
