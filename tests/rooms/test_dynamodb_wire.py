"""What is particular to DynamoDB on an event loop: `test_dynamodb_faults.py` has its faults."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
import uvloop
from dynamodb_scenes import LARGE, TIMEOUT_S, claim_of, claims, fresh_url, requests_by

from coatcheck import AsyncEngine
from coatcheck.core.record import Record, Swap, completed
from coatcheck.errors import ResultUnavailable, StoreUnavailable
from coatcheck.stores import LoopedStore, open_async_store, open_store
from coatcheck.stores.dynamodb import DynamoStore
from coatcheck.stores.dynamodb_wire import DynamoWire
from coatcheck.stores.looped import _Way

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS.values(), ids=LOOPS)
def play(request) -> Iterator[Callable[[Awaitable[None]], None]]:
    """Plays a story on an event loop of either make."""
    with asyncio.Runner(loop_factory=request.param) as runner:

        def play(story: Awaitable[None]) -> None:
            runner.run(bounded(story))

        yield play
    gc.collect()  # what was not closed would say so, and fail the test


@asynccontextmanager
async def wired(url: str):
    """A wire, and its end."""
    with closing(open_store(url)) as store:
        assert isinstance(store, DynamoStore)
        wire = store.wire()
        assert isinstance(wire, DynamoWire)
        yield wire
        await wire.close()


async def client_of(store: Any) -> Any:
    """What sends the swaps and reads of this event loop."""
    await store.get([bytes(16)])
    way = store._ways[asyncio.get_running_loop()]
    assert isinstance(way, _Way)
    assert isinstance(way._wire, DynamoWire)
    return await way._wire._connected()


async def none() -> None:
    return None


def holding(client: Any, number: int) -> asyncio.Event:
    """The request about claim *number* does not leave before the event is set."""
    gate = asyncio.Event()
    name = f"order-{number}".encode()

    async def hold(request: Any, **_: Any) -> None:
        if name in request.body:
            await gate.wait()

    client.meta.events.register("before-send.dynamodb", hold)
    return gate


# --------------------------------------------------------------------------------------- requests


def test_a_guarded_call_on_a_loop_is_two_writes_and_a_retry_is_one(play):
    """L1: DynamoDB bills requests; no thread sends any beside them."""
    url = fresh_url()

    async def work(result: str) -> str:
        return result

    async def story() -> None:
        async with AsyncEngine(url) as engine, AsyncEngine(url) as another:
            for one, wanted in ((engine, 2), (another, 1)):
                await one.start()  # looks at the clock
                client = await client_of(one.store)
                blocking = one.store.blocking
                assert isinstance(blocking, DynamoStore)
                with (
                    requests_by(client) as sent,
                    requests_by(blocking._line._connected()) as by_thread,
                ):
                    assert await one.run("key", work, "done", scope="s") == "done"
                assert sent == ["PutItem"] * wanted
                assert by_thread == []

    play(story())


def test_nobody_on_a_loop_waits_for_the_slowest_of_those_who_came_together(play):
    """L1: there is no bulk write, so every swap has a request of its own."""

    async def story() -> None:
        store = open_async_store(fresh_url())
        gate = holding(await client_of(store), 0)
        first, *others = [store.swap([claim]) for claim in claims(0, 20)]
        assert await asyncio.gather(*others) == [[None]] * 19
        assert await store.swap(claims(20, 1)) == [None]
        assert not first.done()
        gate.set()
        assert await first == [None]
        await store.close()

    play(story())


def test_a_loop_has_as_many_requests_under_way_as_the_url_says_and_no_thread(play):
    """L1: a batch is no exception."""
    at_once, most = [0], [0]

    def enter(**_: Any) -> None:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])

    def leave(**_: Any) -> None:
        at_once[0] -= 1

    async def story() -> None:
        store = open_async_store(fresh_url() + "&concurrency=3")
        client = await client_of(store)
        client.meta.events.register("before-send.dynamodb", enter)
        client.meta.events.register("after-call.dynamodb", leave)
        threads = set(threading.enumerate())
        asked = [store.swap([claim]) for claim in claims(0, 30)]
        asked.append(store.swap(claims(30, 30)))
        assert await asyncio.gather(*asked) == [[None]] * 30 + [[None] * 30]
        assert set(threading.enumerate()) == threads
        await store.close()

    play(story())
    assert 2 <= most[0] <= 3


def test_an_answer_over_400_kb_on_a_loop_reaches_its_caller_and_runs_only_once(play):
    """L12: a retry on another node is told that the result was not kept."""
    url, runs = fresh_url(), []
    result = os.urandom(LARGE).hex()

    async def work() -> str:
        runs.append(1)
        return result

    async def story() -> None:
        async with AsyncEngine(url) as engine, AsyncEngine(url) as another:
            assert await engine.run("key", work, scope="s") == result
            with pytest.raises(ResultUnavailable):
                await another.run("key", work, scope="s")

    play(story())
    assert runs == [1]


def test_notes_that_do_not_fit_fail_alone_on_a_loop(play):
    """L7: nobody else's write suffers from it, also in the same call."""

    async def story() -> None:
        store = open_async_store(fresh_url())
        large = claim_of(0)._replace(progress=os.urandom(LARGE))
        bad = Swap(large.id, 0, large)
        asked = [store.swap([claim]) for claim in (bad, *claims(1, 8))]
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(told[0], ValueError)
        assert told[1:] == [[None]] * 8
        with pytest.raises(ValueError, match="400 kB"):
            await store.swap([bad, *claims(10, 2)])
        assert await store.get([claim_of(0).id, claim_of(10).id]) == [None, claim_of(10)]
        await store.close()

    play(story())


