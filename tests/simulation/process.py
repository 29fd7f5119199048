"""A process: a machine with a clock of its own, and the engine that serves requests on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

from coatcheck.core.keep import Outcome
from coatcheck.core.lifecycle import Answer
from coatcheck.core.policy import Policy
from coatcheck.core.record import IN_DOUBT, RUNNING, Record
from coatcheck.engine.clock import StoreClock
from coatcheck.engine.recovery import Recovery
from coatcheck.errors import StoreUnavailable
from coatcheck.operation import Operation

from .database import Database
from .engine import SimulatedAttempts
from .faults import Broken
from .handlers import Handlers
from .rules import Rules
from .served import LABEL, ServedRequest
from .store import EPOCH_MS, SimulatedStore
from .world import Body, Host, Pause, World

# One in a thousand: twenty times what quartz does, so that it shows.
DRIFT_MAX = 0.001
# How wrong a machine's own time may be; it is used only if that part is broken.
WALL_CLOCK_LEASES_MAX = 3.0


# How often the application is asked about what stays in doubt: often, because faults are short.
RECOVER_EVERY_LEASES = 0.1


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
    handle: Callable[[ServedRequest, Record, Operation], Generator[Pause, Any, Outcome]]


class Clock(StoreClock):
    """Production's clock, on a machine whose time begins anywhere and does not run true."""

    def __init__(self, world: World, lease_ms: int, *, is_looking: bool) -> None:
        super().__init__(cast("Any", None))
        self._world = world
        self._start_ms = world.between(0, 1e9)
        self._rate = 1 + world.between(-DRIFT_MAX, DRIFT_MAX)
        self._is_looking = is_looking
        self.is_running = True  # it has never stood still
        if not is_looking:
            wrong_ms = world.between(-1, 1) * WALL_CLOCK_LEASES_MAX * lease_ms
            self._offset_ms = int(EPOCH_MS - self._start_ms + wrong_ms)

    def local_ms(self) -> int:
        """This machine's monotonic clock."""
        return int(self._start_ms + self._world.now_ms * self._rate)

    def _now_ms(self) -> int:
        return self.local_ms() + self._offset_ms  # also for tasks that are thrown away

    def is_due(self) -> bool:
        """The store's clock must be read again."""
        return self._is_looking and super().is_due()

    def stand_still(self, duration_ms: float) -> None:
        """The machine was suspended: its clock did not go on meanwhile."""
        self._start_ms -= duration_ms
        self.is_running = False


class Process(Host):
    """One process with its engine."""

    def __init__(self, world: World, name: str, setting: Setting) -> None:
        super().__init__(world, name)
        self.setting = setting
        is_looking = setting.broken.engine_asks_the_store_for_the_time
        self.clock = Clock(world, setting.policy.lease_ms, is_looking=is_looking)
        self.is_asking_the_time = False
        self.served: dict[int, ServedRequest] = {}  # by the nonces of their attempts
        self.advancing: ServedRequest | None = None  # whose flow runs right now
        self.attempts = SimulatedAttempts(self)
        self.recovery = Recovery(
            self.attempts,
            cast("Any", setting.store),
            every_s=RECOVER_EVERY_LEASES * setting.policy.lease_ms / 1_000,
            service="",
        )
        self.recovery.register_function(LABEL, setting.policy)

    def serve(
        self, id: bytes, fingerprint: bytes, answer: Callable[[Answer | None], object]
    ) -> None:
        """Serve a request, and call *answer* with what its client gets; None: an error."""
        self.start(self._answering(answer, lambda: ServedRequest(self, id, fingerprint).run()))

    def work(self, text: str, answer: Callable[[Answer | None], object]) -> None:
        """Do the deferred work of *text*, and call *answer* with the result; None: an error."""
        self.start(self._answering(answer, lambda: ServedRequest(self, b"", b"").work(text)))

    def _answering(
        self,
        answer: Callable[[Answer | None], object],
        served: Callable[[], Generator[Pause, Any, Answer | None]],
    ) -> Body:
        try:
            yield from self.look()
        except StoreUnavailable:
            answer(None)
            return
        answer((yield from served()))

    def now_ms(self) -> int:
        """The time, as the engine knows it."""
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
                    yield 4 * store.faults.latency_ms
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
        """Recover what was abandoned; a round of `engine/recovery.py`."""
        self.start(self._recover())

    def _recover(self) -> Body:
        store, recovery = self.setting.store, self.recovery
        try:
            yield from self.look()
            found: list[Record] = yield store.ask(functools.partial(store.find, RUNNING, IN_DOUBT))
            for record in found:
                policy = recovery._policy_of(record)
                if policy is not None and recovery._is_due(self.attempts, record, policy):
                    yield from ServedRequest(self, record.id, record.fingerprint).recover(policy)
        except StoreUnavailable:
            pass

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
