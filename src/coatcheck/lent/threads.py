"""Threads: lent connections for sync code, as async code uses them.

A thread goes on when who waits for it is cancelled. So whatever comes next on a connection waits
for it, and what was borrowed for nobody goes back.
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

from coatcheck.lent.contract import InTransaction, Lent
from coatcheck.stores.ledger import Dialect, Statement

T = TypeVar("T")

# 40: as many as a web framework's own threads, each of which may have lent us a connection. Who
# waits for a connection is in the way of nobody who has one, and who waits there for a row in the
# way of nobody who has claimed it.
_BORROWING = ThreadPoolExecutor(max_workers=40, thread_name_prefix="coatcheck-lent")
_CLAIMING = ThreadPoolExecutor(max_workers=40, thread_name_prefix="coatcheck-claim")
# All others wait for what ends here, so nothing ever stands in line: there are never more threads
# than transactions that are ending.
_ENDING = ThreadPoolExecutor(max_workers=sys.maxsize, thread_name_prefix="coatcheck-end")


async def borrowed_in_thread(borrow: Callable[..., T], *args: object) -> T:
    """What *borrow* gives, which is `Threads` or for event loops; it has the caller's context."""
    borrowing = _BORROWING.submit(copy_context().run, borrow, *args)
    try:
        return await asyncio.wrap_future(borrowing)
    except asyncio.CancelledError:
        borrowing.add_done_callback(_unwanted)
        raise


def _unwanted(borrowing: Future[Any]) -> None:
    """Who has asked for it is not there any more."""
    if borrowing.cancelled() or borrowing.exception() is not None:
        return
    made = borrowing.result()
    if isinstance(made, Threads):
        _ENDING.submit(made.manager.__exit__, None, None, None)
    elif inspect.iscoroutine(made):
        made.close()


class Threads:
    """A lent connection for sync code, in threads, and never in two at once."""

    def __init__(self, manager: AbstractContextManager[Lent], lent: Lent) -> None:
        self.manager = manager
        self.handle = lent.handle
        self.dialect: Dialect = lent.dialect
        self._lent = lent
        self._has_begun = False
        self._last: Future[Any] | None = None

    async def begin(self, claim: Statement) -> int:
        """Begin a transaction, and execute *claim* in it; how many rows it affected."""
        return await self._done(_CLAIMING, self._begin, claim)

    def _begin(self, claim: Statement) -> int:
        self._has_begun = True
        try:
            return self._lent.begin(claim)
        except InTransaction:  # who is told so may have been cancelled
            self._has_begun = False
            raise

    async def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        return await self._done(_CLAIMING, self._lent.write, statement)

    def is_closed(self) -> bool:
        """Its handler has closed it."""
        return self._lent.is_closed()

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, and commit where it affected one row; whether it did."""
        return await self._done(_ENDING, self._lent.end, statement)

    async def rollback(self) -> None:
        """Undo what was begun."""
        await self._done(_ENDING, self._rollback)

    def _rollback(self) -> None:
        if self._has_begun:
            self._lent.rollback()

    async def __aexit__(self, *failure: object) -> None:
        await self._done(_ENDING, self.manager.__exit__, *failure)

    async def _done(self, threads: ThreadPoolExecutor, call: Callable[..., T], *args: object) -> T:
        """What *call* returns, from a thread of ours: others may all wait for each other."""
        last = self._last
        if last is None or last.done():
            future = threads.submit(call, *args)
        else:
            future = _ENDING.submit(_after, last, call, *args)
        self._last = future
        return await asyncio.wrap_future(future)


def _after(last: Future[Any], call: Callable[..., T], *args: object) -> T:
    with suppress(CancelledError):  # before it had begun
        last.exception()
    return call(*args)
