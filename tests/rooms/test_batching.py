"""The two batchers over a scripted store: who leaves together, and that no fate is shared."""

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.batching import BATCH_MAX, Batcher, call_apart
from coatcheck.stores.contract import Page, Query
from coatcheck.stores.fates import results_of
from coatcheck.stores.memory import MemoryStore
from coatcheck.stores.threaded import ThreadedStore

# 10 s: nothing here takes a hundredth of it; who waits longer waits for ever.
TIMEOUT_S = 10


class Interrupted(BaseException):
    """What a signal or a debugger may throw into any thread; no `Exception`."""


class ScriptedStore(MemoryStore):
    """A memory store that writes down its calls, can be held up, and fails where told to."""

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
        """The next call waits until the event that is given back is set."""
        gate = threading.Event()
        self.gates.append(gate)
        return gate

    def wait_for_a_call(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT_S)


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


class Crowd:
    """Threads that ask a batcher while it is held up, one after the other."""

    def __init__(self) -> None:
        self.store = ScriptedStore()
        self.batcher = Batcher(self.store)
        self.threads = ThreadPoolExecutor(20)

    def swap(self, swap: Swap) -> Future[Record | None]:
        return self.threads.submit(self.batcher.swap, swap)

    def get(self, id: bytes) -> Future[Record | None]:
        return self.threads.submit(self.batcher.get, id)

    @contextmanager
    def gathering(self, *asks: Any) -> Iterator[list[Future[Record | None]]]:
        """*asks* wait behind a first call, until the block is left."""
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
def crowd() -> Iterator[Crowd]:
    crowd = Crowd()
    yield crowd
    crowd.threads.shutdown()


def answers(futures: Sequence[Future[Any]]) -> list[Any]:
    """What each of them was told, errors too."""
    return [future.exception(TIMEOUT_S) or future.result() for future in futures]


# -------------------------------------------------------------------------- Batcher, for threads


def test_who_is_alone_writes_in_its_own_thread_with_one_call():
    """L1: no hand-over, no timer, nothing to wait for."""
    store = ScriptedStore()
    batcher = Batcher(store)
    assert batcher.swap(claim(1)) is None
    assert batcher.swap(claim(1, nonce=2)) == claim(1).record
    assert batcher.get(id_of(1)) == claim(1).record
    assert batcher.get(id_of(2)) is None
    assert store.batches == [[id_of(1)], [id_of(1)]]
    assert store.reads == [[id_of(1)], [id_of(2)]]
    assert set(store.threads) == {threading.current_thread()}


def test_what_arrives_while_a_batch_is_away_leaves_together(crowd: Crowd):
    """L1: in the order of arrival."""
    with crowd.gathering(*(claim(number) for number in range(6))) as waiting:
        pass
    assert answers(waiting) == [None] * 6
    assert crowd.store.batches[1:] == [[id_of(number) for number in range(6)]]


def test_two_swaps_of_one_record_never_share_a_batch(crowd: Crowd):
    """L1: the second must see what the first one did; others do not wait for it."""
    asks = [claim(1, nonce=1), claim(1, nonce=2), claim(2), claim(1, nonce=3), claim(3)]
    with crowd.gathering(*asks) as waiting:
        pass
    winner = claim(1, nonce=1).record
    assert answers(waiting) == [None, winner, None, winner, None]
    one, two, three = (id_of(number) for number in (1, 2, 3))
    assert crowd.store.batches[1:] == [[one, two, three], [one], [one]]


def test_readers_of_one_record_share_a_batch(crowd: Crowd):
    """L3: a crowd of waiters that poll for one key costs one read."""
    crowd.batcher.swap(claim(1))
    crowd.store.wait_for_a_call()
    one, two = id_of(1), id_of(2)
    with crowd.gathering(one, two, one, one) as waiting:
        pass
    assert answers(waiting) == [claim(1).record, None, claim(1).record, claim(1).record]
    assert crowd.store.reads[1:] == [[one, two, one, one]]


def test_a_bad_record_in_a_batch_fails_alone(crowd: Crowd):
    """D2: its neighbours are written all the same."""
    crowd.store.failing[id_of(2)] = bad = ValueError("too large")
    with crowd.gathering(*(claim(number) for number in (1, 2, 3))) as waiting:
        pass
    assert answers(waiting) == [None, bad, None]
    assert list(crowd.store.get([id_of(1), id_of(2), id_of(3)])) == [
        *(claim(1).record, None, claim(3).record)
    ]


