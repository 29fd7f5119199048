"""PostgreSQL from an event loop, through asyncpg: what a thread cannot do wrong."""

import asyncio
import gc
import os
import signal
import socket
import threading
from contextlib import closing
from itertools import count

import pytest
import uvloop

from coatcheck import StoreUnavailable
from coatcheck.core.record import completed
from coatcheck.stores import open_store
from coatcheck.stores.contract import HasAsyncBackend
from tests.stores.laws.records import ID, claim_of, id_of
from tests.stores.postgres.access import FromLoop, sessions_of
from tests.stores.postgres.swaps import MANY, claim, complete
from tests.support.servers import START_S_MAX, until
from tests.support.servers.postgres import postgres

NUMBERS = count()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def new_loop(request):
    return request.param


@pytest.fixture
def name():
    """Of the sessions of one test."""
    return f"loop_{next(NUMBERS)}"


@pytest.fixture
def loop(url, name, new_loop):
    with FromLoop(f"{url}&application_name={name}", new_loop) as loop:
        yield loop


def test_two_batches_and_a_read_run_at_the_same_time(loop, url, name):
    """L1, L5: each on a connection of its own, which later calls use again."""
    assert isinstance(loop.store, HasAsyncBackend)

    async def calls():
        halves = [[claim(id) for id in MANY[:10]], [claim(id) for id in MANY[10:]]]
        async with asyncio.timeout(START_S_MAX):
            return await asyncio.gather(
                *map(loop.backend.swap, halves), loop.backend.get([id_of(99)])
            )

    before = sessions_of(url, name)
    assert loop.runner.run(calls()) == [[None] * 10, [None] * 10, [None]]
    during = sessions_of(url, name)
    assert len(during - before) == 3
    assert loop.get(*MANY) == [claim_of(id) for id in MANY]
    assert sessions_of(url, name) == during
    prepared = "select statement from pg_prepared_statements"
    for connection in loop.backend._idle:  # they found out at the same time that there is no pooler
        assert loop.run(connection.fetch(prepared))


def test_a_blocked_loop_is_no_outage(url, new_loop):
    """D2: a handler that blocks the loop for longer than the timeout delays only itself."""

    async def block(loop):
        asked = asyncio.create_task(loop.backend.swap([claim(MANY[1])]))
        await asyncio.sleep(0)
        threading.Event().wait(1)
        return await asked

    with FromLoop(f"{url}&timeout=300ms", new_loop) as loop:
        loop.swap(claim())
        assert loop.runner.run(block(loop)) == [None]


def test_a_call_that_is_cancelled_closes_its_connection(loop, url, name):
    """D2: as the batcher cancels a call to a frozen server; the next call has another connection."""

    async def cancel():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await loop.backend.swap([complete(claim_of())])

    before = sessions_of(url, name)
    loop.swap(claim())
    (frozen,) = sessions_of(url, name) - before
    os.kill(frozen, signal.SIGSTOP)
    try:
        loop.runner.run(cancel())
        (conflict,) = loop.swap(complete(claim_of()))
        assert conflict is None or conflict == completed(claim_of(), b"done")
        assert loop.get(ID) == [completed(claim_of(), b"done")]
    finally:
        os.kill(frozen, signal.SIGCONT)
    until(lambda: frozen not in sessions_of(url, name))


def test_a_host_that_does_not_answer_does_not_use_up_every_attempt(url, new_loop):
    """D2: after a cancelled attempt to connect, the next one begins with another host."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never says a word
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{postgres().port}"
        both = f"postgresql://postgres@{hosts}/postgres?timeout=2s&{url.partition('?')[2]}"
        with FromLoop(both, new_loop) as loop:

            async def cancelled_after_a_while():
                async with asyncio.timeout(0.3):  # two at a time, which count as one failure
                    await asyncio.gather(*(loop.backend.swap([claim(id)]) for id in MANY[:2]))

            with pytest.raises(TimeoutError):
                loop.runner.run(cancelled_after_a_while())
            assert loop.swap(claim()) == [None]


def test_closing_leaves_no_connection_behind(url, name, new_loop):
    """D4: the backend refuses further use."""
    with FromLoop(f"{url}&application_name={name}", new_loop) as loop:
        before = sessions_of(url, name)
        loop.swap(claim())
        assert sessions_of(url, name) > before
        loop.runner.run(loop.backend.close())
        until(lambda: sessions_of(url, name) == before)
        with pytest.raises(StoreUnavailable, match="closed"):
            loop.swap(claim(MANY[1]))


def test_a_call_that_runs_while_the_backend_is_closed_closes_its_connection(loop, url, name):
    """D4."""

    async def close_meanwhile():
        asked = asyncio.create_task(loop.backend.swap([claim()]))
        await asyncio.sleep(0)
        await loop.backend.close()
        assert await asked == [None]

    before = sessions_of(url, name)
    loop.runner.run(close_meanwhile())
    until(lambda: loop.runner.run(asyncio.sleep(0)) or sessions_of(url, name) == before)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_backend_of_a_closed_loop_is_closed_without_waiting(url, name):
    """D4: from another loop, or without any; its sockets go with the last reference."""

    async def use(store):
        backend = store.async_backend()
        await backend.swap([claim(id_of(next(NUMBERS)))])
        return backend

    with closing(open_store(f"{url}&application_name={name}")) as store:
        before = sessions_of(url, name)
        first, second = asyncio.run(use(store)), asyncio.run(use(store))
        asyncio.run(first.close())
        with pytest.raises(StopIteration):
            second.close().send(None)
        gc.collect()
        until(lambda: sessions_of(url, name) == before)


@pytest.mark.parametrize("option", ["channel_binding=require", "require_auth=none"])
def test_a_url_that_only_libpq_can_honour_is_used_through_threads(url, option):
    """D1: no requirement on the security of a connection is ignored."""

    async def ask(store):
        with pytest.raises(NotImplementedError):
            store.async_backend()

    try:
        store = open_store(f"{url}&{option}")
    except StoreUnavailable:  # the tests' server authenticates nobody, so there is no binding
        assert option == "channel_binding=require"
        return
    with closing(store):
        asyncio.run(ask(store))
