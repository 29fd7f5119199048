"""The engine of one simulated process: production's, with its I/O in virtual time.

`Attempts`, `Heartbeat` and `StepWriter` are production's own. The subclasses here only replace what
needs a thread, the operating system or real time, and count what happens. Of the heartbeat that is
its thread: when it ticks, and in which order it does its work.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from coatcheck.core.lifecycle import ClaimRequest, Refuse, Replay
from coatcheck.core.policy import Policy
from coatcheck.core.record import Record, Swap, is_same_write
from coatcheck.engine import attempts as attempts_module
from coatcheck.engine import clock as clock_module
from coatcheck.engine import recovery as recovery_module
from coatcheck.engine import steps as steps_module
from coatcheck.engine.attempts import Attempts
from coatcheck.engine.leases import TICKS_PER_LEASE, Heartbeat
from coatcheck.engine.reconcile_calls import ReconcileCall
from coatcheck.engine.steps import StepWriter
from coatcheck.engine.write_retry import WriteRetry
from coatcheck.errors import StoreUnavailable
from coatcheck.operation import Lease
from coatcheck.telemetry import Telemetry

from .runner import Doing, Runner
from .world import Body, Pause, Resume, World

if TYPE_CHECKING:
    from .process import Process

# Production polls as often as is right for leases of this length; longer ones are polled less
# often here, so that a schedule costs the same with any lease.
POLLED_LEASE_MS = 1_000


class Waiter:
    """A waiting request; see `engine/waiters.py`."""

    def __init__(self, world: World, what: str = "waits") -> None:
        self.record: Record | None = None
        self._world = world
        self._what = what
        self._is_woken = False
        self._resume: Resume | None = None

    def wake(self, record: Record | None) -> None:
        """End the wait, or the next one."""
        if record is not None:
            self.record = record
        self._is_woken = True
        if self._resume is not None:
            self._resume()

    def set(self) -> None:
        """The same, as an event says it."""
        self.wake(None)

    def wait(self, timeout_s: float) -> Doing[None]:
        """Wait until woken, or for *timeout_s*."""
        if self._what:
            self._world.happened("a request", self._what)
        return Doing(self._wait(timeout_s * 1_000))

    def _wait(self, timeout_ms: float) -> Generator[Pause, Any, None]:
        if not self._is_woken:

            def begin(resume: Resume) -> None:
                self._resume = resume
                self._world.later(timeout_ms, resume)

            yield begin
        self._is_woken = False


class SimulatedHeartbeat(Heartbeat):
    """Production's heartbeat, in a task in the place of its thread."""

    def __init__(self, process: Process, made: Heartbeat, *, clock: Any, waiters: Any) -> None:
        super().__init__(
            made.store,
            clock,
            waiters=waiters,
            on_written=made._pending._on_written,
            monotonic=process.local_s,
        )
        self._process = process
        self._wake: Any = Waiter(process.world, "")
        self._runner = Runner(process, lambda _swap: f"heartbeat of {process}")

    def start(self) -> None:
        """Tick from now on, for as long as there is anything to do."""
        if self._thread is None and self._process.is_alive:
            self._thread = cast("Any", self)
            self._process.start(self._ticks())

    def schedule_completion(self, lease: Lease, completion: Swap) -> None:
        """Write the *completion* of *lease* as soon as the store is back."""
        if self._process.is_alive:  # else its tasks are only being thrown away
            self._process.world.happened(
                self._process, "leaves its completion to the heartbeat", completion.record
            )
            super().schedule_completion(lease, completion)

    def _ticks(self) -> Body:
        pause_s = self._process.world.between(0, self._pause_s())  # a real one ticks all the time
        while self.leases or self._pending:
            yield from self._wake.wait(pause_s).body
            for part in (self._renew, self._write_pending, self._process.look):
                try:
                    yield from part()
                except StoreUnavailable:
                    self._process.world.happened(self._process, "a heartbeat fails")
            pause_s = self._pause_s()
        self._thread = None

    def _pause_s(self) -> float:
        # Not sooner for a pending completion: if the store is away, that is only more steps, and
        # another attempt that takes over meanwhile is what the schedules look for.
        return self._lease_ms / 1_000 / TICKS_PER_LEASE

    def _renew(self) -> Generator[Pause, Any, None]:
        return self._runner.run(self.renew(self.now_ms()))

    def _write_pending(self) -> Generator[Pause, Any, None]:
        return self._runner.run(self.write_pending(self.now_ms()))


