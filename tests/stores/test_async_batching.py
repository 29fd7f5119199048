"""Batching for event loops over a scripted backend: batches, order, failures, and loop endings."""

import asyncio
import gc
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import pytest
import uvloop

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.async_batching import TICKS_MAX
from coatcheck.stores.async_store import BatchedAsyncStore
from coatcheck.stores.batch_errors import BatchError
from coatcheck.stores.batching import BATCH_MAX
from coatcheck.stores.contract import AsyncBackend, Query
from coatcheck.stores.memory import MemoryStore
from tests.support.batches import TIMEOUT_S, Interrupted, change, claim, id_of, on_a_loop


class ScriptedBackend:
    """Access to a memory store; it logs its calls, can be blocked, and fails for chosen ids."""

    batch_max = BATCH_MAX

    def __init__(self, store: "ScriptedStore") -> None:
        self.store = store
        self.in_flight = store.in_flight
        self.timeout_s = store.timeout_s
        self.loop = asyncio.get_running_loop()
        self.batches: list[list[int]] = []
        self.running: list[set[bytes]] = []
        self.gates: deque[asyncio.Event] = deque()
        self.closings = 0

    async def swap(self, swaps: Sequence[Swap], /) -> Sequence[Record | None]:
        ids = {swap.id for swap in swaps}
        assert len(ids) == len(swaps)
        assert all(ids.isdisjoint(others) for others in self.running)
        assert asyncio.get_running_loop() is self.loop
        self.batches.append([int.from_bytes(swap.id, "big") for swap in swaps])
        self.running.append(ids)
        assert len(self.running) <= self.in_flight
        try:
            await self._pass()
            for swap in swaps:
                if swap.id in self.store.failing:
                    raise self.store.failing[swap.id]
            return self.store.swap(swaps)
        finally:
            self.running.remove(ids)

    async def get(self, ids: Sequence[bytes], /) -> Sequence[Record | None]:
        await self._pass()
        self.store.reads.append(list(ids))
        return self.store.get(ids)

    async def _pass(self) -> None:
        if self.gates:
            await self.gates.popleft().wait()

    async def close(self) -> None:
        self.closings += 1

    @property
    def is_closed(self) -> bool:
        assert self.closings <= 1
        return self.closings == 1

    def hold(self) -> asyncio.Event:
        """Block the next call until the returned event is set."""
        gate = asyncio.Event()
        self.gates.append(gate)
        return gate


