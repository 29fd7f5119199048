"""The flow of a guarded request, from claim to answer. Start reading here.

    request ─► key ─► scope ─► fingerprint ─► CLAIM ─► execute ─► COMPLETE ─► response
                                                │ lost
                                                ▼
                         completed → replay · running → wait, 409 or 202 · other body → 422
                         lease run out → recovery policy · expired → free or refused

A claim is one optimistic swap against "absent": one round trip when the key is new, and the same
round trip brings the standing record when it is not. `verdict` says what a standing record means
for this request; it is the only place that decides. Everything is a swap against a version that
was seen, so whoever is too late changes nothing.

Invariants, held by `tests/explore` over every interleaving: an attempt executes at most once; two
attempts of one life overlap only after a lease ran out; of all attempts one ends the operation, and
every client that gets a final answer gets that one; no key is stuck longer than its lease, unless
parked in doubt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.policy import Policy
from coatcheck.core.problem import Code, Problem, problem
from coatcheck.core.progress import progress_of
from coatcheck.core.record import (
    COMPLETED,
    GONE,
    IN_DOUBT,
    RUNNING,
    Record,
    Swap,
    completed,
    failed,
    in_doubt,
    is_lease_over,
    is_retention_over,
    is_window_over,
    new_record,
    next_version,
)
from coatcheck.core.replay import KEEP, PACKED, SEALED, Fate, decompressed
from coatcheck.errors import Resumable, StepInDoubt, StoreUnavailable, Unreadable


class Ticket(NamedTuple):
    """One request at the counter: what it is, who asks, and when it came."""

    id: bytes
    fingerprint: bytes
    now_ms: int
    nonce: int
    label: str = ""
    scope: str = ""
    key: str = ""


# Of all its fields in their order; see `new_record`.
new_ticket: Callable[[tuple[Any, ...]], Ticket] = functools.partial(tuple.__new__, Ticket)


class Seen(NamedTuple):
    """A record as it stood at a time."""

    record: Record
    now_ms: int


class Ending(NamedTuple):
    """How an execution ended: what becomes of the claim, and the bytes to keep if any."""

    fate: Fate
    response: bytes | None = None


@dataclass(slots=True)
class Watch(Effect["Seen | None"]):
    """
    Wait until the record differs from *version* or *until_ms* has come, and look at it.

    None where too many wait for this key already.
    """

    id: bytes
    version: int
    until_ms: int


@dataclass(slots=True)
class Execute(Effect[Ending]):
    """Run the handler, as the attempt that *claim* names."""

    claim: Record


@dataclass(slots=True)
class Reconcile(Effect[Ending]):
    """
    Ask the application what became of the attempt before *claim*.

    KEEP: it happened, with this response; RELEASE: it did not; DOUBT: nobody knows.
    """

    claim: Record


class Replay(NamedTuple):
    """Answer with the response that is kept in *record*."""

    record: Record
    response: bytes


class Refuse(NamedTuple):
    """Answer with a problem; nothing ran for this request. *record*: what runs in its place."""

    problem: Problem
    record: Record | None = None


class Executed(NamedTuple):
    """Answer with what the handler just said; it is safe in *record*."""

    record: Record


class Wait(NamedTuple):
    """Someone else executes; look again when something changed."""

    until_ms: int


class TakeOver(NamedTuple):
    """
    Try for the next attempt; *asks* first what became of the one before.

    *is_fresh*: all attempts before were refused at the door, so the key belongs to nothing yet.
    """

    claim: Record
    asks: bool
    is_fresh: bool = False


@dataclass(slots=True)
class Claim(Swap):
    """The swap that gets hold of what is to be executed; *took*: with a life that has begun."""

    took: TakeOver | None = None


class Park(NamedTuple):
    """An attempt died and may not be run again: only a person can say what happened."""

    claim: Record


Answer: TypeAlias = Executed | Replay | Refuse
Verdict: TypeAlias = Replay | Refuse | Wait | TakeOver | Park


def serve(ticket: Ticket, policy: Policy, *, may_claim: bool = True) -> Flow[Answer]:
    """A guarded request, from claim to answer."""
    claim = first_attempt(ticket, policy, GONE, ticket.now_ms)
    lost: Record | None = (yield Claim(ticket.id, 0, claim)) if may_claim else GONE
    is_fresh = True
    if lost is not None:
        held = yield from contend(ticket, policy, lost)
        if not isinstance(held, TakeOver):
            return held
        claim = held.claim
        is_fresh = claim.attempt == 1 or held.is_fresh
        if held.asks:
            told = yield from Reconcile(claim)
            if told.fate is not Fate.RELEASE:  # it happened, or nobody knows: nothing runs
                return (yield from conclude(claim, told, ticket, policy))
    try:
        ending: Ending = yield Execute(claim)
    except Exception as error:
        # Known to have failed, unlike a crash. Whether we can write that down or the lease must
        # run out instead, the handler's own error matters more than ours.
        with suppress(StoreUnavailable):
            yield from settle(claim, Ending(fate_of_error(error, policy)))
        raise
    lost = yield from settle(claim, ending, is_fresh=is_fresh)
    if lost is None or lost.version == 0:  # gone: its whole retention passed while it ran
        return Executed(claim)
    return superseded(lost, ticket, policy)


def fate_of_error(error: BaseException, policy: Policy) -> Fate:
    """What becomes of a claim whose handler raised: it goes by what is known of the effect."""
    if isinstance(error, StepInDoubt):
        return Fate.DOUBT
    return Fate.RELEASE if policy.reruns or isinstance(error, Resumable) else Fate.DOUBT


def contend(ticket: Ticket, policy: Policy, standing: Record) -> Flow[TakeOver | Replay | Refuse]:
    """Get hold of the claim after all, or of the answer that stands."""
    now_ms = ticket.now_ms
    if standing.version == 0:  # the caller has too many keys already; only one it knows will do
        seen = yield from Watch(ticket.id, 0, now_ms)
        if seen is None or seen.record.version == 0:
            return Refuse(problem("too-many-keys"))
        standing, now_ms = seen
    while True:
        decided = verdict(standing, ticket, policy, now_ms)
        if isinstance(decided, (Replay, Refuse)):
            return decided
        if isinstance(decided, Wait):
            seen = yield from Watch(ticket.id, standing.version, decided.until_ms)
            if seen is None:
                return _refuse("too-many-waiting", ticket)
            standing, now_ms = seen
        else:
            lost = yield from _swap_for(decided, standing.version)
            if lost is None and isinstance(decided, TakeOver):
                return decided
            standing = decided.claim if lost is None else lost


def _swap_for(decided: TakeOver | Park, version: int) -> Swap:
    claim = decided.claim
    if isinstance(decided, Park):
        return Swap(claim.id, version, claim)
    return Claim(claim.id, version, claim, decided)


def settle(claim: Record, ending: Ending, *, is_fresh: bool = False) -> Flow[Record | None]:
    """
    End *claim* as *ending* says. None: done; else the record of the attempt that came after.

    *is_fresh*: nothing has run under this key in this life, but for what was refused at the door.

    A renewal of our own may have come between, or its answer may have been lost: the standing
    record then still names our attempt, and we go on from there. So it does where somebody has
    parked us in doubt, because our lease ran out; but who executed knows, and ends the doubt.
    """
    while True:
        end = ended(claim, ending, is_fresh=is_fresh)
        lost: Record | None = yield Swap(claim.id, claim.version, end)
        if lost is None or lost.nonce != claim.nonce or lost.state not in (RUNNING, IN_DOUBT):
            return lost
        if lost.state == IN_DOUBT and ending.fate is Fate.DOUBT:
            return None  # we do not know either
        claim = lost


def conclude(claim: Record, told: Ending, ticket: Ticket, policy: Policy) -> Flow[Replay | Refuse]:
    """End *claim* with what the reconciler told, and answer from the record."""
    lost = yield from settle(claim, told)
    if lost is not None:
        return superseded(lost, ticket, policy)
    if told.fate is Fate.KEEP:
        return of_completed(completed(claim, told.response), ticket)
    return _refuse("outcome-unknown", ticket)


def verdict(standing: Record, ticket: Ticket, policy: Policy, now_ms: int) -> Verdict:
    """What *standing* means for this request. Pure, and the only place that decides."""
    if standing.version == 0:  # nothing stands any more
        return TakeOver(first_attempt(ticket, policy, standing, now_ms), asks=False)
    if is_window_over(standing, now_ms):
        if policy.on_expired == "refuse" and not is_retention_over(standing, now_ms):
            return _refuse("key-expired", ticket, status=policy.expired_status)
        return TakeOver(first_attempt(ticket, policy, standing, now_ms), asks=False)
    # A claim that was refused at the door has no fingerprint: a corrected request may follow.
    if standing.fingerprint not in (ticket.fingerprint, b""):
        return _refuse("key-reused", ticket, status=policy.mismatch)
    if standing.state == COMPLETED:
        return of_completed(standing, ticket)
    if standing.state == RUNNING:
        return _of_running(standing, ticket, policy, now_ms)
    if standing.state == IN_DOUBT and policy.recovery != "reconcile":
        return _refuse("outcome-unknown", ticket)
    claim = next_attempt(standing, ticket, policy, now_ms)
    return TakeOver(claim, asks=standing.state == IN_DOUBT, is_fresh=not standing.fingerprint)


def of_completed(standing: Record, ticket: Ticket) -> Replay | Refuse:
    """The answer where *standing* is completed: what it keeps, if that can be read."""
    if standing.response is None:
        return _refuse("result-unavailable", ticket, reason="its response was not kept")
    if standing.response[:1] in PACKED:  # by an engine that packs, and this one does not
        return _of_packed(standing, standing.response, ticket)
    return Replay(standing, standing.response)


def _of_packed(standing: Record, response: bytes, ticket: Ticket) -> Replay | Refuse:
    if response[0] == SEALED:
        return _refuse("result-unavailable", ticket, reason="it is sealed, and here is no key")
    try:
        return Replay(standing, decompressed(response))
    except Unreadable as error:
        return _refuse("result-unavailable", ticket, reason=str(error))


def _of_running(standing: Record, ticket: Ticket, policy: Policy, now_ms: int) -> Verdict:
    if is_lease_over(standing, now_ms):
        if policy.recovery == "manual":
            return Park(in_doubt(standing))
        asks = policy.recovery == "reconcile"
        return TakeOver(next_attempt(standing, ticket, policy, now_ms), asks=asks)
    wait_until_ms = ticket.now_ms + policy.wait_ms
    if now_ms >= wait_until_ms:
        return _still_running(standing, ticket, now_ms)
    return Wait(min(wait_until_ms, standing.lease_until_ms))


def _still_running(standing: Record, ticket: Ticket, now_ms: int) -> Refuse:
    age_s = max(0, now_ms - standing.created_ms) / 1_000
    refusal = _refuse("in-progress", ticket, reason=f"first seen {age_s:.1f} s ago")
    return refusal._replace(record=standing)


def _refuse(code: Code, ticket: Ticket, *, reason: str = "", status: int = 0) -> Refuse:
    return Refuse(problem(code, key=ticket.key, id=ticket.id, reason=reason, status=status))


def superseded(standing: Record, ticket: Ticket, policy: Policy) -> Replay | Refuse:
    """
    The answer for the client of an attempt that lost its claim while it ran.

    It gets the surviving answer. If there is none yet it is told to ask again: its own answer may
    differ from the one that will stand.
    """
    decided = verdict(standing, ticket, policy, ticket.now_ms)
    if isinstance(decided, (Replay, Refuse)):
        return decided
    return _still_running(standing, ticket, ticket.now_ms)


def ended(claim: Record, ending: Ending, *, is_fresh: bool = False) -> Record:
    """The record that ends *claim*; *is_fresh*: see `settle`."""
    if ending.fate is KEEP:
        return completed(claim, ending.response)
    if ending.fate is Fate.DOUBT:
        return in_doubt(claim)
    released = failed(claim)
    # Only where nothing ran before, nor wrote anything down now: either may have had its effect,
    # and that belongs to the request that asked for it.
    is_forgotten = ending.fate is Fate.FORGET and is_fresh and claim.progress is None
    return released._replace(fingerprint=b"") if is_forgotten else released


def given_back(claim: Claim) -> Swap:
    """
    What follows *claim*, once it holds, where nobody is left to execute it: nothing ran.

    But what became of an attempt before it is still to be asked, where it was to be.
    """
    record = claim.record
    assert record is not None
    took = claim.took or TakeOver(record, asks=False)
    ending = Ending(Fate.DOUBT if took.asks else Fate.FORGET)
    is_fresh = took.is_fresh or record.attempt == 1
    return Swap(record.id, record.version, ended(record, ending, is_fresh=is_fresh))


def first_attempt(ticket: Ticket, policy: Policy, standing: Record, now_ms: int) -> Record:
    """The claim that begins a life, the first or a new one after *standing*."""
    return new_record(
        (
            ticket.id,
            next_version(standing, now_ms),
            RUNNING,
            1,
            ticket.fingerprint,
            now_ms,
            now_ms + policy.lease_ms,
            now_ms + policy.window_ms,
            now_ms + policy.retention_ms,
            ticket.nonce,
            ticket.label,
            ticket.scope,
            ticket.key,
            None,
            None,
        )
    )


def next_attempt(standing: Record, ticket: Ticket, policy: Policy, now_ms: int) -> Record:
    """The claim that goes on with the life of *standing*; raises `Unreadable`."""
    progress_of(standing)  # who cannot read what was done may not go on with it
    return standing._replace(
        version=next_version(standing, now_ms),
        state=RUNNING,
        attempt=standing.attempt + 1,
        fingerprint=ticket.fingerprint,
        lease_until_ms=now_ms + policy.lease_ms,
        nonce=ticket.nonce,
    )
