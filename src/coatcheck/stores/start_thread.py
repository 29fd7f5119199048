"""Starting threads: if the system refuses one, the store is unavailable for as long as that lasts.

A container or a user may have reached its limit of threads. The call then fails with
`StoreUnavailable` and has no effect; the next call tries again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from coatcheck.errors import StoreUnavailable

R = TypeVar("R")


def start_thread(name: str, work: Callable[..., None], *args: object) -> threading.Thread:
    """Start a daemon thread that does *work*; raises `StoreUnavailable` if there is none."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise _no_thread(error) from error
    return thread


async def run_in_thread(
    call: Callable[..., R], *args: object, executor: ThreadPoolExecutor | None = None
) -> R:
    """
    Run *call* in a thread of *executor* (by default the event loop's own) and return its result.

    Raises `StoreUnavailable` if no thread can be started. The call is then not made.
    """
    is_dropped = False

    def run() -> R | None:
        return None if is_dropped else call(*args)

    loop = asyncio.get_running_loop()
    try:
        future = loop.run_in_executor(executor, copy_context().run, run)
    except RuntimeError as error:
        # The executor queues the call before it starts a thread: a later thread would make it.
        is_dropped = True
        raise _no_thread(error) from error
    result: R = await future  # type: ignore[assignment]  # None only if it is dropped
    return result


def _no_thread(error: RuntimeError) -> StoreUnavailable:
    return StoreUnavailable(
        f"no thread could be started ({error}); check the process and thread limits"
    )
