"""Time for tests: a clock that a test sets, and waits that end with a clear failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# 20 s: a hundred times what any of these waits takes; after that something hangs, and the test fails.
WAIT_S_MAX = 20.0
NOW_MS = 1_800_000_000_000


class Clock:
    """A clock that a test sets."""

    def __init__(self, now_ms: int = NOW_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_ms += round(seconds * 1_000)


def eventually(
    is_true: Callable[[], object], *, within_s: float = WAIT_S_MAX, every_s: float = 0.001
) -> None:
    """Wait until *is_true* is; it is called often, because not everything can be waited for."""
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(every_s)


def wait_for(event: threading.Event) -> None:
    """Wait until *event* is set."""
    assert event.wait(WAIT_S_MAX), "it never happened"
