"""Batching for threads over a scripted store: which calls share a batch, and that errors do not."""

import random
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.batch_errors import results_of
from coatcheck.stores.batching import BATCH_MAX, Batcher, call_batch, next_batch
from tests.support.batches import (
    TIMEOUT_S,
    Interrupted,
    ScriptedStore,
    claim,
    id_of,
    wait_until,
)


class Callers:
    """Threads that call a batcher while its store is blocked, one after the other."""

    def __init__(self) -> None:
        self.store = ScriptedStore()
        self.batcher = Batcher(self.store)
        self.threads = ThreadPoolExecutor(20)

    def swap(self, swap: Swap) -> Future[Record | None]:
        return self.threads.submit(self.batcher.swap, swap)

    def get(self, id: bytes) -> Future[Record | None]:
        return self.threads.submit(self.batcher.get, id)

    @contextmanager
    def queued(self, *asks: Any) -> Iterator[list[Future[Record | None]]]:
        """Queue *asks* behind a first call that is blocked until the end of the `with`."""
        is_swap = isinstance(asks[0], Swap)
        group = self.batcher._swaps if is_swap else self.batcher._gets
        gate = self.store.hold()
        first = self.swap(claim(1_000)) if is_swap else self.get(id_of(1_000))
        self.store.wait_for_a_call()
        waiting: list[Future[Record | None]] = []
        for ask in asks:
            waiting.append(self.swap(ask) if is_swap else self.get(ask))
            wait_until(lambda: len(group._waiting) == len(waiting))
        try:
            yield waiting
        finally:
            gate.set()
            first.exception(TIMEOUT_S)


@pytest.fixture
def callers() -> Iterator[Callers]:
    callers = Callers()
    yield callers
    callers.threads.shutdown()


def answers(futures: Sequence[Future[Any]]) -> list[Any]:
    """The result or the error of each."""
    return [future.exception(TIMEOUT_S) or future.result() for future in futures]


def test_a_single_call_is_made_in_the_thread_of_its_caller():
    """L1: nothing is handed over, no timer runs."""
    store = ScriptedStore()
    batcher = Batcher(store)
    assert batcher.swap(claim(1)) is None
    assert batcher.swap(claim(1, nonce=2)) == claim(1).record
    assert batcher.get(id_of(1)) == claim(1).record
    assert batcher.get(id_of(2)) is None
    assert store.batches == [[id_of(1)], [id_of(1)]]
    assert store.reads == [[id_of(1)], [id_of(2)]]
    assert set(store.threads) == {threading.current_thread()}


def test_calls_that_arrive_during_a_call_share_the_next_batch(callers: Callers):
    """L1: in the order of arrival."""
    with callers.queued(*(claim(number) for number in range(6))) as waiting:
        pass
    assert answers(waiting) == [None] * 6
    assert callers.store.batches[1:] == [[id_of(number) for number in range(6)]]


def test_two_swaps_of_one_record_never_share_a_batch(callers: Callers):
    """L1: the second must see what the first one did; others do not wait for it."""
    asks = [claim(1, nonce=1), claim(1, nonce=2), claim(2), claim(1, nonce=3), claim(3)]
    with callers.queued(*asks) as waiting:
        pass
    winner = claim(1, nonce=1).record
    assert answers(waiting) == [None, winner, None, winner, None]
    one, two, three = (id_of(number) for number in (1, 2, 3))
    assert callers.store.batches[1:] == [[one, two, three], [one], [one]]


def test_readers_of_one_record_share_a_batch(callers: Callers):
    """L3: many waiters that poll for one key cost one read."""
    callers.batcher.swap(claim(1))
    callers.store.wait_for_a_call()
    one, two = id_of(1), id_of(2)
    with callers.queued(one, two, one, one) as waiting:
        pass
    assert answers(waiting) == [claim(1).record, None, claim(1).record, claim(1).record]
    assert callers.store.reads[1:] == [[one, two, one, one]]