class ScriptedStore(MemoryStore):
    """A memory store with a scripted backend for each event loop."""

    def __init__(self, in_flight: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__()
        self.in_flight = in_flight
        self.timeout_s = timeout_s
        self.backends: list[ScriptedBackend] = []
        self.failing: dict[bytes, BaseException] = {}
        self.reads: list[list[bytes]] = []
        self.threads: set[threading.Thread] = set()
        self.is_closed = False

    def async_backend(self) -> AsyncBackend:
        self.backends.append(ScriptedBackend(self))
        return self.backends[-1]

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        self.threads.add(threading.current_thread())
        return super().swap(swaps)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class Scene:
    """A store on a running event loop whose first call, of claim 0, is blocked."""

    def __init__(self, in_flight: int = 1) -> None:
        self.blocking = ScriptedStore(in_flight)
        self.store = BatchedAsyncStore(self.blocking)
        self.gate = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.store.get([id_of(0)])
        self.gate = self.backend.hold()
        self.first = self.call(claim(0))
        await turns()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.gate.set()
        if error == (None, None, None):
            async with asyncio.timeout(TIMEOUT_S):
                await self.store.close()

    @property
    def backend(self) -> ScriptedBackend:
        return self.blocking.backends[0]

    def call(self, *swaps: Swap) -> "asyncio.Task[Sequence[Record | None]]":
        return asyncio.ensure_future(self.store.swap(swaps))

    async def outcomes(self, *calls: Awaitable[Any]) -> list[Any]:
        """Unblock the first call, and return the results and errors of *calls*."""
        self.gate.set()
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.gather(*calls, return_exceptions=True)


async def turns() -> None:
    """Let the event loop take more turns than anything here needs."""
    for _ in range(10):
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------------- batches


@on_a_loop
async def test_calls_that_arrive_during_a_call_share_the_next_batch():
    """L1: and no thread is involved."""
    async with Scene() as on:
        rest = [on.call(claim(number)) for number in range(1, 6)]
        rest.append(on.call(claim(6), claim(7)))
        await turns()
        assert on.backend.batches == [[0]]
        assert await on.outcomes(on.first, *rest) == [[None]] * 6 + [[None, None]]
        assert on.backend.batches == [[0], [1, 2, 3, 4, 5, 6, 7]]
        assert on.blocking.threads == {threading.current_thread()}


@on_a_loop
async def test_a_single_call_is_sent_without_waiting_for_a_turn_of_the_loop():
    """L1: its task is the next thing that the event loop runs."""
    async with Scene() as on:
        await on.outcomes(on.first)
        for number in range(1, 4):
            future = on.store._batcher()._swaps.submit(claim(number))
            await asyncio.sleep(0)
            assert on.backend.batches[-1] == [number]
            assert await future is None


@on_a_loop
async def test_callers_that_come_back_in_one_turn_share_a_batch():
    """L1: not one alone and then the others."""
    async with Scene() as on:

        async def call_twice(number: int) -> None:
            await on.store.swap([claim(number)])
            await on.store.swap([claim(100 + number)])

        callers = [asyncio.ensure_future(call_twice(number)) for number in (1, 2, 3)]
        await turns()
        assert await on.outcomes(*callers) == [None] * 3
        assert on.backend.batches == [[0], [1, 2, 3], [101, 102, 103]]


@on_a_loop
async def test_reads_share_a_batch_and_wait_for_no_write():
    """L1: many may look for the same record."""
    async with Scene() as on:
        on.blocking.reads.clear()
        gate = on.backend.hold()
        reads = [asyncio.ensure_future(on.store.get([id_of(1)])) for _ in range(3)]
        await turns()
        gate.set()
        assert await asyncio.gather(*reads) == [[None]] * 3
        assert on.blocking.reads == [[id_of(1)], [id_of(1)] * 2]
        assert not on.first.done()


@on_a_loop
async def test_several_batches_may_be_in_flight_and_one_that_is_stuck_blocks_no_other():
    """L1, D2: only swaps of its own records wait for it."""
    async with Scene(in_flight=2) as on:
        behind = on.call(change(0, 1))
        for number in (1, 2, 3):
            assert list(await on.store.swap([claim(number)])) == [None]
        assert on.backend.batches == [[0], [1], [2], [3]]
        assert not behind.done()
        assert await on.outcomes(on.first, behind) == [[None], [None]]


@on_a_loop
async def test_swaps_of_one_record_are_made_one_after_the_other():
    """L1, L3: in the order of the calls, though another batch could be sent."""
    async with Scene(in_flight=2) as on:
        again = on.call(change(0, 1), claim(5))
        third = on.call(change(5, 1))
        other = on.call(claim(1))
        assert list(await other) == [None]
        assert on.backend.batches == [[0], [5, 1]]
        assert await on.outcomes(on.first, again, third) == [[None], [None, None], [None]]
        assert sorted(on.backend.batches[2:]) == [[0], [5]]


@on_a_loop
async def test_swaps_of_one_record_on_one_loop_never_share_a_batch():
    """L1: the second one sees what the first one wrote."""
    async with Scene() as on:
        rest = [
            on.call(claim(1), claim(2)),
            on.call(claim(2, nonce=2), claim(3)),
            on.call(claim(4)),
            on.call(claim(1, nonce=2)),
        ]
        await turns()
        outcomes = await on.outcomes(*rest)
        assert outcomes == [*([None, None], [claim(2).record, None], [None], [claim(1).record])]
        assert on.backend.batches == [[0], [1, 2, 3, 4], [2, 1]]


@on_a_loop
async def test_a_batch_of_a_loop_has_a_limit_and_the_rest_follows():
    """D2: the last member of a batch does not wait for a thousand others."""
    async with Scene() as on:
        rest = [on.call(claim(number)) for number in range(1, 201)]
        rest.append(on.call(*(claim(number) for number in range(201, 601))))
        await turns()
        assert await on.outcomes(*rest) == [[None]] * 200 + [[None] * 400]
        assert [len(batch) for batch in on.backend.batches] == [1, BATCH_MAX, BATCH_MAX, 88]


# ------------------------------------------------------------------------------------ failures


def test_each_member_gets_its_own_outcome_of_a_batch_error():
    """D2, L1: a caller of several gets those of its own; and no member is retried."""
    unreachable = StoreUnavailable("a shard is unreachable", is_ambiguous=True)

    async def scene() -> None:
        async with Scene() as on:
            outcomes = [None, unreachable, claim(3).record, None, unreachable, None]
            on.blocking.failing[id_of(1)] = BatchError(outcomes)
            calls = [on.call(claim(number)) for number in range(1, 5)]
            calls.append(on.call(claim(5), claim(6)))
            await turns()
            one, two, three, four, several = await on.outcomes(*calls)
            assert [one, three, four] == [[None], [claim(3).record], [None]]
            assert (str(two), two.is_ambiguous) == ("a shard is unreachable", True)
            assert isinstance(several, BatchError)
            assert str(several.outcomes[0]) == "a shard is unreachable"
            assert several.outcomes[0] is not two
            assert several.outcomes[1] is None
            assert on.backend.batches == [[0], [1, 2, 3, 4, 5, 6]]

    asyncio.run(scene())


@pytest.mark.parametrize("raised", [Interrupted(), StopIteration()], ids=repr)
@on_a_loop
async def test_whatever_a_backend_raises_every_caller_gets_an_outcome(raised):
    """D2: fail closed, then go on."""
    async with Scene() as on:
        on.blocking.failing[id_of(2)] = raised
        rest = [on.call(claim(number)) for number in (1, 2)]
        await turns()
        outcomes = await on.outcomes(*rest)
        assert isinstance(outcomes[1], (StoreUnavailable, RuntimeError))
        if isinstance(raised, Interrupted):
            assert [error.is_ambiguous for error in outcomes] == [True] * 2
        assert list(await on.store.swap([claim(3)])) == [None]


@on_a_loop
async def test_a_caller_that_is_cancelled_gives_up_its_result_and_not_its_write():
    """L11: and cancels none of the other members."""
    async with Scene() as on:
        kept, cancelled, other = (on.call(claim(number)) for number in (1, 2, 3))
        await turns()
        on.first.cancel()
        cancelled.cancel()
        assert await on.outcomes(kept, other) == [[None], [None]]
        assert cancelled.cancelled()
        records = await on.store.get([id_of(0), id_of(2)])
        assert list(records) == [claim(0).record, claim(2).record]


# -------------------------------------------------------------------------------- the watchdog


@on_a_loop
async def test_a_call_that_gets_no_answer_is_cancelled_after_its_timeout():
    """D2: a swap may have been applied, a read cannot; the next call works."""
    blocking = ScriptedStore(timeout_s=0.1)
    store = BatchedAsyncStore(blocking)
    await store.get([id_of(0)])
    backend = blocking.backends[0]
    for call, is_ambiguous in ((store.swap([claim(1)]), True), (store.get([id_of(1)]), False)):
        backend.hold()
        start_s = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.1 s") as caught:
            await call
        assert caught.value.is_ambiguous is is_ambiguous
        assert time.monotonic() - start_s >= 0.1
    assert backend.running == []
    assert list(await store.swap([claim(2)])) == [None]
    assert list(await store.get([id_of(1), id_of(2)])) == [None, claim(2).record]
    await store.close()


@on_a_loop
async def test_members_that_are_retried_alone_have_a_timeout_each():
    """D2: a slow batch does not shorten the time of the calls that follow it."""
    async with Scene() as on:
        rest = [on.call(claim(number)) for number in (1, 2, 3)]
        await turns()
        on.blocking.failing[id_of(3)] = ValueError("too large")
        queue = on.store._batcher()._swaps
        swap, ticks = queue._bulk_call, []

        async def slow(swaps: Sequence[Swap]) -> Sequence[Record | None]:
            for _ in range(TICKS_MAX):
                queue._tick()
            ticks.append(queue._in_flight[0].ticks)
            return await swap(swaps)

        queue._bulk_call = slow
        assert (await on.outcomes(*rest))[:2] == [[None], [None]]
        assert ticks == [TICKS_MAX] * 4


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_blocked_event_loop_is_not_an_outage(new_loop):
    """D2: the answer has come meanwhile, and nobody had time to read it."""

    async def scene() -> None:
        blocking = ScriptedStore(timeout_s=0.1)
        store = BatchedAsyncStore(blocking)
        await store.get([id_of(0)])
        gate = blocking.backends[0].hold()
        call = asyncio.ensure_future(store.swap([claim(1)]))
        await turns()
        for _ in range(3):
            deadline_s = time.monotonic() + 0.15
            while time.monotonic() < deadline_s:  # a handler that blocks the event loop
                pass
            await asyncio.sleep(0)
        gate.set()
        assert list(await call) == [None]
        await store.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scene())


