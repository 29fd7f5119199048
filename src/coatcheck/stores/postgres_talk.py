"""What is said to PostgreSQL to swap and to read records, and what its answers mean.

Between `postgres.py` and the connections. Flows, so that a thread (`postgres_link.py`) and an event
loop (`postgres_wire.py`) say the same: they yield a statement with its values, and are sent the
server's result.

A batch is one statement and one round trip, also where some of it lost: then the same answer
brings what stood when the statement began. Only whoever lost against something younger than that
is read once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from psycopg.pq.abc import PGresult

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.record import GONE, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import postgres_rows as rows
from coatcheck.stores.postgres_rows import Prepared

# Each time somebody else got on, so this many times is far more than enough.
TRIES = 10

_id_of = attrgetter("id")


@dataclass(slots=True)
class Say(Effect[PGresult]):
    """Say *statement* with *values*, all of them in the binary format."""

    statement: Prepared
    values: Sequence[bytes | None]


class Talk:
    """
    Everything that is said about the records of one table.

    Args:
        table: its name, quoted.
        compact: keep only digests; label, scope and key are stored empty.
    """

    def __init__(self, table: str, *, compact: bool) -> None:
        self._sayings = rows.sayings_for(table)
        self._compact = compact

    def swap(self, swaps: Sequence[Swap]) -> Flow[Sequence[Record | None]]:
        """Write each record if the version its caller saw still stands."""
        if len(swaps) == 1:
            return [(yield from self._swap_alone(swaps[0]))]
        return (yield from self._swap_together(swaps))

    def _swap_alone(self, swap: Swap) -> Flow[Record | None]:
        """One plain statement where it wins, and one more where it loses."""
        for _ in range(TRIES):
            written = yield from self._write(swap)
            if written.command_tuples == 1:
                return None
            standing = (yield from self.get((swap.id,)))[0]
            if (0 if standing is None else standing.version) != swap.expected:
                return GONE if standing is None else standing
            # It lost, and yet it should win: its rival went between the two statements.
        raise StoreUnavailable("the record came and went too often to be written")

    def write_once(self, swap: Swap) -> Flow[bool]:
        """Whether *swap* wins, on a connection where nobody else is in the way."""
        return (yield from self._write(swap)).command_tuples == 1

    def _write(self, swap: Swap) -> Say:
        sayings = self._sayings
        if swap.record is None:
            return Say(sayings.delete_one, rows.bound_for(swap.id, swap.expected))
        values = rows.values_of(swap.record, compact=self._compact)
        if not swap.expected:
            return Say(sayings.claim_one, values)
        values.append(rows.bigint(swap.expected))
        return Say(sayings.change_one, values)

    def _swap_together(self, swaps: Sequence[Swap]) -> Flow[Sequence[Record | None]]:
        writes = sorted((swap for swap in swaps if swap.record is not None), key=_id_of)
        stood: dict[bytes, Record | None] = {}
        if writes:
            stood = rows.stood_of((yield from self._write_many(writes)))
        if not stood and len(writes) == len(swaps):
            return [None] * len(swaps)
        results: list[Record | None] = []
        for swap in swaps:
            if swap.record is None:  # who deletes is rare, and goes alone
                results.append((yield from self._swap_alone(swap)))
            elif swap.id in stood:
                results.append((yield from self._rival_of(swap, stood[swap.id])))
            else:
                results.append(None)
        return results

    def _write_many(self, writes: Sequence[Swap]) -> Say:
        sayings, claims = self._sayings, [swap.expected for swap in writes].count(0)
        saying = sayings.swap_many
        if claims in (0, len(writes)):
            saying = sayings.claim_many if claims else sayings.change_many
        return Say(saying, rows.columns_of(writes, compact=self._compact))

    def _rival_of(self, swap: Swap, stood: Record | None) -> Flow[Record | None]:
        """What *swap* lost against; *stood* is what was there when the statement began."""
        if (0 if stood is None else stood.version) != swap.expected:
            return GONE if stood is None else stood
        return (yield from self._swap_alone(swap))  # something younger than that

    def get(self, ids: Sequence[bytes]) -> Flow[Sequence[Record | None]]:
        """The records that stand, in the order of *ids*."""
        found = yield from Say(self._sayings.read_many, (rows.ids_of(ids),))
        standing = {record.id: record for record in rows.records_of(found)}
        return [standing.get(id) for id in ids]
