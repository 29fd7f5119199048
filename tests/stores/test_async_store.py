"""Any blocking store on event loops: `ThreadedStore` over a scripted store."""

import asyncio
import random
import subprocess
import sys
import threading
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from coatcheck.errors import StoreUnavailable
from coatcheck.stores import Query, ThreadedStore
from coatcheck.stores.contract import AsyncBackend, Page
from tests.support.batches import (
    TIMEOUT_S,
    Interrupted,
    ScriptedStore,
    claim,
    id_of,
    wait_until,
)


async def started(*calls: Awaitable[Any]) -> list[asyncio.Future[Any]]:
    """Tasks for *calls*, each of which has reached the batcher."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


async def outcomes(tasks: Sequence[asyncio.Future[Any]]) -> list[Any]:
    async with asyncio.timeout(TIMEOUT_S):
        return await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def blocked(store: ScriptedStore) -> Iterator[None]:
    """The next call of *store* is blocked until the end of the `with`."""
    gate = store.hold()
    try:
        yield
    finally:
        gate.set()


def test_calls_of_a_loop_leave_together_in_a_thread():
    """L1: one wake-up of the event loop for each batch, not for each call."""

    async def scene() -> None:
        store = ScriptedStore()
        threaded = ThreadedStore(store)
        loop = asyncio.get_running_loop()
        wake_up, wake_ups = loop.call_soon_threadsafe, []
        with blocked(store):
            first = await started(threaded.swap([claim(0)]))
            await asyncio.to_thread(store.wait_for_a_call)
            rest = await started(
                *(threaded.swap([claim(number)]) for number in range(1, 6)),
                threaded.swap([claim(6), claim(7)]),
            )
            loop.call_soon_threadsafe = lambda *args, **kw: (
                wake_ups.append(args) or wake_up(*args, **kw)
            )
        assert await outcomes([*first, *rest]) == [[None]] * 6 + [[None, None]]
        assert store.batches == [[id_of(0)], [id_of(number) for number in range(1, 8)]]
        assert len(wake_ups) == 2
        assert threading.current_thread() not in store.threads
        await threaded.close()

    asyncio.run(scene())


def test_a_busy_event_loop_wakes_the_thread_once_per_turn():
    """L1: a thread that is woken by the first call would compete with the loop for the GIL."""

    async def scene() -> None:
        store = ScriptedStore()
        threaded = ThreadedStore(store)

        async def call_twice(number: int) -> None:
            await threaded.swap([claim(number)])
            await threaded.swap([claim(100 + number)])

        await outcomes([asyncio.ensure_future(call_twice(number)) for number in range(32)])
        assert [len(batch) for batch in store.batches] == [1, 32, 31]
        await threaded.close()

    asyncio.run(scene())


def test_a_caller_of_a_threaded_store_that_is_cancelled_gives_up_its_result_only():
    """L11: a client that hangs up cancels neither its own write nor that of others."""

    async def scene() -> None:
        store = ScriptedStore()
        threaded = ThreadedStore(store)
        with blocked(store):
            first = await started(threaded.swap([claim(0)]))
            await asyncio.to_thread(store.wait_for_a_call)
            kept, cancelled, other = await started(
                *(threaded.swap([claim(number)]) for number in (1, 2, 3))
            )
            cancelled.cancel()
            first[0].cancel()
            await asyncio.sleep(0)
        assert await outcomes([kept, other]) == [[None], [None]]
        assert cancelled.cancelled()
        assert list(await threaded.get([id_of(0), id_of(2)])) == [claim(0).record, claim(2).record]
        await threaded.close()

    asyncio.run(scene())


def test_an_event_loop_that_ends_during_a_call_blocks_no_other_loop():
    """D2: its results are dropped, its writes are not."""
    store = ScriptedStore()
    threaded = ThreadedStore(store)

    async def leave() -> None:
        await started(threaded.swap([claim(1)]))
        await asyncio.to_thread(store.wait_for_a_call)

    async def stay() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            assert list(await threaded.swap([claim(2)])) == [None]
            assert list(await threaded.get([id_of(1)])) == [claim(1).record]
            await threaded.close()

    gate = store.hold()
    threading.Timer(0.05, gate.set).start()  # after the loop has begun to end
    asyncio.run(leave())
    asyncio.run(stay())


def test_several_event_loops_in_several_threads_share_one_store():
    """L1: every result reaches the loop and the task that called, under load."""
    store = ScriptedStore()
    pause, never = random.Random(11), threading.Event()
    store._pass = lambda: never.wait(timeout=pause.random() / 1_000)
    threaded = ThreadedStore(store)

    async def client(number: int) -> int:
        won = 0
        for round in range(10):
            mine = claim(1_000 * number + round, nonce=number)
            shared = claim(1_000_000 + round, nonce=number)
            conflict, current = await threaded.swap([mine, shared])
            assert conflict is None
            won += current is None
            assert current is None or current.id == shared.id
            assert list(await threaded.get([mine.id])) == [mine.record]
        return won

    async def clients(start: int) -> int:
        return sum(await asyncio.gather(*(client(start + n) for n in range(10))))

    with ThreadPoolExecutor(4) as threads:
        loops = threads.map(lambda n: asyncio.run(clients(10 * n)), range(4), timeout=TIMEOUT_S)
        assert sum(loops) == 10
    assert max(len(batch) for batch in store.batches) > 2
    assert all(len(set(batch)) == len(batch) for batch in store.batches)
    asyncio.run(threaded.close())


def test_a_threaded_store_survives_whatever_its_store_raises():
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


def test_a_threaded_store_never_uses_the_backend_of_its_store():
    """L1: a store that wraps another one must see every call."""

    class Native(ScriptedStore):
        def async_backend(self) -> AsyncBackend:
            raise AssertionError("not asked for")

    async def scene() -> None:
        store = Native()
        threaded = ThreadedStore(store)
        assert list(await threaded.swap([claim(1)])) == [None]
        assert store.batches == [[id_of(1)]]
        await threaded.close()

    asyncio.run(scene())


def test_a_store_may_set_the_size_and_the_number_of_its_calls():
    """L1: a slow request to DynamoDB delays no other one."""

    class OneByOne(ScriptedStore):
        batch_max = 1
        in_flight = 3

    async def scene() -> None:
        store = OneByOne()
        threaded = ThreadedStore(store)
        with blocked(store):
            slow = await started(threaded.swap([claim(0)]))
            await asyncio.to_thread(store.wait_for_a_call)
            rest = await started(*(threaded.swap([claim(number)]) for number in range(1, 6)))
            assert await outcomes(rest) == [[None]] * 5
            assert not slow[0].done()
        assert await outcomes(slow) == [[None]]
        assert [len(batch) for batch in store.batches] == [1] * 6
        await threaded.close()

    asyncio.run(scene())


def test_closing_finishes_queued_calls_and_refuses_later_ones():
    """D2: no call hangs on a closed store, and it is closed once; its threads end."""

    async def scene() -> None:
        store = ScriptedStore()
        threaded = ThreadedStore(store)
        with blocked(store):
            first = await started(threaded.swap([claim(0)]))
            await asyncio.to_thread(store.wait_for_a_call)
            before = await started(threaded.swap([claim(1)]), threaded.get([id_of(9)]))
            closing = await started(threaded.close(), threaded.close())
            after = await started(
                threaded.swap([claim(2)]), threaded.get([id_of(0)]), threaded.find(Query())
            )
        assert await outcomes([*first, *before]) == [[None], [None], [None]]
        assert await outcomes(closing) == [None, None]
        assert store.is_closed
        assert {type(error) for error in await outcomes(after)} == {StoreUnavailable}
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(StoreUnavailable):
                await threaded.swap([claim(3)])
            await threaded.close()
        assert id_of(2) not in store._records
        wait_until(lambda: not store.threads[0].is_alive())

    asyncio.run(scene())


# As a server that forks its workers: used before the fork, and after it in both processes.
FORKED = """
import asyncio, os
from coatcheck.stores import ThreadedStore
from coatcheck.stores.memory import MemoryStore

store = ThreadedStore(MemoryStore())

async def use():
    async with asyncio.timeout(10):
        return list(await store.get([b""]))

kept = asyncio.new_event_loop()
assert kept.run_until_complete(use()) == [None]
child = os.fork()
assert asyncio.run(use()) == [None]
if child == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
kept.run_until_complete(store.close())
kept.close()
"""
# As when another thread of the parent made a call at that very moment.
FORKED_DURING_A_CALL = """
import os
from coatcheck.stores import ThreadedStore
from coatcheck.stores.memory import MemoryStore

store = ThreadedStore(MemoryStore())
store._mutex.acquire()
child = os.fork()
if child:
    store._mutex.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("script", [FORKED, FORKED_DURING_A_CALL], ids=["used", "during a call"])
def test_a_threaded_store_works_in_a_forked_child(script):
    """L1, D2: a child inherits no thread and perhaps held locks, so it has its own."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        command, env=environment, timeout=3 * TIMEOUT_S, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
