"""Any store for event loops: one batcher per loop, over the store's own backend or over threads.

`BatchedAsyncStore` is what `open_async_store` returns. Swaps and reads go through the batcher of
the running event loop (`async_batching.py`); everything else is rare and runs in a thread.

Invariants: every call gets an outcome. When an event loop ends, its queued swaps are still
written and its connections are closed, even if the application never closes the store. After a
fork the child opens its own connections and threads, and never touches those of its parent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.async_batching import AsyncBatcher
from coatcheck.stores.batching import BATCH_MAX
from coatcheck.stores.contract import (
    SWEEP_BATCH,
    AsyncBackend,
    Finding,
    Page,
    Query,
    Store,
)
from coatcheck.stores.fork import renew_after_fork

R = TypeVar("R")


class BatchedAsyncStore:
    """
    A store for event loops that groups the calls of each loop into batches.

    Works from any number of event loops at once. A caller that is cancelled gives up its result;
    its write is made all the same.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_closed = False
        self._loops: dict[asyncio.AbstractEventLoop, _LoopState] = {}
        self._inherited: list[object] = []
        self._unfinished: list[threading.Thread] = []  # they write what closed loops have left
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        # Kept in a child, because destroying them would close the connections of the parent.
        self._inherited.append(self._loops)
        self._loops = {}
        self._unfinished = []
        self._mutex = threading.Lock()

    @property
    def blocking(self) -> Store:
        """The same store for threads."""
        return self._store

    async def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one; see `Store.swap`."""
        return await self._batcher().swap(swaps)

    async def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Read records; see `Store.get`."""
        return await self._batcher().get(ids)

    async def find(self, query: Query) -> Page:
        """Find records for operators, in a thread: no claim waits for it; see `Store.find`."""
        return await self._in_thread(self._store.find, query)

    async def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete records whose retention is over, in a thread; see `Store.sweep`."""
        return await self._in_thread(self._store.sweep, now_ms, limit)

    async def check(self) -> Sequence[Finding]:
        """Check the store's settings, in a thread; see `Store.check`."""
        return await self._in_thread(self._store.check)

    async def now_ms(self) -> int:
        """Read the store's clock, in a thread; see `Store.now_ms`."""
        return await self._in_thread(self._store.now_ms)

    async def close(self) -> None:
        """
        Finish the calls of this event loop, then close the store; a second call does nothing.

        Other event loops are asked to finish theirs, but not waited for: they may have stopped.
        """
        with self._mutex:
            is_first = not self._is_closed
            self._is_closed = True
            loops = dict(self._loops)
            self._loops.clear()
        own = loops.pop(asyncio.get_running_loop(), None)
        self._unfinished += _end_all(loops)
        if own is not None:
            await own.close()
        if not is_first:
            return
        try:
            await run_in_thread(self._close_store)
        except StoreUnavailable:  # no thread could be started
            self._close_store()

    def _close_store(self) -> None:
        for thread in self._unfinished:
            thread.join()
        self._store.close()

    async def _in_thread(self, call: Callable[..., R], *args: object) -> R:
        self._refuse_if_closed()
        return await run_in_thread(call, *args)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("the store is closed")

    def _batcher(self) -> AsyncBatcher:
        """Return the batcher of the running event loop."""
        loop = asyncio.get_running_loop()
        state = self._loops.get(loop)
        return (state or self._new_state(loop)).batcher

    def _new_state(self, loop: asyncio.AbstractEventLoop) -> _LoopState:
        with self._mutex:
            self._refuse_if_closed()
            closed = {old: self._loops.pop(old) for old in [*self._loops] if old.is_closed()}
            state = _LoopState(loop, AsyncBatcher(self._new_backend(), self._store))
            self._loops[loop] = state
        self._unfinished += _end_all(closed)
        return state

    def _new_backend(self) -> AsyncBackend:
        # Not `isinstance`: since Python 3.12 it ignores what `LazyStore` has by `__getattr__`.
        new_backend = getattr(self._store, "async_backend", None)
        if new_backend is not None:
            with suppress(NotImplementedError):
                backend: AsyncBackend = new_backend()
                return backend
        return ThreadBackend(self._store)


