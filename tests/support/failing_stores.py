"""Stores that fail on purpose: real stores, with a network in front that does its worst."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import Store


class Faulty:
    """
    A store whose network a law controls.

    `before` and `after` are called with the swaps of a batch, before they are written and when
    they are written but not acknowledged; what they raise is what the engine gets.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_down = False
        self.before: Callable[[Sequence[Swap]], object] = len
        self.after: Callable[[Sequence[Swap]], object] = len

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        self._refuse_if_down()
        self.before(swaps)
        results = self._store.swap(swaps)
        self.after(swaps)
        return results

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        self._refuse_if_down()
        return self._store.get(ids)

    def now_ms(self) -> int:
        self._refuse_if_down()
        return self._store.now_ms()

    def sweep(self, now_ms: int, limit: int = 500) -> int:
        self._refuse_if_down()
        return self._store.sweep(now_ms, limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _refuse_if_down(self) -> None:
        if self.is_down:
            raise StoreUnavailable("the store is down, because this law says so")


def unavailable(_swaps: Sequence[Swap]) -> None:
    """Nothing was written."""
    raise StoreUnavailable("connection refused")


class LosesOne:
    """The acknowledgement of the next swap for which *chosen* holds is lost; later ones arrive."""

    def __init__(self, chosen: Callable[[Swap], bool]) -> None:
        self._chosen = chosen
        self.is_lost = False

    def __call__(self, swaps: Sequence[Swap]) -> None:
        if not self.is_lost and any(self._chosen(swap) for swap in swaps):
            self.is_lost = True
            raise StoreUnavailable("connection reset", is_ambiguous=True)
