"""Waiters: duplicates that wait for the first attempt to finish.

A waiter in the same process is woken at once, with the record, and reads nothing from the store.
A waiter for another process polls the store, at first after 10 ms, later at most 250 ms apart.
The number of waiters per key is bounded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from coatcheck.core.lifecycle import Snapshot, WaitForChange
from coatcheck.core.record import Record, is_lease_over
from coatcheck.engine.periodic import JITTER

# Called with the record that ended, or with None: read the store.
Wake: TypeAlias = Callable[[Record | None], None]

# The first poll comes soon, because most operations are short; later ones are rarer, because what
# has taken a second may take ten.
POLL_FIRST_S = 0.01
POLL_LAST_S = 0.25
POLL_GROWTH = 1.6


class Waiters:
    """The waiters of this process, by the id of the record they wait for."""

    def __init__(self) -> None:
        self.waiting: dict[bytes, list[Wake]] = {}  # changed only in this class
        self._mutex = threading.Lock()

    def join(self, id: bytes, wake: Wake, waiters_max: int) -> bool:
        """Wait for *id*; False if too many do already."""
        with self._mutex:
            waiting = self.waiting.setdefault(id, [])
            if len(waiting) >= waiters_max:
                if not waiting:
                    del self.waiting[id]
                return False
            waiting.append(wake)
            return True

    def leave(self, id: bytes, wake: Wake) -> None:
        """Stop waiting; does nothing for a waiter that was woken already."""
        with self._mutex:
            waiting = self.waiting.get(id, [])
            if wake in waiting:
                waiting.remove(wake)
            if not waiting:
                self.waiting.pop(id, None)

    def wake(self, record: Record) -> None:
        """Wake all who wait for *record*: its attempt has ended."""
        if not self.waiting:
            return
        with self._mutex:
            waiting = self.waiting.pop(record.id, [])
        for wake in waiting:
            wake(record)

    def wake_to_read(self, id: bytes) -> None:
        """Have all who wait for *id* read the store."""
        with self._mutex:
            waiting = list(self.waiting.get(id, ()))
        for wake in waiting:
            wake(None)

    def count(self, id: bytes) -> int:
        """How many wait for *id* now."""
        return len(self.waiting.get(id, ()))


class Waiter(Protocol):
    """One waiting request; any thread may wake it."""

    record: Record | None  # what it was woken with

    def wake(self, record: Record | None, /) -> None:
        """End the wait, or the next one."""
        ...

    def wait(self, timeout_s: float, /) -> Any:  # noqa: ANN401 - None, awaited in async code
        """Wait until woken, or for *timeout_s*."""
        ...


class ThreadWaiter:
    """A waiting thread."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self._woken = threading.Event()

    def wake(self, record: Record | None) -> None:
        """End the wait, or the next one."""
        if record is not None:
            self.record = record
        self._woken.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until woken, or for *timeout_s*."""
        self._woken.wait(timeout_s)
        self._woken.clear()


class TaskWaiter:
    """A waiting task of an event loop."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] = self._loop.create_future()

    def wake(self, record: Record | None) -> None:
        """End the wait, or the next one."""
        if record is not None:
            self.record = record
        if _runs_on(self._loop):
            self._resolve()
            return
        with suppress(RuntimeError):  # the loop is closed: the task does not wait any more
            self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Wait until woken, or for *timeout_s*."""
        await asyncio.wait((self._woken,), timeout=timeout_s)
        if self._woken.done():
            self._woken = self._loop.create_future()


def _runs_on(loop: asyncio.AbstractEventLoop) -> bool:
    """The caller runs on *loop*."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:  # on none
        return False


def has_changed(read: Snapshot, wait: WaitForChange) -> bool:
    """The wait is over: the record changed, the time has come, or the local executor died."""
    record, now_ms = read
    is_other = record.version != wait.version
    return is_other or now_ms >= wait.until_ms or is_lease_over(record, now_ms)


def poll_pauses_s() -> Iterator[float]:
    """The pause before each poll: growing, bounded, and jittered so that waiters do not align."""
    pause_s = POLL_FIRST_S
    while True:
        yield pause_s * JITTER.uniform(0.8, 1.2)
        pause_s = min(pause_s * POLL_GROWTH, POLL_LAST_S)
