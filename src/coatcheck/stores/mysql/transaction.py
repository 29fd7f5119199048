"""Statements of the MySQL store for transaction mode, and its own connections for that.

A record is then written on a connection of the application, or on one that we open, in the same
transaction as the handler's own changes. Values are sent as parameters here, because the driver may
be any: numbers as they are, and all else in base 64, because a driver may escape text in a way
that the server's `sql_mode` reads differently. Empty values are written as literals, because a
`sql_mode` may turn empty text into null.

A claim is a plain `insert`, which fails if the key exists. The affected rows of an `insert … on
duplicate key update` depend on a flag that the application sets in its driver.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pymysql

from coatcheck.core.record import Swap
from coatcheck.errors import MissingExtra
from coatcheck.stores.mysql.connection import SQL_MODE, Connection, Server
from coatcheck.stores.mysql.statements import (
    COLUMNS,
    INSERT,
    base64_of,
    bytes_of,
    warn_response_dropped,
    without_oversized_response,
)
from coatcheck.stores.transaction_statements import Statement, TransactionStatements

# Limits how long a claim waits for a row, for this statement only. MySQL reads it as a comment.
_LOCK_WAIT = "/*M! set statement innodb_lock_wait_timeout = {:d} for */ "


def transaction_statements_for(
    server: Server, table: str, *, statement_bytes_max: int, is_encrypted: bool, may_create: bool
) -> TransactionStatements:
    """
    Return the statements for *table*, and how to connect to *server*.

    *is_encrypted*: the store's own connection to it uses TLS.
    """
    writer = _Writer(table, statement_bytes_max)
    return TransactionStatements(
        dialect="mysql",
        claim=writer.claim,
        change=writer.change,
        connect=partial(_connect, server),
        connect_async=partial(_connect_async, server, is_encrypted=is_encrypted),
        may_create=may_create,
    )


class _Writer:
    """The statements of one table."""

    def __init__(self, table: str, statement_bytes_max: int) -> None:
        self._statement_bytes_max = statement_bytes_max
        self._insert = INSERT.format(table)
        # Fails without a primary key. A claim in this transaction would then always have succeeded.
        self._update = f"update `{table}` force index (primary) set "

    def claim(self, swap: Swap, wait_ms: int) -> Iterator[Statement]:
        """Yield the claim. On MySQL it waits for a row as long as the session's own setting."""
        claim = self._updated(swap) if swap.expected else self._inserted(swap)
        lock_wait = _LOCK_WAIT.format(max(1, wait_ms // 1_000))
        yield Statement(lock_wait + claim.text, claim.values)

    def change(self, swap: Swap) -> Statement:
        """Return the end of a claim; without a response that does not fit into a statement."""
        fitting = without_oversized_response(swap, self._statement_bytes_max)
        if fitting is not swap and swap.record is not None:
            warn_response_dropped(swap.record)
        return self._updated(fitting)

    def _inserted(self, swap: Swap) -> Statement:
        row = _row_of(swap)
        values = ", ".join(map(_placeholder, row))
        return Statement(f"{self._insert}({values}, 0)", _parameters(row))

    def _updated(self, swap: Swap) -> Statement:
        row = _row_of(swap)[1:]
        assignments = ", ".join(map("{} = {}".format, COLUMNS[1:], map(_placeholder, row)))
        where = f"where id = {_placeholder(swap.id)} and version = {_placeholder(swap.expected)}"
        parameters = _parameters((*row, swap.id, swap.expected))
        return Statement(f"{self._update}{assignments} {where}", parameters)


def _row_of(swap: Swap) -> tuple[int | bytes | None, ...]:
    record = swap.record
    assert record is not None
    return (*record[:10], *map(bytes_of, record[10:13]), *record[13:])


def _placeholder(value: int | bytes | None) -> str:
    if value is None:
        return "null"
    if isinstance(value, int):
        return "%s"
    return "from_base64(%s)" if value else "x''"


def _parameters(row: tuple[int | bytes | None, ...]) -> tuple[int | str, ...]:
    """Return the values for the placeholders of *row*."""
    return tuple(
        value if isinstance(value, int) else base64_of(value)
        for value in row
        if isinstance(value, int) or value
    )


# --- connections of our own -----------------------------------------------------------------------


def _options(server: Server) -> dict[str, Any]:
    """Return the arguments that both drivers take."""
    return {
        "host": server.host,
        "port": server.port,
        "user": server.user,
        "password": server.password.encode(),
        "database": server.database,
        "connect_timeout": server.timeout_s,
        "read_timeout": server.transaction_timeout_s,
        "init_command": f"set session sql_mode = '{SQL_MODE}'",
    }


def _require_answer(server: Server) -> None:
    """
    Log in once with the timeout of the store; raise if the server does not answer.

    The drivers have one timeout for the login and all statements, and the handler's may take long.
    """
    with closing(Connection(server)) as connection:
        connection.run(lambda _: None)


def _connect(server: Server) -> pymysql.Connection[pymysql.cursors.Cursor]:
    _require_answer(server)
    return pymysql.connect(
        **_options(server), **server.tls_options, write_timeout=server.transaction_timeout_s
    )


async def _connect_async(server: Server, *, is_encrypted: bool) -> Any:  # noqa: ANN401 - of a package that may be missing
    try:
        import asyncmy  # noqa: PLC0415 - it may be missing
    except ModuleNotFoundError as error:
        if error.name != "asyncmy":
            raise
        raise MissingExtra("asyncmy", "asyncmy") from error
    await asyncio.to_thread(_require_answer, server)
    context = server.tls if isinstance(server.tls, ssl.SSLContext) else None
    if context is None and is_encrypted:
        context = _unverified()
    return await asyncmy.connect(**_options(server), ssl=context)


def _unverified() -> ssl.SSLContext:
    """Return the context that PyMySQL uses by default: it encrypts, and verifies nothing."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
