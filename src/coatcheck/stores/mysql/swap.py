"""The swap algorithm of the MySQL store, and the other operations on records.

A single swap is one statement that commits by itself. A batch is one command (several if it is too
long for the server): an `insert` of the claims, an `update` of the changes, and the deletes, in a
transaction if there is more than one. The number of affected rows tells whether all swaps of a
statement were applied, or none. If only some were, a `select` reads which. If any were not,
another one reads the current records.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from operator import attrgetter

import pymysql

from coatcheck.core.record import GONE, Record, Swap, is_same_write_cut
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.mysql.connection import Row, Session
from coatcheck.stores.mysql.errors import SEARCH_TIMED_OUT, code_of
from coatcheck.stores.mysql.statements import (
    IDS_MAX,
    Statements,
    Write,
    record_of,
    warn_response_dropped,
    without_oversized_response,
)
from coatcheck.stores.search_timeout import took_too_long

# 5: other nodes do not claim and delete one record so often in a row.
_ATTEMPTS_MAX = 5


def swap(
    session: Session, statements: Statements, swaps: Sequence[Swap]
) -> Sequence[Record | None]:
    """
    Write each record if its version is still the expected one; see `Store.swap`.

    A response that does not fit into a statement is dropped, and the rest of its record is written.
    """
    fitting = [without_oversized_response(swap, session.statement_bytes_max) for swap in swaps]
    return list(map(_answer, swaps, fitting, _swap(session, statements, fitting)))


def _answer(asked: Swap, written: Swap, current: Record | None) -> Record | None:
    """Return the result of the swap that was *asked* for, of which only *written* was sent."""
    if written is asked:
        return current
    assert asked.record is not None
    if current is None:
        warn_response_dropped(asked.record)
    elif is_same_write_cut(current, asked.record):
        # The caller's own write, whose answer was lost. It must recognise it, so it gets it whole.
        return asked.record
    return current


def _swap(
    session: Session, statements: Statements, swaps: Sequence[Swap]
) -> Sequence[Record | None]:
    conflicts: dict[bytes, Record | None] = {}
    # In the order of the ids: two batches that lock rows in different orders would deadlock.
    left: Sequence[Swap] = sorted(swaps, key=attrgetter("id"))
    for _ in range(_ATTEMPTS_MAX):
        not_applied = _write(session, statements, left)
        current = get(session, statements, [swap.id for swap in not_applied])
        left = []
        for swap, record in zip(not_applied, current, strict=True):
            if record is None and (swap.expected or swap.record is None):
                conflicts[swap.id] = GONE if swap.expected else None
            elif record is not None and record.version != swap.expected:
                conflicts[swap.id] = record
            else:  # another node wrote or deleted the record between the two statements
                left.append(swap)
        if not left:
            return [conflicts.get(swap.id) for swap in swaps]
    message = (
        f"{session.server}: gave up after {_ATTEMPTS_MAX} conflicts with a record that was deleted "
        "each time; try again"
    )
    raise StoreUnavailable(message, is_ambiguous=session.has_committed)


def _write(session: Session, statements: Statements, swaps: Sequence[Swap]) -> list[Swap]:
    """Write *swaps* in one command, in several if it is too long; return those not applied."""
    if not swaps:
        return []
    stamp = secrets.randbits(62) if len(swaps) > 1 else 0
    writes = list(statements.batch(swaps, stamp))
    command = "; ".join(write.text for write in writes)
    if len(swaps) > 1 and (len(swaps) > IDS_MAX or len(command) > session.statement_bytes_max):
        half = len(swaps) // 2
        not_applied = _write(session, statements, swaps[:half])
        return [*not_applied, *_write(session, statements, swaps[half:])]
    if len(writes) == 1:
        affected = session.write(command)
    else:
        affected = session.write(f"begin; {command}; commit")[1:-1]
    not_applied = []
    for write, rows in zip(writes, affected, strict=True):
        if rows == 0:
            not_applied += write.swaps
        elif rows < len(write.swaps):
            applied = _applied(session, statements, write, stamp, rows)
            not_applied += [swap for swap in write.swaps if swap.id not in applied]
    return not_applied


def _applied(
    session: Session, statements: Statements, write: Write, stamp: int, rows: int
) -> set[bytes]:
    """Return the ids of the *rows* rows that *write* has affected."""
    ids = [swap.id for swap in write.swaps]
    applied = {id for (id,) in session.read(statements.select_stamped(ids, stamp))}
    if len(applied) != rows:
        message = (
            f"{session.server}: another node changed or deleted records of a batch before it was "
            "known which of its writes were applied; try again"
        )
        raise StoreUnavailable(message, is_ambiguous=True)
    return applied


def get(session: Session, statements: Statements, ids: Sequence[bytes]) -> Sequence[Record | None]:
    """Return the records in the order of *ids*; never waits for a lock."""
    found: dict[bytes, Record] = {}
    for statement in statements.select(ids):
        for row in session.read_records(statement):
            found[row[0]] = record_of(row)
    return [found.get(id) for id in ids]


def search(session: Session, statement: str, limit_s: float) -> Sequence[Row]:
    """Return the rows of *statement*, which the server ends after *limit_s*."""
    try:
        return session.read_records(statement)
    except pymysql.MySQLError as error:
        if code_of(error) in SEARCH_TIMED_OUT:
            raise took_too_long(limit_s) from error
        raise


def sweep(session: Session, statements: Statements, now_ms: int, limit: int) -> int:
    """Delete up to *limit* records whose retention is over, in one statement."""
    ids = [id for (id,) in session.read(statements.select_expired(now_ms, limit))]
    return sum(session.write(statements.delete_expired(ids, now_ms))) if ids else 0
