"""The ledger of the MySQL store: records written in the application's own transaction (L9).

Beside `mysql.py`. Values go as parameters here, because the driver is somebody else's. A claim is
a plain `insert`, whose duplicate is an error: what an `on duplicate key` would count depends on
how the driver was told to count.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any

import pymysql

from coatcheck.core.record import Record, Swap
from coatcheck.errors import MissingExtra
from coatcheck.stores.ledger import Ledger, Statement
from coatcheck.stores.mysql_line import Address
from coatcheck.stores.mysql_rows import COLUMNS, bytes_of
from coatcheck.stores.mysql_talk import new_stamp


def ledger_for(address: Address, table: str, *, compact: bool) -> Ledger:
    """The ledger of the store in *table*."""
    writing = _Writing(table, compact=compact)
    return Ledger(
        dialect="mysql",
        claim=writing.claim,
        change=writing.change,
        connect=partial(_connect, address),
        connect_async=partial(_connect_async, address),
    )


class _Writing:
    """The statements of one table."""

    def __init__(self, table: str, *, compact: bool) -> None:
        marks = ", ".join(["%s"] * len(COLUMNS))
        changes = ", ".join(f"{name} = %s" for name in COLUMNS[1:])
        self._compact = compact
        self._insert = f"insert into `{table}` ({', '.join(COLUMNS)}) values ({marks})"
        self._update = f"update `{table}` set {changes} where id = %s and version = %s"

    def claim(self, swap: Swap, wait_ms: int) -> Iterator[Statement]:
        """A claim, which waits in whole seconds; on MySQL as long as its session says."""
        wait = f"/*M! set statement innodb_lock_wait_timeout = {max(1, wait_ms // 1_000):d} for */ "
        if swap.expected:
            text, values = self.change(swap)
            yield Statement(wait + text, values)
        else:
            yield Statement(wait + self._insert, self._values_of(swap))

    def change(self, swap: Swap) -> Statement:
        """A change of what this transaction has written, or of what stands."""
        return Statement(self._update, (*self._values_of(swap)[1:], swap.id, swap.expected))

    def _values_of(self, swap: Swap) -> tuple[Any, ...]:
        record = swap.record
        assert record is not None
        return (*record[:10], *map(bytes_of, self._texts_of(record)), *record[13:], -new_stamp())

    def _texts_of(self, record: Record) -> tuple[str, str, str]:
        return ("", "", "") if self._compact else (record.label, record.scope, record.key)


def _options(address: Address) -> dict[str, Any]:
    return {
        "host": address.host,
        "port": address.port,
        "user": address.user,
        "password": address.password,
        "connect_timeout": max(1, round(address.timeout_s)),
    }


def _context(address: Address) -> ssl.SSLContext | None:
    return address.tls if isinstance(address.tls, ssl.SSLContext) else None


def _connect(address: Address) -> Any:  # noqa: ANN401 - whatever the driver says it is
    return pymysql.connect(
        **_options(address),
        database=address.database,
        ssl=_context(address),
        ssl_disabled=address.tls is False,
    )


async def _connect_async(address: Address) -> Any:  # noqa: ANN401 - of a package that may not be here
    try:
        import asyncmy  # noqa: PLC0415 - only if asked for
    except ModuleNotFoundError as error:
        raise MissingExtra("asyncmy", "asyncmy") from error
    return await asyncmy.connect(**_options(address), db=address.database, ssl=_context(address))
