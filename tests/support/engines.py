"""Both engines behind the same methods, so that each test runs with both.

A test calls `beside` for a call in another thread, if it needs two at once. For the async engine that
thread has an event loop of its own, which its handler may block; so each such test also tests
an engine that is used from several event loops.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from coatcheck import AsyncEngine, Engine
from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import AsyncStore, Query, Store, ThreadedStore
from coatcheck.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support.times import NOW_MS, WAIT_S_MAX, Clock, eventually, wait_for

__all__ = ["NOW_MS", "WAIT_S_MAX", "Clock", "eventually", "wait_for"]

LEASE_S = 20
# A round of recovery is due once a minute, at the latest after one and a half.
ROUND_S = 90
BY_ADA = {"by": "ada", "why": "asked the bank"}
CLAIM = Record(
    *(b"i" * 16, NOW_MS, RUNNING, 1, b"f" * 16, NOW_MS, NOW_MS + 1_000 * LEASE_S),
    *(NOW_MS + 3_600_000, NOW_MS + 7_200_000, 7, "", "", "", None, None),
)


class Killed(BaseException):
    """An error that neither a handler nor an engine catches: the process ends here."""


class Guards:
    """Makes and uses sync or async engines, and closes them at the end."""

    def __init__(self, *, is_async: bool) -> None:
        self.is_async = is_async
        self._engines: list[Engine | AsyncEngine] = []
        self._threads = ThreadPoolExecutor(max_workers=40)

    def engine(self, store: str | Store = "memory://", *args: Any, **options: Any) -> Any:
        """An engine; a blocking store is wrapped for the async one."""
        if not self.is_async:
            engine: Engine | AsyncEngine = Engine(store, *args, **options)
        else:
            given = store if isinstance(store, str) else self._wrapped(store)
            engine = AsyncEngine(given, *args, **options)
        self._engines.append(engine)
        return engine

    def _wrapped(self, store: Store) -> AsyncStore:
        return AsyncMemoryStore(store) if isinstance(store, MemoryStore) else ThreadedStore(store)

    def run(
        self, engine: Any, key: str, function: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        """`engine.run`; the async engine gets *function* as a coroutine function."""
        return self.done(engine.run(key, self.flavoured(function), *args, **kw))

    def flavoured(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """
        *function*, sync or async as its engine needs it.

        A generator function is a handler for both: what it yields is awaited if it has to be.
        """
        if not self.is_async and not inspect.isgeneratorfunction(function):
            return function

        def called(*args: Any, **kwargs: Any) -> Any:
            return _driven(function(*args, **kwargs))

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if inspect.isgenerator(result):
                return await _driven_async(result)
            return await result if inspect.isawaitable(result) else result

        flavoured = awaited if self.is_async else called
        flavoured.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)
        return flavoured

    def done(self, result: Any) -> Any:
        """*result*, awaited if it has to be."""
        if not inspect.isawaitable(result):
            return result

        async def wait() -> Any:
            return await result

        return asyncio.run(wait())

    def beside(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """The same as `run`, in another thread."""
        return self._threads.submit(self.run, *args, **kwargs)

    def abandon(self, engine: Any, *keys: str, **options: Any) -> None:
        """Attempts that began, and whose process died in the middle."""
        for key in keys or ("k",):
            with pytest.raises(Killed):
                self.run(engine, key, Handler(Killed()), **options)

    def close(self) -> None:
        """End everything that was made here."""
        for engine in self._engines:
            self.done(engine.close())
        self._threads.shutdown()


def _driven(handler: Generator[Any, Any, Any]) -> Any:
    result = None
    try:
        while True:
            result = handler.send(result)
    except StopIteration as end:
        return end.value


async def _driven_async(handler: Generator[Any, Any, Any]) -> Any:
    go_on, result = handler.send, None
    try:
        while True:
            yielded = go_on(result)
            try:
                result = await yielded if inspect.isawaitable(yielded) else yielded
                go_on = handler.send
            except BaseException as error:  # noqa: BLE001 - raised where it was yielded
                go_on, result = handler.throw, error
    except StopIteration as end:
        return end.value


class WatchedStore(MemoryStore):
    """Counts its calls, fails if a test says so, and remembers what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.swaps = 0
        self.gets = 0
        self.sweeps: list[int] = []
        self.written: list[Record | None] = []
        # How the next swaps fail: "down" before they are written, "deaf" after that.
        self.troubles: list[str] = []
        self.is_down = False
        self.has_written = threading.Condition()

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Swap, count, and fail if a test says so."""
        self.swaps += 1
        trouble = self.troubles.pop(0) if self.troubles else ""
        if trouble == "down" or self.is_down:
            raise StoreUnavailable("the store is down")
        conflicts = super().swap(swaps)
        with self.has_written:
            written = zip(swaps, conflicts, strict=True)
            self.written += [swap.record for swap, conflict in written if conflict is None]
            self.has_written.notify_all()
        if trouble == "deaf":
            raise StoreUnavailable("the acknowledgement was lost", is_ambiguous=True)
        return conflicts

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Get, and count."""
        self.gets += 1
        return super().get(ids)

    def sweep(self, now_ms: int, limit: int = 500) -> int:
        """Sweep, and remember how many records it deleted."""
        deleted = super().sweep(now_ms, limit)
        self.sweeps.append(deleted)
        return deleted

    def wait_for(self, is_written: Callable[[Record | None], bool]) -> None:
        """Wait until a record was written of which *is_written* is true."""
        with self.has_written:
            assert self.has_written.wait_for(
                lambda: any(map(is_written, self.written)), timeout=WAIT_S_MAX
            )

    @property
    def records(self) -> list[Record]:
        """All records."""
        return sorted(self._records.values())

    @property
    def record(self) -> Record:
        """The only record."""
        (record,) = self.records
        return record


class Handler:
    """A function that counts its calls, and can be stopped in the middle."""

    def __init__(self, result: Any = "done") -> None:
        self.result = result
        self.calls = 0
        self.is_running = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.is_running.set()
        wait_for(self.may_end)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result() if callable(self.result) else self.result


def held_up(result: Any = "done") -> Handler:
    """A handler that does not end before its `may_end` is set."""
    handler = Handler(result)
    handler.may_end.clear()
    return handler


def only_record(engine: Any) -> Record:
    """The only record in the store of *engine*, whatever store that is."""
    (record,) = engine.attempts._store.find(Query()).records
    return record


def recovery_round(engine: Any, clock: Clock | None = None) -> None:
    """Let the heartbeat start a round of recovery, and wait for its end."""
    if clock is not None:
        clock.advance(ROUND_S)
    before = engine.recovery._thread
    engine.attempts.heartbeat.tick()
    thread = engine.recovery._thread
    assert thread is not before, "no round has begun"
    thread.join(WAIT_S_MAX)
    assert not thread.is_alive()
