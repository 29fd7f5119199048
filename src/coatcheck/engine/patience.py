"""Patience: a write that the store has not answered is tried again, for a while.

A claim whose answer was lost is made once more, because it meets its own record if it took effect.
The end of an execution is worth more: the work is done, and only the store must hear of it. It is
tried again and again, for as long as its client can be kept waiting; then the heart goes on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from coatcheck.core.flow import Effect
from coatcheck.core.record import Swap
from coatcheck.errors import StoreUnavailable

PAUSE_FIRST_S = 0.05
PAUSE_LAST_S = 1.0


class Patience:
    """
    How often one effect is tried again.

    A store that is frozen takes its whole time-out to fail. So the tries count as the pauses do,
    from the first on, and whoever waits waits for *left_s*, and for the one that is under way then.

    Args:
        left_s: how long may be waited in all.
        began_s: when the first try began, on *clock*; it is made now, if that is not said.
    """

    def __init__(
        self,
        left_s: float,
        began_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left_s = left_s
        self._clock = clock
        self._until_s = (clock() if began_s is None else began_s) + left_s
        self._pause_s = PAUSE_FIRST_S
        self._is_second = False

    def pause_s(self, effect: Effect[Any], failure: Exception) -> float | None:
        """How long to wait before *effect* is tried again; None: it is not."""
        if not isinstance(effect, Swap) or not isinstance(failure, StoreUnavailable):
            return None
        if self._left_s > 0 and self._clock() >= self._until_s:
            return None
        if failure.is_ambiguous and not self._is_second:
            self._is_second = True
            return 0.0
        if self._left_s <= 0:
            return None
        jitter = random.uniform(0.8, 1.2)  # noqa: S311 - no secret
        pause_s = min(self._pause_s * jitter, self._left_s)
        self._left_s -= pause_s
        self._pause_s = min(self._pause_s * 2, PAUSE_LAST_S)
        return pause_s
