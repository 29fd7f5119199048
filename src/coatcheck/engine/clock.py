"""The clock: the store's time, without a call for each request.

The store's clock counts, because it is the only one that all nodes share. Between two readings a
clock of this machine is used that no operator and no time server can set.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from coatcheck.stores import Store

# How often it is read at most; clocks drift by less than a millisecond in that time.
LOOK_EVERY_MS = 30_000
# A reading that took longer is not exact: the process may have been stopped meanwhile. It is
# repeated.
LOOK_MS_MAX = 1_000
# Linux has a clock that counts while the machine is suspended. With the other one, a process that
# wakes up would believe in its old leases until the next reading.
BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class StoreClock:
    """Milliseconds on the store's clock; or on *clock*, if a test brings its own."""

    def __init__(self, store: Store, clock: Callable[[], int] | None = None) -> None:
        self._store = store
        self._offset_ms = 0
        self._looked_ms: int | None = None
        self._is_given = clock is not None
        self.now_ms: Callable[[], int] = self._now_ms if clock is None else clock

    def _now_ms(self) -> int:
        # `local_ms`, without a call: this is read for every request.
        ns = time.monotonic_ns() if BOOTTIME is None else time.clock_gettime_ns(BOOTTIME)
        return ns // 1_000_000 + self._offset_ms

    def is_due(self) -> bool:
        """The store's clock must be read again."""
        if self._is_given:
            return False
        return self._looked_ms is None or local_ms() - self._looked_ms >= LOOK_EVERY_MS

    def set(self, asked_ms: int, store_ms: int) -> None:
        """Note that the store returned *store_ms* when asked at *asked_ms* of our own clock."""
        answered_ms = local_ms()
        is_exact = answered_ms - asked_ms <= LOOK_MS_MAX
        if is_exact or self._looked_ms is None:  # an inexact time is better than none
            self._offset_ms = store_ms - (asked_ms + answered_ms) // 2
        if is_exact:
            self._looked_ms = answered_ms

    def guess(self) -> None:
        """Use this machine's own time until the store's clock can be read."""
        if self._looked_ms is None:
            self._offset_ms = time.time_ns() // 1_000_000 - local_ms()

    def look(self) -> None:
        """Read the store's clock, if it is due."""
        if self.is_due():
            asked_ms = local_ms()
            self.set(asked_ms, self._store.now_ms())


def local_ms() -> int:
    """This machine's own clock: monotonic, and on Linux it counts during sleep."""
    ns = time.monotonic_ns() if BOOTTIME is None else time.clock_gettime_ns(BOOTTIME)
    return ns // 1_000_000
