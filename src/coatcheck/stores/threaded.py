"""A blocking store for event loops: the other shape of batching.

One thread performs whatever has gathered and gives all results back in one wake-up of each event
loop, however many of its calls are done. Invariant: every call that was queued is answered, also
when the store throws what is no `Exception`, and after the last one nothing can be queued.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.batching import BATCH_MAX, call_apart, unknown_outcome
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query, Store
from coatcheck.stores.fork import renew_after_fork

R = TypeVar("R")


class ThreadedStore:
    """
    A blocking store for event loops: one thread of its own performs, in groups.

    Works from any number of event loops at once. A cancelled caller is forgotten, its write is not.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_closed = False
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        self._asks: SimpleQueue[_Ask | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def blocking(self) -> Store:
        """The store beneath, for threads."""
        return self._store

    async def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if the version its caller saw still stands; see `Store.swap`."""
        if not swaps:
            return []
        future = asyncio.get_running_loop().create_future()
        self._submit(_Ask(future, swaps))
        results: Sequence[Record | None] = await future
        return results

    async def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand; see `Store.get`."""
        return await self._run(lambda: self._store.get(ids))

    async def find(self, query: Query) -> Page:
        """Records for operators; see `Store.find`. In another thread: claims do not wait for it."""
        self._refuse_if_closed()
        return await asyncio.to_thread(self._store.find, query)

    async def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete what retention allows; see `Store.sweep`."""
        return await self._run(lambda: self._store.sweep(now_ms, limit))

    async def check(self) -> Sequence[Finding]:
        """What the doctor sees; see `Store.check`. In another thread, like `find`."""
        self._refuse_if_closed()
        return await asyncio.to_thread(self._store.check)

    async def now_ms(self) -> int:
        """The store's clock; see `Store.now_ms`."""
        return await self._run(self._store.now_ms)

    async def close(self) -> None:
        """Finish what is queued, then close the store beneath; the second time, do nothing."""
        future = asyncio.get_running_loop().create_future()
        try:
            self._submit(_Ask(future, (), self._store.close), is_last=True)
        except StoreUnavailable:
            return
        await future

    async def _run(self, call: Callable[[], R]) -> R:
        future = asyncio.get_running_loop().create_future()
        self._submit(_Ask(future, (), call))
        result: R = await future
        return result

    def _submit(self, ask: _Ask, *, is_last: bool = False) -> None:
        # Under the mutex nothing can be queued behind the end, where it would wait for ever.
        with self._mutex:
            self._refuse_if_closed()
            if self._thread is None:
                self._thread = self._started_thread()
            self._asks.put(ask)
            if is_last:
                self._is_closed = True
                self._asks.put(None)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("the store is closed")

    def _started_thread(self) -> threading.Thread:
        work = (self._store, self._asks)
        thread = threading.Thread(target=_work, args=work, name="coatcheck-store", daemon=True)
        thread.start()
        weakref.finalize(self, self._asks.put, None)  # a store that is forgotten ends its thread
        return thread


class _Ask:
    """One call of an event loop's, on its way to the writing thread and back."""

    __slots__ = ("call", "error", "future", "result", "swaps")

    def __init__(
        self,
        future: asyncio.Future[Any],
        swaps: Sequence[Swap],
        call: Callable[[], Any] | None = None,
    ) -> None:
        self.future = future
        self.swaps = swaps
        self.call = call
        self.result: Any = None
        self.error: Exception | None = None


def _work(store: Store, asks: SimpleQueue[_Ask | None]) -> None:
    """The writing thread: perform what has gathered, give it all back, look again."""
    waiting: list[_Ask] = []
    is_open = True
    while is_open or waiting:
        if is_open:
            is_open = _gather(asks, waiting)
        batch, waiting = _next_round(waiting)
        try:
            _perform(store, batch)
        except BaseException as error:  # noqa: BLE001 - this thread ends when nobody waits for it
            for ask in batch:
                ask.error = unknown_outcome(error)
        _give_back(batch)


def _gather(asks: SimpleQueue[_Ask | None], waiting: list[_Ask]) -> bool:
    """Move what is queued to *waiting*, and wait if that is nothing; False at the end."""
    while not waiting or asks.qsize():
        ask = asks.get()
        if ask is None:
            return False
        waiting.append(ask)
    return True


def _next_round(waiting: list[_Ask]) -> tuple[list[_Ask], list[_Ask]]:
    """Whoever can go together; two swaps of one record cannot (see `batching.py`)."""
    ids = [swap.id for ask in waiting for swap in ask.swaps]
    if len(set(ids)) == len(ids) <= BATCH_MAX:
        return waiting, []
    seen: set[bytes] = set()
    batch: list[_Ask] = []
    stays: list[_Ask] = []
    for ask in waiting:
        own = {swap.id for swap in ask.swaps}
        if len(seen) >= BATCH_MAX or not seen.isdisjoint(own):
            stays.append(ask)
        else:
            seen |= own
            batch.append(ask)
    return batch, stays


def _perform(store: Store, batch: list[_Ask]) -> None:
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


def _give_back(batch: list[_Ask]) -> None:
    """One wake-up for each event loop, however many of its calls are done."""
    loops: dict[asyncio.AbstractEventLoop, list[_Ask]] = {}
    for ask in batch:
        loops.setdefault(ask.future.get_loop(), []).append(ask)
    for loop, done in loops.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_resolve, done)


def _resolve(done: list[_Ask]) -> None:
    for ask in done:
        if ask.future.cancelled():
            continue
        if ask.error is None:
            ask.future.set_result(ask.result)
        else:
            ask.future.set_exception(ask.error)
