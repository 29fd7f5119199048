"""In place: a write that nobody else could share, done on the event loop's own thread.

Beneath `threaded.py`. To hand a write to another thread and its answer back takes two wake-ups of
idle processors, more than half of what a quick disk takes to keep the write; and a thread that
nobody else asks makes no batch. So whoever has been alone for a while, at a disk that was quick all
the while, has the write done at once, and the event loop stands still for that long.

Invariants: a slow write is waited for on an event loop once, and then others have to be quick in
the thread before the next; whoever does anything in place lets the loop take a turn afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar, runtime_checkable

from coatcheck.core.record import Swap
from coatcheck.stores.contract import Store

T = TypeVar("T")

# 8: a crowd that has just begun is seen in the first of them, and nobody notices eight hand-overs.
ALONE_MIN = 8
# 1 ms: about five times what a quick disk takes.
QUICK_S_MAX = 0.001
# 128 in a row, then again some in the thread: it does what a store puts off while it is in place.
IN_PLACE_MAX = 128


@runtime_checkable
class SwapsAtOnce(Protocol):
    """A store that can write without waiting for anybody but the disk."""

    def swap_at_once(self, swap: Swap) -> bool:
        """
        Whether *swap* has won, and is as durable as any.

        Where not, nobody knows more: ask `swap`, which will do it, or say what stands in its way.
        """
        ...


def swap_at_once_of(store: Store) -> Callable[[Swap], bool] | None:
    """How *store* does that, if it can by itself."""
    # Whoever stands before a store, and passes on what it does not know, would be passed by.
    is_its_own = hasattr(type(store), "swap_at_once")
    return store.swap_at_once if is_its_own and isinstance(store, SwapsAtOnce) else None


class Solitude:
    """Whether the next write may be done in place, from what was seen of those before."""

    def __init__(self) -> None:
        self._seen = 0  # quick ones in a row, each alone

    def is_certain(self) -> bool:
        """Enough was seen."""
        return self._seen >= ALONE_MIN

    def see(self, took_s: float) -> None:
        """A write by itself took *took_s*, in place or not; for ever, where that failed."""
        is_over = took_s > QUICK_S_MAX or self._seen >= ALONE_MIN + IN_PLACE_MAX
        self._seen = 0 if is_over else self._seen + 1

    def end(self) -> None:
        """Somebody else came before one was done."""
        self._seen = 0


class Turn(asyncio.Future[T]):
    """
    A result that is there. Who awaits it goes on in the next turn of the loop, never in this one.

    Else one task that asks again and again would keep all others from their turn.
    """

    def __await__(self) -> Generator[Any, None, T]:
        yield
        return self.result()

    __iter__ = __await__
