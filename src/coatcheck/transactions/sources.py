"""Sources: where the connections for transactions come from, and how they are given back.

The application passes a pool, an engine or session maker, one connection, or a function that
returns a connection or a context manager of one. An async engine accepts the sync ones, too: calls
that may block run in a thread.

Whether a call may block must be known before it is made. Called on the event loop is what is async
by its type or declaration: coroutine functions, functions under `asynccontextmanager`, classes of
async context managers, and what belongs to an async driver or has a name that begins with "async".
Anything else is called in a thread, with a copy of the caller's context. It may return something
async; a function that needs the event loop itself must be declared with `async def`.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from types import CoroutineType
from typing import Any, NamedTuple

from coatcheck.errors import Misconfigured
from coatcheck.transactions import (
    TransactionConnection,
    adapter_for,
    is_async,
    is_connection,
    is_of_async_driver,
)
from coatcheck.transactions.django import DjangoConnection
from coatcheck.transactions.in_threads import ThreadedConnection, acquire_in_thread

# Methods that return a connection: of pools for asyncpg and MySQL, of psycopg's pools, of
# SQLAlchemy's engines.
_METHODS = ("acquire", "connection", "connect")


class ConnectionSource(NamedTuple):
    """A function that opens or acquires a connection, and whether it runs on the event loop."""

    open: Callable[[], Any]
    is_async: bool


def connection_source(given: object) -> ConnectionSource:
    """Return the source for what the application has *given*."""
    if is_connection(given):  # the application keeps it: we neither enter nor close it
        if is_async(given):
            return ConnectionSource(partial(nullcontext, given), is_async=True)
        return ConnectionSource(partial(_kept, given), is_async=False)
    if callable(given):
        return ConnectionSource(given, is_async=_is_for_event_loops(given))
    for name in _METHODS:
        method = getattr(given, name, None)
        if method is not None:
            return ConnectionSource(method, is_async=_is_for_event_loops(method))
    # Not its value: a URL may have a password in it.
    raise Misconfigured(
        f"a {type(given).__name__} provides no connections; pass a pool, an engine, a session "
        "maker, a connection, or a function that returns one"
    )


@contextmanager
def _kept(handle: Any) -> Iterator[Any]:  # noqa: ANN401 - of any driver
    yield handle


def _is_for_event_loops(function: Any) -> bool:  # noqa: ANN401 - anything callable
    """*function* is async, as far as that can be known before it is called."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    type_ = owner if isinstance(owner, type) else type(owner)
    is_plain = isinstance(function, type) or inspect.isroutine(function)
    called = inspect.unwrap(function if is_plain else function.__call__)
    return (
        inspect.iscoroutinefunction(called)
        or inspect.isasyncgenfunction(called)  # under `asynccontextmanager`
        or hasattr(type_, "__aenter__")
        or is_of_async_driver(type_)
    )


def acquire(source: ConnectionSource) -> tuple[TransactionConnection, Callable[..., Any]]:
    """Return a connection from *source*, and the function that gives it back."""
    opened = source.open()
    if _is_for_async_code(opened):
        if inspect.iscoroutine(opened):
            opened.close()
        raise Misconfigured(
            f"{source.open!r} returns async connections; use them with an AsyncEngine"
        )
    return _entered(opened)


def _is_for_async_code(opened: object) -> bool:
    return inspect.isawaitable(opened) or hasattr(type(opened), "__aenter__") or is_async(opened)


def _entered(opened: Any) -> tuple[TransactionConnection, Callable[..., Any]]:  # noqa: ANN401 - of any driver
    manager = _managed(opened)
    return manager.__enter__(), manager.__exit__


@contextmanager
def _managed(opened: Any) -> Iterator[TransactionConnection]:  # noqa: ANN401 - of any driver
    if isinstance(opened, sqlite3.Connection):  # a context manager that does not close
        opened = closing(opened)
    elif not hasattr(type(opened), "__enter__"):
        opened = nullcontext(opened)
    with opened as handle:
        if is_async(handle):
            raise Misconfigured(f"{handle!r} is for async code; use it with an AsyncEngine")
        yield adapter_for(handle)


async def acquire_async(
    source: ConnectionSource,
) -> tuple[TransactionConnection, Callable[..., Any]]:
    """Return a connection from *source*, and the coroutine function that gives it back."""
    if source.is_async:
        opened = source.open()
    else:
        opened = await acquire_in_thread(_open_in_thread, source.open)
    if isinstance(opened, CoroutineType):
        opened = await opened
    if not isinstance(opened, ThreadedConnection) and not _is_for_async_code(opened):
        opened = await acquire_in_thread(_open_in_thread, lambda: opened)
    if isinstance(opened, ThreadedConnection):
        return opened, opened.give_back
    manager = opened if hasattr(type(opened), "__aenter__") else nullcontext(opened)
    handle = await manager.__aenter__()
    try:
        return adapter_for(handle), manager.__aexit__
    except Misconfigured as error:
        await manager.__aexit__(type(error), error, None)
        raise


def _open_in_thread(open_: Callable[[], Any]) -> Any:  # noqa: ANN401 - of any driver
    """Call *open_*; if the result is for sync code, enter it and return a `ThreadedConnection`."""
    try:
        opened = open_()
    except RuntimeError as error:
        if "event loop" in str(error):  # asyncio: "no running event loop"
            raise Misconfigured(
                f"{open_!r} needs the event loop, and plain functions are called in a thread; "
                "declare it with `async def`"
            ) from error
        raise
    if _is_for_async_code(opened):
        return opened
    connection, give_back = _entered(opened)
    if isinstance(connection, DjangoConnection):
        give_back(None, None, None)
        raise Misconfigured(
            "a connection of Django belongs to its thread and cannot be used on an event loop; use "
            "an Engine"
        )
    return ThreadedConnection(connection, give_back)
