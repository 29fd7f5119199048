"""Deferred work: a handler claims an operation, and a worker executes it, through a queue.

The handler puts a short token into the queue, which names its claim. A worker with the token
replaces the nonce of the claim with its own. So only one of any number of deliveries executes, and
the handler can no longer write. If a worker has died or failed, the recovery policy decides about
the next delivery, as about any retry.
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
    """Names a deferred claim: its operation, its generation and its attempt."""

    id: bytes
    generation: int  # the record's `created_ms`
    nonce: int


def encode_token(token: DeferredToken, secret: bytes) -> str:
    """*token* as text for the queue: 64 characters, signed with *secret*."""
    raw = token.id + token.generation.to_bytes(8, "big") + token.nonce.to_bytes(8, "big")
    return base64.urlsafe_b64encode(raw + digested(_DOMAIN, secret, raw)).decode()


def decode_token(text: str, secret: bytes) -> DeferredToken | None:
    """The token in *text*; None if `encode_token` did not make it with this *secret*."""
    try:
        raw = base64.urlsafe_b64decode(text.encode())
    except ValueError:
        return None
    generation, nonce = raw[ID_BYTES : ID_BYTES + 8], raw[ID_BYTES + 8 : ID_BYTES + 16]
    token = DeferredToken(
        raw[:ID_BYTES], int.from_bytes(generation, "big"), int.from_bytes(nonce, "big")
    )
    is_ours = hmac.compare_digest(encode_token(token, secret).encode(), text.encode())
    return token if is_ours else None


def offer(claim: Record, lease_until_ms: int) -> Flow[Record]:
    """Renew our *claim* until *lease_until_ms*, for a worker; raises `ClaimLost`."""
    while True:
        offered = renewed(claim, lease_until_ms)
        conflict = yield from Swap(claim.id, claim.version, offered)
        if conflict is None or is_same_write(conflict, offered):
            return offered
        if not is_same_attempt(conflict, claim):
            raise ClaimLost("another attempt has taken over this operation: nothing was deferred")
        claim = conflict


def run_deferred(
    token: DeferredToken, request: ClaimRequest, policy: Policy, current: Record
) -> Flow[Answer]:
    """One delivery of *token* to a worker, from taking the claim to the answer."""
    now_ms = request.now_ms
    while True:
        if current.created_ms != token.generation or is_window_over(current, now_ms):
            return Refuse(problem("key-expired", key=request.key, id=token.id))
        if not current.fingerprint:  # its handler refused the request after it had deferred it
            reason = "the request was refused after its work was deferred; nothing is left to do"
            return Refuse(problem("key-invalid", reason=reason))
        if current.state != RUNNING or current.nonce != token.nonce:
            return (yield from _taken_before(request, policy, current))
        # Also after the lease has expired: the nonce shows that the work has not begun.
        claim = current._replace(
            version=next_version(current, now_ms),
            lease_until_ms=now_ms + policy.lease_ms,
            nonce=request.nonce,
            progress=_with_steps_of_handler(current),
        )
        conflict = yield from Swap(token.id, current.version, claim)
        if conflict is None:
            return (yield from _executed(claim, request, policy))
        current = conflict


def _with_steps_of_handler(current: Record) -> bytes:
    """
    The progress of *current*, which names the steps of its handler: a worker does not repeat them.

    If an earlier attempt deferred the work, too, only the steps of this attempt are added. Those of
    an earlier worker are not: the next worker must ask for them.
    """
    progress = progress_of(current)
    known, first = progress.handed or (), progress.handed is None
    added = (s.name for s in progress.steps if first or s.attempt == current.attempt)
    return encoded(progress._replace(handed=tuple(dict.fromkeys((*known, *added)))))


def _taken_before(request: ClaimRequest, policy: Policy, current: Record) -> Flow[Answer]:
    """Another worker has taken the claim: it runs, has finished, has failed or has died."""
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
