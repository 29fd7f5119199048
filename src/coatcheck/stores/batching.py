"""Batching: what arrives while a write is on its way leaves together in the next.

No timer and no added latency when idle; one commit or one round trip for hundreds of operations
when busy. Three shapes of the one idea: `Batcher` here for threads; for event loops `looped.py`,
where the store can be asked from one, and else `threaded.py`. Whoever arrives here at an idle store
writes by itself, in its own thread, and those who arrive meanwhile wait; the first of them then
writes for all. No hand-over when alone.

Grouping must not tie fates together: where a store says what became of each (`fates.py`), each is
told that; and when a batch fails otherwise, its members are tried one by one, so that a bad record
fails alone. Trying again is safe, because a swap that took effect the first time
finds exactly the record it wanted to write, and its caller recognises it (`core/serve.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, cast

from coatcheck.core.flow import Effect, Flow, run
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import Store
from coatcheck.stores.fates import Divided, Fate
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.unread import Unread

T = TypeVar("T")

# 256: past this a batch gains little, and its last member waits for all the others.
BATCH_MAX = 256


class Batcher:
    """Groups the swaps and reads of many threads on one blocking store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        self._swaps = _Group(self.store.swap, _apart)
        self._gets = _Group(self.store.get, _in_order)

    def swap(self, swap: Swap) -> Record | None:
        """One swap, perhaps in company."""
        return self._swaps.submit(swap)

    def get(self, id: bytes) -> Record | None:
        """One read, perhaps in company."""
        return self._gets.submit(id)


class _Alone:
    """Stands for the thread that leads without having waited."""


_ALONE = _Alone()


class _Turn(Generic[T]):
    """One thread's place in the queue: what it asks, and its answer once there is one."""

    __slots__ = ("ask", "error", "result", "woken")

    def __init__(self, ask: T) -> None:
        self.ask = ask
        self.result: Record | None = None
        self.error: Exception | None = None
        self.woken = threading.Lock()
        self.woken.acquire()


class _Group(Generic[T]):
    """
    The queue before one bulk call. A thread that is woken has its answer, or leads the next batch.

    Nobody waits for a thread that is gone: whatever interrupts a leader, its batch is told so and
    somebody else leads.
    """

    def __init__(
        self,
        call: Callable[[Sequence[T]], Sequence[Record | None]],
        split: Callable[[list[_Turn[T]]], tuple[list[_Turn[T]], list[_Turn[T]]]],
    ) -> None:
        self._call = call
        self._split = split
        self._mutex = threading.Lock()
        self._waiting: list[_Turn[T]] = []
        self._leader: _Turn[T] | _Alone | None = None  # None: the store is idle

    def submit(self, ask: T) -> Record | None:
        turn: _Turn[T] | None = None  # None: nobody is before us, so there is no queue to stand in
        try:
            with self._mutex:
                if self._leader is None:
                    self._leader = _ALONE
                else:
                    turn = _Turn(ask)
                    self._waiting.append(turn)
            if turn is None:
                result = self._call((ask,))[0]
                self._pass_on(_ALONE)
                return result
            turn.woken.acquire()
            if self._leader is turn:
                self._lead(turn)
        except BaseException:
            self._leave(turn)
            raise
        if turn.error is not None:
            raise turn.error
        return turn.result

    def _lead(self, leader: _Turn[T]) -> None:
        with self._mutex:
            batch, self._waiting = self._split(self._waiting)
        results: Sequence[Record | None] = [None] * len(batch)
        errors: Sequence[Exception | None] = [None] * len(batch)
        try:
            results, errors = call_apart(self._call, [turn.ask for turn in batch])
        except BaseException as interruption:
            errors = [unknown_outcome(interruption) for _ in batch]
            raise
        finally:
            self._pass_on(leader)  # first, so that the store does not wait for our waking others
            for turn, result, error in zip(batch, results, errors, strict=True):
                turn.result = result
                turn.error = error
                turn.woken.release()

    def _leave(self, turn: _Turn[T] | None) -> None:
        """Go without an answer, because of an error of our own."""
        if turn is not None:
            with self._mutex:
                if turn in self._waiting:
                    self._waiting.remove(turn)
        self._pass_on(turn or _ALONE)

    def _pass_on(self, leader: _Turn[T] | _Alone) -> None:
        """Make the thread that has waited longest the next leader, or go idle."""
        with self._mutex:
            if self._leader is not leader:
                return
            self._leader = None
            if self._waiting:
                self._leader = self._waiting[0]
                self._waiting[0].woken.release()