class SimulatedAttempts(Attempts):
    """Production's attempts, in one process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        super().__init__(
            cast("Any", process.setting.store),
            secret=b"",
            clock=cast("Any", process.clock),
            telemetry=Telemetry((), ()),
            new_waiter=partial(Waiter, process.world),
            is_async=False,
            running_loop=lambda: None,
        )
        self._ask = _ask
        runner = Runner(process, self._writer_of)
        self.steps = StepWriter(self.now_ms, lambda flow: Doing(runner.run(flow)))

    def _renew(self) -> None:
        super()._renew()
        # Drawn from the seed, not from the operating system.
        self._nonces = itertools.count(self.process.world.random.getrandbits(62))
        self.heartbeat = SimulatedHeartbeat(
            self.process, self.heartbeat, clock=self.clock, waiters=self.waiters
        )

    def _writer_of(self, swap: Swap) -> object:
        assert swap.record is not None  # a step deletes nothing
        return self.process.served.get(swap.record.nonce)

    def request_for(self, record: Record) -> ClaimRequest:
        """A request for the operation of *record* itself."""
        request = super().request_for(record)
        if self.process.advancing is not None:
            self.process.advancing.becomes(request)
        return request

    def find_replay(self, request: ClaimRequest, policy: Policy) -> Replay | Refuse | None:
        """The answer to *request* from memory, if its completed record is there."""
        known = super().find_replay(request, policy)
        if known is not None:
            self.process.world.happened(self.process, "recalls")
        return known

    def after_write(self, swap: Swap, conflict: Record | None, **more: Any) -> Record | None:
        """Return *conflict*, unless it is our own record."""
        if (
            conflict is not None
            and swap.record is not None
            and is_same_write(conflict, swap.record)
        ):
            self.process.world.happened(self.process, "meets its own record", conflict)
        return super().after_write(swap, conflict, **more)

    def _is_within_quota(self, _request: ClaimRequest, _policy: Policy) -> bool:
        return not self.process.world.chance(self.process.setting.store.faults.crowded)

    def _poll_pauses_s(self, id: bytes) -> Iterator[float]:
        scale = self.process.setting.policy.lease_ms / POLLED_LEASE_MS
        return (pause_s * scale for pause_s in super()._poll_pauses_s(id))


def _ask(call: ReconcileCall) -> Any:
    """Call the reconcile function; how long it may take is for `reconcile_calls` and its tests."""
    return call.ask()


@contextmanager
def machine_clocks(world: World) -> Iterator[None]:
    """Have production read the clock of the simulated machine that runs it."""

    def monotonic() -> float:
        now_s: float = world.running.local_s()
        return now_s

    def local_ms() -> int:
        now_ms: int = world.running.clock.local_ms()
        return now_ms

    time, retry = SimpleNamespace(monotonic=monotonic), partial(WriteRetry, clock=monotonic)
    patches: list[tuple[Any, str, Any]] = [
        (clock_module, "local_ms", local_ms),
        *((module, "time", time) for module in (attempts_module, steps_module)),
        *((m, "WriteRetry", retry) for m in (attempts_module, steps_module, recovery_module)),
    ]
    before = [getattr(module, name) for module, name, _ in patches]
    for module, name, value in patches:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(patches, before, strict=True):
            setattr(module, name, value)
