"""The lifecycle of a guarded request, from claim to answer. Start reading here.

    request ─► key ─► scope ─► fingerprint ─► CLAIM ─► execute ─► COMPLETE ─► response
                                                │ conflict
                                                ▼
                         completed → replay · running → wait, 409 or 202 · other body → 422
                         lease expired → recovery policy · window over → free or refused

A claim is one optimistic swap against "no record": one round trip if the key is new, and the same
round trip returns the current record if it is not. `verdict` decides what a current record means
for this request; nothing else does. Every write is a swap against a version that was read before,
so a process that is too late changes nothing.

Invariants, checked by `tests/explore` over every interleaving: an attempt executes at most once;
two attempts of one generation overlap only after a lease has expired; exactly one attempt ends the
operation, and every client that gets a final answer gets that one; no key is blocked for longer
than its lease, unless it is in doubt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from coatcheck.core.fingerprint import difference
from coatcheck.core.flow import Effect, Flow
from coatcheck.core.keep import COMPLETE, Outcome, OutcomeKind
from coatcheck.core.policy import Policy
from coatcheck.core.problem import Code, Problem, problem
from coatcheck.core.progress import (
    has_notes,
    in_session,
    progress_of,
    readable_progress_of,
    with_failure,
    with_trace,
)
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
from coatcheck.core.response import PACKED, SEALED, decompressed
from coatcheck.errors import Resumable, StepInDoubt, StoreUnavailable, Uncertain, Unreadable


class ClaimRequest(NamedTuple):
    """What an entry point asks the engine to claim: which operation, for which request, when."""

    id: bytes  # see core/identity.py
    fingerprint: bytes  # see core/fingerprint.py
    now_ms: int
    nonce: int  # names the attempt that would begin
    label: str = ""
    scope: str = ""  # the caller of an HTTP request; empty: a function
    key: str = ""
    # Stored with the first claim: the input of a registered function, or the caller's name.
    progress: bytes | None = None
    # The fingerprint of the same request without its session cookie; empty if it has none.
    without_session: bytes = b""


# Makes a request from a tuple of all its fields; see `new_record`.
new_claim_request: Callable[[tuple[Any, ...]], ClaimRequest] = functools.partial(
    tuple.__new__, ClaimRequest
)


class Snapshot(NamedTuple):
    """A record, and when it was read."""

    record: Record
    now_ms: int


@dataclass(slots=True)
class WaitForChange(Effect["Snapshot | None"]):
    """
    Wait until the record differs from *version* or *until_ms* has come, and read it.

    None if too many requests wait for this key already.
    """

    id: bytes
    version: int
    until_ms: int


@dataclass(slots=True)
class Execute(Effect[Outcome]):
    """Run the handler, as the attempt that *claim* names."""

    claim: Record


@dataclass(slots=True)
class Reconcile(Effect[Outcome]):
    """
    Ask the application what the attempt before *claim* did.

    COMPLETE: it happened, with this response; RELEASE: it did not; IN_DOUBT: it is not known.
    """

    claim: Record


class Replay(NamedTuple):
    """Answer with the response that is stored in *record*."""

    record: Record
    response: bytes


class Refuse(NamedTuple):
    """
    Answer with a problem; nothing ran for this request.

    *record*: the attempt that runs in its place, if one does. *cause*: the store's own error.
    """

    problem: Problem
    record: Record | None = None
    cause: Exception | None = None


class Executed(NamedTuple):
    """Answer with what the handler returned; it is stored in *record*."""

    record: Record


class Wait(NamedTuple):
    """Another attempt executes; read the record again when it has changed."""

    until_ms: int


class TakeOver(NamedTuple):
    """
    Try to become the next attempt; *asks*: first ask what the one before did.

    *is_fresh*: all attempts before were refused before the handler began, so that the key is not
    bound to a request yet.
    """

    claim: Record
    asks: bool
    is_fresh: bool = False


class MarkInDoubt(NamedTuple):
    """An attempt died and may not run again: only an operator can say what happened."""

    claim: Record


@dataclass(slots=True)
class Claim(Swap):
    """The swap that claims an execution; *took*: the verdict, if the key had a record already."""

    took: TakeOver | None = None


Answer: TypeAlias = Executed | Replay | Refuse
Verdict: TypeAlias = Replay | Refuse | Wait | TakeOver | MarkInDoubt


def lifecycle(request: ClaimRequest, policy: Policy, *, may_claim: bool = True) -> Flow[Answer]:
    """A guarded request, from claim to answer; *may_claim*: a new key may be used for it."""
    claim = first_attempt(request, policy, GONE, request.now_ms)
    try:
        conflict: Record | None = (yield Claim(request.id, 0, claim)) if may_claim else GONE
    except StoreUnavailable:
        if policy.on_outage != "execute":
            raise
        unguarded = without_record(claim)
        yield from Execute(unguarded)  # whatever becomes of it, nothing is written
        return Executed(unguarded)
    is_fresh = True
    if conflict is not None:
        taken = yield from wait_or_take_over(request, policy, conflict)
        if not isinstance(taken, TakeOver):
            return taken
        claim = taken.claim
        is_fresh = claim.attempt == 1 or taken.is_fresh
        if taken.asks:
            known = yield from Reconcile(claim)
            if known.kind is not OutcomeKind.RELEASE:  # it happened, or that is not known
                return (yield from complete_from_reconcile(claim, known, request, policy))
    try:
        outcome: Outcome = yield Execute(claim)
    except Exception as error:
        # The handler failed, which is known, unlike a crash. If this cannot be written, the lease
        # expires instead; the handler's own error matters more than ours.
        with suppress(StoreUnavailable):
            yield from write_outcome(claim, Outcome(outcome_kind_of_error(error, policy)))
        raise
    conflict = yield from write_outcome(claim, outcome, is_fresh=is_fresh)
    if conflict is None or conflict.version == 0:  # gone: its whole retention passed while it ran
        return Executed(claim)
    return superseded(conflict, request, policy)


def without_record(claim: Record) -> Record:
    """*claim* for a handler that runs unguarded: no record has version 0."""
    return claim._replace(version=0)


def outcome_kind_of_error(error: BaseException, policy: Policy) -> OutcomeKind:
    """What happens to a claim whose handler raised *error*."""
    if isinstance(error, (StepInDoubt, Uncertain)):
        return OutcomeKind.IN_DOUBT
    may_rerun = policy.reruns or isinstance(error, Resumable)
    return OutcomeKind.RELEASE if may_rerun else OutcomeKind.IN_DOUBT


def wait_or_take_over(
    request: ClaimRequest, policy: Policy, current: Record
) -> Flow[TakeOver | Replay | Refuse]:
    """Wait for the attempt of *current*, answer from it, or claim the next attempt."""
    now_ms = request.now_ms
    if current.version == 0:  # the caller has too many keys already: only a known one will do
        read = yield from WaitForChange(request.id, 0, now_ms)
        if read is None or read.record.version == 0:
            return Refuse(problem("too-many-keys"))
        current, now_ms = read
    while True:
        decided = verdict(current, request, policy, now_ms)
        if isinstance(decided, (Replay, Refuse)):
            return decided
        if isinstance(decided, Wait):
            read = yield from WaitForChange(request.id, current.version, decided.until_ms)
            if read is None:
                return _refuse("too-many-waiting", request)
            awaited, (current, now_ms) = current.nonce, read
            is_answered = current.state == COMPLETED and current.nonce == awaited
            if is_answered and not is_window_over(current, request.now_ms):
                # Its window may have ended while it ran. A request that came before that end is no
                # late retry: it gets the answer.
                now_ms = request.now_ms
        else:
            conflict = yield from _swap_for(decided, current.version)
            if conflict is None and isinstance(decided, TakeOver):
                return decided
            current = decided.claim if conflict is None else conflict


def _swap_for(decided: TakeOver | MarkInDoubt, version: int) -> Swap:
    claim = decided.claim
    if isinstance(decided, MarkInDoubt):
        return Swap(claim.id, version, claim)
    return Claim(claim.id, version, claim, decided)


def write_outcome(
    claim: Record, outcome: Outcome, *, is_fresh: bool = False
) -> Flow[Record | None]:
    """
    End *claim* with *outcome*; returns None, or the record of a newer attempt if it lost.

    *is_fresh*: nothing has run under this key before, except attempts that were refused before
    their handler began.

    If the swap lost to our own renewal (same nonce), retry on top of it. If another process marked
    us in doubt because our lease had expired, overwrite that: we know the outcome.
    """
    while True:
        if outcome.kind is COMPLETE:
            record = completed(claim, outcome.response)
            if outcome.trace:
                record = with_trace(record, outcome.trace)
        else:
            record = ended(claim, outcome, is_fresh=is_fresh)
        conflict: Record | None = yield Swap(claim.id, claim.version, record)
        if (
            conflict is None
            or conflict.nonce != claim.nonce
            or conflict.state not in (RUNNING, IN_DOUBT)
        ):
            return conflict
        if conflict.state == IN_DOUBT and outcome.kind is OutcomeKind.IN_DOUBT:
            return None  # we do not know the outcome either
        claim = conflict


def complete_from_reconcile(
    claim: Record, known: Outcome, request: ClaimRequest, policy: Policy
) -> Flow[Replay | Refuse]:
    """End *claim* with what the reconcile function answered, and answer from the record."""
    conflict = yield from write_outcome(claim, known)
    if conflict is not None:
        return superseded(conflict, request, policy)
    if known.kind is COMPLETE:
        return of_completed(completed(claim, known.response), request)
    return _refuse("outcome-unknown", request)


def verdict(current: Record, request: ClaimRequest, policy: Policy, now_ms: int) -> Verdict:
    """What *current* means for this request. Pure, and the only place that decides."""
    if current.version == 0:  # there is no record any more
        return TakeOver(first_attempt(request, policy, current, now_ms), asks=False)
    if is_window_over(current, now_ms):
        if policy.on_expired == "refuse" and not is_retention_over(current, now_ms):
            return _refuse("key-expired", request, status=policy.expired_status)
        return TakeOver(first_attempt(request, policy, current, now_ms), asks=False)
    # A claim that was refused before its handler began has no fingerprint: a corrected request
    # may follow with the same key. All bytes are compared: equal requests have equal ones, also the
    # four that only name a difference.
    if current.fingerprint not in (request.fingerprint, b""):
        return _of_other_request(current, request, policy, now_ms)
    if current.state == COMPLETED:
        return of_completed(current, request)
    if current.state == RUNNING:
        return _of_running(current, request, policy, now_ms)
    if current.state == IN_DOUBT and policy.recovery != "reconcile":
        return _refuse("outcome-unknown", request)
    if _is_exhausted(current, policy):
        code: Code = "outcome-unknown" if current.state == IN_DOUBT else "too-many-attempts"
        return _refuse(code, request, reason=f"all {current.attempt} attempts have failed")
    claim = next_attempt(current, request, policy, now_ms)
    return TakeOver(claim, asks=current.state == IN_DOUBT, is_fresh=not current.fingerprint)


def _of_other_request(
    current: Record, request: ClaimRequest, policy: Policy, now_ms: int
) -> Verdict:
    """
    What *current* means for a request with another fingerprint: refused, with one exception.

    A client may have got its session cookie after its first request. Its retry gets the answer that
    it would get without the cookie. If it becomes the next attempt, the record is bound to the
    session, because the answer is made for it, and may not be shown to requests without it.
    """
    if current.fingerprint == request.without_session:
        before = request._replace(fingerprint=request.without_session, without_session=b"")
        decided = verdict(current, before, policy, now_ms)
        if isinstance(decided, TakeOver):
            return decided._replace(claim=in_session(decided.claim, request.fingerprint))
        return decided
    reason = "the arguments differ"  # of a function; its fingerprint has no parts
    if request.scope:
        reason = difference(current.fingerprint, request.fingerprint)
    return _refuse("key-reused", request, reason=reason, status=policy.mismatch)


def _is_exhausted(current: Record, policy: Policy) -> bool:
    """
    The operation has used all the attempts that its policy allows.

    Without a fingerprint, none of them has reached its handler: a corrected request may follow.
    """
    if policy.attempts_max is None or not current.fingerprint:
        return False
    return current.attempt >= policy.attempts_max


def of_completed(current: Record, request: ClaimRequest) -> Replay | Refuse:
    """The answer from a completed record: its response, if there is one and it can be read."""
    if current.response is None:
        return _refuse("result-unavailable", request, reason="its response was not kept")
    if current.response[:1] in PACKED:  # written by an engine that compresses or encrypts
        return _of_packed(current, current.response, request)
    return Replay(current, current.response)


def _of_packed(current: Record, response: bytes, request: ClaimRequest) -> Replay | Refuse:
    if response[0] == SEALED:
        reason = "its response is encrypted, and this process has no key ring"
        return _refuse("result-unavailable", request, reason=reason)
    try:
        return Replay(current, decompressed(response))
    except Unreadable as error:
        return _refuse("result-unavailable", request, reason=str(error))


def _of_running(current: Record, request: ClaimRequest, policy: Policy, now_ms: int) -> Verdict:
    if is_lease_over(current, now_ms):
        if policy.recovery == "manual" or _is_exhausted(current, policy):
            return MarkInDoubt(_abandoned(current, policy))
        asks = policy.recovery == "reconcile"
        return TakeOver(next_attempt(current, request, policy, now_ms), asks=asks)
    wait_until_ms = request.now_ms + policy.wait_ms
    if now_ms >= wait_until_ms:
        return _still_running(current, request, now_ms)
    return Wait(min(wait_until_ms, current.lease_until_ms))


def _abandoned(current: Record, policy: Policy) -> Record:
    """*current*, whose attempt has died and may not run again, in doubt."""
    doubt = in_doubt(current)
    if readable_progress_of(current) is None:  # encrypted or damaged: it stays as it is
        return doubt
    return with_failure(doubt, "never finished", policy.words)


def _still_running(current: Record, request: ClaimRequest, now_ms: int) -> Refuse:
    age_s = max(0, now_ms - current.created_ms) / 1_000
    refusal = problem(
        "in-progress",
        key=request.key,
        id=request.id,
        reason=f"{age_s:.1f} s ago",
        retry_after_s=retry_after_s(current, now_ms),
    )
    return Refuse(refusal, record=current)


def retry_after_s(current: Record, now_ms: int) -> int:
    """
    After how many seconds the client of an operation that runs should ask again; at least 1.

    Half as long as the operation has taken so far: a quick one is asked for soon, and a slow one
    seldom. But not later than the end of the lease: then the outcome is stored, the lease was
    renewed, or the next attempt may begin.
    """
    half_ms = (now_ms - current.created_ms) // 2
    left_ms = current.lease_until_ms - now_ms
    return max(1, -(-min(half_ms, left_ms) // 1_000))  # rounded up


def _refuse(code: Code, request: ClaimRequest, *, reason: str = "", status: int = 0) -> Refuse:
    return Refuse(problem(code, key=request.key, id=request.id, reason=reason, status=status))


def superseded(current: Record, request: ClaimRequest, policy: Policy) -> Replay | Refuse:
    """
    The answer for the client of an attempt that lost its claim while it ran.

    It gets the answer of the newer attempt. If there is none yet, it must ask again: its own
    answer may differ from the final one.
    """
    decided = verdict(current, request, policy, request.now_ms)
    if isinstance(decided, (Replay, Refuse)):
        return decided
    return _still_running(current, request, request.now_ms)


def ended(claim: Record, outcome: Outcome, *, is_fresh: bool = False) -> Record:
    """The record that ends *claim* with *outcome*; *is_fresh*: see `write_outcome`."""
    if outcome.kind is COMPLETE:
        return completed(claim, outcome.response)
    if outcome.kind is OutcomeKind.REJECT:
        return _rejected(claim, is_fresh=is_fresh)
    record = in_doubt(claim) if outcome.kind is OutcomeKind.IN_DOUBT else failed(claim)
    return with_failure(record, outcome.failure, outcome.policy) if outcome.failure else record


def _rejected(claim: Record, *, is_fresh: bool) -> Record:
    released = failed(claim)
    # The key is free for another request only if nothing ran before and nothing was noted now:
    # either may have had an effect, which belongs to the request that asked for it.
    is_free = is_fresh and not has_notes(claim)
    return released._replace(fingerprint=b"") if is_free else released


def release_of_claim(claim: Claim) -> Swap:
    """
    The swap that releases *claim* once it is written, if no process is left to execute it.

    Nothing ran. But if the attempt before it was to be reconciled, that is still to be done.
    """
    record = claim.record
    assert record is not None
    took = claim.took or TakeOver(record, asks=False)
    outcome = Outcome(OutcomeKind.IN_DOUBT if took.asks else OutcomeKind.REJECT)
    is_fresh = took.is_fresh or record.attempt == 1
    return Swap(record.id, record.version, ended(record, outcome, is_fresh=is_fresh))


def first_attempt(request: ClaimRequest, policy: Policy, current: Record, now_ms: int) -> Record:
    """The claim that begins a generation: the first one, or a new one after *current*."""
    return new_record(
        (
            request.id,
            next_version(current, now_ms),
            RUNNING,
            1,
            request.fingerprint,
            now_ms,
            now_ms + policy.lease_ms,
            now_ms + policy.window_ms,
            now_ms + policy.retention_ms,
            request.nonce,
            request.label,
            request.scope,
            request.key,
            request.progress,
            None,
        )
    )


def next_attempt(current: Record, request: ClaimRequest, policy: Policy, now_ms: int) -> Record:
    """The claim that continues the generation of *current*; raises `Unreadable`."""
    progress_of(current)  # an attempt that cannot read what was done may not continue it
    return current._replace(
        version=next_version(current, now_ms),
        state=RUNNING,
        attempt=current.attempt + 1,
        fingerprint=request.fingerprint,
        lease_until_ms=now_ms + policy.lease_ms,
        nonce=request.nonce,
    )
