"""The statements that write a record in the application's own transaction.

A claim takes an advisory lock by the record's id, which its transaction holds until it ends. Nearly
always the lock is free, and one plain insert suffices. If another transaction holds it, the claim
waits for it, but only for a limited time: the claim sets `lock_timeout` and, if it succeeds,
restores it in the same statement, so the handler's own statements wait as long as they always did.
If it does not succeed, the transaction is rolled back, and the setting with it.

On connections of the store's own, a claim also gives up on a server that does not answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from coatcheck.core.record import Swap
from coatcheck.stores.postgres.connection import AsyncConnection, Connection
from coatcheck.stores.postgres.schema import Names
from coatcheck.stores.postgres.statements import PLACEHOLDERS, row_of
from coatcheck.stores.transaction_statements import Statement, TransactionStatements

# Both are referred to by what follows, because PostgreSQL skips a CTE that is not.
_LOCK_WITH_LIMIT = """\
with limited as materialized (
  select 0 * length(set_config('coatcheck.lock_timeout', current_setting('lock_timeout'), true))
       + 0 * length(set_config('lock_timeout', %s::text, true)) as zero
), locked as materialized (
  select 1 as one, pg_advisory_xact_lock({}) from limited where zero = 0
) """
_RESTORE_LIMIT = (
    " returning set_config('lock_timeout', current_setting('coatcheck.lock_timeout'), true)"
)
# The row version was written by this transaction or a savepoint of it; a committed one is older. So
# the completion finds no row if the handler has committed and is in another transaction now.
_IS_OURS = "age(xmin) <= 0"
_CHANGES = ", ".join(f"{name} = {mark}" for name, mark in PLACEHOLDERS.items() if name != "id")
_WHERE = "id = %s::uuid and version = %s::bigint"
# 5 executions: psycopg's own default.
_PREPARE_THRESHOLD = 5


def transaction_statements_for(
    conninfo: str, names: Names, timeout_s: float, *, prepares: bool, may_create: bool
) -> TransactionStatements:
    """Return the statements for the tables with these *names*."""
    statements = _Statements(names.records, timeout_s)
    # The handler's own statements have no time limit.
    threshold = _PREPARE_THRESHOLD if prepares else None
    return TransactionStatements(
        dialect="postgresql",
        claim=statements.claim,
        change=statements.change,
        connect=partial(Connection.connect, conninfo, prepare_threshold=threshold),
        connect_async=partial(AsyncConnection.connect, conninfo, prepare_threshold=threshold),
        events_table=names.events,
        offsets_table=names.offsets,
        may_create=may_create,
    )


class _Statements:
    """The statements of one table."""

    def __init__(self, table: str, timeout_s: float) -> None:
        # The same id in another table has another lock.
        quoted = table.replace("'", "''")
        lock = f"%s::bigint # '{quoted}'::regclass::oid::bigint"
        lock_with_limit = _LOCK_WITH_LIMIT.format(lock)
        names, values = ", ".join(PLACEHOLDERS), ", ".join(PLACEHOLDERS.values())
        insert = f"insert into {table} ({names}) select {values}"
        self._timeout_s = timeout_s
        self._insert_if_unlocked = (
            f"{insert} where pg_try_advisory_xact_lock({lock}) on conflict (id) do nothing"
        )
        self._insert = (
            f"{lock_with_limit}{insert} from locked on conflict (id) do nothing{_RESTORE_LIMIT}"
        )
        self._replace = (
            f"{lock_with_limit}update {table} set {_CHANGES}"
            f" where {_WHERE} and (select one from locked) = 1{_RESTORE_LIMIT}"
        )
        self._complete = f"update {table} set {_CHANGES} where {_WHERE} and {_IS_OURS}"

    def claim(self, swap: Swap, wait_ms: int) -> Iterator[Statement]:
        """Yield the statements that claim a new key, or an existing record, one after the other."""
        row = _row_of(swap)
        lock = int.from_bytes(swap.id[:8], "big", signed=True)
        limit = f"{wait_ms:d}ms"
        timeout_s = self._timeout_s + wait_ms / 1_000
        if swap.expected:
            values = (limit, lock, *row[1:], row[0], swap.expected)
            yield Statement(self._replace, values, timeout_s)
            return
        yield Statement(self._insert_if_unlocked, (*row, lock), timeout_s)
        yield Statement(self._insert, (limit, lock, *row), timeout_s)

    def change(self, swap: Swap) -> Statement:
        """Return the statement that completes a claim of the same transaction."""
        id, *changes = _row_of(swap)
        return Statement(self._complete, (*changes, id, swap.expected))


def _row_of(swap: Swap) -> tuple[Any, ...]:
    assert swap.record is not None
    return row_of(swap.record)
