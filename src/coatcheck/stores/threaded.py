"""A blocking store for event loops: the other shape of batching.

One thread performs whatever has gathered and gives all results back in one wake-up of each event
loop, however many of its calls are done; where nothing ever gathers, see `in_place.py`.
Invariant: every call that was queued is answered, also when the store throws what is no
`Exception`, and after the last one nothing can be queued.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from operator import attrgetter
from typing import Any, TypeVar

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.batching import call_apart, next_round, unknown_outcome
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query, Store
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.in_place import Solitude, Turn, swap_at_once_of
from coatcheck.stores.scarce import outage_without_thread, started

R = TypeVar("R")


class ThreadedStore:
    """
    A blocking store for event loops: one thread of its own performs, in groups.

    Works from any number of event loops at once. A cancelled caller is forgotten, its write is not.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._swap_at_once = swap_at_once_of(store)
        self._forgotten: weakref.finalize[..., ThreadedStore] | None = None
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        if self._forgotten is not None:  # its lock may have been held when we were forked
            self._forgotten.detach()
        self._queue = _Queue(self._store)
        # A store that is forgotten ends its thread.
        self._forgotten = weakref.finalize(self, self._queue.end)

    @property
    def blocking(self) -> Store:
        """The store beneath, for threads."""
        return self._store

    def swap(self, swaps: Sequence[Swap]) -> asyncio.Future[Sequence[Record | None]]:
        """Write each record if the version its caller saw still stands; see `Store.swap`."""
        loop = asyncio.get_running_loop()
        if len(swaps) == 1 and self._is_done_in_place(loop, swaps[0]):
            turn: Turn[Sequence[Record | None]] = Turn(loop=loop)
            turn.set_result([None])
            return turn
        future: asyncio.Future[Sequence[Record | None]] = loop.create_future()
        if not swaps:
            future.set_result([])
            return future
        try:
            self._queue.put(Ask(loop, future, swaps))
        except StoreUnavailable as error:
            future.set_exception(error)
        return future

    async def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand; see `Store.get`."""
        return await self._run(lambda: self._store.get(ids))

    async def find(self, query: Query) -> Page:
        """Records for operators; see `Store.find`. In another thread: claims do not wait for it."""
        return await self._run_beside(lambda: self._store.find(query))

    async def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete what retention allows; see `Store.sweep`."""
        return await self._run(lambda: self._store.sweep(now_ms, limit))

    async def check(self) -> Sequence[Finding]:
        """What the doctor sees; see `Store.check`. In another thread, like `find`."""
        return await self._run_beside(self._store.check)

    async def now_ms(self) -> int:
        """The store's clock; see `Store.now_ms`."""
        return await self._run(self._store.now_ms)

    async def close(self) -> None:
        """Finish what is queued, then close the store beneath; the second time, do nothing."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        try:
            self._queue.put(Ask(loop, future, (), self._store.close), is_last=True)
        except StoreUnavailable:
            if self._queue.end():  # there is no thread, and so nothing that we would wait for
                self._store.close()
            return
        await future

    def finish(self, ask: Ask) -> None:
        """Perform what an event loop that is about to end, or has ended, has not."""
        try:
            self._queue.put(ask, is_urgent=True)
        except StoreUnavailable as error:
            ask.error = unknown_outcome(error)  # it may have been on its way
            _give_back([ask])

    def _is_done_in_place(self, loop: asyncio.AbstractEventLoop, swap: Swap) -> bool:
        """Whether *swap* could be done here and now, and was; see `in_place.py`."""
        if self._swap_at_once is None or not self._queue.enter():
            return False
        has_won = False
        start_s = time.perf_counter()
        try:
            has_won = self._swap_at_once(swap)
        finally:
            if has_won:  # in the next turn, because whoever else asks in this one was not alone
                loop.call_soon(self._queue.leave, time.perf_counter() - start_s)
            else:
                self._queue.leave(math.inf)
        return has_won

    async def _run(self, call: Callable[[], R]) -> R:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._queue.put(Ask(loop, future, (), call))
        result: R = await future
        return result

    async def _run_beside(self, call: Callable[[], R]) -> R:
        """In a thread of the loop's, because it may take long."""
        self._queue.refuse_if_closed()
        with outage_without_thread():
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(None, copy_context().run, call)
        return await future


class Ask:
    """One call of an event loop's, on its way to the writing thread and back."""

    __slots__ = ("call", "error", "future", "loop", "result", "swaps")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
        swaps: Sequence[Swap],
        call: Callable[[], Any] | None = None,
    ) -> None:
        self.loop = loop
        self.future = future
        self.swaps = swaps
        self.call = call
        self.result: Any = None
        self.error: Exception | None = None


