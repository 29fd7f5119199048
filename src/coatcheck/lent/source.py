"""Sources: where lent connections come from, and how they go back.

A source is what the application has: a pool, an engine or a session maker, one connection, or a
function that gives a connection or a context manager for one. An async engine takes the sync ones,
too: what would block is done in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from types import CoroutineType
from typing import Any, TypeAlias, TypeVar, cast

from coatcheck.errors import Misconfigured
from coatcheck.lent import AsyncLent, Lent, is_async, is_connection, lent_by
from coatcheck.lent.django import DjangoLent
from coatcheck.stores.ledger import Dialect, Statement

T = TypeVar("T")
Source: TypeAlias = Callable[[], Any]

# 40: as many as a web framework's own threads, each of which may have lent us a connection. Who
# waits for a connection is in the way of nobody who has one, and who waits there for a row in the
# way of nobody who has claimed it.
_BORROWING = ThreadPoolExecutor(max_workers=40, thread_name_prefix="coatcheck-lent")
_CLAIMING = ThreadPoolExecutor(max_workers=40, thread_name_prefix="coatcheck-claim")
# All others wait for what ends here, so nothing ever stands in line: there are never more threads
# than transactions that are ending.
_ENDING = ThreadPoolExecutor(max_workers=sys.maxsize, thread_name_prefix="coatcheck-end")

# What leads to a connection: of asyncpg's and MySQL's pools, psycopg's, and SQLAlchemy's engines.
_WAYS = ("acquire", "connection", "connect")


def source_of(given: object) -> Source:
    """What the application has *given*, as a function that lends."""
    if is_connection(given):
        kept = _AsyncKept(given) if is_async(given) else _Kept(given)
        return lambda: kept
    if not callable(given):
        for way in _WAYS:
            lend: Source | None = getattr(given, way, None)
            if lend is not None:
                return lend
        raise Misconfigured(
            f"{given!r} lends no connections; give a pool, an engine, a session maker, a "
            "connection, or a function that makes one"
        )
    return given


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


@contextmanager
def borrowed(source: Source) -> Iterator[Lent]:
    """A connection from *source*, which is given back at the end."""
    made = source()
    if inspect.isawaitable(made) or hasattr(type(made), "__aenter__"):
        if inspect.iscoroutine(made):
            made.close()
        raise Misconfigured(f"{source!r} lends async connections; use them with an AsyncEngine")
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
    made: Any = source()
    if isinstance(made, CoroutineType):
        made = await made
    if hasattr(type(made), "__aenter__"):
        lent: Any = lent_by(await made.__aenter__())
        return lent, made
    if is_async(made):
        lent = lent_by(made)
        return lent, None
    manager = _Threads(borrowed(lambda: made))
    return await manager.__aenter__(), manager


class _Threads:
    """A context manager for sync code, in threads."""

    def __init__(self, manager: AbstractContextManager[Lent]) -> None:
        self._manager = manager

    async def __aenter__(self) -> AsyncLent:
        return Threaded(await _done(_BORROWING, self._manager.__enter__))

    async def __aexit__(self, *failure: object) -> None:
        await _done(_ENDING, self._manager.__exit__, *failure)


async def _done(threads: ThreadPoolExecutor, call: Callable[..., T], *args: object) -> T:
    """What *call* returns, from a thread of ours: the default ones may all wait for each other."""
    return await asyncio.get_running_loop().run_in_executor(threads, call, *args)


class Threaded:
    """A lent connection for sync code, as async code uses it."""

    def __init__(self, lent: Lent) -> None:
        if isinstance(lent, DjangoLent):
            raise Misconfigured("a connection of Django's belongs to its thread; use an Engine")
        self._lent = lent
        self.handle = lent.handle
        self.dialect: Dialect = lent.dialect

    async def begin(self, claim: Statement) -> int:
        """Begin a transaction, and execute *claim* in it; how many rows it affected."""
        return await _done(_CLAIMING, self._lent.begin, claim)

    async def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        return await _done(_CLAIMING, self._lent.write, statement)

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, and commit where it affected one row; whether it did."""
        return await _done(_ENDING, self._lent.end, statement)

    async def rollback(self) -> None:
        """Undo."""
        await _done(_ENDING, self._lent.rollback)
