"""The loop that the consumers of all brokers share: receive, handle several at a time, stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from coatcheck.errors import Misconfigured

logger = logging.getLogger("coatcheck")

T = TypeVar("T")

# 10 handlers at a time: they wait for databases and other services most of the time.
CONCURRENCY = 10
# 1 000 messages pause in one process beside those that are handled: a broken service must not fill
# its memory.
ASIDE_MAX = 1_000


class Running:
    """
    Runs handlers until the application stops them.

        async with Running(stop, concurrency=10) as running:
            while (message := await running.until_stopped(receive())) is not None:
                await running.start(deliver(message))

    At the end it waits for the handlers that run. If one of them raises, which only a lost
    connection to the broker makes it do, the others are cancelled, and the error is raised: the
    broker delivers again what was not acknowledged.
    """

    def __init__(self, stop: asyncio.Event | None, *, concurrency: int = CONCURRENCY) -> None:
        if concurrency < 1:
            raise Misconfigured(f"concurrency is {concurrency!r}; it must be at least 1")
        self.stop = stop or asyncio.Event()
        self._concurrency = concurrency
        self._count = 0
        self._aside = 0
        self._free = asyncio.Semaphore(concurrency)
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._tasks.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def until_stopped(self, receive: Awaitable[T]) -> T | None:
        """What *receive* returns; None if the application stops the consumer before."""
        receiving = asyncio.ensure_future(receive)
        stopping = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({receiving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return receiving.result() if receiving.done() else None
        finally:
            stopping.cancel()
            if not receiving.done():
                receiving.cancel()
                await asyncio.wait({receiving})

    async def room(self) -> int:
        """Wait until a handler may start; how many may: a consumer receives no more than that."""
        await self._free.acquire()
        self._free.release()
        return self._concurrency - self._count

    async def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run *work* in a task, as soon as few enough others run."""
        await self._enter()
        task = self._tasks.create_task(work)
        task.add_done_callback(self._leave)

    def start_soon(self, work: Coroutine[Any, Any, object]) -> None:
        """Run *work* in a task at once, however many others run."""
        self._tasks.create_task(work)

    async def _enter(self) -> None:
        await self._free.acquire()
        self._count += 1

    def _leave(self, _task: object = None) -> None:
        self._count -= 1
        self._free.release()

    @property
    def may_step_aside(self) -> bool:
        """Fewer messages pause than may."""
        return self._aside < ASIDE_MAX

    async def step_aside(self, seconds: float) -> None:
        """Pause in work that was started; others run in its place, unless too many pause."""
        if not self.may_step_aside:
            await self.pause(seconds)
            return
        self._aside += 1
        self._leave()
        try:
            await self.pause(seconds)
        finally:
            await self._enter()
            self._aside -= 1

    async def pause(self, seconds: float) -> None:
        """Wait; not longer than until the application stops the consumer."""
        try:
            async with asyncio.timeout(seconds):
                await self.stop.wait()
        except TimeoutError:
            pass


@asynccontextmanager
async def extending(
    extend: Callable[[], Awaitable[object]], patience_s: float
) -> AsyncIterator[None]:
    """
    Have a broker not deliver a message again while it is handled here.

    The broker delivers it again after *patience_s*; *extend* asks it to wait for that long again.
    It is awaited three times as often, so that one or two that fail do not matter.
    """

    async def extend_again_and_again() -> None:
        while True:
            await asyncio.sleep(patience_s / 3)
            try:
                await extend()
            except Exception as error:  # noqa: BLE001 - of any broker: there will be a duplicate
                logger.warning("coatcheck: the broker could not be asked to wait: %r", error)

    task = asyncio.create_task(extend_again_and_again())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
