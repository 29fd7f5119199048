"""The shelf: connections of the store's own, lent where the application lends none.

A few are kept and used again; who comes when all are out waits, and not for ever. One that did not
come back in order is closed. None crosses a fork.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.fork import renew_after_fork

# 10: a database on a small machine has 100 in all, and each node wants some.
SIZE = 10
# 5 s: as long as a store waits for its database.
TIMEOUT_S = 5.0

_ALL_OUT = f"all {SIZE} connections for transactions are in use"


class Shelf:
    """Connections for threads."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._inherited: list[Any] = []
        self._idle: list[Any] = []
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        # Kept, because letting go of them would say goodbye in the parent's name.
        self._inherited.append(self._idle)
        self._idle = []
        self._room = threading.Semaphore(SIZE)

    @contextmanager
    def __call__(self) -> Iterator[Any]:
        """Lend one."""
        if not self._room.acquire(timeout=TIMEOUT_S):
            raise StoreUnavailable(_ALL_OUT)
        connection = None
        try:
            connection = self._taken()
            if connection is None:
                connection = self._connect()
            yield connection
        except BaseException:
            if connection is not None:
                connection.close()
            self.close()  # what one has died of, the others have died of, too
            raise
        else:
            self._idle.append(connection)
        finally:
            self._room.release()

    def close(self) -> None:
        """Close what is on the shelf."""
        while (connection := self._taken()) is not None:
            connection.close()

    def _taken(self) -> Any | None:  # noqa: ANN401 - of whatever driver
        try:  # another thread may take the last one between a look and a hand
            return self._idle.pop()
        except IndexError:
            return None


class AsyncShelf:
    """Connections for event loops; those of one are never used on another."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        # No event loop crosses a fork, so what belongs to one does not either.
        self._loops: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[asyncio.Semaphore, list[Any]]
        ] = weakref.WeakKeyDictionary()

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Any]:
        """Lend one."""
        loop = asyncio.get_running_loop()
        room, idle = self._loops.setdefault(loop, (asyncio.Semaphore(SIZE), []))
        try:
            await asyncio.wait_for(room.acquire(), TIMEOUT_S)
        except TimeoutError:
            raise StoreUnavailable(_ALL_OUT) from None
        connection = None
        try:
            connection = idle.pop() if idle else await self._connect()
            yield connection
        except BaseException:
            if connection is not None:
                await _closed(connection)
            await _cleared(idle)  # as above
            raise
        else:
            idle.append(connection)
        finally:
            room.release()

    async def close(self) -> None:
        """Close what is on the shelf of this event loop."""
        _, idle = self._loops.pop(asyncio.get_running_loop(), (None, []))
        await _cleared(idle)


async def _cleared(idle: list[Any]) -> None:
    while idle:
        await _closed(idle.pop())


async def _closed(connection: Any) -> None:  # noqa: ANN401 - of whatever driver
    closing = connection.close()
    if inspect.isawaitable(closing):  # of some drivers it is not
        await closing
