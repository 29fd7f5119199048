"""Waiting for what can be read from sockets, of which others may know as well."""

import asyncio
import gc
import socket
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import uvloop

from coatcheck.lent import readable as room
from coatcheck.lent.readable import readable

pytestmark = pytest.mark.parametrize(
    ("run", "has_epoll"),
    [(asyncio.run, True), (asyncio.run, False), (uvloop.run, True)],
    ids=["asyncio", "without epoll", "uvloop"],
)


@pytest.fixture(autouse=True)
def system(monkeypatch, has_epoll):
    """A system that has `epoll`, or one that does not."""
    if has_epoll and not room._HAS_EPOLL:
        pytest.fail("this system has no epoll, and its case is the other one")
    monkeypatch.setattr(room, "_HAS_EPOLL", has_epoll)


@contextmanager
def pair():
    """Two ends; what is said at the second can be read at the first."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        yield here, there


def test_it_returns_when_something_came(run):
    async def main():
        with pair() as (here, there):
            for _ in range(3):
                waiting = asyncio.ensure_future(readable(here.fileno()))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert not waiting.done()
                there.send(b"x")
                await asyncio.wait_for(waiting, 5)
                assert here.recv(9) == b"x"

    run(main())


def test_it_returns_where_something_came_before_or_the_other_end_is_closed(run):
    async def main():
        with pair() as (here, there):
            there.send(b"x")
            await asyncio.wait_for(readable(here.fileno()), 5)
            await asyncio.wait_for(readable(here.fileno()), 5)
            assert here.recv(9) == b"x"
            there.close()
            await asyncio.wait_for(readable(here.fileno()), 5)

    run(main())


def test_many_wait_and_each_is_told_its_own(run):
    async def main():
        with pair() as (here, there), pair() as (other, other_there):
            waiting = [asyncio.ensure_future(readable(end.fileno())) for end in (here, other)]
            other_there.send(b"x")
            await asyncio.wait_for(waiting[1], 5)
            assert not waiting[0].done()
            there.send(b"x")
            await asyncio.wait_for(waiting[0], 5)

    run(main())


def test_who_was_cancelled_is_in_nobodys_way(run):
    async def main():
        with pair() as (here, there):
            waiting = asyncio.ensure_future(readable(here.fileno()))
            await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            there.send(b"x")
            for _ in range(3):  # the loop has looked, and nobody was there
                await asyncio.sleep(0)
            await asyncio.wait_for(readable(here.fileno()), 5)

    run(main())


def test_another_socket_may_have_the_number_of_one_that_was_closed(run):
    async def main():
        for _ in range(3):
            with pair() as (here, there):
                there.send(b"x")
                await asyncio.wait_for(readable(here.fileno()), 5)

    run(main())


def test_others_may_look_at_the_same_socket(run):
    """As the driver does, between two journeys of ours and in its own way."""

    async def main():
        loop = asyncio.get_running_loop()
        with pair() as (here, there):
            for _ in range(2):
                there.send(b"x")
                await asyncio.wait_for(readable(here.fileno()), 5)
                told = asyncio.Event()
                loop.add_reader(here.fileno(), told.set)
                await asyncio.wait_for(told.wait(), 5)
                loop.remove_reader(here.fileno())
                here.recv(9)

    run(main())


def test_what_a_loop_has_looked_at_ends_with_it(run):
    """No descriptor remains of it."""

    async def main():
        with pair() as (here, there):
            there.send(b"x")
            await asyncio.wait_for(readable(here.fileno()), 5)

    def polls() -> int:
        gc.collect()
        count = 0
        for path in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile, as that of the listing itself
                count += "eventpoll" in str(path.readlink())
        return count

    before = polls()
    for _ in range(20):
        run(main())
    assert polls() < before + 20  # others in this process may come and go
