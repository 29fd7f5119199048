"""Periodic: background threads that do not keep their engine alive.

One helper for the heartbeat, the sweeper and the recovery: a daemon thread that calls a method of
its owner again and again, and ends when the owner is closed or garbage-collected; and a schedule
with jitter, so that many nodes do not do the same work at the same moment.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("coatcheck")

# Spreads pauses. Not the global generator: an application may seed it, and tests rely on its state.
JITTER = random.SystemRandom()


def start_daemon(name: str, target: Callable[..., object], *args: Any) -> threading.Thread | None:
    """Start a background thread; None, with an error in the log, if none can be started."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no room for another thread, or the interpreter is ending
        logger.exception(
            "coatcheck: no thread can be started for %s; it is tried again later", name
        )
        return None
    return thread


def repeat(
    owner: weakref.ref[Any],
    step: Callable[[Any], float | None],
    wake: threading.Event,
    first_pause_s: float,
) -> None:
    """
    Call *step* with the owner, then wait for the seconds it returns or for *wake*; and again.

    Ends when the owner is gone or *step* returns None. It holds no reference while it waits.
    """
    pause_s: float | None = first_pause_s
    while pause_s is not None:
        wake.wait(pause_s)
        wake.clear()
        living = owner()
        if living is None:
            return
        pause_s = step(living)
        del living


class AtMostEvery:
    """True at most once in *every_s*: for messages that would fill a log during an outage."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._due_s = -math.inf

    def is_due(self) -> bool:
        """The last time was long enough ago; then the next time is set."""
        now_s = self._clock()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + self._every_s
        return True


class Schedule:
    """About every *every_s*, on the clock that `is_due` is given; None: never."""

    def __init__(self, every_s: float | None) -> None:
        self.every_s = every_s
        self._due_ms: int | None = None  # not known before the first look at the clock

    def is_due(self, now_ms: int) -> bool:
        """It is time; then the next time is set. Never at the first call, which sets the first."""
        if self.every_s is None or (self._due_ms is not None and now_ms < self._due_ms):
            return False
        is_first = self._due_ms is None
        jitter = JITTER.uniform(0.5, 1.5)
        self._due_ms = now_ms + round(1_000 * self.every_s * jitter)
        return not is_first

    def postpone(self, until_ms: int) -> None:
        """Not before *until_ms*."""
        if self._due_ms is not None:
            self._due_ms = max(self._due_ms, until_ms)
