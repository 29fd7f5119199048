"""Functions of the application's that are called, and not awaited.

An async one would give a coroutine: a key made of that is another one with every retry, and an
archive that only gives one has archived nothing. And what cannot be called would fail with every
request: both are found when they are given.
"""

from __future__ import annotations

import inspect

from coatcheck.errors import Misconfigured


def check_function(name: str, function: object) -> None:
    """Refuse what was given as *name*, unless it can be called, and need not be awaited."""
    if not callable(function):
        raise Misconfigured(f"{name}= is a {type(function).__name__}; it is a function")
    refuse_async(name, function)


def refuse_async(name: str, function: object) -> None:
    """Refuse *function*, which was given as *name*, if it is to be awaited."""
    called = getattr(function, "__call__", None)  # noqa: B004 - of an object that can be called
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):
        raise Misconfigured(f"{name}= is called and not awaited: it must not be async")


def refuse_awaitable(name: str, found: object) -> None:
    """The same of what a function has *found* that did not look like one."""
    if inspect.isawaitable(found):
        if inspect.iscoroutine(found):
            found.close()
        raise Misconfigured(f"{name}= is called and not awaited: it must not be async")
