"""The flow of recovery where no client comes back: an abandoned operation settles even so (L6).

What a retry would do about an attempt that died, short of running anything: under "manual" it is
parked in doubt, where people look; under "reconcile" the application is asked what happened, and
the operation ends as it says. Under "retry" only a retry can go on, so it is left alone.
"""

from __future__ import annotations

from coatcheck.core.flow import Flow
from coatcheck.core.policy import Policy
from coatcheck.core.record import Record, Swap, attempt_began_ms
from coatcheck.core.replay import Fate
from coatcheck.core.serve import Park, Reconcile, Seen, TakeOver, Ticket, settle, verdict

# 6: from a minute to about an hour. What could not be told for so long is for a person, and a
# downstream that is back after a day is still asked soon enough.
DOUBLINGS_MAX = 6


def recover(seen: Seen, ticket: Ticket, policy: Policy) -> Flow[Fate | None]:
    """
    Settle the record that was *seen*, if its attempt has died; what became of it.

    None: there was nothing to do, or somebody else has done it. *ticket* is that of the record
    itself, so that the verdict is the one that its own retry would meet.
    """
    decided = verdict(seen.record, ticket, policy, seen.now_ms)
    if not isinstance(decided, (Park, TakeOver)):
        return None
    if isinstance(decided, TakeOver) and not decided.asks:
        return None
    claim = decided.claim
    lost = yield from Swap(claim.id, seen.record.version, claim)
    if lost is not None:
        return None
    if isinstance(decided, Park):
        return Fate.DOUBT
    told = yield from Reconcile(claim)
    lost = yield from settle(claim, told)
    return told.fate if lost is None else None


def ask_from_ms(standing: Record, every_ms: int) -> int:
    """
    From when on to ask about *standing*: the more attempts there were, the later.

    The record knows when its last attempt began. So all nodes wait for the same moment, and it
    needs no memory that a restart would lose.

    Clients that retry are attempts, too, and may be many in a minute. Who only asks again after
    ever longer pauses has spent at least half of the next one on those before; so no pause is
    longer than twice the time that has passed, and clients in a hurry put nothing off.
    """
    began_ms = attempt_began_ms(standing)
    pause_ms = every_ms << min(standing.attempt - 1, DOUBLINGS_MAX)
    return began_ms + min(pause_ms, max(every_ms, 2 * (began_ms - standing.created_ms)))