def test_a_bad_record_in_a_batch_fails_alone(callers: Callers):
    """D2: its neighbours are written all the same."""
    callers.store.failing[id_of(2)] = bad = ValueError("too large")
    with callers.queued(*(claim(number) for number in (1, 2, 3))) as waiting:
        pass
    assert answers(waiting) == [None, bad, None]
    assert list(callers.store.get([id_of(1), id_of(2), id_of(3)])) == [
        *(claim(1).record, None, claim(3).record)
    ]


def test_an_unreachable_store_is_not_called_again_for_each_member(callers: Callers):
    """D2: each member gets an error object of its own, with the cause."""
    callers.store.failing[id_of(2)] = unavailable = StoreUnavailable("gone")
    unavailable.__cause__ = OSError("no route")
    with callers.queued(*(claim(number) for number in (1, 2, 3))) as waiting:
        pass
    errors = answers(waiting)
    assert [str(error) for error in errors] == ["gone"] * 3
    assert {type(error) for error in errors} == {StoreUnavailable}
    assert {error.__cause__ for error in errors} == {unavailable.__cause__}
    assert len({id(error) for error in errors}) == 3
    assert len(callers.store.batches) == 2


def test_a_store_that_fails_during_the_retries_is_not_called_for_the_rest(callers: Callers):
    """D2: the timeouts of the members would add up."""
    callers.store.failing[id_of(1)] = bad = ValueError("bad")
    callers.store.failing[id_of(3)] = StoreUnavailable("gone")
    with callers.queued(*(claim(number) for number in range(1, 7))) as waiting:
        pass
    told = answers(waiting)
    assert told[:2] == [bad, None]
    assert [str(error) for error in told[2:]] == ["gone"] * 4
    together, *alone = callers.store.batches[1:]
    assert len(together) == 6
    assert alone == [[id_of(1)], [id_of(2)], [id_of(3)]]


def fail_one_member(store: ScriptedStore, bad: int) -> None:
    """Let *store* raise a `BatchError` for calls with *bad*, in which only *bad* fails."""
    swap, get = store.swap, store.get
    error = StoreUnavailable("a shard is away")

    def apart(call: Any, asks: Sequence[Any], ids: Sequence[bytes]) -> Any:
        sound = iter(call([ask for ask, id in zip(asks, ids, strict=True) if id != id_of(bad)]))
        return results_of([error if id == id_of(bad) else next(sound) for id in ids])

    store.swap = lambda swaps: apart(swap, swaps, [s.id for s in swaps])  # type: ignore[method-assign]
    store.get = lambda ids: apart(get, ids, ids)  # type: ignore[method-assign]


def test_each_member_gets_its_own_outcome_of_a_batch_error(callers: Callers):
    """D2, L1: and no member is retried."""
    callers.store.swap((taken := claim(4, nonce=9),))
    fail_one_member(callers.store, 2)
    callers.batcher = Batcher(callers.store)
    with callers.queued(*(claim(number) for number in range(1, 6))) as waiting:
        pass
    told = answers(waiting)
    assert str(told.pop(1)) == "a shard is away"
    assert told == [None, None, taken.record, None]
    assert len(callers.store.batches) == 3
    with callers.queued(*(id_of(number) for number in range(1, 4))) as waiting:
        pass
    told = answers(waiting)
    assert str(told.pop(1)) == "a shard is away"
    assert told == [claim(1).record, claim(3).record]


def test_followers_get_an_error_when_their_leader_is_interrupted(callers: Callers):
    """D2: only the interrupted thread ends; the others fail closed, and later calls work."""
    callers.store.failing[id_of(2)] = Interrupted()
    with callers.queued(*(claim(number) for number in (1, 2, 3))) as waiting:
        pass
    assert isinstance(waiting[0].exception(TIMEOUT_S), Interrupted)
    for follower in waiting[1:]:
        assert isinstance(follower.exception(TIMEOUT_S), StoreUnavailable)
    assert callers.swap(claim(4)).result(TIMEOUT_S) is None


def test_an_interrupted_single_call_leaves_the_batcher_idle(callers: Callers):
    """D2: the next thread does not wait for a call that has ended."""
    callers.store.failing[id_of(1)] = Interrupted()
    with pytest.raises(Interrupted):
        callers.batcher.swap(claim(1))
    assert callers.swap(claim(2)).result(TIMEOUT_S) is None


