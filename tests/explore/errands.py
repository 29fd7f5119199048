"""Those who take part in `middle`: flows of production's own, with a handler between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from coatcheck.core.flow import Flow
from coatcheck.core.hand_over import Handed, offer, resume
from coatcheck.core.policy import Policy
from coatcheck.core.progress import Resolution
from coatcheck.core.record import GONE, Record
from coatcheck.core.recover import recover
from coatcheck.core.replay import Fate
from coatcheck.core.resolve import rerun, resolve
from coatcheck.core.serve import Ending, Execute, Executed, Ticket, fate_of_error, serve
from coatcheck.core.steps import Plan, Run, take, unmet
from coatcheck.errors import ClaimLost, Misconfigured, StepInDoubt

from .middle import Ask, Look, Now, Put, Take
from .places import HandlerError

Handler: TypeAlias = Callable[[Record, Policy], Flow[Ending | None]]

BY_ADA = Resolution(0, "as downstream says", "ada", "asked downstream")


# --- what handlers do -------------------------------------------------------------------------


def plain(claim: Record, _policy: Policy) -> Flow[Ending | None]:
    """One effect, and no steps: the policy says what becomes of it."""
    return _answered(claim, frozenset(), (yield from Run("work")))


def stepping(claim: Record, _policy: Policy, once: str = "charge") -> Flow[Ending | None]:
    """A plain step, and one that may happen at most *once*."""
    asked: frozenset[str] = frozenset()
    value = b""
    for name in ("reserve", "charge"):
        now_ms, asked = (yield from Now()), asked | {name}
        plan = Plan(name, at_most_once=name == once, now_ms=now_ms, asked=asked)
        claim, value = yield from take(claim, plan)
    return _answered(claim, asked, value)


def stepping_plainly(claim: Record, policy: Policy) -> Flow[Ending | None]:
    """
    The same in a later release, which calls both of them plain.

    It is deployed where something was left behind: before that it would be right about itself.
    """
    if claim.progress is None:
        return Ending(Fate.RELEASE)
    return (yield from stepping(claim, policy, once=""))


def _answered(claim: Record, asked: frozenset[str], value: bytes) -> Ending:
    """`judged`, where it succeeds."""
    is_unmet = unmet(claim, asked, may_differ=False) is not None
    return Ending(Fate.DOUBT) if is_unmet else Ending(Fate.KEEP, value)


def handing_over(claim: Record, policy: Policy) -> Flow[Ending | None]:
    """Its work is done by whoever takes it from the queue; None: the client is told to ask later."""
    now_ms = yield from Now()
    offered = yield from offer(claim, now_ms + policy.lease_ms)
    yield from Put(Handed(offered.id, offered.created_ms, offered.nonce))
    return None


# --- who takes part ---------------------------------------------------------------------------


def client(handler: Handler) -> Callable[..., Flow[Any]]:
    """A client whose requests are executed by *handler*."""

    def visit(ticket: Ticket, policy: Policy, *, may_claim: bool = True) -> Flow[Any]:
        return (yield from _executed(serve(ticket, policy, may_claim=may_claim), handler, policy))

    return visit


def worker(handler: Handler) -> Callable[..., Flow[Any]]:
    """Whoever is delivered what was handed over."""

    def visit(ticket: Ticket, policy: Policy, **_options: object) -> Flow[Any]:
        handed = yield from Take()
        seen = yield from Look()
        flow = resume(handed, ticket._replace(now_ms=seen.now_ms), policy, seen.record)
        return (yield from _executed(flow, handler, policy))

    return visit


def person(handler: Handler | None = None) -> Callable[..., Flow[Any]]:
    """A person who looks, asks, and decides; with a *handler*, to run it again where it can be."""

    def visit(ticket: Ticket, policy: Policy, **_options: object) -> Flow[Any]:
        seen = yield from Look()
        if seen.record is GONE:
            return Executed(GONE)
        told = yield from Ask(seen.record)
        if handler is None or told.fate is Fate.KEEP:
            return (yield from resolve(seen, told, BY_ADA, abandoned=True))
        flow = rerun(seen, BY_ADA, ticket, policy, abandoned=True)
        return (yield from _executed(flow, handler, policy))

    return visit


def reconciler(ticket: Ticket, policy: Policy, **_options: object) -> Flow[Any]:
    """A round of the background reconciler."""
    seen = yield from Look()
    if seen.record is GONE:
        return Executed(GONE)
    fate = yield from recover(seen, ticket, policy)
    return fate or Executed(GONE)


def _executed(flow: Flow[Any], handler: Handler, policy: Policy) -> Flow[Any]:
    """*flow*, with *handler* in the place of its execution."""
    try:
        effect = next(flow)
        while True:
            if isinstance(effect, Execute):
                yield from effect  # it begins
                ending = yield from _handled(handler, effect.claim, policy)
                if ending is None:
                    return Executed(effect.claim)
                effect = flow.send(ending)
            else:
                effect = flow.send((yield from effect))
    except StopIteration as done:
        return done.value


def _handled(handler: Handler, claim: Record, policy: Policy) -> Flow[Ending | None]:
    """`ending_of_error`, where it fails."""
    try:
        return (yield from handler(claim, policy))
    except (HandlerError, ClaimLost, StepInDoubt, Misconfigured) as error:
        return Ending(fate_of_error(error, policy))
