"""The swap algorithm of the PostgreSQL store, as flows.

A flow yields statements and is sent their rows, so that threads (`connection.py`, psycopg) and
event loops (`async_backend.py`, asyncpg) run the same algorithm.

A batch is one statement, one round trip and one commit. Its answer contains each conflict with the
record as of the statement's snapshot. Only a swap that lost against a transaction younger than
that snapshot needs another round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.record import GONE, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import compact_swap
from coatcheck.stores.postgres import statements
from coatcheck.stores.postgres.errors import ATTEMPTS_MAX, is_rolled_back, to_store_error
from coatcheck.stores.postgres.statements import Row

T = TypeVar("T")

_id_of = attrgetter("id")


@dataclass(slots=True)
class Execute(Effect[Sequence[Row]]):
    """Execute *statement* with *values*, in a transaction of its own; the result is its rows."""

    statement: str
    values: Sequence[object]


class RecordTable:
    """Reads and writes the records of one table, whose name is quoted already."""

    def __init__(self, table: str, *, compact: bool) -> None:
        self.statements = statements.statements_for(table)
        self._compact = compact

    def swap(self, swaps: Sequence[Swap]) -> Flow[Sequence[Record | None]]:
        """Write each record if its version is still the expected one; see `Store.swap`."""
        if self._compact:
            swaps = [compact_swap(swap) for swap in swaps]
        results: dict[bytes, Record | None] = {}
        # Sorted, so that two batches lock their rows in the same order.
        pending = sorted(swaps, key=_id_of)
        for _ in range(ATTEMPTS_MAX):
            conflicts = yield from self.write(pending)
            results.update((swap.id, conflicts.get(swap.id)) for swap in pending)
            # If the snapshot shows the expected version, a younger transaction has changed the
            # record. The next statement sees what it wrote.
            pending = [s for s in pending if s.id in conflicts and _is_expected(s, results[s.id])]
            if not pending:
                return [results[swap.id] for swap in swaps]
        raise StoreUnavailable(f"the record was replaced {ATTEMPTS_MAX} times during one swap")

    def write(self, swaps: Sequence[Swap]) -> Flow[dict[bytes, Record]]:
        """Execute *swaps* once; return the conflicts by id, `GONE` where there is no record."""
        conflicts: dict[bytes, Record] = {}
        writes = [swap for swap in swaps if swap.record is not None]
        if writes:
            conflicts = statements.conflicts_of((yield from self._statement_for(writes)))
        for swap in swaps:  # deletions are rare, and executed one by one
            if swap.record is None:
                values = (statements.uuid_of(swap.id), swap.expected)
                if not (yield from Execute(self.statements.delete_one, values)):
                    conflicts[swap.id] = (yield from self.get((swap.id,)))[0] or GONE
        return conflicts

    def _statement_for(self, writes: Sequence[Swap]) -> Execute:
        first = writes[0]
        if len(writes) > 1 or first.record is None:
            return Execute(self.statements.swap_many, statements.columns_of(writes))
        row = statements.row_of(first.record)
        if first.expected:
            return Execute(self.statements.change_one, (*row, first.expected))
        return Execute(self.statements.claim_one, row)

    def get(self, ids: Sequence[bytes]) -> Flow[Sequence[Record | None]]:
        """Read records, in the order of *ids*."""
        uuids = [statements.uuid_of(id) for id in ids]
        rows = yield from Execute(self.statements.read_many, (uuids,))
        found = {record.id: record for record in map(statements.record_of, rows)}
        return [found.get(id) for id in ids]


def _is_expected(swap: Swap, current: Record | None) -> bool:
    return current is not None and current.version == swap.expected


def with_store_errors(flow: Flow[T], *, writes: bool) -> Flow[T]:
    """
    Run *flow*, retry statements that the server rolled back, and raise what a store raises.

    Each statement is a transaction of its own. So once one was committed, every later failure is
    ambiguous, whatever its code.
    """
    committed = False
    try:
        effect = next(flow)
        while True:
            rows = yield from _with_retries(effect)
            committed = True
            effect = flow.send(rows)
    except StopIteration as done:
        result: T = done.value
        return result
    except Exception as error:
        store_error = to_store_error(error, writes=writes, committed=writes and committed)
        if store_error is error:
            raise
        raise store_error from error


def _with_retries(effect: Effect[Sequence[Row]]) -> Flow[Sequence[Row]]:
    for _ in range(ATTEMPTS_MAX - 1):
        try:
            return (yield from effect)
        except Exception as error:
            if not is_rolled_back(error):
                raise
    return (yield from effect)
