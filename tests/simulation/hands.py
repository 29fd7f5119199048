"""What a handler writes down and hands over: production's own, on the simulated store.

`engine/hand.py` and `engine/resuming.py` are driven as they are. A coroutine that awaits nothing
but `Doing` is a task like any other: what it awaits is what a task yields.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from coatcheck.core.flow import Effect
from coatcheck.core.progress import Progress
from coatcheck.core.record import Record, Swap
from coatcheck.engine.hand import PATIENCE_S, AsyncHand
from coatcheck.engine.patience import Patience
from coatcheck.engine.resuming import hand_over_async
from coatcheck.errors import StoreUnavailable
from coatcheck.operation import StepAsked

from .world import Pause

if TYPE_CHECKING:
    from coatcheck.engine.held import Held

    from .driver import Visit

T = TypeVar("T")


class Doing(Generic[T]):
    """What a task does, for a coroutine that awaits it."""

    def __init__(self, body: Generator[Pause, Any, T]) -> None:
        self._body = body

    def __await__(self) -> Generator[Any, Any, T]:
        return (yield from self._body)


def done(awaitable: Awaitable[T]) -> Generator[Pause, Any, T]:
    """What *awaitable* results in, for a task."""
    return (yield from awaitable.__await__())


class SimulatedHand(AsyncHand):
    """The hand of one visit's operation."""

    def __init__(self, visit: Visit, held: Held) -> None:
        self._local_s = visit.process.local_s
        # Of a desk it needs the time, and a process has that.
        super().__init__(
            cast("Any", visit.process),
            held,
            cast("Any", None),
            lambda swap: Doing(_swapped(visit, (swap,), lambda results: results[0])),
        )

    def step(self, asked: StepAsked) -> Any:
        """Take a step once."""
        return self._step_async(asked)

    def _remember(self, change: Callable[[Progress], Progress]) -> Any:
        return self._remember_async(change)

    async def _swap_async(self, effect: Effect[Any]) -> Record | None:
        assert isinstance(effect, Swap)
        patience = Patience(PATIENCE_S, clock=self._local_s)
        while True:
            try:
                return self._noticed(effect, await self._write_async(effect))
            except StoreUnavailable as failure:
                pause_s = patience.pause_s(effect, failure)
                if pause_s is None:
                    raise
                await Doing(_slept(pause_s * 1_000))


class SimulatedClient:
    """Whoever waits for the answer of one visit, and may be told to ask later."""

    def __init__(self, visit: Visit, held: Held) -> None:
        self.is_handed_over = False
        self._visit = visit
        self._held = held

    def accept(self) -> Any:
        """Nobody asks for that here."""
        raise NotImplementedError

    def hand_over(self, lease_ms: int | None) -> Any:
        """Let somebody else find the answer."""
        return self._hand_over(lease_ms or self._visit.policy.lease_ms)

    async def _hand_over(self, lease_ms: int) -> str:
        visit = self._visit
        visit.process.setting.rules.offers(visit.nonce, lease_ms)
        store = SimpleNamespace(swap=lambda swaps: Doing(_swapped(visit, swaps, list)))
        engine: Any = SimpleNamespace(store=store, desk=visit.process)
        text = await hand_over_async(engine, self._held, lease_ms)
        self.is_handed_over = True
        return text


def _swapped(
    visit: Visit, swaps: Sequence[Swap], chosen: Callable[[list[Record | None]], T]
) -> Generator[Pause, Any, T]:
    store = visit.process.setting.store
    results: list[Record | None] = yield store.ask(lambda: store.swap(swaps, visit))
    return chosen(results)


def _slept(pause_ms: float) -> Generator[Pause, Any, None]:
    yield pause_ms
