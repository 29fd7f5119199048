"""A small pool of the store's own connections, used where the application passes none in.

Idle connections are kept and used again. If all are in use, a caller waits for a limited time. A
connection whose block raised is closed. No connection is used after a fork.
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

# 10: PostgreSQL accepts 100 connections by default, and several nodes share them.
SIZE = 10
# 5 s: as long as a store waits for its database.
TIMEOUT_S = 5.0

_EXHAUSTED = (
    f"all {SIZE} connections for transactions are in use, and none became free within "
    f"{TIMEOUT_S:g} s; pass a larger pool of your own as transactions="
)


class Pool:
    """Connections for threads."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._inherited: list[Any] = []
        self._idle: list[Any] = []
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        # A forked child keeps references to the parent's connections: deleting them would close
        # the parent's sessions.
        self._inherited.append(self._idle)
        self._idle = []
        self._free = threading.Semaphore(SIZE)

    @contextmanager
    def __call__(self) -> Iterator[Any]:
        """Acquire a connection, and give it back at the exit."""
        if not self._free.acquire(timeout=TIMEOUT_S):
            raise StoreUnavailable(_EXHAUSTED)
        connection = None
        try:
            connection = self._pop_idle()
            if connection is None:
                connection = self._connect()
            yield connection
        except BaseException:
            if connection is not None:
                connection.close()
            self.close()  # the idle ones may have failed for the same reason
            raise
        else:
            self._idle.append(connection)
        finally:
            self._free.release()

    def close(self) -> None:
        """Close the idle connections."""
        while (connection := self._pop_idle()) is not None:
            connection.close()

    def _pop_idle(self) -> Any | None:  # noqa: ANN401 - of any driver
        try:  # not `if self._idle`: another thread may take the last one in between
            return self._idle.pop()
        except IndexError:
            return None


class AsyncPool:
    """Connections for event loops; each loop has its own."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        # No event loop survives a fork, so its connections are not used after one either.
        self._loops: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[asyncio.Semaphore, list[Any]]
        ] = weakref.WeakKeyDictionary()

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Any]:
        """Acquire a connection, and give it back at the exit."""
        loop = asyncio.get_running_loop()
        free, idle = self._loops.setdefault(loop, (asyncio.Semaphore(SIZE), []))
        try:
            await asyncio.wait_for(free.acquire(), TIMEOUT_S)
        except TimeoutError:
            raise StoreUnavailable(_EXHAUSTED) from None
        connection = None
        try:
            connection = idle.pop() if idle else await self._connect()
            yield connection
        except BaseException:
            if connection is not None:
                await _close(connection)
            await _close_all(idle)  # they may have failed for the same reason
            raise
        else:
            idle.append(connection)
        finally:
            free.release()

    async def close(self) -> None:
        """Close the idle connections of this event loop."""
        _, idle = self._loops.pop(asyncio.get_running_loop(), (None, []))
        await _close_all(idle)


async def _close_all(idle: list[Any]) -> None:
    while idle:
        await _close(idle.pop())


async def _close(connection: Any) -> None:  # noqa: ANN401 - of any driver
    closing = connection.close()
    if inspect.isawaitable(closing):  # not so with asyncmy
        await closing
