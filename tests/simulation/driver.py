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
from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.core.recover import recover
from coatcheck.core.serve import (
    Answer,
    Ending,
    Execute,
    Reconcile,
    Refuse,
    Seen,
    Ticket,
    Watch,
    serve,
)
from coatcheck.core.transact import IN_TRANSACTION, transact
from coatcheck.engine.desk import Desk
from coatcheck.engine.patience import Patience
from coatcheck.errors import StoreUnavailable

from .handlers import HandlerError
from .transactions import SimulatedTransaction
from .world import Pause, Resume

if TYPE_CHECKING:
    from coatcheck.engine.heart import Held

    from .process import Process

R = TypeVar("R")

# The first look of a waiter, in shares of how long it waits; production looks sooner, and oftener.
POLL_FIRST = 0.05
POLL_GROWTH = 1.6
# More than any visit needs: one that goes round and round without a pause would stop the world.
EFFECTS_MAX = 1_000


class Visit:
    """One request in one process."""

    def __init__(self, process: Process, id: bytes, fingerprint: bytes) -> None:
        world = process.world
        self.process = process
        self.nonce = world.random.getrandbits(62)
        self.ticket = Ticket(id, fingerprint, process.clock.now_ms(), self.nonce)
        self.policy = process.setting.policy
        self.claim: Record | None = None  # what it executed, and how that ended
        self.ending: Ending | None = None
        self._desk = cast("Any", process)  # which has the cache and the heart of a desk
        self._held: Held | None = None
        self._together = SimulatedTransaction(self) if self.policy.mode == "transaction" else None

    def __str__(self) -> str:
        return f"{self.process} visit {self.nonce % 10_000:04}"

    def run(self) -> Generator[Pause, Any, Answer | None]:
        """The answer; None: an error."""
        process, world = self.process, self.process.world
        answer: Answer | None = Desk.recall(self._desk, self.ticket, self.policy)
        if answer is None:
            begin = serve if self.policy.mode == "record" else transact
            may_claim = not world.chance(process.setting.store.weather.crowded)
            world.happened(self, "begins")
            try:
                answer = yield from self._drive(
                    begin(self.ticket, self.policy, may_claim=may_claim)
                )
            except (StoreUnavailable, HandlerError) as error:
                world.happened(self, "ends in an error", str(error))
            finally:
                if self._held is not None:
                    process.let_go(self._held)
                if self._together is not None:
                    self._together.abandon()
        else:
            world.happened(self, "recalls")
        if answer is not None:
            process.setting.rules.answered(self, answer, process.setting.store.get(self.ticket.id))
            what = answer.problem.code if isinstance(answer, Refuse) else type(answer).__name__
            world.happened(self, f"is told: {what}")
        return answer

    def recover(self) -> Generator[Pause, Any, None]:
        """Settle what nobody may come back for; raises where the store does not answer."""
        ticket = self.ticket
        seen = Seen((yield from self.standing(ticket.id)), ticket.now_ms)
        if seen.record.version:
            fate = yield from self._drive(recover(seen, ticket, self.policy))
            if fate is not None:
                self.process.world.happened(self, "recovers", fate.value)

    def _drive(self, flow: Flow[R]) -> Generator[Pause, Any, R]:
        patience: Patience | None = None
        try:
            effect = next(flow)
            for _ in range(EFFECTS_MAX):
                try:
                    result: Any = yield from self._perform(effect)
                except (StoreUnavailable, HandlerError) as failure:
                    patience = patience or self._patience()
                    pause_s = patience.pause_s(effect, failure)
                    if pause_s is not None:
                        yield pause_s * 1_000
                        continue
                    Desk.give_up(self._desk, effect, failure)
                    effect = flow.throw(failure)
                else:
                    effect = flow.send(result)
                patience = None
        except StopIteration as done:
            value: R = done.value
            return value
        self.process.world.broken("every visit comes to its end")

    def _patience(self) -> Patience:
        return Patience(self.policy.patience_ms / 1_000 if self.ending is not None else 0)

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
        setting.rules.begun(claim)
        self.process.world.happened(self, "executes", claim)
        setting.strike(self.process)
        if self._together is None:
            self._held = self.process.hold(claim)
            self.ending = yield from setting.handlers.execute(claim)
        else:
            self.ending = yield from setting.handlers.execute(claim, self._together.charge)
        return self.ending

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
                if seen.record.version != watch.version or seen.now_ms >= watch.until_ms:
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
        return Seen((yield from self.standing(id)), self.process.clock.now_ms())

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
