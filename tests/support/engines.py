"""Both engines behind the same methods, so that each test runs with both.

A test calls `beside` for a call in another thread, if it needs two at once. For the async engine that
thread has an event loop of its own, which its handler may block; so each such test also tests
an engine that is used from several event loops.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from coatcheck import AsyncEngine, Engine
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import AsyncStore, Store, ThreadedStore
from coatcheck.stores.memory import AsyncMemoryStore, MemoryStore

# 20 s: a hundred times what any of these waits takes; after that something hangs, and the test fails.
WAIT_S_MAX = 20.0
NOW_MS = 1_800_000_000_000


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
        """*function*, sync or async as its engine needs it."""
        if not self.is_async:
            return function

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        awaited.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)
        return awaited

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

    def close(self) -> None:
        """End everything that was made here."""
        for engine in self._engines:
            self.done(engine.close())
        self._threads.shutdown()


class Clock:
    """A clock that a test sets."""

    def __init__(self, now_ms: int = NOW_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def pass_s(self, seconds: float) -> None:
        """Let time pass."""
        self.now_ms += round(seconds * 1_000)


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


def eventually(is_true: Callable[[], object]) -> None:
    """Wait until *is_true* is; it is called often, because not everything can be waited for."""
    deadline = time.monotonic() + WAIT_S_MAX
    while not is_true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def wait_for(event: threading.Event) -> None:
    """Wait until *event* is set."""
    assert event.wait(WAIT_S_MAX), "it never happened"


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
