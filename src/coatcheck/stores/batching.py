"""Batching for threads: calls that arrive while a batch is being written leave in the next one.

No timer and no added latency when idle; one commit or one round trip for hundreds of calls when
busy. `async_batching.py` does the same for event loops.

How threads share a call (leader and followers):
 1. A thread that finds the store idle makes its call itself, at once. Nothing is handed over.
 2. A thread that arrives during a call joins a queue and waits on a lock of its own.
 3. When the call ends, its thread wakes the first thread of the queue, which is the next leader.
 4. The leader takes up to 256 entries off the queue, its own first, and makes one bulk call.
 5. It wakes the next leader, then stores the result of each entry and wakes its thread.
 6. So a thread that wakes up has its result, or is the leader.
 7. A leader that is interrupted (Control-C) fails its batch as ambiguous and wakes the next one.
 8. A waiting thread that is interrupted leaves the queue, and passes leadership on if it had it.

The outcome of one member must not depend on the others. `batch_flow`, which both batchers use,
makes the bulk call and works out what each member gets, retrying members one by one if it must.
A retry is safe: a swap that was applied the first time finds exactly the record it wanted to
write, and its caller recognises it (`core/lifecycle.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

from coatcheck.core.flow import Effect, Flow, run
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.batch_errors import BatchError, Outcome, UndecodableRecord
from coatcheck.stores.contract import Store
from coatcheck.stores.fork import renew_after_fork

T = TypeVar("T")

# 256: larger batches gain little, and their last member waits for all the others.
BATCH_MAX = 256


class Batcher:
    """Groups the swaps and reads of many threads into bulk calls of one blocking store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        self._swaps: _Queue[Swap] = _Queue(self.store.swap, attrgetter("ask.id"))
        self._gets: _Queue[bytes] = _Queue(self.store.get, None)

    def swap(self, swap: Swap) -> Record | None:
        """Make one swap, in a batch if other threads swap at the same time; see `Store.swap`."""
        return self._swaps.submit(swap)

    def get(self, id: bytes) -> Record | None:
        """Read one record, in a batch if other threads read at the same time; see `Store.get`."""
        return self._gets.submit(id)


class _Entry(Generic[T]):
    """One waiting thread: what it asks for, and its outcome once there is one."""

    __slots__ = ("ask", "outcome", "woken")

    def __init__(self, ask: T) -> None:
        self.ask = ask
        self.outcome: Outcome = None
        self.woken = threading.Lock()
        self.woken.acquire()


# Marks a leader that did not queue: it found the store idle.
_ALONE: _Entry[Any] = _Entry(None)


class _Queue(Generic[T]):
    """The threads that wait for one kind of bulk call; the module docstring has the protocol."""

    def __init__(
        self,
        call: Callable[[Sequence[T]], Sequence[Record | None]],
        id_of: Callable[[_Entry[T]], bytes] | None,
    ) -> None:
        self._call = call
        self._id_of = id_of  # None: an id may appear twice in a batch
        self._mutex = threading.Lock()
        self._waiting: list[_Entry[T]] = []
        self._leader: _Entry[T] | None = None  # None: the store is idle

    def submit(self, ask: T) -> Record | None:
        entry: _Entry[T] | None = None  # None: the store was idle, so we do not queue
        try:
            with self._mutex:
                if self._leader is None:
                    self._leader = _ALONE
                else:
                    entry = _Entry(ask)
                    self._waiting.append(entry)
            if entry is None:
                result = self._call((ask,))[0]
                self._pass_leadership(_ALONE)
                return result
            entry.woken.acquire()
            if self._leader is entry:
                self._lead(entry)
        except BaseException:
            self._leave(entry)
            raise
        if isinstance(entry.outcome, Exception):
            raise entry.outcome
        return entry.outcome

    def _lead(self, leader: _Entry[T]) -> None:
        """Make one bulk call for the leader and the threads that wait with it."""
        with self._mutex:
            batch, self._waiting = next_batch(self._waiting, BATCH_MAX, self._id_of)
        outcomes: Sequence[Outcome] = ()
        try:
            outcomes = call_batch(self._call, [entry.ask for entry in batch])
        except BaseException as interruption:
            outcomes = [unknown_outcome(interruption) for _ in batch]
            raise
        finally:
            # First, so that the next call does not wait until we have woken all followers.
            self._pass_leadership(leader)
            for entry, outcome in zip(batch, outcomes, strict=True):
                entry.outcome = outcome
                entry.woken.release()

    def _leave(self, entry: _Entry[T] | None) -> None:
        """End without a result, because this thread was interrupted or its own call failed."""
        if entry is not None:
            with self._mutex:
                if entry in self._waiting:
                    self._waiting.remove(entry)
        self._pass_leadership(entry or _ALONE)

    def _pass_leadership(self, leader: _Entry[T]) -> None:
        """Make the longest-waiting thread the next leader; without one the store is idle."""
        with self._mutex:
            if self._leader is not leader:
                return
            self._leader = None
            if self._waiting:
                self._leader = self._waiting[0]
                self._waiting[0].woken.release()


