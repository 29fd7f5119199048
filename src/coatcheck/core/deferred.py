"""Deferred work: a claim whose work another process does, which takes it from a queue.

The handler keeps its claim and names it in a short token for the queue. A worker with the token
replaces the claim's nonce with its own; so of any number of deliveries one executes, and the
handler can change nothing any more. If a worker has died or failed, a further delivery meets what
any retry meets: the recovery policy.
"""

from __future__ import annotations

import base64
import hmac
from typing import NamedTuple

from coatcheck.core.flow import Flow
from coatcheck.core.identity import ID_BYTES, digested
from coatcheck.core.keep import OutcomeKind
from coatcheck.core.lifecycle import (
    Answer,
    ClaimRequest,
    Execute,
    Executed,
    Reconcile,
    Refuse,
    TakeOver,
    complete_from_reconcile,
    superseded,
    wait_or_take_over,
    write_outcome,
)
from coatcheck.core.policy import Policy
from coatcheck.core.problem import problem
from coatcheck.core.progress import encoded, progress_of
from coatcheck.core.record import (
    RUNNING,
    Record,
    Swap,
    is_same_attempt,
    is_same_write,
    is_window_over,
    next_version,
    renewed,
)
from coatcheck.errors import ClaimLost

_DOMAIN = b"coatcheck-handed"


class DeferredToken(NamedTuple):
    """A deferred claim: of which operation, in which generation, by which attempt."""

    id: bytes
    life: int  # the record's `created_ms`
    nonce: int


def encode_token(token: DeferredToken, secret: bytes) -> str:
    """The text for the queue: 64 characters that cannot be made without the secret."""
    raw = token.id + token.life.to_bytes(8, "big") + token.nonce.to_bytes(8, "big")
    return base64.urlsafe_b64encode(raw + digested(_DOMAIN, secret, raw)).decode()


def decode_token(text: str, secret: bytes) -> DeferredToken | None:
    """The token that `encode_token` made *text* from; None if it was not made with *secret*."""
    try:
        raw = base64.urlsafe_b64decode(text.encode())
    except ValueError:
        return None
    life, nonce = raw[ID_BYTES : ID_BYTES + 8], raw[ID_BYTES + 8 : ID_BYTES + 16]
    token = DeferredToken(raw[:ID_BYTES], int.from_bytes(life, "big"), int.from_bytes(nonce, "big"))
    is_ours = hmac.compare_digest(encode_token(token, secret).encode(), text.encode())
    return token if is_ours else None


def offer(claim: Record, lease_until_ms: int) -> Flow[Record]:
    """Keep our *claim* until *lease_until_ms* for a worker. Raises `ClaimLost`."""
    while True:
        offered = renewed(claim, lease_until_ms)
        conflict = yield from Swap(claim.id, claim.version, offered)
        if conflict is None or is_same_write(conflict, offered):
            return offered
        if not is_same_attempt(conflict, claim):
            raise ClaimLost("another attempt has taken over, so that nothing can be deferred")
        claim = conflict


def run_deferred(
    token: DeferredToken, request: ClaimRequest, policy: Policy, current: Record
) -> Flow[Answer]:
    """The deferred work of *token*, from taking it to its answer."""
    now_ms = request.now_ms
    while True:
        if current.created_ms != token.life or is_window_over(current, now_ms):
            return Refuse(problem("key-expired", key=request.key, id=token.id))
        if not current.fingerprint:  # its handler refused the request after it had deferred it
            reason = "its request was refused after it was deferred: there is nothing to do"
            return Refuse(problem("key-invalid", reason=reason))
        if current.state != RUNNING or current.nonce != token.nonce:
            return (yield from _taken_before(request, policy, current))
        # Also after its lease: the work has not begun, and no other attempt has taken over.
        claim = current._replace(
            version=next_version(current, now_ms),
            lease_until_ms=now_ms + policy.lease_ms,
            nonce=request.nonce,
            progress=_progress_of_handler(current),
        )
        conflict = yield from Swap(token.id, current.version, claim)
        if conflict is None:
            return (yield from _executed(claim, request, policy))
        current = conflict


def _progress_of_handler(current: Record) -> bytes:
    """
    What the handler wrote down; its steps are its own, and the work takes others.

    If an earlier attempt deferred the work before, only what this one's handler has added is its
    own: the rest was taken by a worker, and the next worker must ask for it.
    """
    progress = progress_of(current)
    known, first = progress.handed or (), progress.handed is None
    added = (s.name for s in progress.steps if first or s.attempt == current.attempt)
    return encoded(progress._replace(handed=tuple(dict.fromkeys((*known, *added)))))


def _taken_before(request: ClaimRequest, policy: Policy, current: Record) -> Flow[Answer]:
    """Another worker has taken it: one that runs, has finished, has failed or is dead."""
    taken = yield from wait_or_take_over(request, policy, current)
    if not isinstance(taken, TakeOver):
        return taken
    if taken.asks:
        known = yield from Reconcile(taken.claim)
        if known.kind is not OutcomeKind.RELEASE:
            return (yield from complete_from_reconcile(taken.claim, known, request, policy))
    return (yield from _executed(taken.claim, request, policy))


def _executed(claim: Record, request: ClaimRequest, policy: Policy) -> Flow[Answer]:
    outcome = yield from Execute(claim)
    conflict = yield from write_outcome(claim, outcome)
    if conflict is None or conflict.version == 0:  # gone: its whole retention passed while it ran
        return Executed(claim)
    return superseded(conflict, request, policy)