# ------------------------------------------------------------------------- whose connections it is


def test_one_store_serves_many_event_loops_one_after_the_other_and_at_once():
    """L1: of either make; and leaves no connection to those that are over."""
    store = open_async_store(fresh_url())
    assert isinstance(store, LoopedStore)
    wrong: list[object] = []

    async def story(start: int) -> None:
        for claim in claims(start, 5):
            assert await store.swap([claim]) == [None]
        assert await store.get([claim_of(start).id]) == [claim_of(start)]

    def run(start: int) -> None:
        try:
            with asyncio.Runner(loop_factory=[*LOOPS.values()][start % 2]) as runner:
                runner.run(story(start))
        except BaseException as error:  # noqa: BLE001 - told by the test
            wrong.append(error)

    for start in range(0, 35, 5):
        run(start)
    threads = [threading.Thread(target=run, args=(start,)) for start in range(100, 135, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert wrong == []
    asyncio.run(story(200))
    asyncio.run(store.close())
    gc.collect()  # what was not closed would say so, and fail the test


def test_what_a_loop_has_not_written_when_it_ends_a_thread_writes():
    """L5: every request that was on its way."""
    store = open_async_store(fresh_url())

    async def begin() -> None:
        holding(await client_of(store), 0)
        store.swap(claims(0, 1))
        await asyncio.sleep(0)

    async def look() -> Record | None:
        while (found := (await store.get([claim_of(0).id]))[0]) is None:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0)
        await store.close()
        return found

    asyncio.run(begin())
    assert asyncio.run(look()) == claim_of(0)


@pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)
def test_a_loop_that_was_closed_without_a_word_is_left_alone(new_loop):
    """L1: the next one has a client of its own, and what the last one had is garbage."""
    store = open_async_store(fresh_url())

    async def story() -> Any:
        return await bounded(store.swap(claims(0, 1)))

    loop = new_loop()
    assert loop.run_until_complete(story()) == [None]
    with warnings.catch_warnings():
        # Its connections were open when it was closed, which Python complains of by itself.
        warnings.simplefilter("ignore", ResourceWarning)
        loop.close()
        assert asyncio.run(story()) == [claim_of(0)]
        del loop
        gc.collect()
    asyncio.run(store.close())


async def bounded(asked: Awaitable[Any]) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        return await asked


def test_a_cancelled_caller_on_a_loop_is_forgotten_and_its_write_is_not(play):
    """L11: a client that hangs up does not stop the work."""

    async def story() -> None:
        store = open_async_store(fresh_url())
        gate = holding(await client_of(store), 0)
        asked = asyncio.ensure_future(store.swap(claims(0, 1)))
        await asyncio.sleep(0)
        asked.cancel()
        gate.set()
        await store.close()

    play(story())


