"""Flows and effects: the only seam between what is decided and what is done.

A flow is a generator that yields the I/O it wants (an effect) and is sent the result. All
decisions are in flows; a driver only performs. Sync and async code, the explorer of interleavings
and the simulator are drivers of the same flows, so what is proven of one is true of all.

Rules of a flow: it never does I/O, reads a clock, draws a random number or logs; it never yields
after a `BaseException` that is not an `Exception`; it says `yield from effect`, because the types
depend on it, or on the path of every request `result: Type = yield effect`, which is quicker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Effect(Generic[R_co]):
    """One piece of I/O, described. `yield from effect` evaluates to its result."""

    __slots__ = ()

    def __iter__(self) -> Generator[Effect[Any], Any, R_co]:
        result: R_co = yield self
        return result


Flow: TypeAlias = Generator[Effect[Any], Any, R]


def run(flow: Flow[R], perform: Callable[[Effect[Any]], Any]) -> R:
    """Drive *flow* to its end, performing each effect with *perform*."""
    try:
        effect = next(flow)
        while True:
            try:
                result = perform(effect)
            except Exception as error:  # noqa: BLE001 - the flow decides what an error means
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as done:
        value: R = done.value
        return value


async def run_async(flow: Flow[R], perform: Callable[[Effect[Any]], Awaitable[Any]]) -> R:
    """Drive *flow* to its end, awaiting each effect; differs from `run` in that word only."""
    try:
        effect = next(flow)
        while True:
            try:
                result = await perform(effect)
            except Exception as error:  # noqa: BLE001 - the flow decides what an error means
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as done:
        value: R = done.value
        return value