def test_a_store_that_does_not_answer_is_not_asked_again_for_each(crowd: Crowd):
    """D2: all of the batch learn it, each with an error of its own, and the cause is kept."""
    crowd.store.failing[id_of(2)] = unavailable = StoreUnavailable("gone")
    unavailable.__cause__ = OSError("no route")
    with crowd.gathering(*(claim(number) for number in (1, 2, 3))) as waiting:
        pass
    errors = answers(waiting)
    assert [str(error) for error in errors] == ["gone"] * 3
    assert {type(error) for error in errors} == {StoreUnavailable}
    assert {error.__cause__ for error in errors} == {unavailable.__cause__}
    assert len({id(error) for error in errors}) == 3
    assert len(crowd.store.batches) == 2


def test_a_store_that_stops_answering_is_not_asked_for_the_rest(crowd: Crowd):
    """D2: a batch that is tried one by one does not wait for a time-out of each member."""
    crowd.store.failing[id_of(1)] = bad = ValueError("bad")
    crowd.store.failing[id_of(3)] = StoreUnavailable("gone")
    with crowd.gathering(*(claim(number) for number in range(1, 7))) as waiting:
        pass
    told = answers(waiting)
    assert told[:2] == [bad, None]
    assert [str(error) for error in told[2:]] == ["gone"] * 4
    together, *alone = crowd.store.batches[1:]
    assert len(together) == 6
    assert alone == [[id_of(1)], [id_of(2)], [id_of(3)]]


def divided(store: ScriptedStore, bad: int) -> None:
    """What is asked of *store* about *bad* fails by itself from now on, and nothing else does."""
    swap, get = store.swap, store.get
    error = StoreUnavailable("a shard is away")

    def apart(call: Any, asks: Sequence[Any], ids: Sequence[bytes]) -> Any:
        sound = iter(call([ask for ask, id in zip(asks, ids, strict=True) if id != id_of(bad)]))
        return results_of([error if id == id_of(bad) else next(sound) for id in ids])

    store.swap = lambda swaps: apart(swap, swaps, [s.id for s in swaps])  # type: ignore[method-assign]
    store.get = lambda ids: apart(get, ids, ids)  # type: ignore[method-assign]


def test_each_is_told_what_became_of_its_own_where_the_store_says_so(crowd: Crowd):
    """D2, L1: and nobody is asked for again."""
    crowd.store.swap((taken := claim(4, nonce=9),))
    divided(crowd.store, 2)
    crowd.batcher = Batcher(crowd.store)
    with crowd.gathering(*(claim(number) for number in range(1, 6))) as waiting:
        pass
    told = answers(waiting)
    assert str(told.pop(1)) == "a shard is away"
    assert told == [None, None, taken.record, None]
    assert len(crowd.store.batches) == 3
    with crowd.gathering(*(id_of(number) for number in range(1, 4))) as waiting:
        pass
    told = answers(waiting)
    assert str(told.pop(1)) == "a shard is away"
    assert told == [claim(1).record, claim(3).record]


def test_each_on_an_event_loop_is_told_what_became_of_its_own():
    """D2, L1: by the thread that asks for all."""

    async def story() -> None:
        beneath = ScriptedStore()
        divided(beneath, 2)
        store = ThreadedStore(beneath)
        asked = (store.swap([claim(number)]) for number in range(6))
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert str(told.pop(2)) == "a shard is away"
        assert told == [[None]] * 5
        await store.close()

    asyncio.run(story())


def test_who_waits_is_told_when_the_thread_that_wrote_for_it_is_interrupted(crowd: Crowd):
    """D2: only the interrupted thread ends; the others fail closed, and the next ones go on."""
    crowd.store.failing[id_of(2)] = Interrupted()
    with crowd.gathering(*(claim(number) for number in (1, 2, 3))) as waiting:
        pass
    assert isinstance(waiting[0].exception(TIMEOUT_S), Interrupted)
    for follower in waiting[1:]:
        assert isinstance(follower.exception(TIMEOUT_S), StoreUnavailable)
    assert crowd.swap(claim(4)).result(TIMEOUT_S) is None


