"""The ledger of the PostgreSQL store: records written in the application's own transaction (L9).

Beside `postgres.py`. A claim waits for whoever holds its row, but not for ever. The limit is set
and, where the claim was made, taken back by the same statement, so that it costs no round trip and
the handler's own statements wait as they always did; where it was not made, the transaction is
rolled back and the limit with it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import psycopg

from coatcheck.core.record import Record, Swap
from coatcheck.stores.ledger import Ledger, Statement
from coatcheck.stores.postgres_rows import Statements, row_of

# Referred to by what it is put before, because PostgreSQL leaves out what nobody refers to.
_LIMITED = """\
with limited as materialized (
  select 0 * length(set_config('coatcheck.lock_timeout', current_setting('lock_timeout'), true))
       + 0 * length(set_config('lock_timeout', %s::text, true)) as zero
) """
_UNLIMITED = (
    " returning set_config('lock_timeout', current_setting('coatcheck.lock_timeout'), true)"
)


def ledger_for(conninfo: str, statements: Statements, *, compact: bool) -> Ledger:
    """The ledger of the store that *conninfo* leads to."""
    writing = _Writing(statements, compact=compact)
    return Ledger(
        dialect="postgresql",
        claim=writing.claim,
        change=writing.change,
        connect=partial(psycopg.connect, conninfo),
        connect_async=partial(_connect_async, conninfo),
    )


class _Writing:
    """The statements of one table."""

    def __init__(self, statements: Statements, *, compact: bool) -> None:
        claim, change = statements.claim_one.decode(), statements.change_one.decode()
        into, _, values = claim.partition(" values (")
        values = values.removesuffix(") on conflict do nothing")
        self._compact = compact
        self._insert = (
            f"{_LIMITED}{into} select claim.* from (values ({values})) as claim, limited"
            f" where limited.zero = 0 on conflict do nothing{_UNLIMITED}"
        )
        self._replace = f"{_LIMITED}{change} and (select zero from limited) = 0{_UNLIMITED}"
        self._update = change

    def claim(self, swap: Swap, wait_ms: int) -> Statement:
        """A claim, of a key that is new or of a record that stands."""
        if swap.expected:
            return Statement(self._replace, (f"{wait_ms:d}ms", *self._changes_of(swap)))
        row = row_of(_record_of(swap), compact=self._compact)
        return Statement(self._insert, (f"{wait_ms:d}ms", *row))

    def change(self, swap: Swap) -> Statement:
        """The end of a claim that this transaction has made: nobody else can hold it."""
        return Statement(self._update, self._changes_of(swap))

    def _changes_of(self, swap: Swap) -> tuple[Any, ...]:
        row = row_of(_record_of(swap), compact=self._compact)
        return (*row[1:], swap.id, swap.expected)


def _record_of(swap: Swap) -> Record:
    assert swap.record is not None
    return swap.record


async def _connect_async(conninfo: str) -> psycopg.AsyncConnection[Any]:
    return await psycopg.AsyncConnection.connect(conninfo)
