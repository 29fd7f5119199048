"""Sources: where the connections for transactions come from, and how they are given back.

The application passes a pool, an engine or session maker, one connection, or a function that
returns a connection or a context manager of one. An async engine accepts the sync ones, too: calls
that may block run in a thread.

Whether a call may block must be known before it is made. Called on the event loop is what is async
by its type or declaration: coroutine functions, functions under `asynccontextmanager`, classes of
async context managers, and what belongs to an async driver or has a name that begins with "async".
Anything else is called in a thread, with a copy of the caller's context. If such a call returns
something async, or asks for the running event loop, later calls are made on the event loop.
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
from coatcheck.transactions import (
    AsyncTransactionConnection,
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


class ConnectionSource:
    """A function that opens or acquires a connection, and whether it runs on the event loop."""

    __slots__ = ("is_async", "open")

    def __init__(self, open: Callable[[], Any], *, is_async: bool) -> None:
        self.open = open
        self.is_async = is_async


def connection_source(given: object) -> ConnectionSource:
    """Return the source for what the application has *given*."""
    if is_connection(given):
        borrowed = _AsyncBorrowed(given) if is_async(given) else _Borrowed(given)
        return ConnectionSource(lambda: borrowed, is_async=is_async(given))
    if callable(given):
        return ConnectionSource(given, is_async=_is_for_event_loops(given))
    for name in _METHODS:
        method = getattr(given, name, None)
        if method is not None:
            return ConnectionSource(method, is_async=_is_for_event_loops(method))
    raise Misconfigured(
        f"{given!r} provides no connections; pass a pool, an engine, a session maker, a "
        "connection, or a function that returns one"
    )


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


class _Borrowed:
    """One connection that the application keeps: we neither enter nor close it."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - of any driver
        self._handle = handle

    def __enter__(self) -> Any:  # noqa: ANN401 - as above
        return self._handle

    def __exit__(self, *_: object) -> None:
        pass


class _AsyncBorrowed(_Borrowed):
    """The same for async code."""

    async def __aenter__(self) -> Any:  # noqa: ANN401 - as above
        return self._handle

    async def __aexit__(self, *_: object) -> None:
        pass


def acquire(source: ConnectionSource) -> AbstractContextManager[TransactionConnection]:
    """Return a context manager of a connection from *source*, which it gives back at its exit."""
    opened = source.open()
    if _is_awaitable(opened):
        if inspect.iscoroutine(opened):
            opened.close()
        raise Misconfigured(
            f"{source.open!r} returns async connections; use them with an AsyncEngine"
        )
    return _managed(opened)


def _is_awaitable(opened: object) -> bool:
    return inspect.isawaitable(opened) or hasattr(type(opened), "__aenter__")


@contextmanager
def _managed(opened: Any) -> Iterator[TransactionConnection]:  # noqa: ANN401 - of any driver
    if isinstance(opened, sqlite3.Connection):  # a context manager that does not close
        opened = closing(opened)
    elif not hasattr(type(opened), "__enter__"):
        opened = nullcontext(opened)
    with opened as handle:
        if is_async(handle):
            raise Misconfigured(f"{handle!r} is for async code; use it with an AsyncEngine")
        yield cast("TransactionConnection", adapter_for(handle))


async def acquire_async(source: ConnectionSource) -> tuple[AsyncTransactionConnection, Any]:
    """Return a connection from *source*, and the context manager to be exited for it, or None."""
    opened: Any = source.open() if source.is_async else await _open_in_thread(source)
    if isinstance(opened, CoroutineType):
        opened = await opened
    if hasattr(type(opened), "__aenter__"):
        handle = await opened.__aenter__()
        try:
            connection: Any = adapter_for(handle)
        except Misconfigured as error:
            await opened.__aexit__(type(error), error, None)
            raise
        return connection, opened
    if is_async(opened):
        connection = adapter_for(opened)
        return connection, None
    if not isinstance(opened, ThreadedConnection):
        opened = await acquire_in_thread(_enter, lambda: opened)
    return opened, opened


async def _open_in_thread(source: ConnectionSource) -> Any:  # noqa: ANN401 - of any driver
    """
    Open a connection of *source* in a thread.

    Returns a `ThreadedConnection`, or something async; *source* is then called on the event loop
    from now on.
    """
    opened = await acquire_in_thread(_enter, source.open)
    source.is_async = not isinstance(opened, ThreadedConnection)
    return source.open() if opened is _NEEDS_EVENT_LOOP else opened


# Returned in place of a connection by a function that must be called on the event loop.
_NEEDS_EVENT_LOOP = object()


def _enter(open_: Callable[[], Any]) -> Any:  # noqa: ANN401 - of any driver
    """Call *open_*; if the result is for sync code, enter it and return a `ThreadedConnection`."""
    try:
        opened = open_()
    except RuntimeError as error:
        if "event loop" in str(error):  # asyncio: "no running event loop"
            return _NEEDS_EVENT_LOOP
        raise
    if _is_awaitable(opened) or is_async(opened):
        return opened
    manager = _managed(opened)
    connection = manager.__enter__()
    if isinstance(connection, DjangoConnection):
        manager.__exit__(None, None, None)
        raise Misconfigured(
            "a connection of Django belongs to its thread and cannot be used on an event loop; use "
            "an Engine"
        )
    return ThreadedConnection(manager, connection)