# --------------------------------------------------------------------------------- event loops


def test_several_event_loops_have_a_backend_each():
    """L1: every result reaches the loop and the task that called, under load."""
    blocking = ScriptedStore(in_flight=2)
    store = BatchedAsyncStore(blocking)
    pause = random.Random(11)

    async def client(number: int) -> int:
        won = 0
        for round in range(10):
            mine = claim(1_000 * number + round, nonce=number)
            shared = claim(1_000_000 + round, nonce=number)
            conflict, current = await store.swap([mine, shared])
            assert conflict is None
            won += current is None
            assert current is None or current.id == shared.id
            for _ in range(pause.randrange(3)):
                await asyncio.sleep(0)
            assert list(await store.get([mine.id])) == [mine.record]
        return won

    async def clients(start: int) -> int:
        return sum(await asyncio.gather(*(client(start + n) for n in range(10))))

    with ThreadPoolExecutor(4) as threads:
        loops = threads.map(lambda n: asyncio.run(clients(10 * n)), range(4), timeout=TIMEOUT_S)
        assert sum(loops) == 10
    assert len(blocking.backends) == 4
    assert all(backend.is_closed for backend in blocking.backends)
    asyncio.run(store.close())
    assert blocking.is_closed


def test_a_loop_that_ends_finishes_its_writes_and_closes_its_backend():
    """D1, D4: also if the application never closes the store."""
    blocking = ScriptedStore()
    store = BatchedAsyncStore(blocking)

    async def leave() -> None:
        store._batcher()._swaps.submit(claim(0))
        store._batcher()._swaps.submit(claim(1))

    asyncio.run(leave())
    assert blocking.backends[0].is_closed
    assert list(blocking.get([id_of(0), id_of(1)])) == [claim(0).record, claim(1).record]

    async def come_back() -> None:
        assert list(await store.swap([claim(1)])) == [claim(1).record]
        await store.close()

    asyncio.run(come_back())
    assert [backend.closings for backend in blocking.backends] == [1, 1]


