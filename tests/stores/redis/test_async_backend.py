"""What is particular to Redis on an event loop; `test_store.py` has its faults, both ways."""

import asyncio
import gc
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing

import pytest
import uvloop

from coatcheck.core.record import completed
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import open_store
from coatcheck.stores.contract import HasAsyncBackend
from coatcheck.stores.redis.async_backend import RedisBackend
from tests.stores.laws.records import claim_of, id_of
from tests.stores.redis.scenes import change, claim, claims, fake
from tests.support.servers import until
from tests.support.servers.redis import Redis

# 30 s: nothing here takes a tenth of it, also on a busy machine.
TIMEOUT_S = 30
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS.values(), ids=LOOPS)
def new_loop(request) -> Callable[[], asyncio.AbstractEventLoop]:
    return request.param


@pytest.fixture
def run(new_loop) -> Iterator[Callable[[Awaitable[None]], None]]:
    """Run a coroutine on an event loop of either kind."""
    with asyncio.Runner(loop_factory=new_loop) as runner:

        def run(story: Awaitable[None]) -> None:
            async def limited() -> None:
                async with asyncio.timeout(TIMEOUT_S):
                    await story

            runner.run(limited())

        yield run


@pytest.fixture
def server() -> Iterator[Redis]:
    """A server of the test's own, to freeze and to stop."""
    server = Redis()
    yield server
    server.kill(signal.SIGCONT)
    server.remove()


@asynccontextmanager
async def backend_of(url: str) -> AsyncIterator[RedisBackend]:
    """A backend of the running loop, closed at the end."""
    with closing(open_store(url)) as store:
        assert isinstance(store, HasAsyncBackend)
        backend = store.async_backend()
        assert isinstance(backend, RedisBackend)
        yield backend
        await backend.close()


async def some_turns() -> None:
    """Let the loop send what is ready to be sent, and read what has arrived."""
    for _ in range(10):
        await asyncio.sleep(0)


def connections(server: Redis) -> int:
    return len(server.ask("CLIENT LIST").splitlines())


def test_calls_at_the_same_time_get_their_own_answers(run, server: Redis):
    """L1: and reads beside them."""
    batches = [claims(start, 64) for start in range(0, 640, 64)]
    ids = [record.id for batch in batches for record in batch]

    async def story() -> None:
        async with backend_of(server.url) as backend:
            calls = [backend.swap([claim(record) for record in batch]) for batch in batches]
            assert await asyncio.gather(*calls) == [[None] * 64] * 10
            again = [backend.swap([claim(record)]) for record in batches[3]]
            *conflicts, found = await asyncio.gather(*again, backend.get(ids))
            assert conflicts == [[record] for record in batches[3]]
            assert found == [record for batch in batches for record in batch]

    run(story())


def test_a_cancelled_call_discards_its_connection(run, server: Redis):
    """D1: the write is applied, and the next call does not read its answer."""
    first, second = claims(0, 2)

    async def story() -> None:
        async with backend_of(server.url) as backend:
            assert await backend.swap([claim(claim_of(id_of(9)))]) == [None]
            server.kill(signal.SIGSTOP)
            call = asyncio.ensure_future(backend.swap([claim(first)]))
            await some_turns()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            server.kill(signal.SIGCONT)
            assert await backend.get([second.id]) == [None]
            assert await backend.swap([claim(second)]) == [None]
            assert await backend.get([first.id, second.id]) == [first, second]

    run(story())


def test_a_blocked_loop_is_not_an_outage(run, server: Redis):
    """D2: a handler may block the event loop for longer than an answer may take."""

    async def story() -> None:
        async with backend_of(f"{server.url}?timeout=200ms") as backend:
            assert await backend.swap([claim(claim_of())]) == [None]
            server.kill(signal.SIGSTOP)
            call = asyncio.ensure_future(backend.swap([claim(claim_of(id_of(7)))]))
            await some_turns()
            over = time.monotonic() + 0.5
            until(lambda: time.monotonic() > over)  # blocks the loop
            server.kill(signal.SIGCONT)
            assert await call == [None]

    run(story())


