"""What is particular to Redis on an event loop; `test_redis.py` has its faults, over both ways."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from laws.records import claim_of, id_of
from redis_scenes import change, claim, claims, fake, sign_oneself
from servers import free_port, until
from servers.redis import Redis, redis_server

from coatcheck.core.record import GONE, Record, completed
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import LoopedStore, open_async_store, open_store
from coatcheck.stores.redis_replies import NotRedis, Refusal, Replies, Reply, refusal_of
from coatcheck.stores.redis_wire import LANES, RedisWire

# 30 s: nothing here takes a tenth of it, also on a busy machine.
TIMEOUT_S = 30
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS.values(), ids=LOOPS)
def play(request) -> Iterator[Callable[[Awaitable[None]], None]]:
    """Plays a story on an event loop of either make."""
    with asyncio.Runner(loop_factory=request.param) as runner:

        def play(story: Awaitable[None]) -> None:
            async def bounded() -> None:
                async with asyncio.timeout(TIMEOUT_S):
                    await story

            runner.run(bounded())

        yield play


@pytest.fixture
def server() -> Iterator[Redis]:
    """A server of the test's own, to be hurt."""
    server = Redis()
    yield server
    server.remove()


@asynccontextmanager
async def wired(url: str):
    """A wire, and its end."""
    with closing(open_store(url)) as store:
        wire = store.wire()
        assert isinstance(wire, RedisWire)
        yield wire
        await wire.close()


async def sent(wire: RedisWire, count: int) -> None:
    """Wait until *count* batches are on their way, on a connection that is there."""
    line = wire._writer._line
    assert line is not None
    while len(line._asked) < count:  # noqa: ASYNC110 - there is no event that would say so
        await asyncio.sleep(0)


# ----------------------------------------------------------------------------- what a server says

lines = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)
refusals = st.builds(refusal_of, lines.map(lambda text: f"ERR {text}"))
simple = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=40), refusals)
all_replies = st.lists(st.one_of(simple, st.lists(simple, max_size=6)), max_size=6)


def spelt(reply: Reply) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case Refusal():
            return b"-%b\r\n" % str(reply).encode()
        case _:
            return b"*%d\r\n%b" % (len(reply), b"".join(map(spelt, reply)))


@given(all_replies, st.lists(st.integers(1, 30), min_size=1))
def test_replies_are_the_same_however_they_were_cut(replies: list[Reply], sizes: list[int]):
    """D1: whatever bytes the values hold."""
    data = b"+OK\r\n" + b"".join(map(spelt, replies))
    reading, read, number = Replies(), [], 0
    while data:
        size = sizes[number % len(sizes)]
        piece, data = data[:size], data[size:]
        read += reading.feed(piece)
        number += 1
    assert read == [b"OK", *replies]


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 400 Bad Request\r\n", b"*1\r\n*0\r\n", b"$x\r\n", b"+" + b"-" * 100_000]
)
def test_what_no_redis_says_to_us_is_not_read(data: bytes):
    """D2: a line without an end, a list in a list, or another protocol."""
    with pytest.raises(ValueError, match=r".") as caught:
        Replies().feed(data)
    assert isinstance(caught.value, NotRedis) or b"$x" in data


@pytest.mark.parametrize("told", [b"?\r\n", b":x\r\n"])
def test_a_server_that_speaks_no_redis_is_left(play, told):
    """D2: what was sent may have taken effect; the next one connects anew."""
    answers = iter([told, b"*0\r\n"])

    async def story() -> None:
        async with wired(url) as wire:
            with pytest.raises(StoreUnavailable) as caught:
                await wire.swap([claim(claim_of())])
            assert caught.value.is_ambiguous
            assert await wire.swap([claim(claim_of())]) == [None]

    with fake(lambda: next(answers)) as url:
        play(story())


def test_what_nobody_has_asked_for_is_nobodys_answer(play):
    """D1: the connection on which it was said is not used again."""
    answers = iter([b"*0\r\n*2\r\n:1\r\n$0\r\n\r\n", b"$-1\r\n"])

    async def story() -> None:
        async with wired(url) as wire:
            assert await wire.swap([claim(claim_of())]) == [None]
            line = wire._writer._line
            assert line is not None
            assert line.is_lost
            assert line._socket.fileno() < 0, "it was let go of at once"
            assert await wire.swap([claim(claim_of())]) == [None]

    with fake(lambda: next(answers)) as url:
        play(story())


def test_what_nobody_has_asked_for_is_no_answer_to_who_asks_again_at_once(play):
    """D1: as whoever is told that the script is not known does, where it is told."""
    answers = iter([b"-NOSCRIPT No matching script\r\n*0\r\n", b"*1\r\n$0\r\n\r\n"])

    async def story() -> None:
        async with wired(url) as wire:
            assert await wire.swap([claim(claim_of())]) == [GONE]

    with fake(lambda: next(answers)) as url:
        play(story())