def test_who_waits_when_somebody_closes_without_patience_is_told(play):
    """D2: what is on its way is in doubt; nobody waits for ever."""

    async def story() -> None:
        store = open_async_store(fresh_url() + "&concurrency=1")
        gate = holding(await client_of(store), 0)
        asked = [store.swap([claim]) for claim in claims(0, 5)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await store.close()
        gate.set()
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(error) for error in errors} == {StoreUnavailable}
        assert [error.is_ambiguous for error in errors] == [True] + [False] * 4
        await store.close()

    play(story())


def test_a_wire_that_is_closed_is_not_used_again(play, monkeypatch):
    """D2: nor one that is closed while it is opened."""
    opened, gates = DynamoWire._opened, [asyncio.Event()]

    async def opened_late(wire: DynamoWire) -> Any:
        client = await opened(wire)
        await gates[0].wait()
        return client

    async def story() -> None:
        gates[0] = asyncio.Event()
        async with wired(fresh_url()) as wire:
            early = asyncio.ensure_future(wire.swap(claims(0, 1)))
            await asyncio.sleep(0)
            await wire.close()
            gates[0].set()
            for asked in (early, wire.swap(claims(0, 1)), wire.get([bytes(16)])):
                with pytest.raises(StoreUnavailable, match="the store is closed") as caught:
                    await asked
                assert not caught.value.is_ambiguous

    monkeypatch.setattr(DynamoWire, "_opened", opened_late)
    play(story())


def test_a_system_that_gives_no_thread_is_an_outage_for_as_long(play, monkeypatch):
    """D2: aiobotocore reads certificates in one, before the first request."""

    def scarce(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def story() -> None:
        async with wired(fresh_url()) as wire:
            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", scarce)
                with pytest.raises(StoreUnavailable, match="can't start new thread"):
                    await wire.swap(claims(0, 1))
            assert await wire.swap(claims(0, 1)) == [None]

    play(story())


FORKED = """
import asyncio, os, sys
from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.stores import open_async_store

def swap(number):
    id = number.to_bytes(16, "big")
    return [Swap(id, 0, Record(id, 1, RUNNING, 1, id, 1, 1, 1, 1 << 43, 7, "", "", "", None, b""))]

store = open_async_store(sys.argv[1])

async def write(start):
    for number in range(start, start + 20):
        assert await store.swap(swap(number)) == [None]
    assert await store.swap(swap(1)) != [None]

async def main():
    assert await store.swap(swap(1)) == [None]
    child = os.fork()
    if child == 0:
        asyncio.run(write(1000))
        asyncio.run(store.close())
        os._exit(0)
    await write(2000)
    ended = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    await write(3000)
    await store.close()

asyncio.run(main())
print("done")
"""


def test_a_loop_that_forks_shares_no_connection_with_its_child():
    """L1: neither uses, nor ends what is the other's."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, fresh_url()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.stderr == ""
    assert (ran.returncode, ran.stdout) == (0, "done\n")


# ------------------------------------------------------------------------------ without aiobotocore


class Missing:
    """Finds no aiobotocore."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "aiobotocore":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("is_broken", [False, True])
def test_without_aiobotocore_a_loop_has_threads(play, monkeypatch, caplog, is_broken):
    """D1: nobody notices, unless it is there and cannot be used."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiobotocore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "coatcheck.stores.dynamodb_wire")
    if is_broken:
        monkeypatch.setitem(sys.modules, "aiobotocore", types.ModuleType("aiobotocore"))
    else:
        monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])

    async def story() -> None:
        store = open_async_store(fresh_url())
        claim = claim_of(1)
        assert await store.swap(claims(1, 1)) == [None]
        assert await store.swap([Swap(claim.id, 1, completed(claim, b"late"))]) == [claim]
        assert await store.swap(claims(2, 9)) == [None] * 9
        assert await store.get([claim.id]) == [claim]
        await store.close()

    play(story())
    assert ("through threads" in caplog.text) == is_broken
