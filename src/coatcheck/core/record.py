"""The record: what the store keeps for one operation, and every way it may change.

Everything that matters for safety is in this file, as data:

Rule 1: the only moves are those in `MOVES`. Stores, engines and operators change records by swaps,
        and every swap is one of these moves. The laws and the explorer check all of them. A person
        can order two more, `OPERATOR_MOVES`: to correct an own decision, and to erase.
Rule 2: every move increases `version`, and no version is used twice for one id, not even after a
        sweep: a new generation starts its versions from the clock, and a sweep deletes no record
        whose version the clock has not passed. So a version is a fence: a process that holds an
        old one cannot change anything.

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

    A tuple, because two are made for each request and passed to database drivers as they are.
    """

    id: bytes  # 16 bytes; see core/identity.py
    version: int  # the fence
    state: State
    attempt: int  # 1, 2, 3 …
    fingerprint: bytes  # 16 bytes; see core/fingerprint.py
    created_ms: int  # when this generation of the key began
    lease_until_ms: int  # when the claim expires unless renewed; kept while in doubt; otherwise 0
    window_until_ms: int  # retries before this are deduplicated
    expires_ms: int  # the sweep may delete it from here on; set once per generation
    nonce: int  # 63 bits that identify the attempt which holds or last held the claim
    label: str  # shown to operators: "POST /orders"
    scope: str  # shown to operators: the caller's digest
    key: str  # shown to operators: what the client sent
    progress: bytes | None  # steps, notes and a stored input; see core/progress.py
    response: bytes | None  # see core/response.py; None when completed means "not kept"


# Makes a record from a tuple of all its fields. `Record(...)` takes twice as long, and this is on
# the path of every request.
new_record: Callable[[tuple[Any, ...]], Record] = functools.partial(tuple.__new__, Record)


@dataclass(slots=True)
class Swap(Effect["Record | None"]):
    """
    Write *record* if *expected* is still the current version (0: there is no record).

    Results in None if the write was applied, otherwise in the current record. A *record* of None
    deletes. If a record was expected and there is none, the result is `GONE`.
    """

    id: bytes
    expected: int
    record: Record | None


@dataclass(slots=True)
class Get(Effect["Record | None"]):
    """Read the current record; None if there is none."""

    id: bytes


class When(Enum):
    """What must be true of the current record and the clock for a move to be legal."""

    ALWAYS = "always"
    LEASE_OVER = "its lease has expired"
    WINDOW_OVER = "its window is over and no lease is live"
    RETENTION_OVER = "its retention is over and no lease is live"
    DECIDED = "an operator decided it, and not an execution"
    VERSION_PASSED = "the clock has passed its version"


class Move(NamedTuple):
    """One legal change of a record; *source* or *target* None means there is no record."""

    name: str
    source: State | None
    target: State | None
    when: When


MOVES = (
    Move("claim", None, RUNNING, When.ALWAYS),
    Move("renew", RUNNING, RUNNING, When.ALWAYS),
    Move("defer", RUNNING, RUNNING, When.ALWAYS),
    Move("complete", RUNNING, COMPLETED, When.ALWAYS),
    Move("release", RUNNING, FAILED, When.ALWAYS),
    Move("mark in doubt", RUNNING, IN_DOUBT, When.ALWAYS),
    Move("take over", RUNNING, RUNNING, When.LEASE_OVER),
    Move("retry", FAILED, RUNNING, When.ALWAYS),
    Move("resolve as happened", IN_DOUBT, COMPLETED, When.ALWAYS),
    Move("resolve as not happened", IN_DOUBT, FAILED, When.ALWAYS),
    Move("resolve by running again", IN_DOUBT, RUNNING, When.ALWAYS),
    Move("new generation", RUNNING, RUNNING, When.WINDOW_OVER),
    Move("new generation", COMPLETED, RUNNING, When.WINDOW_OVER),
    Move("new generation", FAILED, RUNNING, When.WINDOW_OVER),
    Move("new generation", IN_DOUBT, RUNNING, When.WINDOW_OVER),
    Move("sweep", RUNNING, None, When.RETENTION_OVER),
    Move("sweep", COMPLETED, None, When.RETENTION_OVER),
    Move("sweep", FAILED, None, When.RETENTION_OVER),
    Move("sweep", IN_DOUBT, None, When.RETENTION_OVER),
)

