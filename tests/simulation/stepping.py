"""A handler with a middle: three steps, each with an effect of its own, and the ledgers of those.

    reserve   a plain step: an attempt that dies in it has it run again
    charge    at most once: an attempt that dies in it leaves a doubt, and an operator looks, also
              where a later release calls it plain
    ship      at most once, with a probe that asks what became of it

What each step returned is part of the answer. A handler whose step has failed may be stubborn, and
take it again; production must not be impressed by that.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from coatcheck.core.answers import DidNotHappen, Happened, Unknown
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.progress import progress_of
from coatcheck.core.record import Record
from coatcheck.core.response import decode_value
from coatcheck.operation import Operation

from .downstream import Downstream, generation_of
from .handlers import Ended, HandlerError, Handlers
from .runner import Doing, done
from .world import Pause

if TYPE_CHECKING:
    from .served import ServedRequest

STEPS = ("reserve", "charge", "ship")
BY_HAND = b" by hand"
# How often a handler takes a step that has failed, and the share of those that do.
TRIES = 2
STUBBORN = 0.5
# The share of steps in which trouble comes, in faults that has any.
STRUCK = 0.6
# The share of releases that call a step plain in which an attempt of another has died.
CARELESS = 0.5


class Stepping:
    """The steps of the application, the same in every process."""

    def __init__(self, handlers: Handlers) -> None:
        self.handlers = handlers
        self.world = handlers.world
        self.ledgers = {name: Downstream(self.world) for name in STEPS}
        self._runs = 0

    def execute(self, served: ServedRequest, claim: Record, operation: Operation) -> Ended:
        """Run the handler for *claim*."""
        handlers, world = self.handlers, self.world
        if (refusal := (yield from handlers.begin(claim))) is not None:
            return refusal
        note = f"attempt {claim.attempt} begins"
        yield from done(operation.note(note))
        results = []
        for name in STEPS:
            yield handlers.thought_ms() if name == "charge" else handlers.delay_ms()
            results.append((yield from self._taken(served, claim, operation, name)))
        if world.chance(handlers.faults.fails_late):
            raise HandlerError("after all of its steps")
        return handlers.answered(201, answer_of(claim, results))

    def _taken(
        self, served: ServedRequest, claim: Record, operation: Operation, name: str
    ) -> Generator[Pause, Any, bytes]:
        options: dict[str, Any] = {"at_most_once": name != "reserve"}
        begun = progress_of(claim).step(name)
        if begun is not None and begun.value is None and self.world.chance(CARELESS):
            options["at_most_once"] = False
        if name == "ship":
            options["probe"] = functools.partial(self._asked, claim, name)
        for tries_left in reversed(range(TRIES)):
            function = functools.partial(self._begun, served, claim, name)
            is_known_lost = served.is_known_lost()
            try:
                step = operation.step(name, function, is_known_lost, **options)
                result: bytes = yield from done(step)
            except HandlerError:
                if not tries_left or not self.world.chance(STUBBORN):
                    raise
                self.world.happened("handler", "insists on a step", claim, name)
            else:
                served.process.setting.rules.step_result(claim, name, result)
                return result
        raise AssertionError  # the last one has returned or raised

    def _begun(
        self, served: ServedRequest, claim: Record, name: str, is_known_lost: bool
    ) -> Any:  # `Doing[bytes]`, whose result is stored
        setting = served.process.setting
        setting.rules.step_runs(claim, name, setting.store.get(claim.id), is_lost=is_known_lost)
        self.world.happened("handler", "takes a step", claim, name)
        if self.world.chance(STRUCK):
            setting.strike(served.process)
        self._runs += 1
        response = b"%s %d by %d" % (name.encode(), self._runs, claim.nonce)
        return Doing(self.handlers.charge(claim, response, self.ledgers[name]))

    def _asked(self, claim: Record, name: str, _operation: Operation) -> Doing[object]:
        return Doing(self._probed(claim, name))

    def _probed(self, claim: Record, name: str) -> Generator[Pause, Any, object]:
        handlers, world = self.handlers, self.world
        yield handlers.delay_ms()
        response = self.ledgers[name].ask(claim)
        yield handlers.delay_ms()
        if world.chance(handlers.faults.fails_late):
            world.happened("probe", "does not know", claim)
            return Unknown()
        if response is None or not handlers.broken.probes_tell_the_truth:
            world.happened("probe", "says no", claim)
            return DidNotHappen()
        world.happened("probe", "says yes", claim)
        return Happened(value=response)

    def found(self, record: Record) -> Outcome:
        """
        What an operator decides about *record*, after asking about every step that was begun.

        A step that happened after all may not be taken again; so the rest is done by hand.
        """
        generation, progress = generation_of(record), progress_of(record)
        effects = {name: self.ledgers[name].effects.get(generation) for name in STEPS}
        begun = [step.name for step in progress.steps if step.value is None]
        if not any(effects[name] for name in begun):
            return Outcome(OutcomeKind.RELEASE)
        results = []
        for name in STEPS:
            step, known = progress.step(name), effects[name]
            if step is not None and step.value is not None:
                results.append(decode_value(step.value))
            elif known:
                results.append(known[0].response)
            else:
                results.append(name.encode() + BY_HAND)
        return Outcome(OutcomeKind.COMPLETE, answer_of(record, results))


def answer_of(claim: Record, results: list[bytes]) -> bytes:
    """The answer of a handler whose steps had these *results*."""
    return b"+".join(results) + b" for " + claim.fingerprint


def results_in(answer: bytes) -> dict[str, bytes]:
    """What each step returned, as *answer* tells."""
    parts = answer.rpartition(b" for ")[0].split(b"+")
    return dict(zip(STEPS, parts, strict=True))
