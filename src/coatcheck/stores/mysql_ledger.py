"""The ledger of the MySQL store: records written in the application's own transaction (L9).

Beside `mysql.py`. Values go as parameters here, because the driver is somebody else's: numbers as
they are, and all else in base 64, because how a driver escapes may not be how the server reads it.
An empty value is spelt out, because there is a `sql_mode` that takes an empty text for null.

A claim is a plain `insert`, whose duplicate is an error: what an `on duplicate key` would count
depends on how the driver was told to count.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from coatcheck.core.record import Record, Swap
from coatcheck.errors import MissingExtra
from coatcheck.stores.ledger import Ledger, Statement
from coatcheck.stores.mysql_flow import Terms
from coatcheck.stores.mysql_line import Address
from coatcheck.stores.mysql_own import LOCK_WAIT, Ours, connected
from coatcheck.stores.mysql_rows import COLUMNS, base64_of, bytes_of
from coatcheck.stores.mysql_size import fitting, warn_of_dropped
from coatcheck.stores.mysql_talk import new_stamp


def ledger_for(address: Address, table: str, terms: Terms, *, compact: bool) -> Ledger:
    """The ledger of the store in *table*, on a server whose sessions have *terms*."""
    writing = _Writing(table, terms.statement_bytes_max, compact=compact)
    ours = Ours(table, address.timeout_s)
    return Ledger(
        dialect="mysql",
        claim=writing.claim,
        change=writing.change,
        connect=partial(connected, address, ours),
        connect_async=partial(_connect_async, address, ours, is_encrypted=terms.is_encrypted),
    )


class _Writing:
    """The statements of one table."""

    def __init__(self, table: str, statement_bytes_max: int, *, compact: bool) -> None:
        self._compact = compact
        self._statement_bytes_max = statement_bytes_max
        self._insert = f"insert into `{table}` ({', '.join(COLUMNS)}) values "
        # It fails where there is no primary key, and with it all of a transaction whose claim met
        # no rival for want of one.
        self._update = f"update `{table}` force index (primary) set "

    def claim(self, swap: Swap, wait_ms: int) -> Iterator[Statement]:
        """A claim, which waits in whole seconds; on MySQL as long as its session says."""
        claim = self._changed(swap) if swap.expected else self._inserted(swap)
        limit = LOCK_WAIT.format(max(1, wait_ms // 1_000))
        yield Statement(limit + claim.text, claim.values)

    def change(self, swap: Swap) -> Statement:
        """
        The end of a claim that this transaction has made.

        Without a response that does not fit: the work is done, and that is to be known.
        """
        fit = fitting(swap, self._statement_bytes_max)
        if fit is not swap and swap.record is not None:
            warn_of_dropped(swap.record)
        return self._changed(fit)

    def _inserted(self, swap: Swap) -> Statement:
        row = self._row_of(swap)
        return Statement(f"{self._insert}({', '.join(map(_mark_of, row))})", _values_of(row))

    def _changed(self, swap: Swap) -> Statement:
        row = self._row_of(swap)[1:]
        changes = ", ".join(map("{} = {}".format, COLUMNS[1:], map(_mark_of, row)))
        where = f"where id = {_mark_of(swap.id)} and version = {_mark_of(swap.expected)}"
        values = _values_of((*row, swap.id, swap.expected))
        return Statement(f"{self._update}{changes} {where}", values)

    def _row_of(self, swap: Swap) -> tuple[int | bytes | None, ...]:
        record = swap.record
        assert record is not None
        return (*record[:10], *map(bytes_of, self._texts_of(record)), *record[13:], -new_stamp())

    def _texts_of(self, record: Record) -> tuple[str, str, str]:
        return ("", "", "") if self._compact else (record.label, record.scope, record.key)


def _mark_of(value: int | bytes | None) -> str:
    if value is None:
        return "null"
    if isinstance(value, int):
        return "%s"
    return "from_base64(%s)" if value else "x''"


def _values_of(row: tuple[int | bytes | None, ...]) -> tuple[int | str, ...]:
    """What stands for the marks of *row*."""
    return tuple(
        value if isinstance(value, int) else base64_of(value)
        for value in row
        if isinstance(value, int) or value
    )


async def _connect_async(address: Address, ours: Ours, *, is_encrypted: bool) -> Any:  # noqa: ANN401 - of a package that may not be here
    try:
        from coatcheck.stores import mysql_own_async  # noqa: PLC0415 - only if asked for
    except ModuleNotFoundError as error:
        if error.name != "asyncmy":
            raise
        raise MissingExtra("asyncmy", "asyncmy") from error
    return await mysql_own_async.connected(address, ours, is_encrypted=is_encrypted)
