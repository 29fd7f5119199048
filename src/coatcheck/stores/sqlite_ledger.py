"""The ledger of the SQLite store: records written in the application's own transaction (L9).

Beside `sqlite.py`. Who begins a transaction to write has the whole file, so nobody else's claim is
ever in the way for longer than that takes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from functools import partial
from typing import Any

from coatcheck.core.record import Record, Swap
from coatcheck.errors import MissingExtra
from coatcheck.stores import sqlite_rows as rows
from coatcheck.stores.ledger import Ledger, Statement
from coatcheck.stores.sqlite_file import connect


def ledger_for(path: str, busy_timeout_s: float, *, compact: bool) -> Ledger:
    """The ledger of the store in *path*."""
    row_of = partial(rows.row_of, compact=compact)
    return Ledger(
        dialect="sqlite",
        claim=lambda swap, _wait_ms: _claim(swap, row_of(_record_of(swap))),
        change=lambda swap: Statement(rows.CHANGE_ONE, (*row_of(_record_of(swap)), swap.expected)),
        connect=partial(connect, path, busy_timeout_s),
        connect_async=partial(_connect_async, path, busy_timeout_s),
        is_shelved=False,
    )


def _record_of(swap: Swap) -> Record:
    assert swap.record is not None
    return swap.record


def _claim(swap: Swap, row: rows.Row) -> Iterator[Statement]:
    if swap.expected:
        yield Statement(rows.REPLACE_ONE, (*row, swap.expected))
    else:
        yield Statement(rows.CLAIM_ONE, row)


def _connect_async(path: str, busy_timeout_s: float) -> Any:  # noqa: ANN401 - of a package that may not be here
    try:
        import aiosqlite  # noqa: PLC0415 - only if asked for
    except ModuleNotFoundError as error:
        raise MissingExtra("aiosqlite", "aiosqlite") from error

    def opened() -> sqlite3.Connection:
        return connect(path, busy_timeout_s)

    return aiosqlite.Connection(opened, iter_chunk_size=64)
