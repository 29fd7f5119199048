"""What could not be ended: executions whose end the store has not heard of yet.

Their clients have been told so. The heart tries them at every beat, because the work is done: if
nobody wrote that down, it would be done again. Until then they stay held, so that their leases are
renewed if the store takes that at least, and whoever asks for them in this process waits.

And claims that nobody is left to execute. Whether such a claim was written is not known, and it may
still be on its way; so it is made once more, which then makes no difference, and given back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from coatcheck.core.key import reference_of
from coatcheck.core.record import IN_DOUBT, RUNNING, Record, Swap, is_same_write
from coatcheck.core.serve import Claim, given_back
from coatcheck.engine.apart import Apart, Outcome
from coatcheck.engine.held import Held
from coatcheck.errors import Unreadable

logger = logging.getLogger("coatcheck")

# 10 000: a store that is away for long would otherwise take the process with it.
UNFINISHED_MAX = 10_000


class Unfinished:
    """The ends that are still to be written; *tell* is called with each that has been."""

    def __init__(self, tell: Callable[[Record], None]) -> None:
        self._tell = tell
        # Several of one record, where the claims of duplicates are to be given back.
        self._helds: dict[Held, None] = {}

    def __len__(self) -> int:
        return len(self._helds)

    def add(self, held: Held, end: Swap) -> None:
        """Write the *end* of what is *held* as soon as that can be done."""
        if len(self._helds) >= UNFINISHED_MAX:
            logger.error("the end of %s is not tried any more", reference_of(end.id))
            return
        held.end = end
        self._helds[held] = None

    def write(self, apart: Apart, now_ms: int) -> Iterator[Held]:
        """Write what can be written; what is over then: it was, or it is too late for that."""
        helds = list(self._helds)
        while helds:
            one_each = {held.claim.id: held for held in helds}
            again = [held for held in helds if one_each[held.claim.id] is not held]
            asks = [(held, held.end) for held in one_each.values() if held.end is not None]
            for held, swap, lost in apart.write(asks):
                held.end = self._on_top_of(swap, lost)
                if held.end is not None:
                    again.append(held)
                else:
                    yield self._over(held)
            helds = again
        # After its window nobody asks for it any more; so nothing is held for ever.
        for held in [h for h in list(self._helds) if h.claim.window_until_ms <= now_ms]:
            logger.error("the end of %s is not tried any more", reference_of(held.claim.id))
            held.end = None
            yield self._over(held)

    def _over(self, held: Held) -> Held:
        self._helds.pop(held, None)
        return held

    def _on_top_of(self, swap: Swap, lost: Outcome) -> Swap | None:
        """What is to be written after *swap* has *lost*; None: nothing."""
        record = swap.record
        assert record is not None
        is_written = lost is None or (isinstance(lost, Record) and is_same_write(lost, record))
        if isinstance(swap, Claim):
            return given_back(swap) if is_written else None
        if is_written:
            self._tell(record)
            logger.info("the end of %s is written after all", reference_of(swap.id))
            return None
        # Renewed meanwhile, or parked by who saw our lease run out; but who executed knows.
        if (
            lost is None
            or isinstance(lost, Unreadable)
            or lost.nonce != record.nonce
            or lost.state not in (RUNNING, IN_DOUBT)
            or lost.state == record.state
        ):
            logger.warning("the end of %s came too late", reference_of(swap.id))
            return None
        ended = record._replace(version=lost.version + 1, progress=lost.progress)
        if lost.progress is not None:  # then nothing is forgotten; see `core/serve.py`
            ended = ended._replace(fingerprint=lost.fingerprint)
        return Swap(swap.id, lost.version, ended)