class ThreadedStore(BatchedAsyncStore):
    """
    Any blocking store for event loops, through threads.

    The store itself makes every call, even if it has a backend for event loops. For stores of
    your own, and for stores that wrap another one.
    """

    def _new_backend(self) -> AsyncBackend:
        return ThreadBackend(self._store)


class ThreadBackend:
    """
    Access of one event loop to any blocking store: each call runs in a thread of a small pool.

    A store may say how it wants to be called with the attributes `batch_max` and `in_flight`.
    """

    # The store has timeouts of its own, and a call in a thread cannot be cancelled.
    timeout_s: float | None = None

    def __init__(self, store: Store) -> None:
        self._store = store
        self.batch_max: int = getattr(store, "batch_max", BATCH_MAX)
        # 1: a store that writes one batch after the other gains nothing from a second thread.
        self.in_flight: int = getattr(store, "in_flight", 1)
        # One more for reads, which do not wait for writes.
        self._threads = ThreadPoolExecutor(self.in_flight + 1, "coatcheck-store")

    async def swap(self, swaps: Sequence[Swap], /) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one; see `Store.swap`."""
        return await run_in_thread(self._store.swap, swaps, executor=self._threads)

    async def get(self, ids: Sequence[bytes], /) -> Sequence[Record | None]:
        """Read records; see `Store.get`."""
        return await run_in_thread(self._store.get, ids, executor=self._threads)

    async def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False)


async def run_in_thread(
    call: Callable[..., R], *args: object, executor: ThreadPoolExecutor | None = None
) -> R:
    """
    Run *call* in a thread of *executor* (by default the event loop's own) and return its result.

    Raises `StoreUnavailable` if no thread can be started, as in a container that has reached its
    limit. The call is then not made; the next one tries again.
    """
    is_dropped = False

    def run() -> R | None:
        return None if is_dropped else call(*args)

    loop = asyncio.get_running_loop()
    try:
        future = loop.run_in_executor(executor, copy_context().run, run)
    except RuntimeError as error:
        # The executor queues the call before it starts a thread: a later thread would make it.
        is_dropped = True
        message = f"no thread could be started ({error}); check the process and thread limits"
        raise StoreUnavailable(message) from error
    result: R = await future  # type: ignore[assignment]  # None only if it is dropped
    return result


class _LoopState:
    """The batcher of one event loop, which is closed together with the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, batcher: AsyncBatcher) -> None:
        self.batcher = batcher
        self._loop = loop
        self._closing: asyncio.Task[None] | None = None
        # Runs the generator up to its `yield`, which registers it with the event loop.
        self._lifetime = self._close_with_loop()
        with suppress(StopIteration):
            self._lifetime.__anext__().send(None)

    async def _close_with_loop(self) -> AsyncGenerator[None]:
        """
        Wait to be closed, then close the batcher.

        `asyncio.run` and all servers close the async generators of their event loop before they
        close the loop. There is no other public hook for its end. An event loop also closes a
        generator that is garbage-collected, together with its store.
        """
        try:
            yield
        finally:
            await self.batcher.close()

    async def close(self) -> None:
        """Finish what is queued, and close the backend."""
        await self._lifetime.aclose()

    def close_soon(self) -> None:
        """Close, in a task of the state's own event loop."""
        self._closing = self._loop.create_task(self.close())


def _end_all(loops: dict[asyncio.AbstractEventLoop, _LoopState]) -> list[threading.Thread]:
    """Close the state of each loop on that loop; return the threads that write for closed ones."""
    threads: list[threading.Thread | None] = []
    for loop, state in [*loops.items()]:
        try:
            loop.call_soon_threadsafe(state.close_soon)
        except RuntimeError:  # the loop is closed
            threads.append(state.batcher.abandon())
    loops.clear()
    return [thread for thread in threads if thread is not None]
