"""Functions of the application's that are called, and not awaited.

An async one would give a coroutine: a key made of that is another one with every retry, and an
archive that only gives one has archived nothing.
"""

from __future__ import annotations

import inspect

from coatcheck.errors import Misconfigured


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
