"""A process: a clock of its own, a heart, and what it remembers; it serves visits.

It does what an engine does, in the words of `engine/sync.py`, `engine/desk.py`, `engine/heart.py`
and `engine/clock.py`, on the simulated store. What those keep in memory, it keeps in the same
classes where they do no I/O: the line of who waits, the cache, and the claims that are held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

from coatcheck.core.hand_over import opened
from coatcheck.core.policy import Policy
from coatcheck.core.record import (
    IN_DOUBT,
    RUNNING,
    Record,
    Swap,
    is_lease_over,
    is_same_attempt,
    is_same_write,
    renewed,
)
from coatcheck.core.serve import Answer, Ending
from coatcheck.engine.cache import Cache
from coatcheck.engine.clock import LOOK_EVERY_MS
from coatcheck.engine.desk import Desk
from coatcheck.engine.heart import BEATS_PER_LEASE
from coatcheck.engine.held import Held
from coatcheck.engine.waiting import Line
from coatcheck.errors import StoreUnavailable
from coatcheck.operation import Operation

from .database import Database
from .driver import Visit
from .handlers import Handlers
from .rules import Rules
from .store import EPOCH_MS, SimulatedStore
from .weather import Broken
from .world import Body, Host, Pause, World

# One in a thousand: twenty times what quartz does, so that it shows.
DRIFT_MAX = 0.001
# How wrong a machine's own idea of the time may be; nobody uses it, unless that is broken.
WALL_CLOCK_LEASES_MAX = 3.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What all processes share."""

    store: SimulatedStore
    database: Database
    policy: Policy
    handlers: Handlers
    rules: Rules
    broken: Broken
    strike: Callable[[Process], object]  # called when a process begins to execute
    # What the application does when it is executed.
    handle: Callable[[Visit, Record, Operation], Generator[Pause, Any, Ending]]


class Clock:
    """`engine.clock.StoreClock`, on a machine whose time begins anywhere and does not run true."""

    def __init__(self, world: World, lease_ms: int, *, is_looking: bool) -> None:
        self._world = world
        self._start_ms = world.between(0, 1e9)
        self._rate = 1 + world.between(-DRIFT_MAX, DRIFT_MAX)
        self._looked_ms: int | None = None
        self._offset_ms = 0
        self._is_looking = is_looking
        self.is_running = True  # it has never stood still
        if not is_looking:
            wrong_ms = world.between(-1, 1) * WALL_CLOCK_LEASES_MAX * lease_ms
            self._offset_ms = int(EPOCH_MS - self._start_ms + wrong_ms)

    def local_ms(self) -> int:
        """This machine's monotonic clock."""
        return int(self._start_ms + self._world.now_ms * self._rate)

    def now_ms(self) -> int:
        """The store's time, as this process knows it."""
        return self.local_ms() + self._offset_ms

    def is_due(self) -> bool:
        """It is time to look at the store's clock."""
        if not self._is_looking:
            return False
        return self._looked_ms is None or self.local_ms() - self._looked_ms >= LOOK_EVERY_MS

    def set(self, asked_ms: int, store_ms: int) -> None:
        """Learn that the store said *store_ms* when asked at *asked_ms*."""
        answered_ms = self.local_ms()
        self._offset_ms = store_ms - (asked_ms + answered_ms) // 2
        self._looked_ms = answered_ms

    def stand_still(self, duration_ms: float) -> None:
        """The machine was suspended: its clock did not go on meanwhile."""
        self._start_ms -= duration_ms
        self.is_running = False


