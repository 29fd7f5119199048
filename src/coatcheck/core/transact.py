"""The flow of a guarded request whose record and effect are one transaction (L9).

The same flow as `serve`, with the same decisions; only what its swaps mean is another:

    claim      BEGIN, and the swap in it: the row is locked, so that duplicates wait for it
    complete   the swap, and COMMIT: record and effect are there, or neither is
    give back  ROLLBACK: nothing happened, and nothing remains of the claim either

So there is no window in which the effect is there and the record is not, and nothing to recover:
whoever dies in the middle has done nothing. What an earlier attempt has left in steps, when the
route was not in this mode yet, nobody here can ask for: then nothing runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.policy import Policy
from coatcheck.core.record import COMPLETED, RUNNING, Record, Swap
from coatcheck.core.serve import Answer, Execute, Ticket, serve
from coatcheck.core.steps import unmet


@dataclass(slots=True)
class Begin(Effect[Record | None]):
    """
    Begin a transaction and make the claim *swap* in it, waiting for its row until *until_ms*.

    None: it is open and holds the claim. Else it is rolled back, and this record stands.
    """

    swap: Swap
    until_ms: int


@dataclass(slots=True)
class Commit(Effect[None]):
    """Make *swap* in the transaction that is open, and commit."""

    swap: Swap


@dataclass(slots=True)
class Rollback(Effect[None]):
    """Undo all that was done in the transaction that is open."""


IN_TRANSACTION = (Begin, Commit, Rollback)


def transact(ticket: Ticket, policy: Policy, *, may_claim: bool = True) -> Flow[Answer]:
    """A guarded request, from claim to answer, in one transaction."""
    flow = serve(ticket, policy, may_claim=may_claim)
    until_ms = ticket.now_ms + policy.wait_ms
    is_open = False
    try:
        effect = next(flow)
        while True:
            try:
                asked = _meaning_of(effect, until_ms, is_open=is_open)
                if asked is not effect:  # it ends what is open, or begins
                    is_open = False
                result: object = yield asked
                if isinstance(asked, Begin):
                    is_open = result is None
            except Exception as error:  # noqa: BLE001 - the flow decides what an error means
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as done:
        answer: Answer = done.value
        return answer


def _meaning_of(effect: Effect[Any], until_ms: int, *, is_open: bool) -> Effect[Any]:
    """What *effect* of `serve` is in a transaction, of which one may be open."""
    if isinstance(effect, Swap):
        record = effect.record
        assert record is not None  # a request deletes nothing
        if record.state == RUNNING:
            return Begin(effect, until_ms)
        if not is_open:  # somebody else's attempt that is parked: a write of its own
            return effect
        return Commit(effect) if record.state == COMPLETED else Rollback()
    if isinstance(effect, Execute):
        # Refused where an earlier attempt has taken steps.
        left = unmet(effect.claim, (), may_differ=False)
        if left is not None:
            raise left
    return effect
