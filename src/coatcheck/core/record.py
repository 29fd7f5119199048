"""The record: what the store keeps for one operation, and every way it may change.

Fourth step of the path. Everything that matters for safety is in this file, as data:

Rule 1: the only moves are those in `MOVES`. Stores, engines and people change records by swaps,
        and every swap is one of these moves; the laws and the explorer hold all of them to it.
Rule 2: every move grows `version`, and no version is handed out twice for one id, not even after
        a sweep, because a life starts from the clock and no sweep takes a record whose version
        the clock has not passed. So a version is a fence: who holds an old one changes nothing.

Times are whole milliseconds on the store's clock: exact in every database, and small on disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, NewType

from coatcheck.core.flow import Effect

State = NewType("State", int)

# Plain integers, not an Enum: they go to databases millions of times, and SQLite stores 0 and 1
# in no bytes at all, so the two most common states are the free ones.
RUNNING = State(0)
COMPLETED = State(1)
FAILED = State(2)
IN_DOUBT = State(3)

STATE_NAMES = {
    RUNNING: "running",
    COMPLETED: "completed",
    FAILED: "failed",
    IN_DOUBT: "in_doubt",
}


class Record(NamedTuple):
    """
    One operation as the store keeps it.

    A tuple, because it is made twice for each request and handed to database drivers as it is.
    """

    id: bytes  # 16 bytes; see core/scope.py
    version: int  # the fence
    state: State
    attempt: int  # 1, 2, 3 …
    fingerprint: bytes  # 16 bytes; see core/fingerprint.py
    created_ms: int  # when this life began
    lease_until_ms: int  # how long the claim holds without renewal; in doubt: held; else 0
    window_until_ms: int  # retries before this are deduplicated
    expires_ms: int  # the sweep may take it from here on; set once for each life
    nonce: int  # 63 bits naming the attempt that holds or last held the claim; see `mark_of`
    label: str  # for people: "POST /orders"
    scope: str  # for people: the caller's digest
    key: str  # for people: what the client sent
    progress: bytes | None  # remembered steps and notes
    response: bytes | None  # see core/replay.py; None when completed means "not kept"


# A record of all its fields in their order. For the path of a request: `Record(...)` takes twice
# as long, because it is a function in Python.
new_record: Callable[[tuple[Any, ...]], Record] = functools.partial(tuple.__new__, Record)


@dataclass(slots=True)
class Swap(Effect["Record | None"]):
    """
    Write *record* if *expected* is still the standing version (0: absent).

    The result is None where the write took effect, else the record that stands. A *record* of
    None deletes. A swap whose caller expected a record that is gone by now has lost, too, and
    stores answer that with `GONE`.
    """

    id: bytes
    expected: int
    record: Record | None


class When(Enum):
    """What must be true of the standing record and the clock for a move to be legal."""

    ALWAYS = "always"
    LEASE_OVER = "its lease has run out"
    WINDOW_OVER = "its window is over and nobody holds a live lease"
    RETENTION_OVER = "its retention is over and nobody holds a live lease"


class Move(NamedTuple):
    """One legal change of a record; *source* or *target* None means there is no record."""

    name: str
    source: State | None
    target: State | None
    when: When


MOVES = (
    Move("claim", None, RUNNING, When.ALWAYS),
    Move("renew", RUNNING, RUNNING, When.ALWAYS),
    Move("hand over", RUNNING, RUNNING, When.ALWAYS),
    Move("complete", RUNNING, COMPLETED, When.ALWAYS),
    Move("release", RUNNING, FAILED, When.ALWAYS),
    Move("park", RUNNING, IN_DOUBT, When.ALWAYS),
    Move("take over", RUNNING, RUNNING, When.LEASE_OVER),
    Move("retry", FAILED, RUNNING, When.ALWAYS),
    Move("resolve as happened", IN_DOUBT, COMPLETED, When.ALWAYS),
    Move("resolve as not happened", IN_DOUBT, FAILED, When.ALWAYS),
    Move("resolve by running again", IN_DOUBT, RUNNING, When.ALWAYS),
    Move("new life", RUNNING, RUNNING, When.WINDOW_OVER),
    Move("new life", COMPLETED, RUNNING, When.WINDOW_OVER),
    Move("new life", FAILED, RUNNING, When.WINDOW_OVER),
    Move("new life", IN_DOUBT, RUNNING, When.WINDOW_OVER),
    Move("sweep", RUNNING, None, When.RETENTION_OVER),
    Move("sweep", COMPLETED, None, When.RETENTION_OVER),
    Move("sweep", FAILED, None, When.RETENTION_OVER),
    Move("sweep", IN_DOUBT, None, When.RETENTION_OVER),
)

# What a store answers to a swap that expected a record and found none.
GONE = Record(b"", 0, FAILED, 0, b"", 0, 0, 0, 0, 0, "", "", "", None, None)


# The last bits of a nonce are the mark of its policy, the others are drawn for the attempt alone.
# 20: two marks are the same by chance once in a million times; and 43 are left, which is enough
# that no two attempts of one operation are ever named alike.
MARK_BITS = 20


def mark_of(nonce: int) -> int:
    """How the attempt of this *nonce* is to be recovered if it dies: the mark of its policy."""
    return nonce & ((1 << MARK_BITS) - 1)


def is_lease_over(record: Record, now_ms: int) -> bool:
    """Nobody holds *record*: its lease has run out, or it is not running at all."""
    return record.state != RUNNING or record.lease_until_ms <= now_ms


def is_window_over(record: Record, now_ms: int) -> bool:
    """The key may start a new life."""
    return record.window_until_ms <= now_ms and is_lease_over(record, now_ms)


def is_retention_over(record: Record, now_ms: int) -> bool:
    """The sweep may take the record."""
    # The next life starts from the clock, so the clock must have passed this one's versions.
    return record.expires_ms <= now_ms and record.version < now_ms and is_lease_over(record, now_ms)


_HOLDS = {
    When.ALWAYS: lambda _record, _now_ms: True,
    When.LEASE_OVER: is_lease_over,
    When.WINDOW_OVER: is_window_over,
    When.RETENTION_OVER: is_retention_over,
}


def legal_moves(before: Record | None, after: Record | None, now_ms: int) -> tuple[Move, ...]:
    """
    The moves of the table that lead from *before* to *after* at *now_ms*; none: it is illegal.

    Of a claim that is held its attempt and nonce tell: both the same, it is renewed; another nonce
    for the same attempt, it was handed over; another attempt, somebody takes over.
    """
    if before is not None and after is not None and after.version <= before.version:
        return ()
    source = None if before is None else before.state
    target = None if after is None else after.state
    found = (m for m in MOVES if m.source == source and m.target == target)
    if before is None or after is None:
        return tuple(m for m in found if before is None or _HOLDS[m.when](before, now_ms))
    return tuple(
        move
        for move in found
        if _HOLDS[move.when](before, now_ms)
        and (target != RUNNING or _is_of_attempt(move, before, after))
    )


def _is_of_attempt(move: Move, before: Record, after: Record) -> bool:
    if before.attempt != after.attempt or before.created_ms != after.created_ms:
        return move.name not in ("renew", "hand over")
    return move.name == ("renew" if before.nonce == after.nonce else "hand over")


def next_version(standing: Record, now_ms: int) -> int:
    """The version of a new attempt: above all that was, and above what any earlier life used."""
    return max(standing.version + 1, now_ms)


def attempt_began_ms(record: Record) -> int:
    """When its last attempt began: its version then, and one more for each write since."""
    return record.version


def is_same_attempt(standing: Record, claim: Record) -> bool:
    """*standing* is our own running claim, perhaps renewed since we last looked."""
    return standing.state == RUNNING and standing.nonce == claim.nonce


def is_same_write(standing: Record, record: Record) -> bool:
    """*standing* is *record* as the store keeps it; a compact one drops what is for people."""
    return standing[:_FOR_PEOPLE] == record[:_FOR_PEOPLE] and standing[-2:] == record[-2:]


def is_same_write_cut(standing: Record, record: Record) -> bool:
    """
    *standing* is *record* as a store keeps it that has no room for its response.

    Such a store sees what was sealed, and never the same twice: so progress is not compared.
    """
    return standing[:_FOR_PEOPLE] == record[:_FOR_PEOPLE] and standing.response is None


_FOR_PEOPLE = Record._fields.index("label")  # label, scope and key; then progress and response


def renewed(claim: Record, lease_until_ms: int) -> Record:
    """*claim* with a longer lease."""
    return claim._replace(version=claim.version + 1, lease_until_ms=lease_until_ms)


def completed(claim: Record, response: bytes | None) -> Record:
    """*claim* with its final answer; None where the answer is not kept."""
    return _ended(claim, COMPLETED, response)


def failed(claim: Record) -> Record:
    """*claim* given back: the next retry runs as the next attempt."""
    return _ended(claim, FAILED, None)


def in_doubt(claim: Record) -> Record:
    """*claim* parked: a person or a reconciler must say what happened, and by when it had to."""
    return _ended(claim, IN_DOUBT, None)._replace(lease_until_ms=claim.lease_until_ms)


def _ended(claim: Record, state: State, response: bytes | None) -> Record:
    assert claim.state in (RUNNING, IN_DOUBT)
    return new_record(
        (
            claim.id,
            claim.version + 1,
            state,
            claim.attempt,
            claim.fingerprint,
            claim.created_ms,
            0,
            claim.window_until_ms,
            claim.expires_ms,
            claim.nonce,
            claim.label,
            claim.scope,
            claim.key,
            claim.progress,
            response,
        )
    )
