"""Write retry: how often a write is tried again while the store does not answer.

A claim whose acknowledgement was lost is written once more: if the first write was applied, the
second finds its own record. A completion is worth more, because the work is done. It is retried
for as long as its client can be kept waiting; then the heartbeat continues in the background.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from coatcheck.core.flow import Effect
from coatcheck.core.record import Swap
from coatcheck.engine.periodic import JITTER
from coatcheck.errors import StoreUnavailable

PAUSE_FIRST_S = 0.05
PAUSE_LAST_S = 1.0


class WriteRetry:
    """
    Decides whether one effect is tried again.

    A frozen store takes its whole time-out to fail. So failed tries count as well as pauses, from
    the first on; the last try may end after the limit.

    Args:
        limit_s: how long to retry in all; 0: only once more, after a lost acknowledgement.
        began_s: when the first try began, on *clock*; now, if not given.
    """

    def __init__(
        self,
        limit_s: float,
        began_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left_s = limit_s
        self._clock = clock
        self._until_s = (clock() if began_s is None else began_s) + limit_s
        self._pause_s = PAUSE_FIRST_S
        self._is_second = False

    def pause_s(self, effect: Effect[Any], failure: Exception) -> float | None:
        """How long to wait before *effect* is tried again; None: it is not tried again."""
        if not isinstance(effect, Swap) or not isinstance(failure, StoreUnavailable):
            return None
        if self._left_s > 0 and self._clock() >= self._until_s:
            return None
        if failure.is_ambiguous and not self._is_second:
            self._is_second = True
            return 0.0
        if self._left_s <= 0:
            return None
        jitter = JITTER.uniform(0.8, 1.2)
        pause_s = min(self._pause_s * jitter, self._left_s)
        self._left_s -= pause_s
        self._pause_s = min(self._pause_s * 2, PAUSE_LAST_S)
        return pause_s
