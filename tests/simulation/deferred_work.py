"""Deferred work: a handler that gives it to a queue, and the queue that delivers it.

Like real queues it delivers late, more than once, to any process, and again until a worker
acknowledges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import Answer, Refuse
from coatcheck.core.record import Record
from coatcheck.operation import Operation

from .handlers import Ended, HandlerError, Handlers
from .runner import done
from .world import World

if TYPE_CHECKING:
    from .process import Process

# How often a message is delivered at most, after how many leases again, and how often twice.
DELIVERIES_MAX = 6
AGAIN_LEASES = 2.0
TWICE = 0.2
# After these answers the message is delivered again; any other answer settles it.
BUSY_CODES = ("in-progress", "too-many-waiting")
LONG_LEASES = 3.0


class Queue:
    """Messages on their way to workers."""

    def __init__(self, world: World, lease_ms: int, worker: Callable[[], Process]) -> None:
        self.world = world
        self._lease_ms = lease_ms
        self._worker = worker
        self._settled: set[str] = set()

    def put(self, text: str, delay_ms: float) -> None:
        """Deliver *text* after *delay_ms*, and perhaps once more at any time."""
        self.world.later(delay_ms, self._deliver, text, DELIVERIES_MAX)
        if self.world.chance(TWICE):
            self.world.later(self.world.between(0, 4 * delay_ms), self._deliver, text, 1)

    def _deliver(self, text: str, deliveries_left: int) -> None:
        if text in self._settled and deliveries_left > 1:
            return
        self.world.happened("queue", "delivers")

        def settle(answer: Answer | None) -> None:
            is_busy = isinstance(answer, Refuse) and answer.problem.code in BUSY_CODES
            if answer is not None and not is_busy:
                self._settled.add(text)

        self._worker().work(text, settle)
        if deliveries_left > 1:
            again_ms = AGAIN_LEASES * self._lease_ms
            self.world.later(again_ms, self._deliver, text, deliveries_left - 1)


def execute(handlers: Handlers, claim: Record) -> Ended:
    """The work, in the process that it was delivered to; `outcome_of_accepted` on what it says."""
    outcome = yield from handlers.execute(claim)
    return Outcome(OutcomeKind.COMPLETE) if outcome.kind is OutcomeKind.REJECT else outcome


def defer_work(handlers: Handlers, queue: Queue, claim: Record, operation: Operation) -> Ended:
    """The handler: it gives its work to the *queue*, and may fail before or after that."""
    world, faults = handlers.world, handlers.faults
    if (refusal := (yield from handlers.begin(claim))) is not None:
        return refusal
    lease = handlers.policy.lease_ms / 1_000
    leases = world.random.choice((1.0, LONG_LEASES))
    text = yield from done(operation.defer(leases * lease))
    world.happened("handler", "defers", claim)
    fails = world.chance(faults.fails_late)
    if fails and world.chance(0.5):
        raise HandlerError("deferred, but the queue is unreachable")
    is_late = world.chance(faults.late)
    queue.put(text, handlers.delay_ms() + (world.between(0, faults.late_ms_max) * is_late))
    yield handlers.delay_ms() if faults.is_calm else handlers.thought_ms()
    if fails:
        world.happened("handler", "takes it back", claim)
        if world.chance(0.5):
            return handlers.answered(401, b"not you, after all")
        raise HandlerError("deferred, and failed after all")
    return Outcome(OutcomeKind.COMPLETE, b"accepted")