class _Queue:
    """
    What event loops have asked for; the writing thread takes all of it at once.

    A busy event loop wakes the thread only when it has gone once through all that was ready.
    Woken by the first call, the thread would fight with the loop for the interpreter: the batch
    would be smaller, and everybody slower.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = threading.Lock()
        self._asks: list[Ask] = []
        self._is_closed = False
        self._thread: threading.Thread | None = None
        # Locked until there is something to take.
        self._arrived = threading.Lock()
        self._arrived.acquire()
        self._is_woken = False
        self._waker: asyncio.AbstractEventLoop | None = None  # has promised to wake the thread
        self._is_busy = False  # the last batch was not for one caller alone
        self._is_at_work = False  # something is queued, or the thread performs it
        self._is_in_place = False  # something is done in place, in this turn of its loop
        self._solitude = Solitude()

    def refuse_if_closed(self) -> None:
        """Raise, if nothing can be asked any more."""
        if self._is_closed:
            raise StoreUnavailable("the store is closed")

    def put(self, ask: Ask, *, is_last: bool = False, is_urgent: bool = False) -> None:
        """Ask; after the last one nothing can be asked, where it would wait for ever."""
        loop = ask.loop
        with self._mutex:
            if self._is_closed:
                self.refuse_if_closed()
            if self._thread is None:  # first of all, because there may be none to be had
                self._thread = started("coatcheck-store", _work, self._store, self)
            self._asks.append(ask)
            if self._is_at_work or self._is_in_place:
                self._solitude.end()
            self._is_at_work = True
            if self._waker is loop and not is_last and not is_urgent:
                return
            self._is_closed = is_last
            if not self._is_busy or is_last or is_urgent or self._waker is not None:
                self._wake()  # another loop's promise would not do: that loop may be closed
            else:
                self._waker = loop
                loop.call_soon(self._keep_promise)

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._arrived.release()

    def _keep_promise(self) -> None:
        with self._mutex:
            if self._asks:
                self._wake()

    def take(self, *, waits: bool) -> list[Ask]:
        """All that was asked; nothing, at the end or where there is nothing to wait for."""
        if not self._arrived.acquire(blocking=waits):
            return []
        with self._mutex:
            asks, self._asks = self._asks, []
            self._is_busy = len(asks) > 1
            self._is_woken, self._waker = False, None
        return asks

    def rest(self, batch: list[Ask], took_s: float) -> None:
        """The thread has performed *batch*, and has nothing left of what it took."""
        with self._mutex:
            self._is_at_work = bool(self._asks)
            if len(batch) == 1 and batch[0].swaps:
                self._solitude.see(took_s)

    def enter(self) -> bool:
        """Begin a write in place, if that may be."""
        with self._mutex:
            if self._is_closed or self._is_at_work or self._is_in_place:
                return False
            self._is_in_place = self._solitude.is_certain()
            return self._is_in_place

    def leave(self, took_s: float) -> None:
        """It is done, and took *took_s*."""
        with self._mutex:
            self._is_in_place = False
            self._solitude.see(took_s)

    def is_over(self) -> bool:
        """Nothing is asked any more."""
        with self._mutex:
            return self._is_closed and not self._asks

    def end(self) -> bool:
        """Let the thread end when it has done what was asked; False: it was told so before."""
        with self._mutex:
            if self._is_closed:
                return False
            self._is_closed = True
            self._wake()
            return True


def _work(store: Store, queue: _Queue) -> None:
    """The writing thread: perform what has gathered, give it all back, look again."""
    waiting: list[Ask] = []
    while waiting or not queue.is_over():
        waiting += queue.take(waits=not waiting)
        batch, waiting = next_round(waiting, _swaps_of)
        start_s = time.perf_counter()
        try:
            _perform(store, batch)
        except BaseException as error:  # noqa: BLE001 - this thread ends when nobody waits for it
            for ask in batch:
                ask.error = unknown_outcome(error)
        if not waiting:  # before anybody is told, who might come again at once
            queue.rest(batch, time.perf_counter() - start_s)
        _give_back(batch)


_swaps_of = attrgetter("swaps")


def _perform(store: Store, batch: list[Ask]) -> None:
    swaps = [swap for ask in batch for swap in ask.swaps]
    if swaps:
        results, errors = call_apart(store.swap, swaps)
        has_errors = any(errors)
        start = 0
        for ask in batch:
            end = start + len(ask.swaps)
            ask.result = results[start:end]
            if has_errors:
                ask.error = next((error for error in errors[start:end] if error), None)
            start = end
    for ask in batch:
        if ask.call is not None:
            try:
                ask.result = ask.call()
            except Exception as error:  # noqa: BLE001 - handed to whoever asked
                ask.error = error


def _give_back(batch: list[Ask]) -> None:
    """One wake-up for each event loop, however many of its calls are done."""
    for loop in {ask.loop for ask in batch}:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_resolve, loop, batch)


def _resolve(loop: asyncio.AbstractEventLoop, batch: list[Ask]) -> None:
    """On *loop*: give its own calls their results; the others are for their own loops."""
    for ask in batch:
        future, error = ask.future, ask.error
        if future.done() or ask.loop is not loop:  # done: its caller was cancelled
            continue
        if error is None:
            future.set_result(ask.result)
        else:
            future.set_exception(error)
