"""The parties of `middle`: production flows, with a handler that executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from coatcheck.core.deferred import DeferredToken, offer, run_deferred
from coatcheck.core.flow import Flow
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import (
    ClaimRequest,
    Execute,
    Executed,
    lifecycle,
    outcome_kind_of_error,
)
from coatcheck.core.policy import Policy
from coatcheck.core.progress import Resolution
from coatcheck.core.record import GONE, Record
from coatcheck.core.recovery import recover, rerun, resolve
from coatcheck.core.steps import Run, StepPlan, missing_steps, take
from coatcheck.errors import ClaimLost, Misconfigured, StepInDoubt

from .middle import Ask, Look, Now, Put, Take
from .places import HandlerError

Handler: TypeAlias = Callable[[Record, Policy], Flow[Outcome | None]]

BY_ADA = Resolution(0, "as downstream says", "ada", "asked downstream")


# --- handlers ---------------------------------------------------------------------------------


def plain(claim: Record, _policy: Policy) -> Flow[Outcome | None]:
    """One effect and no steps; the policy decides about errors."""
    return _answered(claim, frozenset(), (yield from Run("work")))


def stepping(claim: Record, _policy: Policy, once: str = "charge") -> Flow[Outcome | None]:
    """A plain step, and one that may happen at most *once*."""
    asked: frozenset[str] = frozenset()
    value = b""
    for name in ("reserve", "charge"):
        now_ms, asked = (yield from Now()), asked | {name}
        plan = StepPlan(name, at_most_once=name == once, now_ms=now_ms, asked=asked)
        claim, value = yield from take(claim, plan)
    return _answered(claim, asked, value)


def stepping_plainly(claim: Record, policy: Policy) -> Flow[Outcome | None]:
    """
    The same in a later release, which declares both steps as plain.

    It runs only after an attempt of the earlier release has stored something.
    """
    if claim.progress is None:
        return Outcome(OutcomeKind.RELEASE)
    return (yield from stepping(claim, policy, once=""))


def _answered(claim: Record, asked: frozenset[str], value: bytes) -> Outcome:
    """The outcome of a handler that succeeds, as the engine decides it."""
    is_unmet = missing_steps(claim, asked, may_differ=False) is not None
    return Outcome(OutcomeKind.IN_DOUBT) if is_unmet else Outcome(OutcomeKind.COMPLETE, value)


def handing_over(claim: Record, policy: Policy) -> Flow[Outcome | None]:
    """Defer the work to a worker; returns None, and the client gets a 202."""
    now_ms = yield from Now()
    offered = yield from offer(claim, now_ms + policy.lease_ms)
    yield from Put(DeferredToken(offered.id, offered.created_ms, offered.nonce))
    return None


# --- parties ----------------------------------------------------------------------------------


def client(handler: Handler) -> Callable[..., Flow[Any]]:
    """A client whose requests are executed by *handler*."""

    def visit(request: ClaimRequest, policy: Policy, *, may_claim: bool = True) -> Flow[Any]:
        return (
            yield from _executed(lifecycle(request, policy, may_claim=may_claim), handler, policy)
        )

    return visit


def worker(handler: Handler) -> Callable[..., Flow[Any]]:
    """A worker that receives a token from the queue."""

    def visit(request: ClaimRequest, policy: Policy, **_options: object) -> Flow[Any]:
        handed = yield from Take()
        seen = yield from Look()
        flow = run_deferred(handed, request._replace(now_ms=seen.now_ms), policy, seen.record)
        return (yield from _executed(flow, handler, policy))

    return visit


def operator(handler: Handler | None = None) -> Callable[..., Flow[Any]]:
    """An operator who reads, asks downstream and decides; with a *handler*, to run it again."""

    def visit(request: ClaimRequest, policy: Policy, **_options: object) -> Flow[Any]:
        seen = yield from Look()
        if seen.record is GONE:
            return Executed(GONE)
        sent = yield from Ask(seen.record)
        if handler is None or sent.kind is OutcomeKind.COMPLETE:
            return (yield from resolve(seen, sent, BY_ADA, abandoned=True))
        flow = rerun(seen, BY_ADA, request, policy, abandoned=True)
        return (yield from _executed(flow, handler, policy))

    return visit


def reconciler(request: ClaimRequest, policy: Policy, **_options: object) -> Flow[Any]:
    """One round of the background recovery."""
    seen = yield from Look()
    if seen.record is GONE:
        return Executed(GONE)
    kind = yield from recover(seen, request, policy)
    return kind or Executed(GONE)


def _executed(flow: Flow[Any], handler: Handler, policy: Policy) -> Flow[Any]:
    """*flow*, with *handler* as its execution."""
    try:
        effect = next(flow)
        while True:
            if isinstance(effect, Execute):
                yield from effect  # it begins
                outcome = yield from _handled(handler, effect.claim, policy)
                if outcome is None:
                    return Executed(effect.claim)
                effect = flow.send(outcome)
            else:
                effect = flow.send((yield from effect))
    except StopIteration as done:
        return done.value


def _handled(handler: Handler, claim: Record, policy: Policy) -> Flow[Outcome | None]:
    """The outcome of *handler*, also if it raises."""
    try:
        return (yield from handler(claim, policy))
    except (HandlerError, ClaimLost, StepInDoubt, Misconfigured) as error:
        return Outcome(outcome_kind_of_error(error, policy))
