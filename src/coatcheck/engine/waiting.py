"""Waiting: duplicates that stand in line for the first attempt to finish.

Who waits in the same process is woken at once, with the record, and costs the store nothing.
Who waits for another process looks from time to time, ever less often. The line is bounded.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

from coatcheck.core.record import Record

Wake: TypeAlias = Callable[[Record], None]

# The first look comes soon, because most operations are short; later ones are rarer, because
# what has taken a second may take ten.
POLL_FIRST_S = 0.01
POLL_LAST_S = 0.25
POLL_GROWTH = 1.6


class Line:
    """Who waits for which record in this process."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[Wake]] = {}
        self._mutex = threading.Lock()

    def join(self, id: bytes, wake: Wake, waiters_max: int) -> bool:
        """Stand in line for *id*; False if the line is full."""
        with self._mutex:
            line = self._waiting.setdefault(id, [])
            if len(line) >= waiters_max:
                if not line:
                    del self._waiting[id]
                return False
            line.append(wake)
            return True

    def leave(self, id: bytes, wake: Wake) -> None:
        """Stop waiting; nothing happens if one was woken already."""
        with self._mutex:
            line = self._waiting.get(id, [])
            if wake in line:
                line.remove(wake)
            if not line:
                self._waiting.pop(id, None)

    def tell(self, record: Record) -> None:
        """Wake all who wait for *record*: its attempt has ended."""
        if not self._waiting:
            return
        with self._mutex:
            line = self._waiting.pop(record.id, [])
        for wake in line:
            wake(record)

    def length(self, id: bytes) -> int:
        """How many wait for *id* now."""
        return len(self._waiting.get(id, ()))


def poll_pauses_s() -> Iterator[float]:
    """How long to wait before each look: growing, bounded, and never in step with others."""
    pause_s = POLL_FIRST_S
    while True:
        yield pause_s * random.uniform(0.8, 1.2)  # noqa: S311 - jitter, not a secret
        pause_s = min(pause_s * POLL_GROWTH, POLL_LAST_S)
