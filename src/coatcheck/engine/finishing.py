"""What could not be ended: executions whose end the store has not heard of yet.

Their clients have been told so. The heart tries them at every beat, because the work is done: if
nobody wrote that down, it would be done again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from coatcheck.core.key import reference_of
from coatcheck.core.record import IN_DOUBT, RUNNING, Record, Swap, is_same_write
from coatcheck.stores.contract import Store

logger = logging.getLogger("coatcheck")

# 10 000: a store that is away for long would otherwise take the process with it.
UNFINISHED_MAX = 10_000


class Unfinished:
    """The ends that are still to be written; *tell* is called with each that has been."""

    def __init__(self, store: Store, tell: Callable[[Record], None]) -> None:
        self._store = store
        self._tell = tell
        self._swaps: dict[bytes, Swap] = {}

    def __len__(self) -> int:
        return len(self._swaps)

    def add(self, swap: Swap) -> None:
        """Write *swap* as soon as that can be done."""
        if len(self._swaps) >= UNFINISHED_MAX:
            logger.error("the end of %s is not tried any more", reference_of(swap.id))
            return
        self._swaps[swap.id] = swap

    def write(self) -> None:
        """Write what can be written; raises while the store is away."""
        for swap in list(self._swaps.values()):
            while True:
                (lost,) = self._store.swap((swap,))
                record = swap.record
                assert record is not None
                if lost is None or is_same_write(lost, record):
                    self._tell(record)
                    logger.info("the end of %s is written after all", reference_of(swap.id))
                    break
                # Parked by somebody who saw our lease run out; but who executed knows.
                is_ours = lost.nonce == record.nonce and lost.state in (RUNNING, IN_DOUBT)
                if not is_ours or lost.state == record.state:
                    logger.warning("the end of %s came too late", reference_of(swap.id))
                    break
                version = lost.version
                swap = Swap(  # noqa: PLW2901 - the same end, on top of it
                    swap.id, version, record._replace(version=version + 1, progress=lost.progress)
                )
            self._swaps.pop(swap.id, None)