@on_a_loop
async def test_a_batch_that_is_cancelled_is_written_by_a_thread():
    """L11: as when an event loop ends, which cancels every task it knows."""
    async with Scene() as on:
        futures = [on.store._batcher()._swaps.submit(claim(number)) for number in (1, 2)]
        for task in asyncio.all_tasks() - {asyncio.current_task(), on.first}:
            task.cancel()
        assert await on.outcomes(on.first, *futures) == [[None], None, None]
        assert len(on.blocking.threads) == 2


@on_a_loop
async def test_a_batch_that_is_cancelled_without_a_thread_to_be_had_is_ambiguous(monkeypatch):
    """L1: it was sent, so it may have been applied."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with Scene() as on:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for task in asyncio.all_tasks() - {asyncio.current_task(), on.first}:
                task.cancel()
            (error,) = await on.outcomes(on.first)
        assert isinstance(error, StoreUnavailable)
        assert error.is_ambiguous
        assert list(await on.store.swap([claim(1)])) == [None]


def test_the_writes_that_a_closed_loop_has_left_are_made_by_a_thread():
    """D1: such a loop had no time to finish anything."""
    blocking = ScriptedStore()
    store = BatchedAsyncStore(blocking)
    ended = asyncio.new_event_loop()

    def call_and_stop() -> None:
        queue = store._batcher()._swaps
        queue._is_busy = True  # so that the call waits for the end of this turn
        queue.submit(claim(1))
        queue.submit(change(1, 1))
        ended.stop()

    ended.call_soon(call_and_stop)
    ended.run_forever()
    ended.close()
    assert blocking.get([id_of(1)]) == [None]

    async def scene() -> None:
        assert list(await store.swap([claim(2)])) == [None]
        await store.close()

    asyncio.run(scene())
    assert list(blocking.get([id_of(1)])) == [change(1, 1).record]
    assert [backend.is_closed for backend in blocking.backends] == [True, True]


@on_a_loop
async def test_a_store_that_is_garbage_collected_closes_its_backend():
    """D4: nothing can use it any more."""
    blocking = ScriptedStore()
    store = BatchedAsyncStore(blocking)
    await store.swap([claim(1)])
    del store
    gc.collect()
    await turns()
    assert blocking.backends[0].is_closed


@on_a_loop
async def test_a_store_without_a_backend_for_this_loop_goes_through_threads():
    """L1: such as a Redis cluster."""

    class Without(ScriptedStore):
        def async_backend(self) -> AsyncBackend:
            raise NotImplementedError

    blocking = Without()
    store = BatchedAsyncStore(blocking)
    assert list(await store.swap([claim(1)])) == [None]
    assert list(await store.get([id_of(1)])) == [claim(1).record]
    await store.close()
    assert threading.current_thread() not in blocking.threads
    assert blocking.is_closed


# ------------------------------------------------------------------------------------- the end


@on_a_loop
async def test_an_empty_call_on_a_loop_returns_nothing():
    """D1: and reaches no backend."""
    blocking = ScriptedStore()
    store = BatchedAsyncStore(blocking)
    assert list(await store.swap([])) == []
    assert list(await store.get([])) == []
    assert blocking.backends[0].batches == []
    assert store.blocking is blocking
    await store.close()


@on_a_loop
async def test_closing_finishes_calls_in_flight_and_refuses_later_ones():
    """D2: no call hangs on a closed store, and it is closed once."""
    async with Scene() as on:
        before = [on.call(claim(1)), asyncio.ensure_future(on.store.get([id_of(9)]))]
        await turns()
        closing = [asyncio.ensure_future(on.store.close()) for _ in range(2)]
        await turns()
        after = [on.call(claim(2)), asyncio.ensure_future(on.store.get([id_of(0)]))]
        refused = await asyncio.gather(*after, return_exceptions=True)
        assert {type(error) for error in refused} == {StoreUnavailable}
        assert not on.backend.is_closed
        assert await on.outcomes(on.first, *before) == [[None], [None], [None]]
        await asyncio.gather(*closing)
        assert on.backend.is_closed
        assert on.blocking.is_closed
        with pytest.raises(StoreUnavailable):
            await on.store.swap([claim(3)])
        with pytest.raises(StoreUnavailable):
            await on.store.find(Query())
    assert id_of(2) not in on.blocking._records
