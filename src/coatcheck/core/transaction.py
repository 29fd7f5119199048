"""The lifecycle of a guarded request whose record and effect are one transaction.

The same flow as `lifecycle`, with the same decisions; only its writes differ:

    claim      BEGIN, and the swap in it: the row is locked, so that duplicates wait for it
    complete   the swap, and COMMIT: record and effect are both there, or neither is
    release    ROLLBACK: nothing remains of the effect, nor of the claim

The effect never exists without its record, and there is nothing to recover: the database rolls back
the transaction of a process that dies. If an earlier attempt has left steps, from a time when the
route was not in this mode, the operation is refused: a step cannot be asked for its outcome here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.lifecycle import Answer, ClaimRequest, Execute, lifecycle
from coatcheck.core.policy import Policy
from coatcheck.core.record import COMPLETED, RUNNING, Record, Swap
from coatcheck.core.steps import missing_steps


@dataclass(slots=True)
class Begin(Effect[Record | None]):
    """
    Begin a transaction and make the claim *swap* in it, waiting for its row until *until_ms*.

    Results in None if the transaction is open and holds the claim. Otherwise it is rolled back, and
    the result is the current record.
    """

    swap: Swap
    until_ms: int


@dataclass(slots=True)
class Commit(Effect[None]):
    """Make *swap* in the open transaction, and commit."""

    swap: Swap


@dataclass(slots=True)
class Rollback(Effect[None]):
    """Undo everything that was done in the open transaction."""


IN_TRANSACTION = (Begin, Commit, Rollback)


def transactional(request: ClaimRequest, policy: Policy, *, may_claim: bool = True) -> Flow[Answer]:
    """A guarded request, from claim to answer, in one transaction."""
    flow = lifecycle(request, policy, may_claim=may_claim)
    until_ms = request.now_ms + policy.wait_ms
    is_open = False
    try:
        effect = next(flow)
        while True:
            try:
                meant = _meaning_of(effect, until_ms, is_open=is_open)
                if meant is not effect:  # it begins a transaction, or ends the open one
                    is_open = False
                result: object = yield meant
                if isinstance(meant, Begin):
                    is_open = result is None
            except Exception as error:  # noqa: BLE001 - the lifecycle decides what it means
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as done:
        answer: Answer = done.value
        return answer


def _meaning_of(effect: Effect[Any], until_ms: int, *, is_open: bool) -> Effect[Any]:
    """Return what to do in the place of *effect* of `lifecycle`."""
    if isinstance(effect, Swap):
        record = effect.record
        assert record is not None  # a request deletes nothing
        if record.state == RUNNING:
            return Begin(effect, until_ms)
        if not is_open:  # it marks another attempt in doubt, which is a write by itself
            return effect
        return Commit(effect) if record.state == COMPLETED else Rollback()
    if isinstance(effect, Execute):
        # Refused if an earlier attempt has taken steps.
        left = missing_steps(effect.claim, (), may_differ=False)
        if left is not None:
            raise left
    return effect
