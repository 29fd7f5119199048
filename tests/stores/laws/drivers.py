"""Who performs the effects of a law: on a blocking store, on an async store, or in batches.

The drivers differ in how they wait, and in nothing a law could see.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from coatcheck.core.flow import Effect, Flow, run, run_async
from coatcheck.core.record import Swap
from coatcheck.stores.batching import Batcher

from .effects import (
    Check,
    Close,
    Find,
    GetAll,
    ReadClock,
    ReadKind,
    Reopen,
    SwapAll,
    Sweep,
    Together,
)
from .kinds import KINDS, Kind

R = TypeVar("R")

# 30 s: a thousand times what any of these waits takes; past it something hangs, and says so.
WAIT_S_MAX = 30


class Driver(Protocol):
    """A store that was opened fresh, and a way to run flows on it."""

    kind: Kind

    def run(self, flow: Flow[R]) -> R:
        """Drive *flow* to its end."""
        ...

    def close(self) -> None:
        """Let go of the store and of whatever the driver holds itself."""
        ...


def method_of(effect: Effect[Any]) -> tuple[str, tuple[Any, ...]]:
    """The method of a store that performs *effect*, and its arguments."""
    match effect:
        case SwapAll(swaps):
            return "swap", (swaps,)
        case GetAll(ids):
            return "get", (ids,)
        case Find(query):
            return "find", (query,)
        case Sweep(now_ms, limit):
            return "sweep", (now_ms, limit)
        case Check():
            return "check", ()
        case ReadClock():
            return "now_ms", ()
        case Close():
            return "close", ()
    raise AssertionError(f"no law may yield {effect!r}")


class SyncDriver:
    """Laws on a blocking store; what happens together happens in threads."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        self.kind = kind
        self._url = kind.fresh_url(directory)
        self._open()

    def _open(self) -> None:
        self.store = self.kind.open(self._url)

    def run(self, flow: Flow[R]) -> R:
        return run(flow, self.perform)

    def perform(self, effect: Effect[Any]) -> Any:
        match effect:
            case Swap():
                return self.store.swap((effect,))[0]
            case Together(flows):
                return self._run_together(flows)
            case Reopen():
                self.store.close()
                return self._open()
            case ReadKind():
                return self.kind
        method, arguments = method_of(effect)
        return getattr(self.store, method)(*arguments)

    def _run_together(self, flows: Sequence[Flow[Any]]) -> list[Any]:
        start = threading.Barrier(len(flows))

        def run_one(flow: Flow[Any]) -> Any:
            start.wait(WAIT_S_MAX)
            return self.run(flow)

        with ThreadPoolExecutor(len(flows)) as threads:
            return list(threads.map(run_one, flows, timeout=WAIT_S_MAX))

    def close(self) -> None:
        self.store.close()


class BatchedDriver(SyncDriver):
    """Laws on a blocking store behind the batcher; a batch is many threads with one swap each."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        super().__init__(kind, directory)
        self._threads = ThreadPoolExecutor(8)

    def _open(self) -> None:
        super()._open()
        self._batcher = Batcher(self.store)

    def perform(self, effect: Effect[Any]) -> Any:
        match effect:
            case Swap():
                return self._batcher.swap(effect)
            case SwapAll(swaps):
                return self._in_company(self._batcher.swap, swaps)
            case GetAll(ids):
                return self._in_company(self._batcher.get, ids)
        return super().perform(effect)

    def _in_company(self, call: Callable[[Any], R], asks: Sequence[Any]) -> list[R]:
        return list(self._threads.map(call, asks, timeout=WAIT_S_MAX))

    def close(self) -> None:
        self._threads.shutdown()
        super().close()


class AsyncDriver:
    """Laws on an async store; what happens together happens on two event loops."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        self.kind = kind
        self._url = kind.fresh_url(directory)
        self.store = kind.open_async(self._url)
        self._runner = asyncio.Runner()

    def run(self, flow: Flow[R]) -> R:
        return self._runner.run(run_async(flow, self.perform))

    async def perform(self, effect: Effect[Any]) -> Any:
        match effect:
            case Swap():
                return (await self.store.swap((effect,)))[0]
            case Together(flows):
                return await self._run_together(flows)
            case Reopen():
                await self.store.close()
                self.store = self.kind.open_async(self._url)
                return None
            case ReadKind():
                return self.kind
        method, arguments = method_of(effect)
        return await getattr(self.store, method)(*arguments)

    async def _run_together(self, flows: Sequence[Flow[Any]]) -> list[Any]:
        async def run_all(some: Sequence[Flow[Any]]) -> list[Any]:
            return await asyncio.gather(*(run_async(flow, self.perform) for flow in some))

        here, there = flows[::2], flows[1::2]
        elsewhere = asyncio.to_thread(lambda: asyncio.run(run_all(there)))
        async with asyncio.timeout(WAIT_S_MAX):
            results_here, results_there = await asyncio.gather(run_all(here), elsewhere)
        results: list[Any] = [None] * len(flows)
        results[::2], results[1::2] = results_here, results_there
        return results

    def close(self) -> None:
        self._runner.run(self.store.close())
        self._runner.close()


DRIVERS: dict[str, Callable[[Kind, Path], Driver]] = {
    "sync": SyncDriver,
    "async": AsyncDriver,
    "batched": BatchedDriver,
}
# Every kind, driven in every way. With `is_threaded` only event loops differ.
PAIRS = [(kind, way) for kind in KINDS for way in DRIVERS if way == "async" or not kind.is_threaded]


def name_of(pair: tuple[Kind, str]) -> str:
    """As it stands in the name of a test."""
    kind, way = pair
    return f"{way}-{kind.name}"