# What only a person orders, with `resolve(correct=True)` and `erase`.
OPERATOR_MOVES = (
    Move("correct", COMPLETED, COMPLETED, When.DECIDED),
    Move("correct", COMPLETED, FAILED, When.DECIDED),
    Move("correct", FAILED, COMPLETED, When.DECIDED),
    Move("correct", FAILED, FAILED, When.DECIDED),
    Move("erase", COMPLETED, None, When.VERSION_PASSED),
    Move("erase", FAILED, None, When.VERSION_PASSED),
    Move("erase", IN_DOUBT, None, When.VERSION_PASSED),
)

# What a store returns for a swap that expected a record and found none.
GONE = Record(b"", 0, FAILED, 0, b"", 0, 0, 0, 0, 0, "", "", "", None, None)


def is_lease_over(record: Record, now_ms: int) -> bool:
    """No process holds *record*: its lease has expired, or it is not running."""
    return record.state != RUNNING or record.lease_until_ms <= now_ms


def is_window_over(record: Record, now_ms: int) -> bool:
    """The key may start a new generation."""
    return record.window_until_ms <= now_ms and is_lease_over(record, now_ms)


def is_retention_over(record: Record, now_ms: int) -> bool:
    """The sweep may delete the record."""
    # The next generation starts from the clock, so the clock must have passed this one's versions.
    return record.expires_ms <= now_ms and record.version < now_ms and is_lease_over(record, now_ms)


def can_erase(record: Record, now_ms: int) -> bool:
    """An operator may delete the record; its next generation then starts above its version."""
    return record.state != RUNNING and record.version < now_ms


_HOLDS = {
    When.ALWAYS: lambda _record, _now_ms: True,
    When.LEASE_OVER: is_lease_over,
    When.WINDOW_OVER: is_window_over,
    When.RETENTION_OVER: is_retention_over,
}


def legal_moves(before: Record | None, after: Record | None, now_ms: int) -> tuple[Move, ...]:
    """
    The moves of the table that lead from *before* to *after* at *now_ms*; none if it is illegal.

    For a running claim, attempt and nonce tell the moves apart. Both are equal: a renewal. Only the
    nonce is new: a worker has taken deferred work. The attempt is new: a takeover.
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
        return move.name not in ("renew", "defer")
    return move.name == ("renew" if before.nonce == after.nonce else "defer")


def next_version(current: Record, now_ms: int) -> int:
    """The version of a new attempt: above every version that this key has used before."""
    return max(current.version + 1, now_ms)


def attempt_began_ms(record: Record) -> int:
    """About when the last attempt began: versions start from the clock and count the writes."""
    return record.version


def is_same_attempt(current: Record, claim: Record) -> bool:
    """*current* is our own running claim, perhaps renewed since we last read it."""
    return current.state == RUNNING and current.nonce == claim.nonce


def is_same_write(current: Record, record: Record) -> bool:
    """*current* is *record* as a store keeps it; a compact store drops texts for people."""
    return current[:_TEXTS] == record[:_TEXTS] and current[-2:] == record[-2:]


def is_same_write_cut(current: Record, record: Record) -> bool:
    """
    *current* is *record* as a store keeps it that had no room for its response.

    Progress is not compared: such a store sees it encrypted, which is different each time.
    """
    return current[:_TEXTS] == record[:_TEXTS] and current.response is None


_TEXTS = Record._fields.index("label")  # label, scope and key; then progress and response


def renewed(claim: Record, lease_until_ms: int) -> Record:
    """*claim* with a longer lease."""
    return claim._replace(version=claim.version + 1, lease_until_ms=lease_until_ms)


def completed(claim: Record, response: bytes | None) -> Record:
    """*claim* with its final answer; None if the answer is not kept."""
    assert claim.state in (RUNNING, IN_DOUBT)
    return new_record(
        (
            claim.id,
            claim.version + 1,
            COMPLETED,
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


def failed(claim: Record) -> Record:
    """*claim* released: the next retry runs as the next attempt."""
    return completed(claim, None)._replace(state=FAILED)


def in_doubt(claim: Record) -> Record:
    """*claim* in doubt: an operator or a reconcile function must say what happened."""
    return completed(claim, None)._replace(state=IN_DOUBT, lease_until_ms=claim.lease_until_ms)
