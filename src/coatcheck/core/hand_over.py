"""Handing over: a claim whose work is done elsewhere, by whoever takes it from a queue (L10).

The handler keeps its claim and names it in a short text for the queue. Whoever gets the text swaps
the claim's nonce for one of its own; so of any number of deliveries one executes, and the handler
that has handed over can change nothing any more. Where a worker has died or failed, a further
delivery meets what any retry meets: the recovery policy.
"""

from __future__ import annotations

import base64
import hmac
from typing import NamedTuple

from coatcheck.core.flow import Flow
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
from coatcheck.core.replay import Fate
from coatcheck.core.scope import ID_BYTES, digested
from coatcheck.core.serve import (
    Answer,
    Execute,
    Executed,
    Reconcile,
    Refuse,
    TakeOver,
    Ticket,
    conclude,
    contend,
    settle,
    superseded,
)
from coatcheck.errors import ClaimLost

_DOMAIN = b"coatcheck-handed"


class Handed(NamedTuple):
    """A claim that was handed over: of which operation, in which life, by which attempt."""

    id: bytes
    life: int  # the record's `created_ms`
    nonce: int


def sealed(handed: Handed, secret: bytes) -> str:
    """The text for the queue: 64 characters that nobody without the secret can make."""
    raw = handed.id + handed.life.to_bytes(8, "big") + handed.nonce.to_bytes(8, "big")
    return base64.urlsafe_b64encode(raw + digested(_DOMAIN, secret, raw)).decode()


def opened(text: str, secret: bytes) -> Handed | None:
    """What `sealed` made *text* from; None if that was somebody else."""
    try:
        raw = base64.urlsafe_b64decode(text.encode())
    except ValueError:
        return None
    life, nonce = raw[ID_BYTES : ID_BYTES + 8], raw[ID_BYTES + 8 : ID_BYTES + 16]
    handed = Handed(raw[:ID_BYTES], int.from_bytes(life, "big"), int.from_bytes(nonce, "big"))
    return handed if hmac.compare_digest(sealed(handed, secret).encode(), text.encode()) else None


def offer(claim: Record, lease_until_ms: int) -> Flow[Record]:
    """Keep our *claim* until *lease_until_ms* for whoever takes it. Raises `ClaimLost`."""
    while True:
        offered = renewed(claim, lease_until_ms)
        lost = yield from Swap(claim.id, claim.version, offered)
        if lost is None or is_same_write(lost, offered):
            return offered
        if not is_same_attempt(lost, claim):
            raise ClaimLost("another attempt has taken over: there is nothing to hand over")
        claim = lost


def resume(handed: Handed, ticket: Ticket, policy: Policy, standing: Record) -> Flow[Answer]:
    """The work of a claim that was *handed* over, from taking it to its answer."""
    now_ms = ticket.now_ms
    while True:
        if standing.created_ms != handed.life or is_window_over(standing, now_ms):
            return Refuse(problem("key-expired", key=ticket.key, id=handed.id))
        if not standing.fingerprint:  # refused at the door, by the handler that had handed it over
            reason = "its request was refused after it was handed over: there is nothing to do"
            return Refuse(problem("key-invalid", reason=reason))
        if standing.state != RUNNING or standing.nonce != handed.nonce:
            return (yield from _contended(ticket, policy, standing))
        # Also after its lease: it was never begun, and nobody else has taken it.
        claim = standing._replace(
            version=next_version(standing, now_ms),
            lease_until_ms=now_ms + policy.lease_ms,
            nonce=ticket.nonce,
            progress=_handed_on(standing),
        )
        lost = yield from Swap(handed.id, standing.version, claim)
        if lost is None:
            return (yield from _executed(claim, ticket, policy))
        standing = lost


def _handed_on(standing: Record) -> bytes:
    """
    What the handler wrote down; its steps are its own, and the work's are others.

    Where the work was handed over before, by an earlier attempt, only what this one's handler has
    added is its own: all else was taken by a worker, and the next worker must ask for it.
    """
    progress = progress_of(standing)
    known, first = progress.handed or (), progress.handed is None
    added = (s.name for s in progress.steps if first or s.attempt == standing.attempt)
    return encoded(progress._replace(handed=tuple(dict.fromkeys((*known, *added)))))


def _contended(ticket: Ticket, policy: Policy, standing: Record) -> Flow[Answer]:
    """It was taken before: by somebody who is at it, has finished, has failed or is dead."""
    held = yield from contend(ticket, policy, standing)
    if not isinstance(held, TakeOver):
        return held
    if held.asks:
        told = yield from Reconcile(held.claim)
        if told.fate is not Fate.RELEASE:
            return (yield from conclude(held.claim, told, ticket, policy))
    return (yield from _executed(held.claim, ticket, policy))


def _executed(claim: Record, ticket: Ticket, policy: Policy) -> Flow[Answer]:
    ending = yield from Execute(claim)
    lost = yield from settle(claim, ending)
    if lost is None or lost.version == 0:  # gone: its whole retention passed while it ran
        return Executed(claim)
    return superseded(lost, ticket, policy)
