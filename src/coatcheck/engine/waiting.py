"""Waiting: duplicates that stand in line for the first attempt to finish.

Who waits in the same process is woken at once, with the record, and costs the store nothing.
Who waits for another process looks from time to time, ever less often; where the store carries a
bell (`bell.py`) it is woken to look, and looks rarely. The line is bounded.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeAlias

from coatcheck.core.record import Record, is_lease_over
from coatcheck.core.serve import Seen, Watch

# With the record that ended, or with None: then the store is to be looked at.
Wake: TypeAlias = Callable[[Record | None], None]
# Says on all nodes that the record of this id has ended.
Ring: TypeAlias = Callable[[bytes], None]

# The first look comes soon, because most operations are short; later ones are rarer, because
# what has taken a second may take ten.
POLL_FIRST_S = 0.01
POLL_LAST_S = 0.25
POLL_GROWTH = 1.6
# 10 000: more than any process executes at once.
WANTED_MAX = 10_000


class Line:
    """Who waits for which record in this process, and which of them others want to hear of."""

    def __init__(self) -> None:
        self.waiting: dict[bytes, list[Wake]] = {}  # changed here only
        self._wanted: dict[bytes, Ring] = {}  # executed here, and waited for elsewhere
        self._promised: set[bytes] = set()  # waited for here, and executed where its end is rung
        self._mutex = threading.Lock()

    def join(self, id: bytes, wake: Wake, waiters_max: int) -> bool:
        """Stand in line for *id*; False if the line is full."""
        with self._mutex:
            line = self.waiting.setdefault(id, [])
            if len(line) >= waiters_max:
                if not line:
                    del self.waiting[id]
                return False
            line.append(wake)
            return True

    def leave(self, id: bytes, wake: Wake) -> None:
        """Stop waiting; nothing happens if one was woken already."""
        with self._mutex:
            line = self.waiting.get(id, [])
            if wake in line:
                line.remove(wake)
            if not line:
                self.waiting.pop(id, None)
                self._promised.discard(id)

    def tell(self, record: Record) -> None:
        """Wake all who wait for *record*, here and elsewhere: its attempt has ended."""
        if self._wanted and (ring := self._wanted.pop(record.id, None)) is not None:
            ring(record.id)
        if not self.waiting:
            return
        with self._mutex:
            line = self.waiting.pop(record.id, [])
            self._promised.discard(record.id)
        for wake in line:
            wake(record)

    def want(self, id: bytes, ring: Ring) -> bool:
        """Have *ring* called when *id* ends; False if there are too many to be rung for."""
        if len(self._wanted) < WANTED_MAX:
            self._wanted[id] = ring
            return True
        return id in self._wanted

    def forget_wanted(self, is_here: Callable[[bytes], bool]) -> None:
        """Ring for nothing that is executed here no more: its end could not be written."""
        for id in list(self._wanted):
            if not is_here(id):
                self._wanted.pop(id, None)

    def nudge(self, id: bytes, *, is_promised: bool) -> None:
        """Have all who wait for *id* look at the store; *is_promised*: its end will be rung."""
        with self._mutex:
            line = list(self.waiting.get(id, ()))
            if line and is_promised:
                self._promised.add(id)
            else:
                self._promised.discard(id)
        for wake in line:
            wake(None)

    def is_promised(self, id: bytes) -> bool:
        """Another node will ring when *id* ends."""
        return id in self._promised

    def forget_promises(self) -> None:
        """Expect no ring any more: it would not be heard."""
        with self._mutex:
            self._promised.clear()

    def ids(self) -> list[bytes]:
        """What is waited for now."""
        with self._mutex:
            return list(self.waiting)

    def length(self, id: bytes) -> int:
        """How many wait for *id* now."""
        return len(self.waiting.get(id, ()))


class Waiter:
    """A thread that waits; anybody may wake it."""

    def __init__(self) -> None:
        self.record: Record | None = None  # what it was woken with
        self._woken = threading.Event()

    def wake(self, record: Record | None) -> None:
        """End the wait, or the next one."""
        if record is not None:
            self.record = record
        self._woken.set()

    def wait(self, timeout_s: float) -> None:
        """Until somebody wakes us, or it has been long enough."""
        self._woken.wait(timeout_s)
        self._woken.clear()


class AsyncWaiter:
    """A task that waits; anybody may wake it, from any thread."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] = self._loop.create_future()

    def wake(self, record: Record | None) -> None:
        """End the wait, or the next one."""
        if record is not None:
            self.record = record
        if _is_running(self._loop):
            self._resolve()
            return
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Until somebody wakes us, or it has been long enough."""
        await asyncio.wait((self._woken,), timeout=timeout_s)
        if self._woken.done():
            self._woken = self._loop.create_future()


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """The caller runs on *loop*, so that it need not be woken."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:  # none does
        return False


def has_changed(seen: Seen, watch: Watch) -> bool:
    """What is waited for has come: another record, the time, or the death of who lived here."""
    record, now_ms = seen
    is_other = record.version != watch.version
    return is_other or now_ms >= watch.until_ms or is_lease_over(record, now_ms)


def poll_pauses_s() -> Iterator[float]:
    """How long to wait before each look: growing, bounded, and never in step with others."""
    pause_s = POLL_FIRST_S
    while True:
        yield jittered(pause_s)
        pause_s = min(pause_s * POLL_GROWTH, POLL_LAST_S)


def jittered(pause_s: float) -> float:
    """About *pause_s*."""
    return pause_s * random.uniform(0.8, 1.2)  # noqa: S311 - jitter, not a secret
