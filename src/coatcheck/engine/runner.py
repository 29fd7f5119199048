"""Runners: perform the effects of flows, in a thread or on an event loop.

The only place where the two differ. A runner knows a store and nothing of what flows decide.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from coatcheck.core.flow import Call, Flow, Sleep
from coatcheck.core.record import Get, Record, Swap
from coatcheck.stores.contract import Store

T = TypeVar("T")


class Runner:
    """Runs flows in the caller's own thread."""

    def __init__(
        self, swap: Callable[[Swap], Record | None], get: Callable[[bytes], Record | None]
    ) -> None:
        self._swap = swap
        self._get = get

    @classmethod
    def for_store(cls, store: Store) -> Runner:
        """A runner that calls *store* for each write by itself."""
        return cls(lambda swap: store.swap((swap,))[0], lambda record: store.get((record,))[0])

    def run(self, flow: Flow[T]) -> T:
        """Run *flow* to its end."""
        try:
            effect = next(flow)
            while True:
                try:
                    if isinstance(effect, Swap):
                        result: Any = self._swap(effect)
                    elif isinstance(effect, Call):
                        result = effect.function(*effect.args)
                    elif isinstance(effect, Get):
                        result = self._get(effect.id)
                    else:
                        assert isinstance(effect, Sleep)
                        time.sleep(effect.seconds)
                        result = None
                except BaseException as error:  # noqa: BLE001 - the flow decides what it means
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as done:
            value: T = done.value
            return value


class AsyncRunner:
    """Runs flows on the caller's event loop."""

    def __init__(
        self,
        swap: Callable[[Sequence[Swap]], Awaitable[Sequence[Record | None]]],
        get: Callable[[Sequence[bytes]], Awaitable[Sequence[Record | None]]],
    ) -> None:
        self._swap = swap
        self._get = get

    async def run(self, flow: Flow[T]) -> T:
        """Run *flow* to its end."""
        try:
            effect = next(flow)
            while True:
                try:
                    if isinstance(effect, Swap):
                        (result,) = await self._swap((effect,))
                    elif isinstance(effect, Call):
                        result = effect.function(*effect.args)
                        if inspect.isawaitable(result):
                            result = await result
                    elif isinstance(effect, Get):
                        (result,) = await self._get((effect.id,))
                    else:
                        assert isinstance(effect, Sleep)
                        await asyncio.sleep(effect.seconds)
                        result = None
                except BaseException as error:  # noqa: BLE001 - the flow decides what it means
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as done:
            value: T = done.value
            return value


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs the caller; None in a plain thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def run_here(in_thread: Runner, on_loop: AsyncRunner) -> Callable[[Flow[Any]], Any]:
    """
    Runs flows wherever it is called: on an event loop its result is awaited, in a thread not.

    A framework may run the blocking parts of an async application in threads.
    """

    def run(flow: Flow[Any]) -> Any:  # noqa: ANN401 - the flow's result, or an awaitable of it
        return in_thread.run(flow) if running_loop() is None else on_loop.run(flow)

    return run
