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
    """
    Reads and writes the records of one table.

    Args:
        table: its name, quoted.
        compact: keep the label, but neither scope nor key; see `compact_record`.
    """

    def __init__(self, table: str, *, compact: bool) -> None:
        self.statements = statements.statements_for(table)
        self._compact = compact

    def swap(self, swaps: Sequence[Swap]) -> Flow[Sequence[Record | None]]:
        """Write each record if its version is still the expected one; see `Store.swap`."""
        if self._compact:
            swaps = [compact_swap(swap) for swap in swaps]
        if len(swaps) == 1:
            return [(yield from self._swap_one(swaps[0]))]
        # Sorted, so that two batches lock their rows in the same order.
        writes = sorted((swap for swap in swaps if swap.record is not None), key=_id_of)
        conflicts: dict[bytes, Record | None] = {}
        if writes:
            conflicts = statements.conflicts_of((yield from self._write_many(writes)))
        results: list[Record | None] = []
        for swap in swaps:
            if swap.record is None:  # deletions are rare, and executed one by one
                results.append((yield from self._swap_one(swap)))
            elif swap.id in conflicts:
                results.append((yield from self._conflicting_record(swap, conflicts[swap.id])))
            else:
                results.append(None)
        return results

    def _swap_one(self, swap: Swap) -> Flow[Record | None]:
        """One plain statement, and a second one after a conflict."""
        for _ in range(ATTEMPTS_MAX):
            if (yield from self.write_one(swap)):
                return None
            current = (yield from self.get((swap.id,)))[0]
            if _version_of(current) != swap.expected:
                return GONE if current is None else current
            # The conflicting record changed between the two statements, so this swap may succeed.
        raise StoreUnavailable(f"the record was replaced {ATTEMPTS_MAX} times during one swap")

    def write_one(self, swap: Swap) -> Flow[bool]:
        """Execute *swap* once; whether it was applied."""
        if swap.record is None:
            values = (statements.uuid_of(swap.id), swap.expected)
            return bool((yield from Execute(self.statements.delete_one, values)))
        row = statements.row_of(swap.record)
        if not swap.expected:
            return bool((yield from Execute(self.statements.claim_one, row)))
        return bool((yield from Execute(self.statements.change_one, (*row, swap.expected))))

    def _write_many(self, writes: Sequence[Swap]) -> Execute:
        claims = [swap.expected for swap in writes].count(0)
        if claims == len(writes):
            statement = self.statements.claim_many
        else:
            statement = self.statements.swap_many if claims else self.statements.change_many
        return Execute(statement, statements.columns_of(writes))

    def _conflicting_record(self, swap: Swap, in_snapshot: Record | None) -> Flow[Record | None]:
        """Return what *swap* lost against; *in_snapshot* was there when the statement began."""
        if _version_of(in_snapshot) != swap.expected:
            return GONE if in_snapshot is None else in_snapshot
        return (yield from self._swap_one(swap))  # it lost against a younger transaction

    def get(self, ids: Sequence[bytes]) -> Flow[Sequence[Record | None]]:
        """Read records, in the order of *ids*."""
        uuids = [statements.uuid_of(id) for id in ids]
        rows = yield from Execute(self.statements.read_many, (uuids,))
        found = {record.id: record for record in map(statements.record_of, rows)}
        return [found.get(id) for id in ids]


def _version_of(record: Record | None) -> int:
    return 0 if record is None else record.version


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
