"""The bell of the PostgreSQL store: LISTEN and NOTIFY, on one connection of its own.

Beside `postgres_link.py`. Not one of the connections that write: a NOTIFY makes its commit wait for
all others that notify. And this one's commits wait for no disk and no standby, because a word need
not survive anything.

Behind a pooler there is no bell: what listens there is somebody else's session.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.postgres_link import Connection

# The number of the table tells our channel from those of other schemas, however they are named.
_WHO_AND_WHERE = b"select pg_backend_pid(), to_regclass(%s)::oid::bigint"


class PostgresBell:
    """
    Everybody who has the same table open.

    Args:
        conninfo: where to, in the driver's words.
        table: the records' table, as it stands in statements.
        timeout_s: how long connecting may take, and each statement.
    """

    def __init__(self, conninfo: str, table: str, timeout_s: float) -> None:
        self._conninfo = conninfo
        self._table = table
        self._timeout_s = timeout_s
        self._channel = ""
        self._heard: list[str] = []
        self._connection: Connection | None = None
        self._inherited: list[Connection | None] = []
        renew_after_fork(self)

    def _renew(self) -> None:
        # Kept, because letting go of it would say goodbye in the parent's name.
        self._inherited.append(self._connection)
        self._connection = None
        self._heard = []

    def open(self) -> bool:
        """Listen; False behind a pooler, where who greets us is not who answers."""
        connection = Connection.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        self._connection = connection
        connection.timeout_s = self._timeout_s
        pid, table = connection.execute(_WHO_AND_WHERE, (self._table,)).fetchone() or (0, None)
        if pid != connection.info.backend_pid:
            return False
        if table is None:
            raise StoreUnavailable(f"there is no table {self._table}")
        self._channel = f"coatcheck_{table}"
        # What comes while we ask for something else.
        connection.add_notify_handler(lambda note: self._heard.append(note.payload))
        connection.execute(b"set synchronous_commit = off")
        connection.execute(f"listen {self._channel}".encode())
        return True

    def fileno(self) -> int:
        """The connection's."""
        return self._ready().fileno()

    def ring(self, words: str) -> None:
        """Notify the channel."""
        self._ready().execute(b"select pg_notify(%s, %s)", (self._channel, words))

    def heard(self) -> Sequence[str]:
        """What has come, also while we rang."""
        pgconn = self._ready().pgconn
        pgconn.consume_input()
        while (note := pgconn.notifies()) is not None:
            self._heard.append(note.extra.decode("ascii", "replace"))
        heard, self._heard = self._heard, []
        return heard

    def ping(self) -> None:
        """Ask for nothing in particular."""
        self._ready().execute(b"select 1")

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        self._heard = []
        if connection is not None:
            connection.close()

    def _ready(self) -> Connection:
        if self._connection is None:
            raise psycopg.InterfaceError("the bell is not open")
        return self._connection
