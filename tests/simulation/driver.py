"""A visit: one request, whose flow is driven as the engines drive it.

A write whose answer was lost is tried once more and recognises its own record, the end of an
execution is tried for longer and then left to the heart, who waits stands in line and looks from
time to time: `engine/driver.py`, with `yield` where that would block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.hand_over import Handed, resume
from coatcheck.core.policy import changed
from coatcheck.core.progress import Resolution
from coatcheck.core.record import RUNNING, Record, Swap, is_lease_over
from coatcheck.core.recover import recover
from coatcheck.core.replay import Fate
from coatcheck.core.resolve import Resolved, Stands, rerun, resolve
from coatcheck.core.serve import (
    Answer,
    Ending,
    Execute,
    Executed,
    Reconcile,
    Refuse,
    Seen,
    Ticket,
    Watch,
    serve,
)
from coatcheck.core.transact import IN_TRANSACTION, transact
from coatcheck.engine.desk import Desk, ending_of_error, judged
from coatcheck.engine.patience import Patience
from coatcheck.engine.waiting import has_changed
from coatcheck.errors import ClaimLost, StepInDoubt, StoreUnavailable
from coatcheck.operation import Operation

from .handlers import HandlerError
from .hands import SimulatedClient, SimulatedHand
from .transactions import SimulatedTransaction
from .world import Pause, Resume

if TYPE_CHECKING:
    from coatcheck.engine.held import Held

    from .process import Process

R = TypeVar("R")

# The first look of a waiter, in shares of how long it waits; production looks sooner, and oftener.
POLL_FIRST = 0.05
POLL_GROWTH = 1.6
# More than any visit needs: one that goes round and round without a pause would stop the world.
EFFECTS_MAX = 1_000

# What a handler may raise.
ERRORS = (HandlerError, ClaimLost, StepInDoubt, StoreUnavailable)


class HandedOver(Exception):
    """The handler has handed its claim over: its client is told to ask later."""


class Visit:
    """One request in one process; or one delivery of its work, or a person's decision about it."""

    def __init__(
        self, process: Process, id: bytes, fingerprint: bytes, *, is_person: bool = False
    ) -> None:
        world = process.world
        self.process = process
        self.nonce = world.random.getrandbits(62)
        self.ticket = Ticket(id, fingerprint, process.clock.now_ms(), self.nonce)
        self.policy = process.setting.policy
        self.is_person = is_person
        self.is_work = False
        self.claim: Record | None = None  # what it executed, and how that ended
        self.ending: Ending | None = None
        self.beside: int | None = None  # whose claim its process held when it last decided to write
        self._error: Exception | None = None  # of its handler
        self._desk = cast("Any", process)  # which has the cache and the heart of a desk
        self._held: Held | None = None
        self._together = SimulatedTransaction(self) if self.policy.mode == "transaction" else None

    def __str__(self) -> str:
        return f"{self.process} visit {self.nonce % 10_000:04}"

    def run(self) -> Generator[Pause, Any, Answer | None]:
        """The answer; None: an error."""
        world = self.process.world
        known = Desk.recall(self._desk, self.ticket, self.policy)
        if known is not None:
            world.happened(self, "recalls")
            return self._answered(known)
        begin = serve if self.policy.mode == "record" else transact
        may_claim = not world.chance(self.process.setting.store.weather.crowded)
        world.happened(self, "begins")
        answer = yield from self._executed(begin(self.ticket, self.policy, may_claim=may_claim))
        return self._answered(answer)

    def work(self, handed: Handed) -> Generator[Pause, Any, Answer | None]:
        """Do what was *handed* over; `Engine.resume`. The answer; None: an error."""
        self.is_work = True
        try:
            standing = (yield from self._look(handed.id)).record
        except StoreUnavailable:
            return None
        self.ticket = self.ticket._replace(fingerprint=standing.fingerprint)
        self.process.world.happened(self, "takes up work")
        flow = resume(handed, self.ticket, self.policy, standing)
        return self._answered((yield from self._executed(flow)))

    def _executed(self, flow: Flow[R]) -> Generator[Pause, Any, R | None]:
        """Drive *flow*, which may execute; None: an error, or it comes later."""
        answer: R | None = None
        try:
            answer = yield from self._drive(flow)
        except HandedOver:
            self.process.world.happened(self, "is told: Accepted")
        except (StoreUnavailable, HandlerError) as error:
            self._error = self._error or error
        finally:
            if self._held is not None:
                self.process.let_go(self._held)
            if self._together is not None:
                self._together.abandon()
        if self._error is not None:
            self.process.world.happened(self, "ends in an error", str(self._error))
            return None
        return answer

    def _answered(self, answer: Answer | None) -> Answer | None:
        if answer is not None:
            setting = self.process.setting
            setting.rules.answered(self, answer, setting.store.get(self.ticket.id))
            what = answer.problem.code if isinstance(answer, Refuse) else type(answer).__name__
            self.process.world.happened(self, f"is told: {what}")
        return answer

    # --- as a person --------------------------------------------------------------------------

    def resolve(
        self, seen: Seen, ending: Ending, *, abandoned: bool
    ) -> Generator[Pause, Any, None]:
        """Say what became of what was *seen*; raises where the store does not answer."""
        outcome = "happened" if ending.fate is Fate.KEEP else "did not happen"
        why = Resolution(seen.now_ms, outcome, str(self), "asked downstream")
        told = yield from self._drive(resolve(seen, ending, why, abandoned=abandoned))
        is_done = isinstance(told, Resolved)
        self.process.world.happened(self, "decides" if is_done else "decides too late", outcome)

    def rerun(self, seen: Seen, *, abandoned: bool) -> Generator[Pause, Any, None]:
        """Run what was *seen* again, now."""
        self.policy = changed(self.policy, {"recovery": "manual", "reconcile": None})
        self.ticket = self.ticket._replace(fingerprint=seen.record.fingerprint)
        why = Resolution(seen.now_ms, "run again", str(self), "downstream knows nothing of it")
        flow = rerun(seen, why, self.ticket, self.policy, abandoned=abandoned)
        told = yield from self._executed(flow)
        if isinstance(told, Executed):
            self._answered(told)
        elif isinstance(told, Stands):
            self.process.world.happened(self, "decides too late", "run again")

    # --- nobody waits for it ------------------------------------------------------------------

    def recover(self) -> Generator[Pause, Any, None]:
        """Settle what nobody may come back for; raises where the store does not answer."""
        ticket = self.ticket
        seen = Seen((yield from self._look(ticket.id)).record, ticket.now_ms)
        if seen.record.version:
            fate = yield from self._drive(recover(seen, ticket, self.policy))
            if fate is not None:
                self.process.world.happened(self, "recovers", fate.value)

    def _drive(self, flow: Flow[R]) -> Generator[Pause, Any, R]:
        patience: Patience | None = None
        try:
            effect = next(flow)
            began_s = self.process.local_s()
            for _ in range(EFFECTS_MAX):
                try:
                    result: Any = yield from self._perform(effect)
                except (StoreUnavailable, HandlerError) as failure:
                    patience = patience or self._patience(began_s)
                    pause_s = patience.pause_s(effect, failure)
                    if pause_s is not None:
                        yield pause_s * 1_000
                        continue
                    Desk.give_up(self._desk, effect, failure)
                    effect = flow.throw(failure)
                else:
                    effect = flow.send(result)
                patience, began_s = None, self.process.local_s()
        except StopIteration as done:
            value: R = done.value
            return value
        self.process.world.broken("every visit comes to its end")

    def _patience(self, began_s: float) -> Patience:
        left_s = self.policy.patience_ms / 1_000 if self.ending is not None else 0
        return Patience(left_s, began_s, self.process.local_s)

    def _perform(self, effect: Effect[Any]) -> Generator[Pause, Any, Any]:
        if isinstance(effect, Swap):
            return self._swap(effect)
        if isinstance(effect, Watch):
            return self._watch(effect)
        if isinstance(effect, Execute):
            return self._execute(effect.claim)
        if isinstance(effect, Reconcile):
            return self._reconcile(effect.claim)
        assert isinstance(effect, IN_TRANSACTION)
        assert self._together is not None
        return self._together.perform(effect)

    # --- writes -------------------------------------------------------------------------------

    def _swap(self, swap: Swap) -> Generator[Pause, Any, Record | None]:
        setting = self.process.setting
        beside = self.process.held.get(swap.id)
        self.beside = None if beside is None else beside.claim.nonce
        ask = functools.partial(setting.store.swap, [swap], self)
        results: list[Record | None] = yield setting.store.ask(ask)
        assert swap.record is not None
        if setting.broken.engine_believes_in_its_claims and swap.record.state == RUNNING:
            return None
        return self.process.noticed(swap, results[0])

    # --- executions ---------------------------------------------------------------------------

    def _execute(self, claim: Record) -> Generator[Pause, Any, Ending]:
        setting = self.process.setting
        self.claim = claim
        setting.rules.begun(claim, is_work=self.is_work)
        self.process.world.happened(self, "executes", claim)
        setting.strike(self.process)
        if self._together is None:
            self.ending = yield from self._handled(claim)
        else:
            self.ending = yield from setting.handlers.execute(claim, self._together.charge)
        return self.ending

    def _handled(self, claim: Record) -> Generator[Pause, Any, Ending]:
        """`Engine._execute`, and what an adapter makes of its operation."""
        held = self._held = self.process.hold(claim)
        operation = Operation(claim, hand=functools.partial(SimulatedHand, self, held))
        client = operation.client = SimulatedClient(self, held)
        try:
            ending = yield from self.process.setting.handle(self, claim, operation)
        except ERRORS as error:
            self._error = error
            return ending_of_error(operation, error, self.policy)
        if client.is_handed_over and ending.fate is Fate.KEEP:
            raise HandedOver
        return judged(operation, ending)

    def is_known_lost(self) -> bool:
        """Its lease is over, as it knows itself, and somebody else has its claim."""
        held, setting = self._held, self.process.setting
        assert held is not None
        is_over = is_lease_over(held.claim, self.process.now_ms())
        standing = setting.store.get(held.claim.id)
        is_ours = standing.nonce == held.claim.nonce and standing.state == RUNNING
        return is_over and not is_ours

    def _reconcile(self, claim: Record) -> Generator[Pause, Any, Ending]:
        held = self.process.hold(claim)
        try:
            return (yield from self.process.setting.handlers.reconcile(claim))
        finally:
            self.process.let_go(held)

    # --- waiting ------------------------------------------------------------------------------

    def _watch(self, watch: Watch) -> Generator[Pause, Any, Seen | None]:
        process, now_ms = self.process, self.process.clock.now_ms
        if watch.until_ms <= now_ms():
            return (yield from self._look(watch.id))
        waiter = Waiter()
        if not process.line.join(watch.id, waiter.wake, self.policy.waiters_max):
            return None
        process.world.happened(self, "waits")
        try:
            for pause_ms in self._pauses_ms(watch.id):
                left_ms = max(0.0, watch.until_ms - now_ms())
                yield from waiter.wait(process.world.later, min(pause_ms, left_ms))
                if waiter.record is not None:
                    return Seen(waiter.record, now_ms())
                seen = yield from self._look(watch.id)
                if has_changed(seen, watch):
                    return seen
        finally:
            process.line.leave(watch.id, waiter.wake)
        raise AssertionError  # the pauses never end

    def _pauses_ms(self, id: bytes) -> Iterator[float]:
        pause_ms = POLL_FIRST * self.policy.wait_ms
        while True:
            is_here = id in self.process.held or id in self.process.under_way
            yield math.inf if is_here else pause_ms * self.process.world.between(0.8, 1.2)
            pause_ms *= POLL_GROWTH

    def _look(self, id: bytes) -> Generator[Pause, Any, Seen]:
        standing = self.process.standing((yield from self.standing(id)))
        return Seen(standing, self.process.clock.now_ms())

    def standing(self, id: bytes) -> Generator[Pause, Any, Record]:
        """What the store has of *id*."""
        store = self.process.setting.store
        record: Record = yield store.ask(functools.partial(store.get, id))
        return record


class Waiter:
    """A task that waits; anybody may wake it."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self._is_woken = False
        self._resume: Resume | None = None

    def wake(self, record: Record | None) -> None:
        """End the wait, or the next one."""
        if record is not None:
            self.record = record
        self._is_woken = True
        if self._resume is not None:
            self._resume()

    def wait(self, later: Any, timeout_ms: float) -> Generator[Pause, Any, None]:
        """Until somebody wakes us, or it has been long enough."""
        if not self._is_woken:

            def begin(resume: Resume) -> None:
                self._resume = resume
                later(timeout_ms, resume)

            yield begin
        self._is_woken = False
