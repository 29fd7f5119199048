"""Finishing work in spite of cancellation.

Some callers are cancelled once, others again and again until they obey (anyio). A rollback must not
be interrupted by either, so it runs in a task of its own, which no caller cancels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

# An event loop keeps only weak references to its tasks.
_running: set[asyncio.Task[None]] = set()


async def run_to_end(work: Coroutine[Any, Any, None], limit_s: float) -> None:
    """
    Await *work* even if the caller is cancelled meanwhile; the cancellation is raised afterwards.

    After *limit_s* this returns (or raises the cancellation), and *work* goes on in the background.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    task = loop.create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    cancellation: asyncio.CancelledError | None = None
    while not task.done() and (left_s := deadline_s - loop.time()) > 0:
        try:
            await asyncio.wait((task,), timeout=left_s)
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation
