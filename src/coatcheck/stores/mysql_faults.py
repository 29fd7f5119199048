"""What a MySQL server can do to us, in words: which of its errors means what.

Below `mysql_flow.py`, which meets them. The numbers are those of MySQL and MariaDB alike.

Invariant: an error becomes `StoreUnavailable`; or `Misconfigured` where a store is opened and
could never work; or `ValueError` where the record itself cannot be written, by whatever server.
"""

from __future__ import annotations

from coatcheck.errors import Misconfigured, StoreUnavailable

# Two transactions want each other's rows, or one waits too long for somebody else's: the server
# undoes the one that it tells so, which may try again.
_DEADLOCK, _LOCK_TIMEOUT = 1213, 1205
COLLISIONS = frozenset({_DEADLOCK, _LOCK_TIMEOUT})

# The fault of what was to be written. Missing, cut off (1366), out of range, too long; a row or a
# statement too large.
_STATEMENT_TOO_LARGE = 1153
_OF_THE_RECORD = frozenset({1048, 1366, 1264, 1406, 1118, _STATEMENT_TOO_LARGE})

# After these the connection is as good as before.
PASSING = COLLISIONS | _OF_THE_RECORD - {_STATEMENT_TOO_LARGE}

# What a statement is told that would make what is there: a table, a column, an index.
MADE_ALREADY = frozenset({1050, 1060, 1061})

# What the driver says, not the server: no connection; lost while sending; lost while waiting.
UNREACHABLE, SERVER_GONE, SERVER_LOST, _NO_TLS = 2003, 2006, 2013, 2026

# What a server says to a write that takes none; we say it to ourselves where one is read from.
READ_ONLY = 1290
_IS_READ_ONLY = "it is read-only; is it a replica?"
NO_TABLE = 1146
# What a user is told who has no right to a table, or to a column of it.
_NO_RIGHT = 1142
DENIED = frozenset({_NO_RIGHT, 1143})
# What a trigger says that refuses.
RAISED = 1644
# What keeps statements from being prepared: there are too many already, or a proxy knows none.
UNPREPARED = frozenset({1295, 1461})
# What a statement is told that has reached a limit of time: by MariaDB, by MySQL.
TOOK_TOO_LONG = frozenset({1969, 3024})
# What happened, in words; whatever is not here is told in the server's own.
_FAULTS = {
    UNREACHABLE: "it cannot be reached; is it running, and does it listen there?",
    SERVER_GONE: "the connection was lost",
    SERVER_LOST: "the connection was lost, or there was no answer in time",
    _NO_TLS: "it offers no TLS; give it a certificate, or leave out ssl=1",
    1040: "it has no connection left; raise its max_connections",
    1044: "the user may not use this database; grant it",
    1045: "it refuses the user or the password",
    1047: "this node is not part of its cluster just now",
    1049: "there is no such database; create it, or name another one",
    1054: "a table of that name is there already, and not of our making; name another one",
    1130: "it lets nobody in from this machine",
    _NO_RIGHT: "the user may not do this; grant it, or have the tables created by somebody else",
    NO_TABLE: "a table of ours is gone, and all records with it",
    _DEADLOCK: "others lock the same rows in another order, again and again",
    _LOCK_TIMEOUT: "somebody keeps rows, or the table, locked",
    1021: "its disk is full",
    1114: "its disk is full",
    READ_ONLY: _IS_READ_ONLY,
    1792: _IS_READ_ONLY,
    1836: _IS_READ_ONLY,
    1176: "its table has lost an index, which `coatcheck doctor` names",
    1243: "it has forgotten what was prepared",
    1615: "it has no room for what was prepared; raise its table_definition_cache",
    1665: "its binlog_format is STATEMENT; set it to ROW",
}
# To open the same URL again could not work either.
_HOPELESS = frozenset({_NO_TLS, 1044, 1045, 1049, 1054, 1130, _NO_RIGHT, 1665})
# The server has refused, or has not got all of it. Any other error of a write that commits may
# have come when that was done.
_NOTHING_WRITTEN = frozenset(_FAULTS) - {SERVER_LOST}


def explained(
    code: int, text: str, where: str, *, opening: bool = False, is_unsure: bool = False
) -> Exception:
    """
    What an error means to whoever uses the store at *where*.

    *is_unsure*: it was the answer to a write that commits.
    """
    if code in _OF_THE_RECORD:
        return ValueError(f"{where}: a record cannot be written: {text}")
    message = f"{where}: {_FAULTS.get(code, 'the server failed')} ({text})"
    if opening and code in _HOPELESS:
        return Misconfigured(message)
    return StoreUnavailable(message, is_ambiguous=is_unsure and code not in _NOTHING_WRITTEN)