# ------------------------------------------------------------------------------ several at a time


def test_batches_that_are_on_their_way_at_once_have_their_own_answers(play, server: Redis):
    """L1: and all of them one connection, also if nobody had opened it before."""
    batches = [claims(start, 70) for start in range(0, 700, 70)]
    ids = [record.id for batch in batches for record in batch]

    async def story() -> None:
        async with wired(server.url) as wire:
            before = len(server.ask("CLIENT LIST").splitlines())
            asked = [wire.swap([claim(record) for record in batch]) for batch in batches]
            assert await asyncio.gather(*asked) == [[None] * 70] * 10
            assert len(server.ask("CLIENT LIST").splitlines()) == before + 1
            again = [wire.swap([claim(record)]) for record in batches[3]]
            *lost, found = await asyncio.gather(*again, wire.get(ids))
            assert lost == [[record] for record in batches[3]]
            assert found == [record for batch in batches for record in batch]

    play(story())


def test_who_is_cancelled_does_not_take_the_next_ones_answer(play, server: Redis):
    """D1: the write is not cancelled."""
    first, second = claims(0, 2)

    async def story() -> None:
        async with wired(server.url) as wire:
            assert await wire.swap([claim(claim_of(id_of(9)))]) == [None]
            server.kill(signal.SIGSTOP)
            leaving = asyncio.ensure_future(wire.swap([claim(first)]))
            await sent(wire, 1)
            staying = asyncio.ensure_future(wire.swap([claim(second)]))
            await sent(wire, 2)
            leaving.cancel()
            await asyncio.wait([leaving])
            server.kill(signal.SIGCONT)
            assert await staying == [None]
            assert await wire.get([first.id, second.id]) == [first, second]

    with_running(server, lambda: play(story()))


def with_running(server: Redis, act: Callable[[], None]) -> None:
    """Whatever becomes of it, the server can be ended."""
    try:
        act()
    finally:
        server.kill(signal.SIGCONT)


def test_who_waits_when_the_server_is_demoted_still_has_an_answer(play):
    """D1, D2: only who asks after that connects anew."""
    is_left = threading.Event()

    def told() -> Iterator[bytes]:
        yield b"-READONLY You can't write\r\n"
        is_left.wait(TIMEOUT_S)
        yield b"*0\r\n"
        yield b"$-1\r\n"

    async def story() -> None:
        async with wired(url) as wire:
            first, second = (
                asyncio.ensure_future(wire.swap([claim(record)])) for record in claims(0, 2)
            )
            with pytest.raises(StoreUnavailable, match="READONLY") as caught:
                await first
            assert not caught.value.is_ambiguous
            assert wire._writer._line is None
            is_left.set()
            assert await second == [None]
            assert await wire.swap([claim(claim_of())]) == [None]

    answers = told()
    with fake(lambda: next(answers)) as url:
        play(story())


def test_everybody_who_waits_is_told_when_the_server_falls_silent(play, server: Redis):
    """D2: in the time that was allowed, however many of them there are."""

    async def story() -> None:
        async with wired(f"{server.url}?timeout=200ms") as wire:
            assert await wire.swap([claim(claim_of())]) == [None]
            server.kill(signal.SIGSTOP)
            begun = time.monotonic()
            asked = [wire.swap([claim(record)]) for record in claims(10, 5)]
            for error in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(error, StoreUnavailable)
                assert error.is_ambiguous
                assert "no answer within 0.2 s" in str(error)
            assert time.monotonic() - begun < 5

    with_running(server, lambda: play(story()))


def test_a_loop_that_was_held_up_does_not_blame_the_server(play, server: Redis):
    """D2: a handler may block the event loop for longer than an answer may take."""

    async def story() -> None:
        async with wired(f"{server.url}?timeout=200ms") as wire:
            assert await wire.swap([claim(claim_of())]) == [None]
            server.kill(signal.SIGSTOP)
            asked = asyncio.ensure_future(wire.swap([claim(claim_of(id_of(7)))]))
            await sent(wire, 1)
            over = time.monotonic() + 0.5
            until(lambda: time.monotonic() > over)
            server.kill(signal.SIGCONT)
            assert await asked == [None]

    with_running(server, lambda: play(story()))


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_what_is_larger_than_a_socket_holds_arrives_whole(play, tmp_path, scheme):
    """D1, X3: there and back, in plain and in TLS."""
    sign_oneself(tmp_path)
    files = {"tls_cert_file": f"{tmp_path}/cert.pem", "tls_key_file": f"{tmp_path}/key.pem"}
    port = free_port()
    server = Redis(tls_port=str(port), tls_auth_clients="no", **files)
    url = f"rediss://localhost:{port}/0?tls_ca={tmp_path}/cert.pem"
    records = [
        completed(record, os.urandom(1_000_000 if number % 5 else 3))
        for number, record in enumerate(claims(0, 30))
    ]

    async def story() -> None:
        async with wired(url if scheme == "rediss" else server.url) as wire:
            some, others = [claim(r) for r in records[:15]], [claim(r) for r in records[15:]]
            assert await asyncio.gather(wire.swap(some), wire.swap(others)) == [[None] * 15] * 2
            assert await wire.get([record.id for record in records]) == records
            assert await wire.swap(others) == records[15:]
            line = wire._writer._line
            assert line is not None
            is_watched = asyncio.get_running_loop().remove_writer(line._socket)
            assert not is_watched, "nothing is left to be sent"

    try:
        play(story())
    finally:
        server.remove()


