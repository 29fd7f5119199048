"""The runner: performs the effects of production's flows, each as a pause of a task.

What `engine/runner.py` does in a thread or on an event loop, this does in virtual time. While an
effect waits for the store, the clock or a function of the application, other tasks run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from coatcheck.core.flow import Call, Effect, Flow, Sleep
from coatcheck.core.record import Get, Record, Swap
from coatcheck.engine.lease_writes import SwapAll

from .world import Pause, Violation

if TYPE_CHECKING:
    from .process import Process
    from .served import ServedRequest

T = TypeVar("T")

# More than any flow needs: one that goes round and round without a pause would stop the world.
EFFECTS_MAX = 1_000


class Crashed(BaseException):
    """The process has crashed."""


def _discard(flow: Flow[Any]) -> None:
    """End *flow*; the process is dead, so its remaining effects are not performed."""
    with suppress(Crashed, StopIteration):
        flow.throw(Crashed())
        while True:
            flow.send(None)


class Doing(Generic[T]):
    """What a function of the application or a driver does, as the body of a task."""

    def __init__(self, body: Generator[Pause, Any, T]) -> None:
        self.body = body


def done(doing: Doing[T]) -> Generator[Pause, Any, T]:
    """What *doing* results in, for a task."""
    return (yield from doing.body)


class Runner:
    """
    Runs flows in one process.

    Args:
        writer: who writes a record, for the rules: a request, or the name of a background task.
        served: the request that the flows belong to, if they belong to one.
    """

    def __init__(
        self,
        process: Process,
        writer: Callable[[Swap], object],
        served: ServedRequest | None = None,
    ) -> None:
        self._process = process
        self._writer = writer
        self._served = served

    def run(self, flow: Flow[T]) -> Generator[Pause, Any, T]:
        """Run *flow* to its end."""
        send: Callable[[Any], Effect[Any]] = flow.send
        value: Any = None
        for _ in range(EFFECTS_MAX):
            self._process.advancing = self._served
            try:
                effect = send(value)
            except StopIteration as stopped:
                result: T = stopped.value
                return result
            try:
                value = yield from self._perform(effect)
            except Violation:
                raise
            except GeneratorExit:  # its process has crashed, and its tasks are thrown away
                _discard(flow)
                raise
            except BaseException as error:  # noqa: BLE001 - the flow decides what it means
                send, value = flow.throw, error
            else:
                send = flow.send
        self._process.world.broken("every flow comes to its end")

    def _perform(self, effect: Effect[Any]) -> Generator[Pause, Any, Any]:
        store = self._process.setting.store
        if isinstance(effect, Swap):
            [conflict] = yield from self._swap([effect])
            return conflict
        if isinstance(effect, SwapAll):
            return (yield from self._swap(list(effect.swaps)))
        if isinstance(effect, Get):
            record: Record = yield store.ask(functools.partial(store.get, effect.id))
            return record if record.version else None
        if isinstance(effect, Sleep):
            yield effect.seconds * 1_000
            return None
        assert isinstance(effect, Call)
        result = effect.function(*effect.args)
        return (yield from result.body) if isinstance(result, Doing) else result

    def _swap(self, swaps: list[Swap]) -> Generator[Pause, Any, list[Record | None]]:
        store, writer = self._process.setting.store, self._writer(swaps[0])
        if self._served is not None:
            self._served.is_about_to_write(swaps[0].id)
        conflicts: list[Record | None] = yield store.ask(
            functools.partial(store.swap, swaps, writer)
        )
        return conflicts
