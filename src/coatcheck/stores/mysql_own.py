"""Connections of the MySQL store's own for transactions, lent where the application lends none.

Beneath `mysql_ledger.py`; for event loops there is `mysql_own_async.py`. What we say on them is
answered in time or the server is taken for dead; what a handler says may take as long as it takes.
"""

from __future__ import annotations

import re
import ssl
from typing import Any

import pymysql

from coatcheck.stores.mysql_line import SQL_MODE, Address

# How a claim begins that waits for a lock; MySQL takes it for a remark.
LOCK_WAIT = "/*M! set statement innodb_lock_wait_timeout = {:d} for */ "
_WAITS = r"/\*M! set statement innodb_lock_wait_timeout = (\d+) for \*/ "


class Ours:
    """Which statements are ours, and how long we wait for them."""

    def __init__(self, table: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        written = rf"(?:{_WAITS})?(?:insert into|update) `{table}` "
        login = "set names |set session sql_mode "
        frame = "(?:begin|commit|rollback|(?:release )?savepoint coatcheck_claim)$"
        self._statement = re.compile(f"{written}|{login}|{frame}", re.IGNORECASE)

    def limit_s(self, statement: str) -> float | None:
        """How long to wait for *statement*; None: it is a handler's."""
        known = self._statement.match(statement)
        return self.timeout_s + int(known[1] or 0) if known else None


def options(address: Address) -> dict[str, Any]:
    """What both drivers are told."""
    return {
        "host": address.host,
        "port": address.port,
        "user": address.user,
        "password": address.password.encode(),
        "database": address.database,
        "connect_timeout": max(1, round(address.timeout_s)),
        "init_command": f"set session sql_mode = '{SQL_MODE}'",
    }


class _Own(pymysql.Connection):
    """A connection that does not wait for ever."""

    def __init__(self, ours: Ours, **options: Any) -> None:
        self._ours = ours
        super().__init__(**options)

    def _wait(self, limit_s: float | None) -> None:
        # The driver has no public word for it, once it is connected.
        vars(self)["_read_timeout"] = limit_s

    def query(self, sql: str, unbuffered: bool = False) -> int:  # noqa: FBT001, FBT002 - the driver's
        """Perform *sql*."""
        self._wait(self._ours.limit_s(sql))
        return super().query(sql, unbuffered)

    def commit(self) -> None:
        """Commit."""
        self._wait(self._ours.timeout_s)
        super().commit()

    def rollback(self) -> None:
        """Undo."""
        self._wait(self._ours.timeout_s)
        super().rollback()


def connected(address: Address, ours: Ours) -> pymysql.Connection[pymysql.cursors.Cursor]:
    """A connection for threads."""
    context = address.tls if isinstance(address.tls, ssl.SSLContext) else None
    return _Own(
        ours,
        **options(address),
        ssl=context,
        ssl_disabled=address.tls is False,
        read_timeout=ours.timeout_s,
        write_timeout=ours.timeout_s,
    )
