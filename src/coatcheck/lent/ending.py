"""Endings: what must be done to its end, also for somebody who is cancelled meanwhile.

Some cancel once, and some again and again until they are obeyed, like anyio. What ends a
transaction is therefore in a task of its own, which nobody cancels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

# Kept, because an event loop forgets a task that nobody else knows of.
_UNDER_WAY: set[asyncio.Task[None]] = set()


async def to_the_end(work: Coroutine[Any, Any, None], limit_s: float) -> None:
    """
    Await *work* to its end, and only then be cancelled.

    After *limit_s* it goes on by itself.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + limit_s
    task = loop.create_task(work)
    _UNDER_WAY.add(task)
    task.add_done_callback(_UNDER_WAY.discard)
    interruption: asyncio.CancelledError | None = None
    while not task.done() and (left_s := until_s - loop.time()) > 0:
        try:
            await asyncio.wait((task,), timeout=left_s)
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is not None:
        raise interruption
