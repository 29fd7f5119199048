"""Flows and effects: they separate decisions from I/O.

A flow is a generator. It yields a description of the I/O that it needs (an effect), and receives
the result. Flows make all decisions; a runner only performs effects. The sync engine, the async
engine, the explorer of interleavings and the simulator run the same flows, so what is proven with
one of them holds for all.

Rules for a flow: it does no I/O, reads no clock, draws no random number and does not log. It uses
`yield from effect`, which is typed, or `result: Type = yield effect`, which is faster. After a
`BaseException` that is not an `Exception` (a cancellation, Control-C) it yields nothing more,
except to roll a transaction back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Effect(Generic[R_co]):
    """A description of one piece of I/O. `yield from effect` evaluates to its result."""

    __slots__ = ()

    def __iter__(self) -> Generator[Effect[Any], Any, R_co]:
        result: R_co = yield self
        return result


Flow: TypeAlias = Generator[Effect[Any], Any, R]


@dataclass(slots=True)
class Sleep(Effect[None]):
    """Do nothing for a while."""

    seconds: float


@dataclass(slots=True)
class Call(Effect[Any]):
    """Call *function*; an async runner awaits what it returns."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


def run(flow: Flow[R], perform: Callable[[Effect[Any]], Any]) -> R:
    """Run *flow* to its end; *perform* performs each effect."""
    try:
        effect = next(flow)
        while True:
            try:
                result = perform(effect)
            except BaseException as error:  # noqa: BLE001 - the flow decides what an error means
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as done:
        value: R = done.value
        return value


async def run_async(flow: Flow[R], perform: Callable[[Effect[Any]], Awaitable[Any]]) -> R:
    """Run *flow* to its end; *perform* performs each effect, and is awaited."""
    try:
        effect = next(flow)
        while True:
            try:
                result = await perform(effect)
            except BaseException as error:  # noqa: BLE001 - the flow decides what an error means
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as done:
        value: R = done.value
        return value
