"""The swap algorithm of the MySQL store, and the other operations on records.

A single swap is one statement that commits by itself. A batch is one command whatever its size: an
`insert` of the claims and an `update` of the changes, each in the order of the ids, with a
transaction around them if there are both. If the number of affected rows equals the number of
swaps, all were applied and nothing is read. If it does not, one `select` finds the conflicts: rows
that do not bear the stamp of this write (`statements.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TypeAlias

import pymysql

from coatcheck.core.record import GONE, Record, Swap, is_same_write_cut
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import Page, Query
from coatcheck.stores.mysql.connection import Row, Session
from coatcheck.stores.mysql.errors import SEARCH_TIMED_OUT, code_of
from coatcheck.stores.mysql.statements import (
    IDS_MAX,
    Statements,
    new_stamp,
    record_of,
    stamp_of,
    warn_response_dropped,
    without_oversized_response,
)
from coatcheck.stores.search_timeout import took_too_long

# 5: other nodes do not claim and delete one record, or sweep the same ids, so often in a row.
_ATTEMPTS_MAX = 5

# The records that stand instead, by id; None if a delete was applied.
_Conflicts: TypeAlias = "dict[bytes, Record | None]"

_by_id = attrgetter("id")


def swap(
    session: Session, statements: Statements, swaps: Sequence[Swap]
) -> Sequence[Record | None]:
    """
    Write each record if its version is still the expected one; see `Store.swap`.

    A response that does not fit into a statement is dropped, and the rest of its record is written.
    """
    fitting = [without_oversized_response(swap, session.statement_bytes_max) for swap in swaps]
    return list(map(_answer, swaps, fitting, _swap(session, statements, fitting)))


def _answer(asked: Swap, written: Swap, standing: Record | None) -> Record | None:
    """Return the result of the swap that was *asked* for, of which only *written* was sent."""
    if written is asked:
        return standing
    assert asked.record is not None
    if standing is None:
        warn_response_dropped(asked.record)
    elif is_same_write_cut(standing, asked.record):
        # The caller's own write, whose answer was lost. It must recognise it, so it gets it whole.
        return asked.record
    return standing


def _swap(
    session: Session, statements: Statements, swaps: Sequence[Swap]
) -> Sequence[Record | None]:
    if len(swaps) == 1:
        return [_swap_single(session, statements, swaps[0])]
    # In the order of the ids: two batches that lock rows in different orders would deadlock.
    writes = sorted((swap for swap in swaps if swap.record is not None), key=_by_id)
    conflicts = _swap_batch(session, statements, writes)
    for swap in swaps:
        if swap.record is None:  # deletes are rare, and go one by one
            conflicts[swap.id] = _swap_single(session, statements, swap)
    return [conflicts.get(swap.id) for swap in swaps]


def _swap_single(session: Session, statements: Statements, swap: Swap) -> Record | None:
    """Write one record: one statement if the swap is applied, and a read if there is a conflict."""
    for _ in range(_ATTEMPTS_MAX):
        statement = statements.single(swap, new_stamp())
        _refuse_if_too_large(session, statement)
        if session.write(statement) == 1:
            return None
        (standing,) = get(session, statements, (swap.id,))
        if standing is None and (swap.expected or swap.record is None):
            return GONE if swap.expected else None
        if standing is not None and standing.version != swap.expected:
            return standing
        # The swap was not applied, and now it could be: another node wrote or deleted the record
        # between the two statements.
    raise StoreUnavailable(f"{session.server}: a record was created and deleted again and again")


def _swap_batch(session: Session, statements: Statements, swaps: Sequence[Swap]) -> _Conflicts:
    """Write claims and changes; return the standing record of each conflict."""
    if not swaps:
        return {}
    stamp = new_stamp()
    commands = list(_commands(session, statements, swaps, stamp))
    if len(commands) == 1:
        applied = session.write(commands[0])
    else:
        session.begin()
        applied = sum(map(session.write, commands))
        session.commit()
    if applied == len(swaps):
        return {}
    return _conflicts(session, statements, swaps, stamp, applied=applied)


def _commands(
    session: Session, statements: Statements, swaps: Sequence[Swap], stamp: int
) -> Iterator[str]:
    """Yield *swaps* as few commands, each of which the server accepts."""
    command = statements.batch(swaps, stamp)
    half = len(swaps) // 2
    if half and (len(swaps) > IDS_MAX or len(command) > session.statement_bytes_max):
        yield from _commands(session, statements, swaps[:half], stamp)
        yield from _commands(session, statements, swaps[half:], stamp)
    else:
        _refuse_if_too_large(session, command)
        yield command


def _conflicts(
    session: Session, statements: Statements, swaps: Sequence[Swap], stamp: int, *, applied: int
) -> _Conflicts:
    """Find the swaps that were not applied, after the commit."""
    rows: dict[bytes, Row] = {}
    for statement in statements.select([swap.id for swap in swaps]):
        rows.update((row[0], row) for row in session.read_records(statement))
    found: _Conflicts = {id: record_of(row) for id, row in rows.items() if stamp_of(row) != stamp}
    found |= {swap.id: GONE for swap in swaps if swap.expected and swap.id not in rows}
    if applied + len(found) != len(swaps):
        # Another node wrote between the two statements, so it is not known any more which swaps
        # were applied. A caller that retries finds its own write, or is applied then.
        message = f"{session.server}: records were changed or deleted while they were written"
        raise StoreUnavailable(message, is_ambiguous=True)
    return found


def _refuse_if_too_large(session: Session, statement: str) -> None:
    """Raise before the statement is sent; the server would close the connection on it."""
    if len(statement) > session.statement_bytes_max:
        raise ValueError(
            f"a record takes a statement of {len(statement)} bytes, and the server accepts at most "
            f"{session.statement_bytes_max}; raise its max_allowed_packet, or store less in the "
            "steps and notes of the operation"
        )


def get(session: Session, statements: Statements, ids: Sequence[bytes]) -> Sequence[Record | None]:
    """Return the records in the order of *ids*; never waits for a lock."""
    found: dict[bytes, Record] = {}
    for statement in statements.select(ids):
        for row in session.read_records(statement):
            found[row[0]] = record_of(row)
    return [found.get(id) for id in ids]


def find(session: Session, statements: Statements, query: Query, limit_s: float) -> Page:
    """Return records in id order; the server ends the search after *limit_s*."""
    try:
        rows = session.read_records(statements.search(query, limit_s))
    except pymysql.MySQLError as error:
        if code_of(error) in SEARCH_TIMED_OUT:
            raise took_too_long(limit_s) from error
        raise
    records = [record_of(row) for row in rows[: query.limit]]
    return Page(records, records[-1].id if len(rows) > query.limit else None)


def sweep(session: Session, statements: Statements, now_ms: int, limit: int) -> int:
    """Delete up to *limit* records whose retention is over, in one statement."""
    for _ in range(_ATTEMPTS_MAX):
        ids = [id for (id,) in session.read(statements.select_expired(now_ms, limit))]
        if not ids:
            return 0
        if deleted := session.write(statements.delete_expired(ids, now_ms)):
            return deleted
        # Another node has just deleted all of them, but there may be more.
    return 0
