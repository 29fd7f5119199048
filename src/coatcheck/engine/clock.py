"""The clock: the store's time, without asking the store each time.

The store's clock rules, because it is the only one that all nodes share. Between two looks at it
time goes on by a clock of this machine's that no operator and no time server can set.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from coatcheck.stores import Store

# A look at most this often; clocks drift by less than a millisecond in that time.
LOOK_EVERY_MS = 30_000
# One that took longer tells little: we may have been stopped on either side of it. It is repeated.
LOOK_MS_MAX = 1_000
# Linux has a clock that goes on while the machine is suspended. By the other one whoever wakes up
# would believe in its old leases until the next look.
BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class StoreClock:
    """Milliseconds on the store's clock; or on *clock*, where a test brings its own time."""

    def __init__(self, store: Store, clock: Callable[[], int] | None = None) -> None:
        self._store = store
        self._offset_ms = 0
        self._looked_ms: int | None = None
        self._is_given = clock is not None
        self.now_ms: Callable[[], int] = self._now_ms if clock is None else clock

    def _now_ms(self) -> int:
        return local_ms() + self._offset_ms

    def is_due(self) -> bool:
        """It is time to look at the store's clock."""
        if self._is_given:
            return False
        return self._looked_ms is None or local_ms() - self._looked_ms >= LOOK_EVERY_MS

    def set(self, asked_ms: int, store_ms: int) -> None:
        """Learn that the store said *store_ms* when asked at *asked_ms* (our own clock)."""
        answered_ms = local_ms()
        is_exact = answered_ms - asked_ms <= LOOK_MS_MAX
        if is_exact or self._looked_ms is None:  # a time that is not exact is better than none
            self._offset_ms = store_ms - (asked_ms + answered_ms) // 2
        if is_exact:
            self._looked_ms = answered_ms

    def look(self) -> None:
        """Ask the store, if it is time to."""
        if self.is_due():
            asked_ms = local_ms()
            self.set(asked_ms, self._store.now_ms())


def local_ms() -> int:
    """This machine's own clock: it only goes on, and where it can also during sleep."""
    ns = time.monotonic_ns() if BOOTTIME is None else time.clock_gettime_ns(BOOTTIME)
    return ns // 1_000_000
