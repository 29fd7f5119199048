"""Engines on memory, whose time only a test moves."""

from __future__ import annotations

import functools
import math

from coatcheck.core.lifecycle import Refuse, Replay
from coatcheck.core.policy import Duration, Policy, duration_ms
from coatcheck.engine import AsyncEngine, Engine
from coatcheck.engine.waiters import TaskWaiter, ThreadWaiter
from coatcheck.errors import Misconfigured
from coatcheck.operation import Operation
from coatcheck.stores import AsyncStore, Store

# Any time will do, but always the same: derived keys depend on it. This is in January 2027.
START_MS = 1_800_000_000_000


class AttemptKilled(BaseException):
    """
    Raised by `kill_attempt`: the attempt ends, and nothing more is written for it.

    No `Exception`, so that neither a handler nor the engine takes it for a failure.
    """


class AttemptKilledInLoop(AttemptKilled, Exception):
    """
    What leaves the middleware in its place.

    Starlette's `TestClient` ends its event loop at everything that is no `Exception`.
    """


class Clock:
    """A clock that stands still until a test moves it; `Engine(url, clock=Clock())`."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        """The time in milliseconds."""
        return self.now_ms

    def travel(self, by: Duration) -> None:
        """Move *by* a duration: seconds, a timedelta, or text such as "90s" or "72h"."""
        try:
            by_ms = duration_ms(by)
        except (ValueError, OverflowError) as error:
            raise Misconfigured(f"travel: {error}") from error
        if by_ms < 0:
            raise Misconfigured(f"a store's clock does not go back; you gave {by!r}")
        self.now_ms += by_ms

    def reach(self, time_ms: int) -> None:
        """Move to *time_ms*, unless it is later already: several may have waited until then."""
        self.now_ms = max(self.now_ms, time_ms)


# A duplicate waits by the engine's clock. If that stood still, it would wait for ever for an
# attempt that a test has killed. So the clock moves by the time that it has waited in vain.


class _TimedThreadWaiter(ThreadWaiter):
    """A waiting thread, for which time passes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout_s: float) -> None:
        """Wait until woken, or for *timeout_s*."""
        until_ms = self._clock.now_ms + math.ceil(timeout_s * 1_000)
        super().wait(timeout_s)
        if self.record is None:
            self._clock.reach(until_ms)


class _TimedTaskWaiter(TaskWaiter):
    """A waiting task, for which time passes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    async def wait(self, timeout_s: float) -> None:
        """Wait until woken, or for *timeout_s*."""
        until_ms = self._clock.now_ms + math.ceil(timeout_s * 1_000)
        await super().wait(timeout_s)
        if self.record is None:
            self._clock.reach(until_ms)


class _Travelling:
    """What both engines add; *clock* is shared by all that look at the same store."""

    clock: Clock
    policy: Policy

    def travel(self, by: Duration) -> None:
        """Move the engine's clock *by* a duration."""
        self.clock.travel(by)

    def travel_past_lease(self, policy: Policy | None = None) -> None:
        """
        Move the clock until a lease of now has expired: the next retry takes over.

        An operation that is still executing in this process keeps its claim, as it does in
        production. *policy*: of the route, if it has one of its own.
        """
        self.clock.now_ms += (policy or self.policy).lease_ms + 1

    def travel_past_window(self, policy: Policy | None = None) -> None:
        """Move the clock until the window of a key of now is over; *policy*: as above."""
        self.clock.now_ms += (policy or self.policy).window_ms + 1


class TimedEngine(_Travelling, Engine):
    """An `Engine` on memory with a clock of its own, and without background work."""

    def __init__(
        self,
        policy: Policy | str | None = None,
        *,
        store: str | Store = "memory://",
        clock: Clock | None = None,
    ) -> None:
        self.clock = Clock() if clock is None else clock
        super().__init__(store, policy, clock=self.clock, sweep_every_s=None, recover_every_s=None)
        self.attempts.new_waiter = functools.partial(_TimedThreadWaiter, self.clock)


class AsyncTimedEngine(_Travelling, AsyncEngine):
    """An `AsyncEngine` on memory with a clock of its own, and without background work."""

    def __init__(
        self,
        policy: Policy | str | None = None,
        *,
        store: str | AsyncStore = "memory://",
        clock: Clock | None = None,
    ) -> None:
        self.clock = Clock() if clock is None else clock
        super().__init__(store, policy, clock=self.clock, sweep_every_s=None, recover_every_s=None)
        self.attempts.new_waiter = functools.partial(_TimedTaskWaiter, self.clock)

    async def fail(self, operation: Operation, error: BaseException) -> Replay | Refuse | None:
        """As in every engine; of a killed attempt, raise that it was killed."""
        answer = await super().fail(operation, error)
        if isinstance(error, AttemptKilled):
            raise AttemptKilledInLoop(*error.args) from error
        return answer

    def stop(self) -> None:
        """End the threads, in a test that has no event loop any more."""
        self._close_threads()
