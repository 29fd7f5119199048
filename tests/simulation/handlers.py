"""The handlers: what applications do when they are executed, and when they are asked.

A handler thinks, has its effect downstream, thinks again and answers. It may fail before, saying
so, or in the middle of it; and what it sent may arrive long after it has failed, or died. Those
with steps are in `stepping`, and those that defer in `deferred_work`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from coatcheck.core.answers import DidNotHappen, Happened, Unknown
from coatcheck.core.keep import Outcome, OutcomeKind, outcome_kind_of
from coatcheck.core.policy import Policy
from coatcheck.core.record import Record
from coatcheck.core.response import Response, encode_value
from coatcheck.operation import Operation

from .downstream import Downstream
from .faults import Broken, Faults
from .world import Pause, Resume, World

Ended: TypeAlias = Generator[Pause, Any, Outcome]
# How a handler has its effect; in a transaction it is a write, and may fail like one.
Charge: TypeAlias = Callable[[Record, bytes], Generator[Pause, Any, bytes]]

# Most handlers are over before their first renewal; some need several.
SHORT_SHARE = 0.6
LONG_LEASES_MAX = 1.5


class HandlerError(Exception):
    """The handler failed."""


class Handlers:
    """The application, the same in every process."""

    def __init__(
        self, world: World, policy: Policy, downstream: Downstream, broken: Broken
    ) -> None:
        self.world = world
        self.policy = policy
        self.downstream = downstream
        self.broken = broken
        self.faults = Faults(0.0, 0.0)

    def execute(self, claim: Record, charge: Charge | None = None) -> Ended:
        """Run the handler for *claim*, with its effect by *charge*."""
        world, faults = self.world, self.faults
        if (refusal := (yield from self.begin(claim))) is not None:
            return refusal
        fails_late = world.chance(faults.fails_late)
        if fails_late and world.chance(0.3):
            raise HandlerError("before its effect, but the client does not know")
        response = b"by %d for %s" % (claim.nonce, claim.fingerprint)
        response = yield from (charge or self.charge)(claim, response)
        yield self.thought_ms()
        if fails_late:
            world.happened("handler", "fails", claim)
            if world.chance(0.5):
                raise HandlerError("after its effect")
            return self.answered(503, b"sorry")
        if world.chance(faults.not_kept):
            return Outcome(OutcomeKind.COMPLETE, None)
        return self.answered(201, response)

    def begin(self, claim: Record) -> Generator[Pause, Any, Outcome | None]:
        """Think, and perhaps refuse, before anything has happened."""
        yield self.thought_ms()
        if not self.world.chance(self.faults.fails_early):
            return None
        self.world.happened("handler", "refuses", claim)
        return self.answered(self.world.random.choice((429, 401)), b"not now")

    def reconcile(self, claim: Record) -> Generator[Pause, Any, object]:
        """Ask downstream what became of the attempt before *claim*."""
        world = self.world
        world.happened("reconciler", "is asked", claim)
        yield self.delay_ms()
        response = self.downstream.ask(claim)
        yield self.delay_ms()
        if world.chance(self.faults.fails_late):
            world.happened("reconciler", "does not know", claim)
            return Unknown()
        if response is None or not self.broken.reconciler_tells_the_truth:
            world.happened("reconciler", "says no", claim)
            return DidNotHappen()
        world.happened("reconciler", "says yes", claim)
        return Happened(value=response)

    def charge(
        self, claim: Record, response: bytes, ledger: Downstream | None = None
    ) -> Generator[Pause, Any, bytes]:
        """Have an effect downstream, or in the *ledger* of a step."""
        ledger = ledger or self.downstream
        answer: bytes | None = yield functools.partial(self._send, ledger, claim, response)
        if answer is None:
            raise HandlerError("downstream has refused")
        return answer

    def _send(self, ledger: Downstream, claim: Record, response: bytes, resume: Resume) -> None:
        world, faults = self.world, self.faults
        name = "charge" if self.broken.keys_are_derived else f"charge {claim.attempt}"
        key = Operation(claim, self.policy).derive(name)
        act = functools.partial(ledger.charge, claim, key, response, world.now_ms)
        if world.chance(faults.fails_late / 2):  # it arrives late, or never
            world.happened("downstream", "does not answer", claim)
            if world.chance(0.7):
                late_ms = faults.timeout_ms + world.between(0, faults.late_ms_max)
                world.later(late_ms, act)
            world.later(faults.timeout_ms, resume, None, HandlerError("no answer"))
        else:
            world.later(self.delay_ms(), self._arrive, act, resume)

    def _arrive(self, act: Callable[[], bytes | None], resume: Resume) -> None:
        self.world.later(self.delay_ms(), resume, act())

    def answered(self, status: int, body: bytes) -> Outcome:
        """How an execution ended that has answered."""
        kind = outcome_kind_of(
            Response(status, (), body), self.policy.keep, reruns=self.policy.reruns
        )
        is_kept = kind is OutcomeKind.COMPLETE
        return Outcome(kind, encode_value(body) if is_kept else None)

    def thought_ms(self) -> float:
        """How long a handler thinks."""
        if self.world.chance(SHORT_SHARE):
            return self.delay_ms()
        return self.world.between(0, LONG_LEASES_MAX * self.policy.lease_ms)

    def delay_ms(self) -> float:
        """How long a message to downstream takes, or its answer."""
        return self.faults.latency_ms * self.world.between(0.5, 2)