def test_an_interruption_of_who_is_alone_leaves_the_store_idle(crowd: Crowd):
    """D2: the next thread finds no batch that never comes back."""
    crowd.store.failing[id_of(1)] = Interrupted()
    with pytest.raises(Interrupted):
        crowd.batcher.swap(claim(1))
    assert crowd.swap(claim(2)).result(TIMEOUT_S) is None


def test_a_thread_that_is_interrupted_while_it_waits_leaves_nobody_waiting(crowd: Crowd):
    """D2: it was next to lead, and is not there any more."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    gate = crowd.store.hold()
    first = crowd.swap(claim(1))
    crowd.store.wait_for_a_call()

    def interrupt_the_waiting() -> Future[Record | None]:
        wait_until(lambda: len(crowd.batcher._swaps._waiting) == 1)
        behind = crowd.swap(claim(3))
        wait_until(lambda: len(crowd.batcher._swaps._waiting) == 2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return behind

    try:
        other = crowd.threads.submit(interrupt_the_waiting)
        with pytest.raises(Interrupted):
            crowd.batcher.swap(claim(2))  # in the main thread, where signals arrive
        gate.set()
        assert first.result(TIMEOUT_S) is None
        assert other.result(TIMEOUT_S).result(TIMEOUT_S) is None
        assert crowd.batcher.swap(claim(4)) is None
    finally:
        gate.set()
        signal.signal(signal.SIGUSR1, before)


def test_a_store_that_loses_count_does_not_make_anybody_hang(crowd: Crowd):
    """D2: fewer answers than questions is a bug of the store, and everyone hears of it."""
    swap = crowd.store.swap
    crowd.batcher._swaps._call = lambda swaps: swap(swaps)[1:]
    with crowd.gathering(claim(1), claim(2)) as waiting:
        pass
    assert [type(error) for error in answers(waiting)] == [AssertionError] * 2
    crowd.batcher._swaps._call = swap
    assert crowd.swap(claim(3)).result(TIMEOUT_S) is None


def test_answers_reach_the_thread_that_asked_under_load():
    """L1: 16 threads, a store that takes random time, and every answer is the right one."""
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


# ----------------------------------------------------------------- ThreadedStore, for event loops


async def submitted(*calls: Any) -> list[asyncio.Task[Any]]:
    """Tasks for *calls*, each of them as far as the queue."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


