"""Statements that write a record in the application's own transaction on SQLite.

A transaction that writes locks the whole file, so a claim never waits for another claim longer than
for that lock.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from functools import partial
from typing import Any

from coatcheck.core.record import Swap
from coatcheck.errors import MissingExtra
from coatcheck.stores.sqlite import statements
from coatcheck.stores.sqlite.connection import connect
from coatcheck.stores.transaction_statements import Statement, TransactionStatements


def transaction_statements_for(
    path: str, busy_timeout_s: float, *, may_create: bool
) -> TransactionStatements:
    """Return the statements for the store in *path*."""
    return TransactionStatements(
        dialect="sqlite",
        claim=_claim,
        change=lambda swap: Statement(*statements.write_one(swap)),
        connect=partial(connect, path, busy_timeout_s),
        connect_async=partial(_connect_async, path, busy_timeout_s),
        is_pooled=False,
        may_create=may_create,
    )


def _claim(swap: Swap, _wait_ms: int) -> Iterator[Statement]:
    # A key that starts over changes its expiry.
    yield Statement(*statements.write_one(swap, change=statements.REPLACE_ONE))


def _connect_async(path: str, busy_timeout_s: float) -> Any:  # noqa: ANN401 - aiosqlite is optional
    try:
        import aiosqlite  # noqa: PLC0415 - optional
    except ModuleNotFoundError as error:
        raise MissingExtra("aiosqlite", "aiosqlite") from error

    def connect_here() -> sqlite3.Connection:
        return connect(path, busy_timeout_s)

    return aiosqlite.Connection(connect_here, iter_chunk_size=64)