def test_a_waiting_thread_that_is_interrupted_passes_leadership_on(callers: Callers):
    """D2: it was the next leader."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    gate = callers.store.hold()
    first = callers.swap(claim(1))
    callers.store.wait_for_a_call()

    def interrupt_the_waiting() -> Future[Record | None]:
        wait_until(lambda: len(callers.batcher._swaps._waiting) == 1)
        behind = callers.swap(claim(3))
        wait_until(lambda: len(callers.batcher._swaps._waiting) == 2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return behind

    try:
        other = callers.threads.submit(interrupt_the_waiting)
        with pytest.raises(Interrupted):
            callers.batcher.swap(claim(2))  # in the main thread, where signals arrive
        gate.set()
        assert first.result(TIMEOUT_S) is None
        assert other.result(TIMEOUT_S).result(TIMEOUT_S) is None
        assert callers.batcher.swap(claim(4)) is None
    finally:
        gate.set()
        signal.signal(signal.SIGUSR1, before)


def test_a_store_that_returns_too_few_results_makes_no_caller_hang(callers: Callers):
    """D2: that is a bug of the store, and each caller gets an error."""
    swap = callers.store.swap
    callers.batcher._swaps._call = lambda swaps: swap(swaps)[1:]
    with callers.queued(claim(1), claim(2)) as waiting:
        pass
    assert [type(error) for error in answers(waiting)] == [AssertionError] * 2
    callers.batcher._swaps._call = swap
    assert callers.swap(claim(3)).result(TIMEOUT_S) is None


def test_results_reach_the_thread_that_called_under_load():
    """L1: 16 threads, a store that takes random time, and every result is the right one."""
    store = ScriptedStore()
    pause, never = random.Random(7), threading.Event()
    store._pass = lambda: never.wait(timeout=pause.random() / 1_000)
    batcher = Batcher(store)

    def client(number: int) -> None:
        for round in range(40):
            mine = claim(100 * number + round, nonce=number)
            shared = claim(10_000 + round, nonce=number)
            assert batcher.swap(mine) is None
            standing = batcher.swap(shared) or shared.record
            assert standing is not None
            assert standing.id == shared.id
            assert batcher.get(mine.id) == mine.record
            assert batcher.get(shared.id) == standing
            assert batcher.swap(mine) == mine.record

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(client, range(16), timeout=TIMEOUT_S))
    assert max(len(batch) for batch in store.batches) > 1
    assert all(len(set(batch)) == len(batch) for batch in store.batches)


def test_a_member_is_ambiguous_if_its_retry_finds_the_store_unreachable():
    """L1: a batch need not be one transaction; the failed call may have written this member."""

    def fail_and_go_away(asks):
        if len(asks) > 1:
            raise ValueError("one of them is bad")
        raise StoreUnavailable("gone")

    errors = call_batch(fail_and_go_away, ["one", "two"])
    assert [str(error) for error in errors] == ["gone"] * 2
    assert [error.is_ambiguous for error in errors] == [True] * 2


def test_a_lost_acknowledgement_is_ambiguous_for_each_member():
    """L1: the engine then makes the same swap again."""

    def lose_acknowledgement(_asks):
        raise StoreUnavailable("the answer was lost", is_ambiguous=True)

    errors = call_batch(lose_acknowledgement, ["one", "two"])
    assert [error.is_ambiguous for error in errors] == [True, True]


def test_a_batch_has_a_limit_and_keeps_the_order_of_each_record():
    """D2, L1: the last member must not wait for a thousand others, nor overtake its own record."""
    asks = [1, 2, 1, 3, 2, 4, 5]
    batch, stays = next_batch(asks, 3, id_of, {id_of(3)})
    assert (batch, stays) == ([1, 2, 4], [1, 3, 2, 5])
    assert next_batch(asks, 3, None) == ([1, 2, 1], [3, 2, 4, 5])
    many = list(range(600))
    batch, stays = next_batch(many, BATCH_MAX, id_of)
    assert (batch, stays) == (many[:BATCH_MAX], many[BATCH_MAX:])
