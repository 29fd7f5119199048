"""Waits of async tests that end with a clear failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sized
from typing import Any

from tests.support.times import WAIT_S_MAX


async def arrived(seen: Sized, count: int) -> None:
    """Wait until *seen*, which a handler appends to, has *count* elements."""
    async with asyncio.timeout(WAIT_S_MAX):
        while len(seen) < count:  # noqa: ASYNC110 - a handler appends to it
            await asyncio.sleep(0.005)


async def until(look: Callable[[], Awaitable[Any]], *, pause_s: float = 0.005) -> Any:
    """Look again and again; what was found."""
    async with asyncio.timeout(WAIT_S_MAX):
        while not (found := await look()):  # noqa: ASYNC110 - a server does not notify
            await asyncio.sleep(pause_s)
        return found
