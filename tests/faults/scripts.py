"""One script for sync and for async code: a generator that yields what may have to be awaited.

So a handler, its victim and its retry are written once, and run on both engines.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

Script: TypeAlias = Generator[Any, Any, T]


def play(script: Script[T]) -> T:
    """In a thread: what is yielded is done already."""
    value = None
    while True:
        try:
            value = script.send(value)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return] # what the script returns


async def play_async(script: Script[T]) -> T:
    """On an event loop: what is yielded is awaited, and other tasks have a turn in any case."""
    go_on: Callable[[], Any] = partial(script.send, None)
    while True:
        try:
            asked = go_on()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return] # as above
        try:
            value = await (asked if inspect.isawaitable(asked) else asyncio.sleep(0, asked))
        except BaseException as error:  # noqa: BLE001 - the script may handle it
            go_on = partial(script.throw, error)
        else:
            go_on = partial(script.send, value)
