"""The lifecycle of a guarded request that commits its record and its effect in one transaction.

The flow and its decisions are those of `lifecycle`. Only its writes differ:

    claim      BEGIN, then the swap: it locks the row, and duplicates wait for the lock
    complete   the swap, then COMMIT: of record and effect, both exist or neither does
    refuse     ROLLBACK TO a savepoint after the claim, the swap, then COMMIT: only the answer
               remains, and the row was locked all the time
    release    ROLLBACK: neither the effect nor the claim remains

So there is nothing to recover: a process that dies before the commit has done nothing. Handlers in
this mode have no steps. If an earlier attempt has stored some, because the route was in record mode
then, the handler does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.keep import CLIENT_ERROR, Outcome
from coatcheck.core.lifecycle import Answer, ClaimRequest, Execute, lifecycle
from coatcheck.core.policy import Policy
from coatcheck.core.record import COMPLETED, RUNNING, Record, Swap
from coatcheck.core.steps import missing_steps


@dataclass(slots=True)
class Begin(Effect[Record | None]):
    """
    Begin a transaction and do *swap*, the claim, in it; wait for the row's lock until *until_ms*.

    Results in None if the transaction is open and holds the claim. Otherwise it was rolled back,
    and the result is the current record. *can_undo*: also set a savepoint after the claim.
    """

    swap: Swap
    until_ms: int
    can_undo: bool


@dataclass(slots=True)
class Commit(Effect[None]):
    """Do *swap* in the open transaction, and commit; *undo*: first roll back to the savepoint."""

    swap: Swap
    undo: bool = False


@dataclass(slots=True)
class Rollback(Effect[None]):
    """Roll the open transaction back."""


IN_TRANSACTION = (Begin, Commit, Rollback)


def transactional(request: ClaimRequest, policy: Policy, *, may_claim: bool = True) -> Flow[Answer]:
    """A guarded request, from claim to answer, in one transaction."""
    flow = lifecycle(request, policy, may_claim=may_claim)
    # The result of a guarded function always counts as a success. A function has no caller.
    can_undo = policy.commit == "success" and bool(request.scope)
    begin = partial(Begin, until_ms=request.now_ms + policy.wait_ms, can_undo=can_undo)
    is_open = undo = False
    try:
        effect = next(flow)
        while True:
            try:
                translated = _in_transaction(effect, begin, is_open=is_open, undo=undo)
                if translated is not effect:  # it begins a transaction, or ends the open one
                    is_open = False
                result: object = yield translated
                if isinstance(translated, Begin):
                    is_open = result is None
                elif isinstance(result, Outcome):
                    undo = can_undo and result.status >= CLIENT_ERROR
            except Exception as error:  # noqa: BLE001 - the lifecycle decides what it means
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as done:
        answer: Answer = done.value
        return answer


def _in_transaction(
    effect: Effect[Any], begin: Callable[[Swap], Begin], *, is_open: bool, undo: bool
) -> Effect[Any]:
    """
    The effect that stands for *effect* of `lifecycle`.

    *is_open*: a transaction is open. *undo*: its completion rolls the handler's writes back.
    """
    if isinstance(effect, Swap):
        record = effect.record
        assert record is not None  # a request deletes nothing
        if record.state == RUNNING:
            return begin(effect)
        if not is_open:  # marks another attempt in doubt, without a transaction
            return effect
        return Commit(effect, undo) if record.state == COMPLETED else Rollback()
    if isinstance(effect, Execute):
        problem = missing_steps(effect.claim, (), may_differ=False)
        if problem is not None:
            raise problem
    return effect
