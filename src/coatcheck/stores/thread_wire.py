"""A wire made of threads: for stores whose driver can only block, and that write on several lines.

Each lane is a thread, and while one waits for the server the event loop and the others go on.
Invariants: what a thread has taken it ends and answers, also for a caller who was cancelled; after
closing nothing can be asked, where it would wait for ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.batching import unknown_outcome
from coatcheck.stores.contract import Store
from coatcheck.stores.scarce import started

_Results: TypeAlias = Sequence[Record | None]
# Who waits, and what is called with what. A plain queue, because executors take twice as long.
_Ask: TypeAlias = tuple["asyncio.Future[_Results]", Callable[[Any], _Results], Sequence[Any]]
_Asks: TypeAlias = "SimpleQueue[_Ask | None]"


class ThreadWire:
    """One event loop's threads to *store*, which can make *lanes* swaps at once, and a read."""

    def __init__(self, store: Store, lanes: int) -> None:
        self.lanes = lanes
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._asks: _Asks = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def swap(self, swaps: Sequence[Swap], /) -> asyncio.Future[_Results]:
        """Write each record if the version its caller saw still stands; see `Store.swap`."""
        return self._ask(self._store.swap, swaps)

    def get(self, ids: Sequence[bytes], /) -> asyncio.Future[_Results]:
        """The records that stand; see `Store.get`."""
        return self._ask(self._store.get, ids)

    def _ask(
        self, call: Callable[[Any], _Results], asks: Sequence[Any]
    ) -> asyncio.Future[_Results]:
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        if len(self._threads) <= self.lanes:  # one at a time, as long as they may be needed
            self._threads.append(started("coatcheck-store", _work, self._loop, self._asks))
        future: asyncio.Future[_Results] = self._loop.create_future()
        self._asks.put((future, call, asks))
        return future

    async def close(self) -> None:
        """Let the threads end when they have done what was asked; after that nothing can be."""
        self._is_closed = True
        for _ in self._threads:
            self._asks.put(None)


def _work(loop: asyncio.AbstractEventLoop, asks: _Asks) -> None:
    """A thread: one call after the other."""
    while (ask := asks.get()) is not None:
        future, call, asked = ask
        results: _Results = ()
        error: Exception | None = None
        try:
            results = call(asked)
        except Exception as raised:  # noqa: BLE001 - handed to whoever waits
            error = raised
        except BaseException as interruption:  # noqa: BLE001 - this thread ends when it is told to
            error = unknown_outcome(interruption)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_resolve, future, results, error)


def _resolve(future: asyncio.Future[_Results], results: _Results, error: Exception | None) -> None:
    if future.done():  # its caller was cancelled
        return
    if error is None:
        future.set_result(results)
    else:
        future.set_exception(error)
