"""Batching for event loops: calls that arrive while a batch is in flight leave in the next one.

The asyncio counterpart of `batching.py`, with the same outcomes after a failure. One batcher
serves one event loop and one backend, so nothing here needs a lock.

- A call on an idle batcher is sent at once, in a batch of its own.
- Calls that arrive while the backend is busy collect in a queue. They are sent once per turn of
  the event loop, so that all calls of a turn share a batch.
- Swaps of one record keep their order, and never share a batch or run at the same time.
- Each batch runs in a task of its own. A caller that is cancelled gives up its result only.
- A watchdog cancels a call that takes too long. It counts turns of a timer instead of asking the
  clock: while other code blocks the event loop, answers wait unread, and that is no outage.
- When the event loop ends, unfinished swaps go to the blocking store, in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Generic, TypeAlias, TypeVar, cast

from coatcheck.core.flow import Effect, run_async
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.batch_errors import Outcome, results_of
from coatcheck.stores.batching import (
    BATCH_MAX,
    BulkCall,
    batch_flow,
    call_batch,
    next_batch,
    unknown_outcome,
)
from coatcheck.stores.contract import AsyncBackend, Store

T = TypeVar("T")

Results: TypeAlias = Sequence[Record | None]

# A call may take eight ticks of an eighth of its timeout each. However long the event loop is
# blocked, that is one tick, and the answer is read before the next.
TICKS_MAX = 8


class AsyncBatcher:
    """Groups the swaps and reads of one event loop into bulk calls of its backend."""

    def __init__(self, backend: AsyncBackend, store: Store) -> None:
        # *store* finishes, in a thread, the swaps that this loop leaves behind.
        self._backend = backend
        self._is_over = False
        self._swaps: _Queue[Swap] = _Queue(backend, backend.swap, store.swap, writes=True)
        self._gets: _Queue[bytes] = _Queue(backend, backend.get, store.get, writes=False)

    async def swap(self, swaps: Sequence[Swap]) -> Results:
        """Make swaps, together with those of other tasks; see `Store.swap`."""
        return await self._swaps.call(swaps)

    async def get(self, ids: Sequence[bytes]) -> Results:
        """Read records, together with those that other tasks read; see `Store.get`."""
        return await self._gets.call(ids)

    async def close(self) -> None:
        """Refuse new calls, finish those that were made, and close the backend."""
        try:
            await self._swaps.close()
            await self._gets.close()
        finally:  # also if this is cancelled while it waits
            self._is_over = True
            await self._backend.close()

    def abandon(self) -> threading.Thread | None:
        """
        Close the backend of an event loop that was closed before its batcher.

        Returns the thread that finishes the swaps which the loop has left, if there are any.
        """
        if self._is_over:
            return None
        self._is_over = True
        closing = self._backend.close()
        # By contract it does not wait here, so one step is all of it; no loop is there to log to.
        with suppress(StopIteration, Exception):
            closing.send(None)
        closing.close()
        return self._swaps.abandon()


@dataclass(slots=True, eq=False)
class _Member(Generic[T]):
    """One call: what it asks for, and the future that its caller awaits."""

    ask: T
    future: asyncio.Future[Record | None]


@dataclass(slots=True, eq=False)
class _Batch(Generic[T]):
    """Members whose bulk call is in flight."""

    members: list[_Member[T]]
    task: asyncio.Task[list[Outcome]] | None = None
    ticks: int = 0  # of the timer, since the call began


class _Queue(Generic[T]):
    """The swaps, or the reads, that wait for the backend, and the batches that are in flight."""

    def __init__(
        self,
        backend: AsyncBackend,
        bulk_call: Callable[[Sequence[T]], Awaitable[Results]],
        blocking: Callable[[Sequence[T]], Results],
        *,
        writes: bool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._bulk_call = bulk_call  # of the backend
        self._blocking = blocking  # the same call of the blocking store
        self._writes = writes
        self._id_of: Callable[[_Member[T]], bytes] | None = attrgetter("ask.id") if writes else None
        self._batch_max = backend.batch_max if writes else BATCH_MAX
        self._in_flight_max = backend.in_flight if writes else 1
        self._timeout_s = backend.timeout_s
        self._waiting: list[_Member[T]] = []
        self._in_flight: list[_Batch[T]] = []
        self._in_threads = 0  # members that a thread finishes
        # The last batch had several members: its callers are likely to call again together.
        self._is_busy = False
        self._flush: asyncio.Handle | None = None  # runs at the end of this turn of the loop
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._is_idle = asyncio.Event()  # set when it is closed and has nothing left to do

    async def call(self, asks: Sequence[T]) -> Results:
        """Return the results of *asks*; raise the error of one, or a `BatchError` of several."""
        if len(asks) == 1:
            return [await self.submit(asks[0])]
        futures = [self.submit(ask) for ask in asks]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        return results_of(cast("list[Outcome]", outcomes))

    def submit(self, ask: T) -> asyncio.Future[Record | None]:
        """Queue one call and return the future of its result."""
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        member = _Member(ask, self._loop.create_future())
        self._waiting.append(member)
        if not self._in_flight and not self._is_busy:
            self._send()
        else:
            self._send_soon()
        return member.future

    def _send_soon(self) -> None:
        """Send at the end of this turn of the event loop, when all of its calls are queued."""
        if self._flush is None and len(self._in_flight) < self._in_flight_max:
            self._flush = self._loop.call_soon(self._send)

    def _send(self) -> None:
        """Start as many batches as may be in flight."""
        self._flush = None
        while self._waiting and len(self._in_flight) < self._in_flight_max:
            members, self._waiting = next_batch(
                self._waiting, self._batch_max, self._id_of, self._ids_in_flight()
            )
            if not members:  # all of them are swaps of records that are in flight
                return
            self._is_busy = len(members) > 1
            self._start(_Batch(members))

    def _ids_in_flight(self) -> set[bytes]:
        id_of = self._id_of
        if id_of is None:
            return set()
        return {id_of(member) for batch in self._in_flight for member in batch.members}

    def _start(self, batch: _Batch[T]) -> None:
        self._in_flight.append(batch)
        flow = batch_flow([member.ask for member in batch.members])
        batch.task = self._loop.create_task(run_async(flow, partial(self._perform, batch)))
        # A callback, because a task that is cancelled before it has begun runs no code of its own.
        batch.task.add_done_callback(partial(self._finish, batch))
        if self._timer is None:
            self._start_timer()

    async def _perform(self, batch: _Batch[T], effect: Effect[Results]) -> Results:
        """Make one call, within the timeout."""
        assert isinstance(effect, BulkCall)
        batch.ticks = 0
        try:
            return await self._bulk_call(effect.asks)
        except asyncio.CancelledError:
            if batch.ticks <= TICKS_MAX or batch.task is None:
                raise
            batch.task.uncancel()  # the watchdog has cancelled the call, not the batch
            message = f"the store did not answer within {self._timeout_s:g} s"
            raise StoreUnavailable(message, is_ambiguous=self._writes) from None

    def _finish(self, batch: _Batch[T], task: asyncio.Task[list[Outcome]]) -> None:
        """Give the members of *batch* their outcomes."""
        self._in_flight.remove(batch)
        if task.cancelled():  # the event loop is ending: it cancels all tasks
            self._finish_in_thread(batch.members)
        elif interruption := task.exception():
            self._resolve(batch.members, [unknown_outcome(interruption) for _ in batch.members])
        else:
            self._resolve(batch.members, task.result())
        if self._waiting:
            # After the callers that were just resolved, which are likely to call again.
            self._send_soon()

    def _resolve(self, members: Sequence[_Member[T]], outcomes: Sequence[Outcome]) -> None:
        for member, outcome in zip(members, outcomes, strict=True):
            if member.future.done():  # its caller was cancelled
                continue
            if isinstance(outcome, Exception):
                member.future.set_exception(outcome)
            else:
                member.future.set_result(outcome)
        self._check_idle()

    # ---------------------------------------------------------------------------- the watchdog

    def _start_timer(self) -> None:
        if self._timeout_s is not None:
            self._timer = self._loop.call_later(self._timeout_s / TICKS_MAX, self._tick)

    def _tick(self) -> None:
        """Count for each call in flight, and cancel those that have taken too long."""
        self._timer = None
        for batch in self._in_flight:
            batch.ticks += 1
            if batch.ticks > TICKS_MAX and batch.task is not None:
                batch.task.cancel()
        if self._in_flight:
            self._start_timer()

    # ------------------------------------------------------------------------- the loop's end

    async def close(self) -> None:
        """Refuse new calls and wait until those that were made have their outcome."""
        self._is_closed = True
        self._check_idle()
        await self._is_idle.wait()

    def _check_idle(self) -> None:
        if self._is_closed and not (self._waiting or self._in_flight or self._in_threads):
            self._is_idle.set()

    def abandon(self) -> threading.Thread | None:
        """Let a thread make the calls that a closed event loop has left."""
        self._is_closed = True
        members = [member for batch in self._in_flight for member in batch.members]
        return self._finish_in_thread([*members, *self._waiting])

    def _finish_in_thread(self, members: list[_Member[T]]) -> threading.Thread | None:
        """
        Let a thread make the calls of *members* on the blocking store.

        Calls that were in flight may thus be made twice, which is safe; see `batching.py`.
        """
        if not members:
            return None
        self._in_threads += len(members)
        thread = threading.Thread(target=self._call_blocking, args=(members,), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system refuses to start one
            self._finish_thread(members, [unknown_outcome(error) for _ in members])
            return None
        return thread

    def _call_blocking(self, members: list[_Member[T]]) -> None:
        while members:
            batch, members = next_batch(members, self._batch_max, self._id_of)
            try:
                outcomes = call_batch(self._blocking, [member.ask for member in batch])
            except BaseException as interruption:  # noqa: BLE001 - the thread has no caller
                outcomes = [unknown_outcome(interruption) for _ in batch]
            with suppress(RuntimeError):  # the event loop is closed, and its callers are gone
                self._loop.call_soon_threadsafe(self._finish_thread, batch, outcomes)

    def _finish_thread(self, members: list[_Member[T]], outcomes: Sequence[Outcome]) -> None:
        self._in_threads -= len(members)
        if not self._loop.is_closed():
            self._resolve(members, outcomes)