class Process(Host):
    """One process with its engine."""

    secret = b""

    def __init__(self, world: World, name: str, setting: Setting) -> None:
        super().__init__(world, name)
        self.setting = setting
        self.line = Line()
        self.cache = Cache()
        self.held: dict[bytes, Held] = {}
        self.under_way: dict[bytes, Record] = {}
        is_looking = setting.broken.engine_asks_the_store_for_the_time
        self.clock = Clock(world, setting.policy.lease_ms, is_looking=is_looking)
        self.is_asking_the_time = False
        self._is_beating = False

    def serve(self, id: bytes, fingerprint: bytes, tell: Callable[[Answer | None], object]) -> None:
        """Serve a request, and *tell* its client the answer; None: an error."""
        self.start(self._served(id, fingerprint, tell))

    def _served(
        self, id: bytes, fingerprint: bytes, tell: Callable[[Answer | None], object]
    ) -> Body:
        try:
            yield from self.look()
        except StoreUnavailable:
            tell(None)
            return
        answer = yield from Visit(self, id, fingerprint).run()
        tell(answer)

    def work(self, text: str, tell: Callable[[Answer | None], object]) -> None:
        """Do what was handed over as *text*, and *tell* the queue the answer; None: an error."""
        self.start(self._worked(text, tell))

    def _worked(self, text: str, tell: Callable[[Answer | None], object]) -> Body:
        handed = opened(text, self.secret)
        assert handed is not None
        try:
            yield from self.look()
        except StoreUnavailable:
            tell(None)
            return
        answer = yield from Visit(self, handed.id, b"").work(handed)
        tell(answer)

    def now_ms(self) -> int:
        """The time, as the engine's desk would say it."""
        return self.clock.now_ms()

    def local_s(self) -> float:
        """This machine's monotonic clock."""
        return self.clock.local_ms() / 1_000

    def look(self) -> Generator[Pause, Any, None]:
        """Ask the store for the time, if it is time to."""
        if self.clock.is_due():
            asked_ms, store = self.clock.local_ms(), self.setting.store
            self.is_asking_the_time = True
            try:
                if self.setting.broken.freezes_while_it_asks_the_time:
                    self.setting.strike(self)
                    yield 4 * store.weather.latency_ms
                store_ms: int = yield store.ask(store.now_ms)
            finally:
                self.is_asking_the_time = False
            self.clock.set(asked_ms, store_ms)

    def sweep(self) -> None:
        """Have the store forget what it may."""
        self.start(self._sweep())

    def _sweep(self) -> Body:
        store = self.setting.store
        try:
            yield from self.look()
            yield store.ask(functools.partial(store.sweep, self.clock.now_ms()))
        except StoreUnavailable:
            pass

    def recover(self) -> None:
        """Settle what was abandoned; a round of `engine/reconciler.py`."""
        self.start(self._recover())

    def _recover(self) -> Body:
        store = self.setting.store
        try:
            yield from self.look()
            found: list[Record] = yield store.ask(functools.partial(store.find, RUNNING, IN_DOUBT))
            for record in found:
                if is_lease_over(self.standing(record), self.clock.now_ms()):
                    yield from Visit(self, record.id, record.fingerprint).recover()
        except StoreUnavailable:
            pass

    def noticed(self, swap: Swap, lost: Record | None) -> Record | None:
        """*lost*, unless it is our own record; see `Desk.noticed`."""
        record = swap.record
        assert record is not None
        if lost is not None:
            is_own = is_same_write(lost, record)
            if not is_own or not self.setting.broken.engine_recognises_its_own_write:
                return lost if lost.nonce == record.nonce else self.standing(lost)
            self.world.happened(self, "meets its own record", record)
        if record.state != RUNNING:
            self._remember(record)
        return None

    def standing(self, record: Record) -> Record:
        """*record* as it stands in this process; see `Desk.standing`."""
        if not self.setting.broken.engine_knows_what_lives_in_it:
            return record
        return Desk.standing(cast("Any", self), record)

    def _remember(self, record: Record) -> None:
        if record.response is not None:
            self.cache.put(record)
        self.line.tell(record)

    # --- the heart ----------------------------------------------------------------------------

    @property
    def heart(self) -> Process:
        """It beats here."""
        return self

    def hold(self, claim: Record) -> Held:
        """Keep *claim* alive from now on."""
        before = self.held.get(claim.id)
        held = self.held[claim.id] = Held(claim, self.setting.policy.lease_ms)
        if before is not None and before.claim.nonce != claim.nonce:
            before.lose()
        self._beat_from_now_on()
        return held

    def let_go(self, held: Held) -> None:
        """Stop renewing, unless its end is still to be written; who waits looks at the store."""
        id = held.claim.id
        if held.end is None and self.held.get(id) is held:
            del self.held[id]
            self.line.nudge(id, is_promised=False)

    def finish(self, held: Held, end: Swap) -> None:
        """Write the end of an execution as soon as the store is back."""
        self.world.happened(self, "leaves an end to the heart", end.record)
        held.end = end
        self._beat_from_now_on()

    def wake(self) -> None:
        """It beats when it does."""

    def _beat_from_now_on(self) -> None:
        if not self._is_beating:
            self._is_beating = True
            self.start(self._beats())

    def _beats(self) -> Body:
        while self.held:
            yield self.setting.policy.lease_ms / BEATS_PER_LEASE
            renews = self.setting.broken.heart_renews
            for part in (self._renew, self._finish, self.look) if renews else (self._finish,):
                try:
                    yield from part()
                except StoreUnavailable:
                    self.world.happened(self, "a beat fails")
        self._is_beating = False

    def _finish(self) -> Generator[Pause, Any, None]:
        """`Unfinished.write`: what could not be ended when it was over."""
        for held in [held for held in self.held.values() if held.end is not None]:
            while held.end is not None:
                swap, record = held.end, held.end.record
                assert record is not None
                [lost] = yield from self._swap([swap])
                held.end = None
                if lost is None or is_same_write(lost, record):
                    self._remember(record)
                elif lost.nonce == record.nonce and lost.state in {RUNNING, IN_DOUBT} - {
                    record.state
                }:  # on top of a renewal, or of who parked it
                    ended = record._replace(version=lost.version + 1, progress=lost.progress)
                    held.end = Swap(swap.id, lost.version, ended)
            self.let_go(held)

    def _renew(self) -> Generator[Pause, Any, None]:
        now_ms = self.clock.now_ms()
        due = [held for held in self.held.values() if held.is_due(now_ms)]
        if not due:
            return
        swaps = [
            Swap(h.claim.id, h.claim.version, renewed(h.claim, now_ms + h.lease_ms)) for h in due
        ]
        results = yield from self._swap(swaps)
        for held, swap, lost in zip(due, swaps, results, strict=True):
            assert swap.record is not None
            if lost is None or is_same_write(lost, swap.record):
                held.claim = swap.record
            elif is_same_attempt(lost, held.claim):
                held.claim = lost
            elif held.end is None and self.held.get(held.claim.id) is held:
                self.let_go(held)
                held.lose()

    def _swap(self, swaps: list[Swap]) -> Generator[Pause, Any, list[Record | None]]:
        store = self.setting.store
        results: list[Record | None] = yield store.ask(
            functools.partial(store.swap, swaps, f"heart of {self}")
        )
        return results

    # --- what becomes of it -------------------------------------------------------------------

    def freeze(self, duration_ms: float, *, is_suspended: bool) -> None:
        """Do nothing for a while; *is_suspended*: the clock of the machine stands still, too."""
        if self.is_asking_the_time and not self.setting.broken.freezes_while_it_asks_the_time:
            return
        self.frozen_until_ms = self.world.now_ms + duration_ms
        is_suspended = is_suspended and self.clock.is_running  # once, lest it is away too long
        if is_suspended:
            self.clock.stand_still(duration_ms)
        self.world.happened(self, "is suspended" if is_suspended else "freezes")

    def crash(self) -> None:
        """End at once; what is on its way still arrives."""
        self.is_alive = False
        self.world.happened(self, "crashes")
        self.setting.database.lose(self)