def test_a_lost_answer_is_ambiguous_and_the_repeated_write_finds_itself(run, server: Redis):
    """D1, D2: the server closed the connection while a write was on its way."""
    record = claim_of()
    done = completed(record, b"201")

    async def story() -> None:
        async with backend_of(server.url) as backend:
            assert await backend.swap([claim(record)]) == [None]
            server.kill(signal.SIGSTOP)
            call = asyncio.ensure_future(backend.swap([change(record, done)]))
            await some_turns()
            server.kill(signal.SIGKILL)
            with pytest.raises(StoreUnavailable) as caught:
                await call
            assert caught.value.is_ambiguous
            server.start()
            assert await backend.swap([change(record, done)]) == [None]
            assert await backend.swap([change(record, done)]) == [done]

    run(story())


def test_a_reply_that_is_not_redis_is_an_ambiguous_error(run):
    """D2: the next call uses a new connection."""
    answers = iter([b"?\r\n", b"*0\r\n"])

    async def story() -> None:
        async with backend_of(url) as backend:
            with pytest.raises(StoreUnavailable) as caught:
                await backend.swap([claim(claim_of())])
            assert caught.value.is_ambiguous
            assert await backend.swap([claim(claim_of())]) == [None]

    with fake(lambda: next(answers)) as url:
        run(story())


def test_a_second_reply_to_one_command_is_not_taken_for_the_next(run):
    """D1: the connection on which it came is not used again."""
    answers = iter([b"*0\r\n*1\r\n$0\r\n\r\n", b"*0\r\n"])

    async def story() -> None:
        async with backend_of(url) as backend:
            assert await backend.swap([claim(claim_of())]) == [None]
            assert await backend.swap([claim(claim_of())]) == [None]

    with fake(lambda: next(answers)) as url:
        run(story())


def test_one_store_serves_many_event_loops(new_loop, server: Redis):
    """L1: one after the other and at the same time; a closed backend leaves no connection."""
    store = open_store(server.url)
    assert isinstance(store, HasAsyncBackend)
    before = connections(server)
    wrong: list[object] = []

    async def story(start: int) -> None:
        backend = store.async_backend()
        for record in claims(start, 20):
            assert await backend.swap([claim(record)]) == [None]
        assert await backend.get([id_of(start)]) == claims(start, 1)
        await backend.close()

    def run(start: int) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(story(start))
        except BaseException as error:  # noqa: BLE001 - the assertion below shows it
            wrong.append(error)

    for start in range(0, 100, 20):
        run(start)
    threads = [threading.Thread(target=run, args=(start,)) for start in range(100, 200, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert wrong == []
    until(lambda: connections(server) <= before)
    store.close()
    gc.collect()  # an unclosed connection would warn, and fail the test


@pytest.mark.parametrize("turns", range(1, 5))
def test_a_close_that_is_cancelled_leaves_no_connection_open(run, server: Redis, turns: int):
    """L1: also if the loop ends at once."""

    async def story() -> None:
        with closing(open_store(server.url)) as store:
            assert isinstance(store, HasAsyncBackend)
            backend = store.async_backend()
            assert await backend.swap([claim(claim_of())]) == [None]
            task = asyncio.ensure_future(backend.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})

    before = connections(server)
    run(story())
    until(lambda: connections(server) <= before)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a closed loop leaves its sockets open
def test_a_backend_of_a_closed_loop_can_be_closed_from_another(new_loop, server: Redis):
    """L1: without waiting, and the server's connection is gone."""
    with closing(open_store(server.url)) as store:
        assert isinstance(store, HasAsyncBackend)
        before = connections(server)

        async def first() -> RedisBackend:
            backend = store.async_backend()
            assert isinstance(backend, RedisBackend)
            assert await backend.swap([claim(claim_of())]) == [None]
            return backend

        loop = new_loop()
        backend = loop.run_until_complete(first())
        loop.close()
        asyncio.run(backend.close())
        del backend, loop
        gc.collect()
        until(lambda: connections(server) <= before)
