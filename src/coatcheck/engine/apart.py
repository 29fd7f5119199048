"""Apart: many swaps in one call, each with an outcome of its own.

One record that cannot be written makes a whole call fail, and so does one dead shard of a cluster.
Where the store says what became of each (`stores/fates.py`), that is it; what has failed together
otherwise is tried apart. What has failed alone is left out of the next call, so
that trouble that lasts costs the others nothing. And all of it is bounded: a store that is away
is not asked once for each claim, with a time-out each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from coatcheck.core.record import Record, Swap
from coatcheck.engine.held import Held
from coatcheck.errors import StoreUnavailable, Unreadable
from coatcheck.stores.contract import Store
from coatcheck.stores.fates import Divided, Fate

# 3, and none that was answered: then it is the store. If they were just those of a dead shard,
# the next beat begins with others.
FAILURES_MAX = 3

# None: it is written. `Unreadable`: what stands is sealed with a key that is not here.
Outcome: TypeAlias = Record | Unreadable | None


class Tried(NamedTuple):
    """What became of the *swap* for a claim that is *held*."""

    held: Held
    swap: Swap
    lost: Outcome


class Apart:
    """
    Writes what one beat has to write of one kind.

    Args:
        budget_s: how long to go on when something has failed; the try that is under way then ends.
    """

    def __init__(
        self, store: Store, budget_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._failure: Exception | None = None  # the first of those that failed alone
        self._store = store
        self._budget_s = budget_s
        self._clock = clock
        self._until_s: float | None = None  # nothing has failed
        self._unanswered = 0
        self._is_answered = False

    def write(self, asks: Sequence[tuple[Held, Swap]]) -> Iterator[Tried]:
        """What becomes of each of *asks*; nothing is said of what fails, or could not be tried."""
        sound = [ask for ask in asks if not ask[0].failures]
        suspect = [ask for ask in asks if ask[0].failures]
        yield from self._together(sound)
        # Those that were tried least come first, so that each has its turn.
        for ask in sorted(suspect, key=lambda ask: ask[0].failures):
            yield from self._alone(*ask)

    def raise_failure(self) -> None:
        """Say that not all could be written, if so it was."""
        if self._failure is not None:
            raise self._failure

    def _together(self, asks: Sequence[tuple[Held, Swap]]) -> Iterator[Tried]:
        fates = self._fates_of(asks) if len(asks) > 1 else None
        if fates is None:
            for ask in asks:
                yield from self._alone(*ask)
        else:
            for ask, fate in zip(asks, fates, strict=True):
                yield from self._noted(*ask, fate)

    def _fates_of(self, asks: Sequence[tuple[Held, Swap]]) -> Sequence[Fate] | None:
        """What became of each; None: all have failed, of one of them or of the store."""
        try:
            return self._store.swap([swap for _, swap in asks])
        except Divided as error:
            if not all(isinstance(fate, StoreUnavailable) for fate in error.fates):
                return error.fates
        except Exception:  # noqa: BLE001, S110 - each alone will tell
            pass
        self._begin_to_count()
        return None

    def _alone(self, held: Held, swap: Swap) -> Iterator[Tried]:
        if self._is_over():
            return
        fate: Fate
        try:
            (fate,) = self._store.swap((swap,))
        except Exception as error:  # noqa: BLE001 - of this one, or of the store
            fate = error
        yield from self._noted(held, swap, fate)

    def _noted(self, held: Held, swap: Swap, fate: Fate) -> Iterator[Tried]:
        if isinstance(fate, Exception) and not isinstance(fate, Unreadable):
            self._begin_to_count()
            held.failures += 1
            self._unanswered += isinstance(fate, StoreUnavailable)
            self._failure = self._failure or fate
            return
        held.failures = 0
        self._is_answered = True
        yield Tried(held, swap, fate)

    def _begin_to_count(self) -> None:
        if self._until_s is None:
            self._until_s = self._clock() + self._budget_s

    def _is_over(self) -> bool:
        """No more is tried: the store is away, or it has taken too long."""
        if self._until_s is None:
            return False
        is_away = self._unanswered >= FAILURES_MAX and not self._is_answered
        return is_away or self._clock() >= self._until_s
