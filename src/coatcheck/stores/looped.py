"""A store whose server can be asked from an event loop itself: the third shape of batching.

Each event loop has a wire of its own to the server, and no thread stands in between. What arrives
while batches are on their way leaves together in the next; several may be on their way at once,
so that client and server need not wait for each other in turn.

Invariants: every call that was queued is answered, also when the wire throws what is no
`Exception`; what a loop has not written when it ends is written by a thread; a record is on its
way once at a time, and in the order in which it was asked for; after closing nothing can be queued.

No task of ours stands in between, either: each would cost another turn of the loop.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import SWEEP_BATCH, Finding, HasWire, Page, Query, Store, Wire
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.lanes import Call, Future, Lanes, by_id, in_order, refuse
from coatcheck.stores.threaded import Ask, ThreadedStore


class LoopedStore:
    """
    A store for event loops that goes over each loop's own wire, in groups.

    Works from any number of event loops at once. A cancelled caller is forgotten, its write is not.
    What operators ask for goes to the store beneath, in a thread.
    """

    def __init__(self, store: Store) -> None:
        assert isinstance(store, HasWire)
        self._store = store
        self._new_wire = store.wire
        self._threaded = ThreadedStore(store)
        self._is_closed = False
        self._ways: dict[asyncio.AbstractEventLoop, _Way | ThreadedStore] = {}
        self._inherited: list[object] = []
        self._forgotten: weakref.finalize[..., LoopedStore] | None = None
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        # Kept, because letting go of them would say goodbye in the parent's name.
        self._inherited.append(self._ways)
        if self._forgotten is not None:
            self._forgotten.detach()
        self._ways = {}
        self._mutex = threading.Lock()
        self._forgotten = weakref.finalize(self, _end_all, self._ways)

    @property
    def blocking(self) -> Store:
        """The store beneath, for threads."""
        return self._store

    def swap(self, swaps: Sequence[Swap]) -> asyncio.Future[Sequence[Record | None]]:
        """Write each record if the version its caller saw still stands; see `Store.swap`."""
        loop = asyncio.get_running_loop()
        try:
            return (self._ways.get(loop) or self._way_of(loop)).swap(swaps)
        except StoreUnavailable as error:
            future: asyncio.Future[Sequence[Record | None]] = loop.create_future()
            future.set_exception(error)
            return future

    async def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand; see `Store.get`."""
        loop = asyncio.get_running_loop()
        return await (self._ways.get(loop) or self._way_of(loop)).get(ids)

    async def find(self, query: Query) -> Page:
        """Records for operators; see `Store.find`."""
        return await self._threaded.find(query)

    async def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete what retention allows; see `Store.sweep`."""
        return await self._threaded.sweep(now_ms, limit)

    async def check(self) -> Sequence[Finding]:
        """What the doctor sees; see `Store.check`."""
        return await self._threaded.check()

    async def now_ms(self) -> int:
        """The store's clock; see `Store.now_ms`."""
        return await self._threaded.now_ms()

    async def close(self) -> None:
        """
        Finish what is queued, then close the store beneath; the second time, do nothing.

        Other event loops finish theirs by themselves: who knows whether they still run?
        """
        with self._mutex:
            self._is_closed = True
            ways = dict(self._ways)
            self._ways.clear()
        own = ways.pop(asyncio.get_running_loop(), None)
        _end_all(ways)
        if isinstance(own, _Way):
            await own.close()
        await self._threaded.close()

    def _way_of(self, loop: asyncio.AbstractEventLoop) -> _Way | ThreadedStore:
        """The way from *loop*, which has none yet; those of loops that are closed are over."""
        with self._mutex:
            if self._is_closed:
                raise StoreUnavailable("the store is closed")
            over = {other: self._ways.pop(other) for other in [*self._ways] if other.is_closed()}
            try:
                way: _Way | ThreadedStore = _Way(loop, self._new_wire(), self._threaded)
            except NotImplementedError:
                way = self._threaded
            self._ways[loop] = way
        _end_all(over)
        return way


def _end_all(ways: dict[asyncio.AbstractEventLoop, _Way | ThreadedStore]) -> None:
    """Let each loop end its own way, when it has done what was asked; or do so for it."""
    for loop, way in [*ways.items()]:
        if isinstance(way, _Way):
            try:
                loop.call_soon_threadsafe(way.end)
            except RuntimeError:  # the loop is closed
                way.abandon()
    ways.clear()


class _Way:
    """From one event loop to the server: what it has asked for, and its wire."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, wire: Wire, threaded: ThreadedStore
    ) -> None:
        self._loop = loop
        self._wire = wire
        self._threaded = threaded
        self._swaps = Lanes(loop, wire.swap, by_id, lanes=wire.lanes, give_up=self._finish)
        self._reads = Lanes(loop, wire.get, in_order, lanes=1, give_up=refuse)
        # Write, or read, together with whoever comes along.
        self.swap: Callable[[Sequence[Swap]], Future] = self._swaps.put
        self.get: Callable[[Sequence[bytes]], Future] = self._reads.put
        self._is_over = False
        self._ending: asyncio.Task[None] | None = None
        self._life = self._live()
        with suppress(StopIteration):
            self._life.__anext__().send(None)

    async def _live(self) -> AsyncGenerator[None]:
        """
        A generator that stands still until it is closed.

        Event loops close what generators they have left before they end: who forgets to close us
        loses neither a write nor a connection.
        """
        try:
            yield
        finally:
            try:
                await self._swaps.close()
                await self._reads.close()
            finally:  # also where somebody has no patience
                self._is_over = True
                await self._wire.close()

    async def close(self) -> None:
        """Finish what is queued, and let go of the wire."""
        await self._life.aclose()

    def end(self) -> None:
        """On its own loop: close, without anybody waiting for it."""
        self._ending = self._loop.create_task(self.close())

    def abandon(self) -> None:
        """Its loop is closed: let a thread write what is left, and let go of the wire."""
        if self._is_over:
            return
        self._is_over = True
        self._swaps.abandon()
        self._reads.abandon()
        closing = self._wire.close()
        with suppress(Exception):  # it waits for nothing, so this is all of it
            closing.send(None)
        closing.close()

    def _finish(self, ask: Call[Swap]) -> None:
        future, swaps = ask
        self._threaded.finish(Ask(self._loop, future, swaps))
