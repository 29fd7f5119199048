"""Wires made of threads: several calls at once, and none without an answer."""

import asyncio
import threading

import pytest
from laws.records import claim_of

from coatcheck.core.record import Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.looped import LoopedStore
from coatcheck.stores.memory import MemoryStore
from coatcheck.stores.thread_wire import ThreadWire

WAIT_S_MAX = 10


class Slow(MemoryStore):
    """A store on two lines: a swap stays on its way until *gate* opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.here = threading.Semaphore(0)  # how many have arrived
        self.failure: BaseException | None = None

    def wire(self) -> ThreadWire:
        return ThreadWire(self, lanes=2)

    def swap(self, swaps):
        self.here.release()
        assert self.gate.wait(WAIT_S_MAX)
        if self.failure is not None:
            raise self.failure
        return super().swap(swaps)


@pytest.fixture
def store() -> Slow:
    return Slow()


def run(story):
    return asyncio.run(asyncio.wait_for(story, WAIT_S_MAX))


def claim(number: int) -> Swap:
    record = claim_of(number.to_bytes(16, "big"))
    return Swap(record.id, 0, record)


def test_as_many_batches_as_there_are_lanes_are_on_their_way(store):
    """The server works on one while the other is made and read."""

    async def story() -> None:
        looped = LoopedStore(store)
        first = asyncio.ensure_future(looped.swap([claim(1)]))
        assert await asyncio.to_thread(store.here.acquire, timeout=WAIT_S_MAX)
        second = asyncio.ensure_future(looped.swap([claim(2)]))
        assert await asyncio.to_thread(store.here.acquire, timeout=WAIT_S_MAX)
        store.gate.set()
        assert [await first, await second] == [[None], [None]]
        await looped.close()

    run(story())


def test_the_error_of_a_blocking_store_reaches_its_caller(store):
    """D2: as it is."""
    store.gate.set()
    store.failure = StoreUnavailable("away")

    async def story() -> None:
        wire = store.wire()
        with pytest.raises(StoreUnavailable, match="away"):
            await wire.swap([claim(1)])
        await wire.close()

    run(story())


def test_what_is_no_exception_leaves_a_doubt_and_a_thread_that_goes_on(store):
    """D2: whoever waits is told that it may have taken effect."""
    store.gate.set()
    store.failure = SystemExit()

    async def story() -> None:
        wire = store.wire()
        for _ in range(4):  # more than there are threads
            with pytest.raises(StoreUnavailable) as caught:
                await wire.swap([claim(1)])
            assert caught.value.is_ambiguous
        store.failure = None
        assert await wire.swap([claim(1)]) == [None]
        await wire.close()

    run(story())


def test_a_cancelled_write_takes_effect_all_the_same(store):
    """L11: its caller is forgotten, and it is not."""

    async def story() -> None:
        wire = store.wire()
        writing = wire.swap([claim(1)])
        assert await asyncio.to_thread(store.here.acquire, timeout=WAIT_S_MAX)
        writing.cancel()
        store.gate.set()
        (standing,) = await wire.get([claim(1).id])
        while standing is None:
            (standing,) = await wire.get([claim(1).id])
        await wire.close()

    run(story())


def test_who_waits_when_somebody_closes_without_patience_is_told(store):
    """D2: what is on its way is ended, and what has not left is refused."""

    async def story() -> None:
        looped = LoopedStore(store)
        store.gate.set()
        for number in range(3):  # as many as there are threads
            await looped.swap([claim(number)])
        store.gate.clear()
        asked = [looped.swap([claim(number)]) for number in range(3, 12)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await looped.close()
        store.gate.set()
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert told[0] == [None]
        refusals = [error for error in told if isinstance(error, StoreUnavailable)]
        assert refusals
        assert len(store._records) == 3 + told.count([None]) == 12 - len(refusals)
        assert not any(error.is_ambiguous for error in refusals)
        await looped.close()

    run(story())


def test_threads_end_when_their_wire_is_closed(store):
    """D2: and not before they have answered."""
    store.gate.set()

    async def story() -> list[threading.Thread]:
        wire = store.wire()
        await asyncio.gather(*(wire.swap([claim(number)]) for number in range(5)))
        await wire.close()
        return wire._threads

    threads = run(story())
    assert len(threads) == 3  # two that write, one that reads
    for thread in threads:
        thread.join(WAIT_S_MAX)
        assert not thread.is_alive()