def test_everybody_who_waits_for_a_connection_is_told_that_there_is_none(play, server: Redis):
    """D2: nothing was sent; each has an error of its own, and who comes later tries again."""

    async def story() -> None:
        async with wired(server.url) as wire:
            server.stop()
            asked = [wire.swap([claim(record)]) for record in claims(0, 3)]
            errors = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(error) for error in errors] == [StoreUnavailable] * 3
            assert not any(error.is_ambiguous for error in errors)
            assert len({id(error) for error in errors}) == 3
            server.start()
            assert await wire.swap([claim(claim_of())]) == [None]

    play(story())


# -------------------------------------------------------------------------- whose connections it is


def test_who_waits_when_somebody_closes_without_patience_is_told(play, server: Redis):
    """D2: what is on its way is in doubt, and what has not left is refused."""

    async def story() -> None:
        store = open_async_store(server.url)
        await store.swap([claim(claim_of(id_of(99)))])
        server.kill(signal.SIGSTOP)
        asked = [store.swap([claim(record)]) for record in claims(0, 9)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await store.close()
        errors = await asyncio.gather(*asked, return_exceptions=True)
        server.kill(signal.SIGCONT)
        assert {type(error) for error in errors} == {StoreUnavailable}
        assert [error.is_ambiguous for error in errors] == [True] * LANES + [False] * (9 - LANES)
        await store.close()

    with_running(server, lambda: play(story()))


def test_a_wire_that_is_closed_is_not_used_again(play):
    """D2: nor one that is closed while it is opened."""

    async def story() -> None:
        async with wired(redis_server().fresh_url()) as wire:
            early = asyncio.ensure_future(wire.swap([claim(claim_of())]))
            await asyncio.sleep(0)
            await wire.close()
            for asked in (early, wire.swap([claim(claim_of())]), wire.get([bytes(16)])):
                with pytest.raises(StoreUnavailable, match="the store is closed") as caught:
                    await asked
                assert not caught.value.is_ambiguous
            assert wire._writer._line is None

    play(story())


@pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)
def test_one_store_serves_many_event_loops_one_after_the_other_and_at_once(new_loop, server: Redis):
    """L1: and leaves no connection to those that are over."""
    store = open_async_store(server.url)
    assert isinstance(store, LoopedStore)
    before = len(server.ask("CLIENT LIST").splitlines())
    wrong: list[object] = []

    async def story(start: int) -> None:
        for record in claims(start, 20):
            assert await store.swap([claim(record)]) == [None]
        assert await store.get([id_of(start)]) == claims(start, 1)

    def run(start: int) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(story(start))
        except BaseException as error:  # noqa: BLE001 - told by the test
            wrong.append(error)

    for start in range(0, 100, 20):
        run(start)
    threads = [threading.Thread(target=run, args=(start,)) for start in range(100, 200, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert wrong == []
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(story(200))
        until(lambda: len(server.ask("CLIENT LIST").splitlines()) <= before + 2)
        runner.run(store.close())
    gc.collect()  # what was not closed would say so, and fail the test


FORKED = """
import asyncio, os, sys
from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.stores import open_async_store

def swap(number):
    id = number.to_bytes(16, "big")
    return [Swap(id, 0, Record(id, 1, RUNNING, 1, id, 1, 1, 1, 1 << 43, 7, "", "", "", None, b""))]

store = open_async_store(sys.argv[1])

async def write(start):
    for number in range(start, start + 300):
        assert await store.swap(swap(number)) == [None]
    assert await store.swap(swap(1)) != [None]

async def main():
    assert await store.swap(swap(1)) == [None]
    assert await store.get([bytes(16)]) == [None]
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
    """L1: neither uses, nor ends, nor stops listening to what is the other's."""
    url = redis_server().fresh_url()
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, url],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.stderr == ""
    assert (ran.returncode, ran.stdout) == (0, "done\n")


def test_a_change_that_lost_its_answer_finds_itself_when_it_is_repeated(play, server: Redis):
    """D1, D2: also where the connection was killed at the server, with batches on their way."""
    record = claim_of()
    after: Record = completed(record, b"201")

    async def story() -> None:
        async with wired(server.url) as wire:
            assert await wire.swap([claim(record)]) == [None]
            server.ask("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")
            assert await wire.swap([change(record, after)]) == [None], "connected anew"
            assert await wire.swap([change(record, after)]) == [after]

    play(story())
