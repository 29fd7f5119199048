"""Branches: parts of a saga that run at the same time, on an event loop or in threads."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# 32: as many threads as Python's own pools have at most.
BRANCHES_MAX = 32


async def gather_on_loop(branches: tuple[Any, ...]) -> list[Any]:
    """Run *branches*, which are awaitables; all of them end before the first failure is raised."""
    tasks = [asyncio.ensure_future(_coroutine(branch)) for branch in branches]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks)
    except BaseException:  # cancelled from outside: the background continues the saga
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    raise_first([task.exception() for task in tasks])
    return [task.result() for task in tasks]


async def _coroutine(branch: Any) -> Any:  # noqa: ANN401 - the application's own
    started: Any = branch() if callable(branch) else branch
    return await started


def gather_in_threads(branches: tuple[Callable[[], Any], ...]) -> list[Any]:
    """Run *branches*, which are functions; all of them end before the first failure is raised."""
    with ThreadPoolExecutor(BRANCHES_MAX, "coatcheck-saga") as pool:
        contexts = [(contextvars.copy_context(), branch) for branch in branches]
        futures = [pool.submit(context.run, branch) for context, branch in contexts]
    raise_first([future.exception() for future in futures])
    return [future.result() for future in futures]


def raise_first(errors: list[BaseException | None]) -> None:
    """Raise the first error; what ends the run comes before a failure."""
    found = [error for error in errors if error is not None]
    for error in found:
        if not isinstance(error, Exception):
            raise error
    if found:
        raise found[0]
