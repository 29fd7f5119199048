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
