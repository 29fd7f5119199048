"""Recovery: ends an abandoned operation that no client retries.

It does what a retry would do about an attempt that died, except for running anything. Under
"manual" the operation is marked in doubt, for an operator. Under "reconcile" the application is
asked what happened, and the operation ends as it answers. Under "retry" only a retry can go on, so
it is left alone.
"""

from __future__ import annotations

from coatcheck.core.flow import Flow
from coatcheck.core.keep import OutcomeKind
from coatcheck.core.lifecycle import (
    ClaimRequest,
    MarkInDoubt,
    Reconcile,
    Snapshot,
    TakeOver,
    verdict,
    write_outcome,
)
from coatcheck.core.policy import Policy
from coatcheck.core.record import Record, Swap, attempt_began_ms

# 6: from a minute to about an hour. What is unknown for so long is for an operator, and a
# downstream that is back after a day is still asked soon enough.
DOUBLINGS_MAX = 6


def recover(read: Snapshot, request: ClaimRequest, policy: Policy) -> Flow[OutcomeKind | None]:
    """
    End the operation of the record that was *read*, if its attempt has died; how it ended.

    None: there was nothing to do, or another process has done it. *request* is that of the record
    itself, so that the verdict is the one that its own retry would get.
    """
    decided = verdict(read.record, request, policy, read.now_ms)
    if not isinstance(decided, (MarkInDoubt, TakeOver)):
        return None
    if isinstance(decided, TakeOver) and not decided.asks:
        return None
    claim = decided.claim
    conflict = yield from Swap(claim.id, read.record.version, claim)
    if conflict is not None:
        return None
    if isinstance(decided, MarkInDoubt):
        return OutcomeKind.IN_DOUBT
    known = yield from Reconcile(claim)
    conflict = yield from write_outcome(claim, known)
    return known.kind if conflict is None else None


def ask_from_ms(current: Record, every_ms: int) -> int:
    """
    From when on to ask about *current*: the more attempts there were, the later.

    The record knows when its last attempt began. So all nodes wait for the same moment, and no
    memory is needed that a restart would lose.

    Clients that retry are attempts, too, and may be many in a minute. So no pause is longer than
    twice the time that has passed since the first attempt: clients in a hurry postpone nothing.
    """
    began_ms = attempt_began_ms(current)
    pause_ms = every_ms << min(current.attempt - 1, DOUBLINGS_MAX)
    return began_ms + min(pause_ms, max(every_ms, 2 * (began_ms - current.created_ms)))
