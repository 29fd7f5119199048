"""Connections for sync code, used from an event loop: each call runs in a thread.

A thread cannot be cancelled. If its caller is, the next call on the connection waits for the thread
first, and a connection that was acquired for a cancelled caller is given back.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from coatcheck.core.flow import Call, Flow
from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.contract import InTransaction, TransactionConnection, call

T = TypeVar("T")

# Three executors, because one would deadlock: threads that wait for a free connection must not
# keep those out that have one, and threads that wait for a locked row must not keep out the
# commit that unlocks it. 40: the default number of threads of a web framework (anyio).
_ACQUIRING = ThreadPoolExecutor(max_workers=40, thread_name_prefix="coatcheck-acquire")
_CLAIMING = ThreadPoolExecutor(max_workers=40, thread_name_prefix="coatcheck-claim")
# Without a limit, because the others wait for what runs here. It never has more threads than
# there are transactions that are ending.
_ENDING = ThreadPoolExecutor(max_workers=sys.maxsize, thread_name_prefix="coatcheck-end")


async def acquire_in_thread(open_: Callable[..., T], *args: object) -> T:
    """Call *open_* in a thread, with the caller's context; it returns a `ThreadedConnection`."""
    future = _ACQUIRING.submit(copy_context().run, open_, *args)
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
        _ENDING.submit(opened.give_back_here, None, None, None)
    elif inspect.iscoroutine(opened):
        opened.close()


class ThreadedConnection(TransactionConnection):
    """A connection for sync code, used in threads, and never in two at the same time."""

    def __init__(
        self, connection: TransactionConnection, give_back_here: Callable[..., Any]
    ) -> None:
        super().__init__(connection.handle)
        self.dialect: Dialect = connection.dialect
        self.give_back_here = give_back_here
        self._connection = connection
        self._has_begun = False
        self._last: Future[Any] | None = None

    def begin(self, claim: Iterable[Statement], *, can_undo: bool = False) -> Flow[bool]:
        """Begin a transaction and write *claim* in it; return whether it was written."""
        is_written: bool = yield from Call(self._call, (_CLAIMING, self._begin, claim, can_undo))
        return is_written

    def _begin(self, claim: Iterable[Statement], can_undo: bool) -> bool:  # noqa: FBT001 - an executor passes it
        self._has_begun = True
        try:
            is_written: bool = call(self._connection.begin(claim, can_undo=can_undo))
        except InTransaction:  # noted here, because a cancelled caller does not get the exception
            self._has_begun = False
            raise
        return is_written

    def write(self, statement: Statement) -> Flow[int]:
        """Execute *statement* and return the number of affected rows."""
        write = self._connection.write(statement)
        affected: int = yield from Call(self._call, (_ENDING, call, write))
        return affected

    def end(self, completion: Statement, *, undo: bool = False) -> Flow[None]:
        """Write *completion* and commit; raises `NotCommitted` if our transaction is over."""
        end = self._connection.end(completion, undo=undo)
        yield from Call(self._call, (_ENDING, call, end))

    def rollback(self) -> Flow[None]:
        """Roll back, if a transaction was begun."""
        yield from Call(self._call, (_ENDING, self._rollback))

    def _rollback(self) -> None:
        if self._has_begun:
            call(self._connection.rollback())

    async def give_back(self, *failure: object) -> None:
        """Give the connection back to its source."""
        await self._call(_ENDING, self.give_back_here, *failure)

    async def _call(
        self, threads: ThreadPoolExecutor, function: Callable[..., T], *args: object
    ) -> T:
        """Call *function* in one of *threads*, after the previous call on this connection."""
        last = self._last
        if last is None or last.done():
            future = threads.submit(function, *args)
        else:
            future = _ENDING.submit(_call_after, last, function, *args)
        self._last = future
        return await asyncio.wrap_future(future)


def _call_after(last: Future[Any], function: Callable[..., T], *args: object) -> T:
    with suppress(CancelledError):  # cancelled before it had begun
        last.exception()
    return function(*args)
