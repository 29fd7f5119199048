"""Sources: where lent connections come from, and how they go back.

A source is what the application has: a pool, an engine or a session maker, one connection, or a
function that gives a connection or a context manager for one. An async engine takes the sync ones,
too: what would block is done in a thread.

What may block can be told from no call that was made already, so it has to be known before. On the
event loop is called what is async by its type or its declaration: coroutine functions, functions
under `asynccontextmanager`, classes of async context managers, and what belongs to an async driver
or is called "async…". Anything else is called in a thread, with the caller's context. Where it
gives something async there, or misses the event loop, it is called on the event loop from then on.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from types import CoroutineType
from typing import Any, cast

from coatcheck.errors import Misconfigured
from coatcheck.lent import AsyncLent, Lent, is_async, is_connection, is_of_async_driver, lent_by
from coatcheck.lent.django import DjangoLent
from coatcheck.lent.threads import Threads, borrowed_in_thread

# What leads to a connection: of asyncpg's and MySQL's pools, psycopg's, and SQLAlchemy's engines.
_WAYS = ("acquire", "connection", "connect")


class Source:
    """A function that lends, and whether it is to be called on the event loop."""

    __slots__ = ("is_async", "lend")

    def __init__(self, lend: Callable[[], Any], *, is_async: bool) -> None:
        self.lend = lend
        self.is_async = is_async


def source_of(given: object) -> Source:
    """What the application has *given*, as a source."""
    if is_connection(given):
        kept = _AsyncKept(given) if is_async(given) else _Kept(given)
        return Source(lambda: kept, is_async=is_async(given))
    if callable(given):
        return Source(given, is_async=_is_for_loops(given))
    for way in _WAYS:
        lend = getattr(given, way, None)
        if lend is not None:
            return Source(lend, is_async=_is_for_loops(lend))
    raise Misconfigured(
        f"{given!r} lends no connections; give a pool, an engine, a session maker, a connection, "
        "or a function that makes one"
    )


def _is_for_loops(lend: Any) -> bool:  # noqa: ANN401 - whatever can be called
    """*lend* is known to be for event loops, before it is called."""
    while isinstance(lend, partial):
        lend = lend.func
    owner = getattr(lend, "__self__", lend)
    kind = owner if isinstance(owner, type) else type(owner)
    is_function = isinstance(lend, type) or inspect.isroutine(lend)
    function = inspect.unwrap(lend if is_function else lend.__call__)
    return (
        inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)  # under `asynccontextmanager`
        or hasattr(kind, "__aenter__")
        or is_of_async_driver(kind)
    )


class _Kept:
    """A connection that stays its owner's: it is neither entered nor closed."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of whatever driver
        self._handle = handle

    def __enter__(self) -> Any:  # noqa: ANN401 - as above
        return self._handle

    def __exit__(self, *_: object) -> None:
        pass


class _AsyncKept(_Kept):
    """The same for async code."""

    async def __aenter__(self) -> Any:  # noqa: ANN401 - as above
        return self._handle

    async def __aexit__(self, *_: object) -> None:
        pass


def borrowed(source: Source) -> AbstractContextManager[Lent]:
    """A connection from *source*, which is given back at the end."""
    made = source.lend()
    if _is_awaited(made):
        if inspect.iscoroutine(made):
            made.close()
        raise Misconfigured(
            f"{source.lend!r} lends async connections; use them with an AsyncEngine"
        )
    return _managed(made)


def _is_awaited(made: object) -> bool:
    return inspect.isawaitable(made) or hasattr(type(made), "__aenter__")


@contextmanager
def _managed(made: Any) -> Iterator[Lent]:  # noqa: ANN401 - of whatever driver
    if isinstance(made, sqlite3.Connection):  # it is a context manager that does not close
        made = closing(made)
    elif not hasattr(type(made), "__enter__"):
        made = nullcontext(made)
    with made as handle:
        yield _sync(handle)


def _sync(handle: Any) -> Lent:  # noqa: ANN401 - of whatever driver
    if is_async(handle):
        raise Misconfigured(f"{handle!r} is for async code; use it with an AsyncEngine")
    return cast("Lent", lent_by(handle))


async def borrow(source: Source) -> tuple[AsyncLent, Any]:
    """A connection from *source*, and the context manager to be left for it, or None."""
    made: Any = source.lend() if source.is_async else await _lent_in_thread(source)
    if isinstance(made, CoroutineType):
        made = await made
    if hasattr(type(made), "__aenter__"):
        handle = await made.__aenter__()
        try:
            lent: Any = lent_by(handle)
        except Misconfigured as error:
            await made.__aexit__(type(error), error, None)
            raise
        return lent, made
    if is_async(made):
        lent = lent_by(made)
        return lent, None
    if not isinstance(made, Threads):
        made = await borrowed_in_thread(_entered, lambda: made)
    return made, made


async def _lent_in_thread(source: Source) -> Any:  # noqa: ANN401 - of whatever driver
    """What *source* lends: `Threads`, or what is for event loops, which then is known of it."""
    made = await borrowed_in_thread(_entered, source.lend)
    source.is_async = not isinstance(made, Threads)
    return source.lend() if made is _ON_LOOP else made


# In place of what a function would give that has to be called on the event loop.
_ON_LOOP = object()


def _entered(lend: Callable[[], Any]) -> Any:  # noqa: ANN401 - of whatever driver
    """What *lend* gives; where that is for sync code, the connection and what has lent it."""
    try:
        made = lend()
    except RuntimeError as error:
        if "event loop" in str(error):  # asyncio misses the one that runs
            return _ON_LOOP
        raise
    if _is_awaited(made) or is_async(made):
        return made
    manager = _managed(made)
    lent = manager.__enter__()
    if isinstance(lent, DjangoLent):
        manager.__exit__(None, None, None)
        raise Misconfigured("a connection of Django's belongs to its thread; use an Engine")
    return Threads(manager, lent)
