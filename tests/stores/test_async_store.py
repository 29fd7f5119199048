"""Any blocking store on event loops: `ThreadedStore` over a scripted store."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Iterator, Sequence
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
    on_a_loop,
    wait_until,
)


async def started(*calls: Awaitable[Any]) -> list[asyncio.Future[Any]]:
    """Tasks for *calls*, each of which has reached the batcher."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


async def outcomes(tasks: Sequence[asyncio.Future[Any]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def blocked(store: ScriptedStore) -> Iterator[None]:
    """The next call of *store* is blocked until the end of the `with`."""
    gate = store.hold()
    try:
        yield
    finally:
        gate.set()


@on_a_loop
async def test_calls_of_a_loop_leave_together_in_a_thread():
    """L1: one wake-up of the event loop for each batch, not for each call."""
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


@on_a_loop
async def test_a_busy_event_loop_wakes_the_thread_once_per_turn():
    """L1: a thread that is woken by the first call would compete with the loop for the GIL."""
    store = ScriptedStore()
    threaded = ThreadedStore(store)

    async def call_twice(number: int) -> None:
        await threaded.swap([claim(number)])
        await threaded.swap([claim(100 + number)])

    await outcomes([asyncio.ensure_future(call_twice(number)) for number in range(32)])
    assert [len(batch) for batch in store.batches] == [1, 32, 31]
    await threaded.close()


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


@on_a_loop
async def test_a_threaded_store_survives_whatever_its_store_raises():
    """D2: fail closed, then go on."""
    store = ScriptedStore()
    store.failing[id_of(1)] = Interrupted()
    threaded = ThreadedStore(store)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(StoreUnavailable):
            await threaded.swap([claim(1)])
        assert list(await threaded.swap([claim(2)])) == [None]
    await threaded.close()


@on_a_loop
async def test_claims_do_not_wait_for_an_operator():
    """O1, L1: a search through a million records takes its time, and only the operator's."""
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


@on_a_loop
async def test_a_threaded_store_never_uses_the_backend_of_its_store():
    """L1: a store that wraps another one must see every call."""

    class Native(ScriptedStore):
        def async_backend(self) -> AsyncBackend:
            raise AssertionError("not asked for")

    store = Native()
    threaded = ThreadedStore(store)
    assert list(await threaded.swap([claim(1)])) == [None]
    assert store.batches == [[id_of(1)]]
    await threaded.close()


@on_a_loop
async def test_a_store_may_set_the_size_and_the_number_of_its_calls():
    """L1: a slow request to DynamoDB delays no other one."""

    class OneByOne(ScriptedStore):
        batch_max = 1
        in_flight = 3

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


@on_a_loop
async def test_closing_finishes_queued_calls_and_refuses_later_ones():
    """D2: no call hangs on a closed store, and it is closed once; its threads end."""
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


# -------------------------------------------------------------------------- without threads


@contextmanager
def no_threads() -> Iterator[None]:
    """As when a container or a user has reached its limit."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


@on_a_loop
async def test_without_a_thread_the_store_is_unavailable_and_nothing_is_written_later():
    """D2, O1: calls fail without effect meanwhile; when threads can be started again, all work."""
    store = ThreadedStore(ScriptedStore())
    ids = [id_of(number) for number in range(10)]
    with no_threads():
        for _ in range(2):
            calls = [store.swap([claim(number)]) for number in range(5)]
            others = (store.get(ids[:1]), store.find(Query()), store.sweep(1), store.check())
            errors = await asyncio.gather(*calls, *others, return_exceptions=True)
            assert [type(error) for error in errors] == [StoreUnavailable] * 9
            assert not any(error.is_ambiguous for error in errors)
            assert {type(error.__cause__) for error in errors} == {RuntimeError}
    after = await asyncio.gather(*(store.swap([claim(number)]) for number in range(5, 10)))
    assert list(map(list, after)) == [[None]] * 5
    written = [claim(number).record for number in range(5, 10)]
    assert list(await store.get(ids)) == [None] * 5 + written
    assert list((await store.find(Query())).records) == written
    await store.close()


@on_a_loop
async def test_a_store_can_be_closed_without_a_thread():
    """D4: there is nothing to wait for; and it is closed once."""
    beneath = ScriptedStore()
    store = ThreadedStore(beneath)
    with no_threads():
        for _ in range(2):
            await store.close()
            assert beneath.is_closed
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.swap([claim(1)])


# ------------------------------------------------------------------------------------- forks

# As a server that forks its workers: used before the fork, and after it in both processes.
FORKED = """
import asyncio, os
from coatcheck.stores.async_store import BatchedAsyncStore, ThreadedStore
from coatcheck.stores.memory import MemoryStore

class Backend:
    batch_max, in_flight, timeout_s = 256, 1, 5
    def __init__(self):
        self.pid = os.getpid()
    async def swap(self, swaps):
        raise NotImplementedError
    async def get(self, ids):
        assert self.pid == os.getpid()
        return [None for _ in ids]
    async def close(self):
        assert self.pid == os.getpid()

class Native(MemoryStore):
    def async_backend(self):
        return Backend()

store = {store}

async def use():
    async with asyncio.timeout(10):
        return list(await store.get([b""]))

kept = asyncio.new_event_loop()
assert kept.run_until_complete(use()) == [None]
store._mutex.acquire()  # as if another thread made its first call at that very moment
child = os.fork()
if child:
    store._mutex.release()
assert asyncio.run(use()) == [None]
if child == 0:
    os._exit(0)  # otherwise it would close its parent's event loop
assert kept.run_until_complete(use()) == [None]
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
kept.run_until_complete(store.close())
kept.close()
"""


@pytest.mark.parametrize("store", ["BatchedAsyncStore(Native())", "ThreadedStore(MemoryStore())"])
def test_a_store_works_in_a_forked_child_and_in_its_parent(store):
    """L1, D2: a child inherits no thread and perhaps held locks, so it has its own."""
    script = FORKED.replace("{store}", store)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        command, env=environment, timeout=3 * TIMEOUT_S, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
