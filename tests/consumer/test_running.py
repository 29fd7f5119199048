"""The loop of all consumers: bounded, stops in good order, and loses no error."""

from __future__ import annotations

import asyncio

import pytest

from coatcheck import Misconfigured
from coatcheck.consumer import running as running_module
from coatcheck.consumer.running import Running, extending
from tests.consumer.waits import arrived


def test_at_most_as_many_handlers_run_at_one_time_as_are_allowed():
    running_now, most = 0, 0

    async def work():
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0)
        running_now -= 1

    async def main():
        async with Running(None, concurrency=3) as running:
            for _ in range(20):
                await running.start(work())

    asyncio.run(main())
    assert most == 3
    assert running_now == 0


def test_a_consumer_that_is_stopped_waits_for_its_handlers_and_receives_no_more():
    done = []

    async def work():
        await asyncio.sleep(0)
        done.append(1)

    async def main():
        stop = asyncio.Event()
        async with Running(stop) as running:
            await running.start(work())
            stop.set()
            assert await running.until_stopped(asyncio.Event().wait()) is None
            await running.pause(3_600)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert done == [1]


def test_a_consumer_knows_how_many_messages_it_may_receive():
    async def main():
        may_end = asyncio.Event()
        async with Running(None, concurrency=2) as running:
            rooms = [await running.room()]
            await running.start(may_end.wait())
            rooms.append(await running.room())
            await running.start(may_end.wait())
            waiting = asyncio.ensure_future(running.room())
            await asyncio.sleep(0)
            assert not waiting.done()
            may_end.set()
            rooms.append(await waiting)
        return rooms

    rooms = asyncio.run(asyncio.wait_for(main(), 20))
    assert rooms[:2] == [2, 1]
    assert rooms[2] >= 1


@pytest.mark.parametrize(("aside_max", "others"), [(1, 2), (0, 1)])
def test_others_run_in_the_place_of_one_that_pauses_unless_too_many_pause(
    monkeypatch, aside_max, others
):
    monkeypatch.setattr(running_module, "ASIDE_MAX", aside_max)

    async def main():
        stop = asyncio.Event()
        async with Running(stop, concurrency=2) as running:
            await running.start(running.step_aside(3_600))
            await asyncio.sleep(0)
            room = await running.room()
            stop.set()
        return room, await running.room()

    assert asyncio.run(asyncio.wait_for(main(), 20)) == (others, 2)


def test_an_error_of_one_handler_ends_the_consumer_with_that_error():
    async def fail():
        raise ConnectionResetError("the broker is gone")

    async def main():
        async with Running(None) as running:
            await running.start(fail())
            await asyncio.Event().wait()

    with pytest.raises(ConnectionResetError):
        asyncio.run(asyncio.wait_for(main(), 20))


def test_an_error_while_receiving_is_raised():
    async def receive():
        raise ConnectionResetError

    async def main():
        async with Running(None) as running:
            await running.until_stopped(receive())

    with pytest.raises(ConnectionResetError):
        asyncio.run(main())


def test_a_consumer_without_handlers_is_refused():
    with pytest.raises(Misconfigured, match="at least 1"):
        Running(None, concurrency=0)


def test_a_broker_is_asked_to_wait_again_and_again_also_after_it_has_failed(caplog):
    calls = []

    async def extend():
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError

    async def main():
        async with extending(extend, 0.03):
            await arrived(calls, 3)
        count = len(calls)
        await asyncio.sleep(0)
        return count

    assert asyncio.run(main()) == len(calls)
    assert "could not be asked to wait: ConnectionError()" in caplog.text
