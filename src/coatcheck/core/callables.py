"""Checks of functions that the application passes in and the library calls without awaiting.

An async function would return a coroutine. A key made of that differs with every retry, and an
archive function that returns one has archived nothing. So async functions are refused when they are
passed in, or at the latest when they have been called.
"""

from __future__ import annotations

import inspect

from coatcheck.errors import Misconfigured


def check_function(name: str, function: object) -> None:
    """Raise `Misconfigured` unless the argument *name* is a sync function."""
    if not callable(function):
        raise Misconfigured(f"{name}= is a {type(function).__name__}; it must be a function")
    refuse_async(name, function)


def refuse_async(name: str, function: object) -> None:
    """Raise `Misconfigured` if the argument *name* is an async function."""
    if is_async_function(function):
        raise Misconfigured(_MUST_BE_SYNC.format(name=name))


def is_async_function(function: object) -> bool:
    """*function* is written with `async def`."""
    called = getattr(function, "__call__", None)  # noqa: B004 - of an object that can be called
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def refuse_awaitable(name: str, result: object) -> None:
    """Raise `Misconfigured` if the function *name* returned something to await."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise Misconfigured(_MUST_BE_SYNC.format(name=name))


_MUST_BE_SYNC = "{name}= is called without await, so it must not be async"
