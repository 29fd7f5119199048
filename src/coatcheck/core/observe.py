"""Observe mode: what record mode would have done with a request that runs in any case.

The observed request is claimed like any other, so that a later one finds its record. But it never
waits, never asks a reconcile function and never marks anything in doubt.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from coatcheck.core.flow import Flow
from coatcheck.core.lifecycle import (
    Claim,
    ClaimRequest,
    MarkInDoubt,
    Refuse,
    TakeOver,
    Wait,
    first_attempt,
    verdict,
)
from coatcheck.core.policy import Policy
from coatcheck.core.record import GONE, Record, is_same_write

WouldHave: TypeAlias = Literal["executed", "would_replay", "would_wait", "would_refuse"]


class Observation(NamedTuple):
    """
    What would have happened to a request.

    *claim*: this request holds it, so its end is to be written. *is_fresh*: see `write_outcome`.
    """

    outcome: WouldHave
    code: str = ""  # of the problem that the client would have got
    claim: Record | None = None
    is_fresh: bool = False


WOULD_REPLAY = Observation("would_replay")
WOULD_WAIT = Observation("would_wait", "in-progress")


def observe(request: ClaimRequest, policy: Policy) -> Flow[Observation]:
    """Claim *request* if record mode would execute it; return what record mode would do."""
    claim = first_attempt(request, policy, GONE, request.now_ms)
    conflict = yield from Claim(request.id, 0, claim)
    if conflict is None or is_same_write(conflict, claim):
        return Observation("executed", claim=claim, is_fresh=True)
    decided = verdict(conflict, request, policy, request.now_ms)
    if isinstance(decided, TakeOver):
        claim = decided.claim
        conflict = yield from Claim(request.id, conflict.version, claim, decided)
        if conflict is not None and not is_same_write(conflict, claim):
            return WOULD_WAIT  # another request took it over at the same time
        is_fresh = decided.is_fresh or claim.attempt == 1
        return Observation("executed", claim=claim, is_fresh=is_fresh)
    if isinstance(decided, MarkInDoubt):
        return Observation("would_refuse", "outcome-unknown")
    return WOULD_WAIT if isinstance(decided, Wait) else _of_refusal(decided, policy)


def _of_refusal(decided: object, policy: Policy) -> Observation:
    """The same for a request that would have been answered at once."""
    code = decided.problem.code if isinstance(decided, Refuse) else "result-unavailable"
    if code == "result-unavailable":  # it is completed: observed records keep no response
        return WOULD_REPLAY
    if code == "in-progress" and policy.in_flight == "202":
        return WOULD_WAIT
    return Observation("would_refuse", code)
