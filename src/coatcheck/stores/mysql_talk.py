"""What is said to MySQL about records, and what its answers mean.

Flows, so that a thread (`mysql_line.py`) and an event loop (`mysql_wire.py`) say the same.

A swap alone is one prepared statement, which commits by itself. A batch is one command, whatever
its size: an `insert` of what is claimed, an `update` of what is changed, each in the order of the
ids, and a transaction around them if there are both. That all of them won is seen from the number
of affected rows. Only if not is anything read, and the stamps of the rows tell who won
(`mysql_rows.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from operator import attrgetter, is_
from typing import TypeAlias

from coatcheck.core.flow import Flow
from coatcheck.core.record import GONE, Record, Swap, is_same_write_cut
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import mysql_values
from coatcheck.stores.contract import Page, Query
from coatcheck.stores.mysql_faults import READ_ONLY, TOOK_TOO_LONG
from coatcheck.stores.mysql_flow import Say, Terms, holds, reads, writes
from coatcheck.stores.mysql_packets import Refusal, Row
from coatcheck.stores.mysql_rows import (
    IDS_MAX,
    Statements,
    id_in,
    is_of_replica,
    record_of,
    stamp_of,
)
from coatcheck.stores.mysql_size import fitting, warn_of_dropped
from coatcheck.stores.searching import took_too_long

# 5 times: nobody else claims and deletes one record, or sweeps the same ones, so often in a row.
_LOOKS_MAX = 5

_Lost: TypeAlias = "dict[bytes, Record | None]"

_by_id = attrgetter("id")


class Talk:
    """
    Everything that is said about the records of one table.

    Args:
        table: its name, which must need no escaping.
        where: the server, for people.
        compact: keep only digests; label, scope and key are stored empty.
    """

    def __init__(self, table: str, where: str, *, compact: bool) -> None:
        self.statements = Statements(table, compact=compact)
        self._where = where
        self._compact = compact

    def swap(self, terms: Terms, swaps: Sequence[Swap]) -> Flow[Sequence[Record | None]]:
        """
        Write each record if the version its caller saw still stands.

        Of a record whose response does not fit, all else is written.
        """
        fit = [fitting(swap, terms.statement_bytes_max) for swap in swaps]
        standing = yield from self._swap(terms, fit)
        if all(map(is_, fit, swaps)):
            return standing
        return list(map(_told, swaps, fit, standing))

    def _swap(self, terms: Terms, swaps: Sequence[Swap]) -> Flow[Sequence[Record | None]]:
        if len(swaps) == 1:
            return [(yield from self._swap_alone(terms, swaps[0]))]
        lasting = sorted((swap for swap in swaps if swap.record is not None), key=_by_id)
        lost = yield from self._swap_together(terms, lasting)
        for swap in swaps:
            if swap.record is None:  # who deletes is rare, and goes alone
                lost[swap.id] = yield from self._swap_alone(terms, swap)
        return [lost.get(swap.id) for swap in swaps] if lost else [None] * len(swaps)

    def _swap_alone(self, terms: Terms, swap: Swap) -> Flow[Record | None]:
        """One plain statement where it wins, one more where it loses, and no transaction."""
        for _ in range(_LOOKS_MAX):
            written = yield from self._write_alone(terms, swap)
            if written.affected == 1:
                return None
            standing = (yield from self._read((swap.id,))).get(swap.id)
            if standing is None and (swap.expected or swap.record is None):
                return GONE if swap.expected else None
            if standing is not None and standing.version != swap.expected:
                return standing
            # It lost, and yet it should win: what it lost against came or went in between.
        raise StoreUnavailable(f"{self._where}: a record came and went, again and again")

    def _write_alone(self, terms: Terms, swap: Swap) -> Say:
        record, stamp = swap.record, new_stamp()
        if record is None or not terms.kept:
            say = writes(self.statements.alone(swap, stamp))
        elif swap.expected:
            change = terms.kept[1]
            command = mysql_values.change(change, swap, record, -stamp, compact=self._compact)
            say = Say(command, commits=True)
        else:
            claim = terms.kept[0]
            command = mysql_values.claim(claim, record, -stamp, compact=self._compact)
            say = Say(command, commits=True)
        _refuse_if_too_large(terms, say.command)
        return say

    def _swap_together(self, terms: Terms, swaps: Sequence[Swap]) -> Flow[_Lost]:
        """What stands instead, for each of *swaps* that lost; they are claims and changes."""
        stamp = new_stamp()
        statements = list(self._portions(terms, swaps, stamp)) if swaps else []
        affected = 0
        if len(statements) == 1:
            affected = (yield from writes(statements[0])).affected
        elif statements:
            yield from holds(b"begin")
            for statement in statements:
                affected += (yield from holds(statement)).affected
            yield from writes(b"commit")
        if affected == len(swaps):
            return {}
        return (yield from self._losers(swaps, stamp, affected))

    def _portions(self, terms: Terms, swaps: Sequence[Swap], stamp: int) -> Iterator[bytes]:
        """*swaps* in as few statements as the server takes."""
        statement = self.statements.together(swaps, stamp)
        half = len(swaps) // 2
        if half and (len(swaps) > IDS_MAX or len(statement) > terms.statement_bytes_max):
            yield from self._portions(terms, swaps[:half], stamp)
            yield from self._portions(terms, swaps[half:], stamp)
        else:
            _refuse_if_too_large(terms, statement)
            yield statement

    def _losers(self, swaps: Sequence[Swap], stamp: int, won: int) -> Flow[_Lost]:
        """Who of *swaps* is not among those that *won*; this is committed."""
        rows: dict[bytes, Row] = {}
        for statement in self.statements.read([swap.id for swap in swaps]):
            rows.update((id_in(row), row) for row in (yield from _found(statement)))
        lost: _Lost = {id: record_of(row) for id, row in rows.items() if stamp_of(row) != -stamp}
        lost |= {swap.id: GONE for swap in swaps if swap.expected and swap.id not in rows}
        if won + len(lost) != len(swaps):
            # Somebody was between the two statements, and who has won cannot be told any more.
            # Whoever tries again finds what it has written, or wins.
            message = f"{self._where}: records came or went while they were written"
            raise StoreUnavailable(message, is_ambiguous=True)
        return lost

    def get(self, ids: Sequence[bytes]) -> Flow[Sequence[Record | None]]:
        """The records that stand, in the order of *ids*; never waits for a lock."""
        standing = yield from self._read(ids)
        return [standing.get(id) for id in ids]

    def find(self, query: Query, limit_s: float) -> Flow[Page]:
        """Records for operators, in id order; the server gives up after *limit_s*."""
        try:
            rows = yield from _found(self.statements.find(query, limit_s))
        except Refusal as refusal:
            if refusal.code not in TOOK_TOO_LONG:
                raise
            raise took_too_long(limit_s) from refusal
        records = [record_of(row) for row in rows[: query.limit]]
        return Page(records, records[-1].id if len(rows) > query.limit else None)

    def sweep(self, now_ms: int, limit: int) -> Flow[int]:
        """Delete up to *limit* records whose retention is over, in one statement."""
        for _ in range(_LOOKS_MAX):
            rows = (yield from reads(self.statements.expired(now_ms, limit))).rows
            if not rows:
                return 0
            taken = yield from writes(self.statements.sweep(map(id_in, rows), now_ms))
            if taken.affected:
                return taken.affected
            # Another node has just swept them all, but perhaps there are more.
        return 0

    def _read(self, ids: Sequence[bytes]) -> Flow[dict[bytes, Record]]:
        found: dict[bytes, Record] = {}
        for statement in self.statements.read(ids):
            for row in (yield from _found(statement)):
                found[id_in(row)] = record_of(row)
        return found


def _told(swap: Swap, written: Swap, standing: Record | None) -> Record | None:
    """What the caller of *swap* is told, of which only *written* was sent."""
    if written is swap:
        return standing
    assert swap.record is not None
    if standing is None:
        warn_of_dropped(swap.record)
    elif is_same_write_cut(standing, swap.record):
        return swap.record  # its own, from a try whose answer was lost; so its writer will know it
    return standing


def _found(statement: str) -> Flow[Sequence[Row]]:
    """The rows that *statement* finds; a replica is not believed, nor a primary that became one."""
    rows = (yield from reads(statement)).rows
    if rows and is_of_replica(rows[0]):
        raise Refusal(READ_ONLY, "read_only is on")
    return rows


def _refuse_if_too_large(terms: Terms, statement: bytes) -> None:
    """Raise, before anything is sent, where the server would hang up."""
    if len(statement) > terms.statement_bytes_max:
        raise ValueError(
            f"a record takes a statement of {len(statement)} bytes, and the server takes at most "
            f"{terms.statement_bytes_max}; raise its max_allowed_packet, or note less in its steps"
        )


def new_stamp() -> int:
    """A number that nobody else has; of 62 bits, and not 0."""
    return secrets.randbits(62) + 1