def _apart(waiting: list[_Turn[Swap]]) -> tuple[list[_Turn[Swap]], list[_Turn[Swap]]]:
    """
    The next batch of *waiting*, and who stays for the one after.

    Two swaps of one record, as simultaneous duplicates make them, never share a batch: the second
    must see what the first one did.
    """
    batch: dict[bytes, _Turn[Swap]] = {}
    stays = [
        turn
        for turn in waiting
        if len(batch) >= BATCH_MAX or batch.setdefault(turn.ask.id, turn) is not turn
    ]
    return list(batch.values()), stays


def next_round(
    waiting: list[T],
    swaps_of: Callable[[T], Sequence[Swap]],
    limit: int = BATCH_MAX,
    away: set[bytes] | frozenset[bytes] = frozenset(),
) -> tuple[list[T], list[T]]:
    """
    The same for those who may ask for several at once, while the ids in *away* are on their way.

    Whoever stays is not overtaken by anybody who asks for one of its records.
    """
    ids = [swap.id for ask in waiting for swap in swaps_of(ask)]
    if len(ids) <= limit and len(set(ids)) == len(ids) and away.isdisjoint(ids):
        return waiting, []
    taken = set(away)
    count = 0
    batch: list[T] = []
    stays: list[T] = []
    for ask in waiting:
        own = [swap.id for swap in swaps_of(ask)]
        if count >= limit or not taken.isdisjoint(own):
            stays.append(ask)
        else:
            batch.append(ask)
            count += len(own)
        taken.update(own)
    return batch, stays


def _in_order(waiting: list[T]) -> tuple[list[T], list[T]]:
    return waiting[:BATCH_MAX], waiting[BATCH_MAX:]


@dataclass(slots=True)
class Bulk(Effect[Sequence["Record | None"]], Generic[T]):
    """Make the bulk call for *asks*."""

    asks: Sequence[T]


# For each who asked: its answer, or why it has none.
Answers: TypeAlias = tuple[Sequence[Record | None], Sequence[Exception | None]]


def call_apart(
    call: Callable[[Sequence[T]], Sequence[Record | None]], asks: Sequence[T]
) -> Answers:
    """Make one bulk call; if it fails for a reason of one member's, call for each alone."""
    return run(apart(asks), lambda bulk: call(cast("Bulk[T]", bulk).asks))


def apart(asks: Sequence[T]) -> Flow[Answers]:
    """The flow of `call_apart`, for those who await."""
    try:
        results = yield from Bulk(asks)
        assert len(results) == len(asks), f"{len(asks)} questions, {len(results)} answers"
        return results, [None] * len(asks)
    except Divided as error:
        return _told(error.fates)
    except StoreUnavailable as error:
        return _told([error] * len(asks))
    except Exception as error:  # noqa: BLE001 - handed to whoever asked
        if len(asks) == 1:
            return [None], [error]
    return (yield from _each(asks))


def _each(asks: Sequence[T]) -> Flow[Answers]:
    results: list[Record | None] = []
    errors: list[Exception | None] = []
    for ask in asks:
        # A store that has stopped answering is not asked again: its time-outs would add up.
        last = errors[-1] if errors else None
        if isinstance(last, StoreUnavailable) and not isinstance(last, Unread):
            results.append(None)
            errors.append(_copy_of(last))
            continue
        one_result, (error,) = yield from apart([ask])
        if isinstance(error, StoreUnavailable):
            error.is_ambiguous = True  # some of the batch may have been written before it failed
        results += one_result
        errors.append(error)
    return results, errors


def _told(fates: Sequence[Fate]) -> Answers:
    results: list[Record | None] = []
    errors: list[Exception | None] = []
    for fate in fates:
        if isinstance(fate, Exception):
            results.append(None)
            errors.append(_copy_of(fate) if isinstance(fate, StoreUnavailable) else fate)
        else:
            results.append(fate)
            errors.append(None)
    return results, errors


def _copy_of(error: StoreUnavailable) -> StoreUnavailable:
    """One for each caller: an error that is raised in many places collects all their stacks."""
    kind = Unread if isinstance(error, Unread) else StoreUnavailable
    copy = kind(str(error), is_ambiguous=error.is_ambiguous)
    copy.__cause__ = error.__cause__
    return copy.with_traceback(error.__traceback__)


def unknown_outcome(interruption: BaseException | None) -> StoreUnavailable:
    """For those whose batch was interrupted by what is no `Exception`, such as Control-C."""
    message = "the write was interrupted; whether it took effect is not known"
    error = StoreUnavailable(message, is_ambiguous=True)
    error.__cause__ = interruption
    return error
