"""Handlers that fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


async def fail(_message: object) -> None:
    raise ValueError


def failing_once(seen: list[Any], name: str) -> Callable[[object], Awaitable[None]]:
    """A handler that notes the attribute *name* of each message, and fails for the first."""

    async def fail_once(message: object) -> None:
        seen.append(getattr(message, name))
        if len(seen) == 1:
            raise ValueError

    return fail_once


# Poisoned messages, more than twice as many as are handled at one time, and a healthy one behind them.
POISON = b"poison"
BEHIND_POISON = [*((f"{number}-poison", POISON) for number in range(25)), ("healthy", b"1")]


def failing_for_poison(seen: list[Any]) -> Callable[[Any], Awaitable[None]]:
    """A handler that notes the id of each message, and fails if it is poisoned."""

    async def fail_for_poison(message: Any) -> None:
        seen.append(message.message_id)
        if message.body == POISON:
            raise ValueError

    return fail_for_poison