async def told(tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
    async with asyncio.timeout(TIMEOUT_S):
        return await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def gathering(store: ScriptedStore) -> Iterator[None]:
    """Whatever is submitted inside waits until the block is left."""
    gate = store.hold()
    try:
        yield
    finally:
        gate.set()


def test_what_gathers_on_an_event_loop_leaves_together():
    """L1: one batch away, all others in the next, and one wake-up for all of them."""

    async def scene() -> None:
        store = ScriptedStore()
        threaded = ThreadedStore(store)
        loop = asyncio.get_running_loop()
        wake_ups: list[object] = []
        wake_up = loop.call_soon_threadsafe
        with gathering(store):
            first = await submitted(threaded.swap([claim(0)]))
            await asyncio.to_thread(store.wait_for_a_call)
            rest = await submitted(
                *(threaded.swap([claim(number)]) for number in range(1, 6)),
                threaded.swap([claim(6), claim(7)]),
            )
            loop.call_soon_threadsafe = lambda *args, **kw: (
                wake_ups.append(args) or wake_up(*args, **kw)
            )
        assert await told([*first, *rest]) == [[None]] * 6 + [[None, None]]
        assert store.batches == [[id_of(0)], [id_of(number) for number in range(1, 8)]]
        assert len(wake_ups) == 2
        assert len(set(store.threads)) == 1
        assert store.threads[0] is not threading.current_thread()
        await threaded.close()

    asyncio.run(scene())


def make_busy(threaded: ThreadedStore, store: ScriptedStore) -> None:
    """Let *threaded* see a batch of several, from an event loop that is closed afterwards."""

    async def scene() -> None:
        with gathering(store):
            first = await submitted(threaded.swap([claim(100)]))
            await asyncio.to_thread(store.wait_for_a_call)
            rest = await submitted(*(threaded.swap([claim(number)]) for number in (101, 102)))
        await told([*first, *rest])

    asyncio.run(scene())
    store.batches.clear()


def test_a_busy_event_loop_hands_over_once_for_each_turn():
    """L1: the thread is not woken by the first call, but when all that are ready have asked."""
    store = ScriptedStore()
    threaded = ThreadedStore(store)
    make_busy(threaded, store)

    async def scene() -> None:
        async def ask(number: int) -> object:
            assert not threaded._queue._is_woken
            return await threaded.swap([claim(number)])

        assert await told([asyncio.ensure_future(ask(n)) for n in range(32)]) == [[None]] * 32
        await threaded.close()

    asyncio.run(scene())
    assert store.batches == [[id_of(number) for number in range(32)]]


def test_an_event_loop_that_ended_before_it_handed_over_holds_nobody_up():
    """D1: its calls are performed all the same, and those of other loops do not wait for it."""
    store = ScriptedStore()
    threaded = ThreadedStore(store)
    make_busy(threaded, store)
    ended = asyncio.new_event_loop()

    def ask_and_stop() -> None:
        threaded.swap([claim(1)])
        ended.stop()

    ended.call_soon(ask_and_stop)
    ended.run_forever()
    ended.close()

    async def scene() -> None:
        assert await told(await submitted(threaded.swap([claim(2)]))) == [[None]]
        await threaded.close()

    asyncio.run(scene())
    assert sorted(id for batch in store.batches for id in batch) == [id_of(1), id_of(2)]


def test_swaps_of_one_record_from_one_event_loop_never_share_a_batch():
    """L1: nor do two bulk swaps that have one record in common."""

    async def scene() -> None:
        store = ScriptedStore()
        threaded = ThreadedStore(store)
        with gathering(store):
            first = await submitted(threaded.swap([claim(0)]))
            await asyncio.to_thread(store.wait_for_a_call)
            rest = await submitted(
                threaded.swap([claim(1), claim(2)]),
                threaded.swap([claim(2, nonce=2), claim(3)]),
                threaded.swap([claim(4)]),
                threaded.swap([claim(1, nonce=2)]),
            )
        winners = [claim(2).record, None], [claim(1).record]
        assert await told([*first, *rest]) == [[None], [None, None], winners[0], [None], winners[1]]
        numbers = [[int.from_bytes(id, "big") for id in batch] for batch in store.batches]
        assert numbers == [[0], [1, 2, 4], [2, 3, 1]]
        await threaded.close()

    asyncio.run(scene())


def test_a_batch_has_a_limit_and_the_rest_follows():
    """D2: the last member of a batch does not wait for a thousand others."""

    async def scene() -> None:
        store = ScriptedStore()
        threaded = ThreadedStore(store)
        with gathering(store):
            first = await submitted(threaded.swap([claim(0)]))
            await asyncio.to_thread(store.wait_for_a_call)
            rest = await submitted(*(threaded.swap([claim(n)]) for n in range(1, 601)))
        assert await told([*first, *rest]) == [[None]] * 601
        assert [len(batch) for batch in store.batches] == [1, BATCH_MAX, BATCH_MAX, 88]
        await threaded.close()

    asyncio.run(scene())


def test_a_bad_record_of_an_event_loop_fails_alone():
    """D2: and so does one call of another kind in the same round."""

    async def scene() -> None:
        store = ScriptedStore()
        store.failing[id_of(2)] = bad = ValueError("too large")
        threaded = ThreadedStore(store)
        with gathering(store):
            first = await submitted(threaded.swap([claim(0)]))
            await asyncio.to_thread(store.wait_for_a_call)
            rest = await submitted(
                threaded.swap([claim(1)]),
                threaded.swap([claim(2)]),
                threaded.sweep("not a time"),  # type: ignore[arg-type]
                threaded.get([id_of(1), id_of(2), id_of(3)]),
                threaded.swap([claim(3)]),
            )
        _, one, two, swept, standing, three = await told([*first, *rest])
        assert (one, two, three) == ([None], bad, [None])
        assert isinstance(swept, TypeError)
        assert standing == [claim(1).record, None, claim(3).record]
        await threaded.close()

    asyncio.run(scene())


def test_an_event_loop_is_told_at_once_that_the_store_does_not_answer():
    """D2: every caller gets an error of its own, and the batch is not repeated."""

    async def scene() -> None:
        store = ScriptedStore()
        store.failing[id_of(2)] = StoreUnavailable("gone")
        threaded = ThreadedStore(store)
        with gathering(store):
            first = await submitted(threaded.swap([claim(0)]))
            await asyncio.to_thread(store.wait_for_a_call)
            rest = await submitted(*(threaded.swap([claim(n)]) for n in (1, 2, 3)))
        errors = (await told([*first, *rest]))[1:]
        assert [str(error) for error in errors] == ["gone"] * 3
        assert len({id(error) for error in errors}) == 3
        assert len(store.batches) == 2
        await threaded.close()

    asyncio.run(scene())


def test_a_cancelled_caller_is_forgotten_and_its_write_is_not():
    """L11: a client that hangs up cancels neither its neighbours nor what it asked for."""

    async def scene() -> None:
        store = ScriptedStore()
        threaded = ThreadedStore(store)
        with gathering(store):
            first = await submitted(threaded.swap([claim(0)]))
            await asyncio.to_thread(store.wait_for_a_call)
            kept, cancelled, other = await submitted(
                *(threaded.swap([claim(number)]) for number in (1, 2, 3))
            )
            cancelled.cancel()
            first[0].cancel()
            await asyncio.sleep(0)
        assert await told([kept, other]) == [[None], [None]]
        assert cancelled.cancelled()
        assert list(await threaded.get([id_of(0), id_of(2)])) == [claim(0).record, claim(2).record]
        await threaded.close()

    asyncio.run(scene())


def test_an_event_loop_that_ended_does_not_keep_the_others_waiting():
    """D2: its answers are thrown away, theirs arrive."""
    store = ScriptedStore()
    threaded = ThreadedStore(store)

    async def leave() -> None:
        await submitted(threaded.swap([claim(1)]))
        await asyncio.to_thread(store.wait_for_a_call)

    async def stay() -> None:
        assert list(await threaded.swap([claim(2)])) == [None]
        assert list(await threaded.get([id_of(1)])) == [claim(1).record]
        await threaded.close()

    gate = store.hold()
    asyncio.run(leave())
    gate.set()
    asyncio.run(stay())


def test_several_event_loops_in_several_threads_share_one_store():
    """L1: every answer reaches the loop and the task that asked, under load."""
    store = ScriptedStore()
    pause, never = random.Random(11), threading.Event()
    store._pass = lambda: never.wait(timeout=pause.random() / 1_000)
    threaded = ThreadedStore(store)

    async def client(number: int) -> int:
        won = 0
        for round in range(10):
            mine = claim(1_000 * number + round, nonce=number)
            shared = claim(1_000_000 + round, nonce=number)
            lost, standing = await threaded.swap([mine, shared])
            assert lost is None
            won += standing is None
            assert standing is None or standing.id == shared.id
            assert list(await threaded.get([mine.id])) == [mine.record]
        return won

    async def clients(start: int) -> int:
        return sum(await asyncio.gather(*(client(start + n) for n in range(10))))

    with ThreadPoolExecutor(4) as threads:
        loops = threads.map(lambda n: asyncio.run(clients(10 * n)), range(4), timeout=TIMEOUT_S)
        assert sum(loops) == 10
    assert len(set(store.threads)) == 1
    assert max(len(batch) for batch in store.batches) > 2
    assert all(len(set(batch)) == len(batch) for batch in store.batches)
    asyncio.run(threaded.close())


def test_the_writing_thread_survives_whatever_a_store_throws():
    """D2: fail closed, then go on."""

    async def scene() -> None:
        store = ScriptedStore()
        store.failing[id_of(1)] = Interrupted()
        threaded = ThreadedStore(store)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(StoreUnavailable):
                await threaded.swap([claim(1)])
            assert list(await threaded.swap([claim(2)])) == [None]
        await threaded.close()

    asyncio.run(scene())


def test_claims_do_not_wait_for_an_operator():
    """O1, L1: a search through a million records takes its time, and only the operator's."""

    async def scene() -> None:
        store = ScriptedStore()
        gate, searching = threading.Event(), threading.Event()
        find = store.find

        def find_slowly(query: Query) -> Page:
            searching.set()
            assert gate.wait(TIMEOUT_S)
            return find(query)

        store.find = find_slowly  # type: ignore[method-assign]
        threaded = ThreadedStore(store)
        async with asyncio.timeout(TIMEOUT_S):
            search = asyncio.ensure_future(threaded.find(Query()))
            assert await asyncio.to_thread(searching.wait, TIMEOUT_S)
            assert list(await threaded.swap([claim(1)])) == [None]
            assert not search.done()
            gate.set()
            assert list((await search).records) == [claim(1).record]
        await threaded.close()

    asyncio.run(scene())


def test_an_empty_swap_of_an_event_loop_is_answered():
    """D1: with as many answers as questions."""

    async def scene() -> None:
        store = ScriptedStore()
        threaded = ThreadedStore(store)
        async with asyncio.timeout(TIMEOUT_S):
            assert list(await threaded.swap([])) == []
            assert list(await threaded.get([])) == []
        assert store.batches == []
        await threaded.close()

    asyncio.run(scene())


def test_closing_finishes_what_is_queued_and_refuses_what_comes_after():
    """D2: nobody hangs on a closed store, and it is closed once however often it is told."""

    async def scene() -> None:
        store = ScriptedStore()
        threaded = ThreadedStore(store)
        with gathering(store):
            first = await submitted(threaded.swap([claim(0)]))
            await asyncio.to_thread(store.wait_for_a_call)
            before = await submitted(threaded.swap([claim(1)]), threaded.get([id_of(0)]))
            closing = await submitted(threaded.close(), threaded.close())
            after = await submitted(
                threaded.swap([claim(2)]), threaded.get([id_of(0)]), threaded.find(Query())
            )
        assert await told([*first, *before]) == [[None], [None], [claim(0).record]]
        assert await told(closing) == [None, None]
        assert store.is_closed
        assert {type(error) for error in await told(after)} == {StoreUnavailable}
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(StoreUnavailable):
                await threaded.swap([claim(3)])
            await threaded.close()
        assert id_of(2) not in store._records
        wait_until(lambda: not store.threads[0].is_alive())

    asyncio.run(scene())


# Loads like a server that forks its workers: used before the fork, and after it in both.
FORKED = """
import asyncio, os
from coatcheck.stores import ThreadedStore
from coatcheck.stores.memory import MemoryStore

store = ThreadedStore(MemoryStore())

async def use():
    async with asyncio.timeout(10):
        return list(await store.get([b""]))

assert asyncio.run(use()) == [None]
child = os.fork()
assert asyncio.run(use()) == [None]
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_threaded_store_works_on_in_a_forked_child():
    """L1, D2: a child inherits no thread, so it starts one of its own."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        command, env=environment, timeout=3 * TIMEOUT_S, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


# As when another thread of the parent was asking for something at that very moment.
FORKED_WHILE_ASKED = """
import os
from coatcheck.stores import ThreadedStore
from coatcheck.stores.memory import MemoryStore

store = ThreadedStore(MemoryStore())
store._queue._mutex.acquire()
child = os.fork()
if child:
    store._queue._mutex.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_child_that_was_forked_while_its_parent_asked_can_end():
    """D2: it lets go of what it has inherited, and not of a lock that nobody will release."""
    command = [sys.executable, "-c", FORKED_WHILE_ASKED]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        command, env=environment, timeout=3 * TIMEOUT_S, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_who_is_tried_again_alone_is_in_doubt_where_the_store_has_gone_away():
    """L1: a batch need not be one transaction; some of it may have been written the first time."""

    def fail_and_go_away(asks):
        if len(asks) > 1:
            raise ValueError("one of them is bad")
        raise StoreUnavailable("gone")

    _results, errors = call_apart(fail_and_go_away, ["one", "two"])
    assert [str(error) for error in errors] == ["gone"] * 2
    assert [error.is_ambiguous for error in errors] == [True] * 2


def test_a_lost_acknowledgement_stays_ambiguous_for_each_of_its_batch():
    """L1: an engine that is told so tries again; one that is not would refuse what happened."""

    def lose_acknowledgement(_asks):
        raise StoreUnavailable("the answer was lost", is_ambiguous=True)

    _results, errors = call_apart(lose_acknowledgement, ["one", "two"])
    assert [error.is_ambiguous for error in errors] == [True, True]
