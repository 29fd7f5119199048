"""A scripted store for the tests of the batchers, and records to write into it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import TypeVar

from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.stores.batching import call_batch
from coatcheck.stores.memory import MemoryStore

T = TypeVar("T")

# 10 s: nothing here takes a hundredth of it; a test that waits longer would wait for ever.
TIMEOUT_S = 10


class Interrupted(BaseException):
    """What a signal or a debugger may raise in any thread: not an `Exception`."""


class ScriptedStore(MemoryStore):
    """A memory store that logs its calls, can be blocked, and fails for chosen ids."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[bytes]] = []
        self.reads: list[list[bytes]] = []
        self.threads: list[threading.Thread] = []
        self.gates: deque[threading.Event] = deque()
        self.entered = threading.Semaphore(0)
        self.failing: dict[bytes, BaseException] = {}
        self.is_closed = False

    def _pass(self) -> None:
        gate = self.gates.popleft() if self.gates else None
        self.entered.release()
        if gate is not None:
            assert gate.wait(TIMEOUT_S)

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        self.batches.append([swap.id for swap in swaps])
        self.threads.append(threading.current_thread())
        self._pass()
        for swap in swaps:
            if swap.id in self.failing:
                raise self.failing[swap.id]
        return super().swap(swaps)

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        self.reads.append(list(ids))
        self._pass()
        return super().get(ids)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True

    def hold(self) -> threading.Event:
        """Block the next call until the returned event is set."""
        gate = threading.Event()
        self.gates.append(gate)
        return gate

    def wait_for_a_call(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT_S)


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The async *test*, run by an event loop of its own."""

    @wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def in_time() -> None:
            async with asyncio.timeout(3 * TIMEOUT_S):
                await test(*args, **kwargs)

        asyncio.run(in_time())

    return run


def id_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def claim(number: int, nonce: int = 1) -> Swap:
    id = id_of(number)
    record = Record(id, 1, RUNNING, 1, id, 1, 1, 1, 1, nonce, "", "", "", None, None)
    return Swap(id, 0, record)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def change(number: int, version: int) -> Swap:
    record = claim(number).record
    assert record is not None
    return Swap(record.id, version, record._replace(version=version + 1))


def call_apart(
    call: Callable[[Sequence[T]], Sequence[Record | None]], asks: Sequence[T]
) -> tuple[list[Record | None], list[Exception | None]]:
    """Make the bulk *call* as a batcher does; return the results and the errors of its members."""
    outcomes = call_batch(call, asks)
    results = [None if isinstance(outcome, Exception) else outcome for outcome in outcomes]
    return results, [outcome if isinstance(outcome, Exception) else None for outcome in outcomes]
