"""Connections for sync code, used from an event loop: each call runs in a thread.

A thread cannot be cancelled. If its caller is, the next call on the connection waits for the thread
first, and a connection that was acquired for a cancelled caller is given back.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from typing import Any, TypeVar

from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.contract import InTransaction, TransactionConnection

T = TypeVar("T")

# Three executors, because one would deadlock: threads that wait for a free connection must not
# keep those out that have one, and threads that wait for a locked row must not keep out the
# commit that unlocks it. 40: the default number of threads of a web framework (anyio).
_ACQUIRING = ThreadPoolExecutor(max_workers=40, thread_name_prefix="coatcheck-acquire")
_CLAIMING = ThreadPoolExecutor(max_workers=40, thread_name_prefix="coatcheck-claim")
# Without a limit, because the others wait for what runs here. It never has more threads than
# there are transactions that are ending.
_ENDING = ThreadPoolExecutor(max_workers=sys.maxsize, thread_name_prefix="coatcheck-end")


async def acquire_in_thread(enter: Callable[..., T], *args: object) -> T:
    """Call *enter* in a thread, with the caller's context; it returns a `ThreadedConnection`."""
    future = _ACQUIRING.submit(copy_context().run, enter, *args)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(_give_back)
        raise


def _give_back(future: Future[Any]) -> None:
    """Give back a connection whose caller was cancelled."""
    if future.cancelled() or future.exception() is not None:
        return
    opened = future.result()
    if isinstance(opened, ThreadedConnection):
        _ENDING.submit(opened.manager.__exit__, None, None, None)
    elif inspect.iscoroutine(opened):
        opened.close()


class ThreadedConnection:
    """A connection for sync code, used in threads, and never in two at the same time."""

    def __init__(
        self,
        manager: AbstractContextManager[TransactionConnection],
        connection: TransactionConnection,
    ) -> None:
        self.manager = manager
        self.handle = connection.handle
        self.dialect: Dialect = connection.dialect
        self._connection = connection
        self._has_begun = False
        self._last: Future[Any] | None = None

    async def begin(self, claim: Statement) -> int:
        """Begin a transaction, execute *claim* in it and return the number of affected rows."""
        return await self._call(_CLAIMING, self._begin, claim)

    def _begin(self, claim: Statement) -> int:
        self._has_begun = True
        try:
            return self._connection.begin(claim)
        except InTransaction:  # noted here, because a cancelled caller does not get the exception
            self._has_begun = False
            raise

    async def write(self, statement: Statement) -> int:
        """Execute *statement* and return the number of affected rows."""
        return await self._call(_CLAIMING, self._connection.write, statement)

    def is_closed(self) -> bool:
        """The handler has closed it."""
        return self._connection.is_closed()

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, commit if it affected one row, and return whether it did."""
        return await self._call(_ENDING, self._connection.end, statement)

    async def rollback(self) -> None:
        """Roll back, if a transaction was begun."""
        await self._call(_ENDING, self._rollback)

    def _rollback(self) -> None:
        if self._has_begun:
            self._connection.rollback()

    async def __aexit__(self, *failure: object) -> None:
        await self._call(_ENDING, self.manager.__exit__, *failure)

    async def _call(self, threads: ThreadPoolExecutor, call: Callable[..., T], *args: object) -> T:
        """Call *call* in one of *threads*, after the previous call on this connection."""
        last = self._last
        if last is None or last.done():
            future = threads.submit(call, *args)
        else:
            future = _ENDING.submit(_call_after, last, call, *args)
        self._last = future
        return await asyncio.wrap_future(future)


def _call_after(last: Future[Any], call: Callable[..., T], *args: object) -> T:
    with suppress(CancelledError):  # cancelled before it had begun
        last.exception()
    return call(*args)