# ----------------------------------------------------------------- shared with async_batching.py


def next_batch(
    waiting: list[T],
    limit: int,
    id_of: Callable[[T], bytes] | None,
    in_flight: Collection[bytes] = (),
) -> tuple[list[T], list[T]]:
    """
    Split *waiting* into the next batch and the entries that stay.

    With *id_of*, no id appears twice in the batch, and no entry overtakes an earlier one of the
    same id, nor one whose id is *in_flight*: the second swap of a record must see the first.
    """
    if id_of is None:
        return waiting[:limit], waiting[limit:]
    seen = set(in_flight)
    batch: list[T] = []
    stays: list[T] = []
    for position, entry in enumerate(waiting):
        if len(batch) == limit:
            return batch, stays + waiting[position:]
        id = id_of(entry)
        (stays if id in seen else batch).append(entry)
        seen.add(id)
    return batch, stays


@dataclass(slots=True)
class BulkCall(Effect[Sequence["Record | None"]], Generic[T]):
    """Make the bulk call for *asks*."""

    asks: Sequence[T]


def call_batch(
    call: Callable[[Sequence[T]], Sequence[Record | None]], asks: Sequence[T]
) -> list[Outcome]:
    """Make the bulk *call* and return the outcome of each of *asks*; see `batch_flow`."""
    return run(batch_flow(asks), lambda effect: call(cast("BulkCall[T]", effect).asks))


def batch_flow(asks: Sequence[T]) -> Flow[list[Outcome]]:
    """
    Make one bulk call and return the outcome of each member.

    - The call succeeds: each member has its result.
    - `BatchError`: the store knows the outcome of each member.
    - `StoreUnavailable`: every member fails with it. The batch is not retried.
    - Any other error may be the fault of one bad record: each member is called again alone.

    No two members get the same exception object, as each `raise` adds to its traceback.
    """
    try:
        results = yield from BulkCall(asks)
        assert len(results) == len(asks), f"{len(results)} results for {len(asks)} members"
    except BatchError as error:
        return [_copy_of(outcome) for outcome in error.outcomes]
    except StoreUnavailable as error:
        return [_copy_of(error) for _ in asks]
    except Exception as error:  # noqa: BLE001 - the member's own outcome
        if len(asks) == 1:
            return [error]
    else:
        return [*results]
    return (yield from _one_by_one(asks))


def _one_by_one(asks: Sequence[T]) -> Flow[list[Outcome]]:
    outcomes: list[Outcome] = []
    for ask in asks:
        last = outcomes[-1] if outcomes else None
        if isinstance(last, StoreUnavailable) and not isinstance(last, UndecodableRecord):
            # The store is unreachable: another call for each member would add up the timeouts.
            outcomes.append(_copy_of(last))
            continue
        (outcome,) = yield from batch_flow([ask])
        if isinstance(outcome, StoreUnavailable):
            outcome.is_ambiguous = True  # the failed batch may have written this member
        outcomes.append(outcome)
    return outcomes


def _copy_of(outcome: Outcome) -> Outcome:
    if not isinstance(outcome, StoreUnavailable):
        return outcome
    kind = UndecodableRecord if isinstance(outcome, UndecodableRecord) else StoreUnavailable
    copy = kind(str(outcome), is_ambiguous=outcome.is_ambiguous)
    copy.__cause__ = outcome.__cause__
    return copy.with_traceback(outcome.__traceback__)


def unknown_outcome(interruption: BaseException | None) -> StoreUnavailable:
    """Return the error for a member whose call was interrupted, for example by Control-C."""
    message = "the call was interrupted; a write may have been applied"
    error = StoreUnavailable(message, is_ambiguous=True)
    error.__cause__ = interruption
    return error
