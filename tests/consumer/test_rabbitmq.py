"""RabbitMQ: what is acknowledged, what comes again, what becomes a dead letter (E1)."""

from __future__ import annotations

import asyncio
import functools
from contextlib import asynccontextmanager
from unittest.mock import Mock

import aio_pika
import pytest

from coatcheck import Misconfigured
from coatcheck.consumer import Inbox, event_ids
from coatcheck.consumer import rabbitmq as rabbitmq_module
from coatcheck.consumer.rabbitmq import _Fetching, _next, consume
from coatcheck.consumer.running import Running
from tests.consumer.failing import BEHIND_POISON, POISON, failing_for_poison, failing_once
from tests.consumer.law import Source
from tests.consumer.waits import arrived, until
from tests.support.servers.rabbitmq import rabbitmq

QUORUM = {"x-queue-type": "quorum"}
SINGLE = {"x-single-active-consumer": True}


async def published(url, name, events, arguments=QUORUM):
    connection = await aio_pika.connect(url)
    async with connection:
        channel = await connection.channel()
        await channel.declare_queue(name, durable=True, arguments=arguments)
        for id, body in events:
            headers = {"event": id} if id else {}
            message = aio_pika.Message(body, message_id=id, headers=headers, delivery_mode=2)
            await channel.default_exchange.publish(message, routing_key=name)


class Site:
    """A queue, its consumer in a task, and its dead letters."""

    def __init__(self, name, arguments, channel, stop, consuming):
        self.name = name
        self.channel = channel
        self.stop = stop
        self.arguments = arguments
        self._task = asyncio.create_task(consuming)

    async def end(self):
        self.stop.set()
        await asyncio.wait_for(self._task, 20)

    async def publish(self, *events):
        await published(rabbitmq().url, self.name, events, self.arguments)

    async def dead_letter(self):
        queue = await self.channel.declare_queue(f"{self.name}.dead-letters", durable=True)
        return await until(lambda: queue.get(fail=False, no_ack=True))

    async def left(self):
        """How many messages are ready in the queue; those given back come one after the other."""
        connection = await aio_pika.connect(rabbitmq().url)
        async with connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(self.name, durable=True, passive=True)
            return queue.declaration_result.message_count


@asynccontextmanager
async def consuming(function, tmp_path, concurrency=10, arguments=QUORUM, **settings):
    """A consumer of a fresh queue, which is stopped at the end."""
    server = rabbitmq()
    name, stop = server.fresh_name(), asyncio.Event()
    connection = await aio_pika.connect_robust(server.url)
    async with (
        connection,
        Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c", **settings) as inbox,
    ):
        channel = await connection.channel()
        queue = await channel.declare_queue(name, durable=True, arguments=arguments)
        handler = inbox.handler(name="h", event_id=event_ids.header("event"))(function)
        working = consume(queue, handler, stop=stop, concurrency=concurrency)
        site = Site(name, arguments, channel, stop, working)
        try:
            yield site
        finally:
            await site.end()


def test_a_message_is_handled_once_and_acknowledged(tmp_path):
    seen = []

    async def main():
        async def on_message(message):
            seen.append((message.message_id, message.body, message.headers["message-id"]))

        # One at a time, so that all messages before the last one are answered.
        async with consuming(on_message, tmp_path, concurrency=1) as site:
            await site.publish(("a", b"1"), ("a", b"1"), ("b", b"2"))
            await arrived(seen, 2)
            await site.end()
            assert await site.left() == 0

    asyncio.run(main())
    assert sorted(seen) == [("a", b"1", "a"), ("b", b"2", "b")]


def test_a_failed_message_is_handled_again_and_nothing_is_lost(tmp_path):
    seen = []

    async def main():
        async with consuming(failing_once(seen, "message_id"), tmp_path, backoff="10ms") as site:
            await site.publish(("a", b"1"))
            await arrived(seen, 2)

    asyncio.run(main())
    assert seen == ["a", "a"]


@pytest.mark.parametrize("concurrency", [1, 10])
@pytest.mark.parametrize("arguments", [QUORUM, {}, SINGLE, {**QUORUM, **SINGLE}], ids="-".join)
def test_poisoned_messages_that_pause_do_not_hold_up_the_healthy_one_behind_them(
    tmp_path, arguments, concurrency
):
    seen = []

    async def main():
        settings = {"arguments": arguments, "concurrency": concurrency, "backoff": "5m"}
        async with consuming(failing_for_poison(seen), tmp_path, **settings) as site:
            await site.publish(*BEHIND_POISON)
            await arrived(seen, len(BEHIND_POISON))
            await site.end()

            async def are_those_that_pause_back():
                return await site.left() == len(BEHIND_POISON) - 1

            await until(are_those_that_pause_back)

    asyncio.run(main())
    assert sorted(seen) == sorted(id for id, _ in BEHIND_POISON)


def test_a_message_that_pauses_while_the_connection_is_lost_does_not_end_the_fetching(monkeypatch):
    monkeypatch.setattr(rabbitmq_module, "RETRY_S", 0.01)
    calls = []

    class Queue:
        channel = Mock(is_closed=False)

        async def consume(self, _callback, consumer_tag):
            calls.append(consumer_tag)
            if len(calls) == 2:
                raise ConnectionError

        async def cancel(self, _tag):
            raise ConnectionError

    async def main():
        fetching = _Fetching(Queue(), asyncio.Queue(), 1)
        await fetching.start()
        async with Running(None, concurrency=1) as running:
            message = Mock(consumer_tag=calls[0])
            await running.start(fetching.pause(message, 0.01, running))

    asyncio.run(asyncio.wait_for(main(), 20))
    assert len(set(calls)) == 3


def test_no_more_messages_are_fetched_than_are_handled_beside_those_that_pause(tmp_path):
    """Others are for other consumers of the queue."""
    seen = []

    async def main():
        fail_for_poison, may_end = failing_for_poison(seen), asyncio.Event()

        async def on_message(message):
            await fail_for_poison(message)
            await may_end.wait()

        async with consuming(on_message, tmp_path, concurrency=4, backoff="5m") as site:
            await site.publish(*[(f"{number}-poison", POISON) for number in range(25)])
            await site.publish(*[(str(number), b"1") for number in range(25)])
            await arrived(seen, 25 + 3)  # one that pauses is not yet half of four
            left = await site.left()
            may_end.set()
            await arrived(seen, 50)
            return left

    # 4 run, and up to 5 more wait here since the last subscription.
    assert asyncio.run(main()) >= 25 - 4 - 5


def test_a_message_that_was_kept_for_long_goes_back_to_the_queue_after_its_pause(
    tmp_path, monkeypatch
):
    """RabbitMQ closes a channel that keeps a message for 30 minutes."""
    monkeypatch.setattr(rabbitmq_module, "KEPT_S_MAX", 0.01)
    deliveries = []

    async def main():
        async with consuming(
            failing_once(deliveries, "deliveries"), tmp_path, backoff="5m"
        ) as site:
            await site.publish(("a", b"1"))
            await arrived(deliveries, 2)

    asyncio.run(main())
    assert deliveries == [None, 2]  # it came from the queue again


def test_a_channel_that_could_lose_dead_letters_is_refused(tmp_path):
    async def main():
        connection = await aio_pika.connect(rabbitmq().url)
        async with connection, Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c") as inbox:
            channel = await connection.channel(publisher_confirms=False)
            queue = await channel.declare_queue(rabbitmq().fresh_name(), exclusive=True)
            handler = inbox.handler(name="h")(lambda message: None)
            with pytest.raises(Misconfigured, match="publisher confirms"):
                await consume(queue, handler)

    asyncio.run(main())


def test_a_closed_channel_ends_the_consumer_with_an_error(tmp_path):
    async def main():
        connection = await aio_pika.connect(rabbitmq().url)
        async with Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c") as inbox:
            channel = await connection.channel()
            queue = await channel.declare_queue(rabbitmq().fresh_name(), exclusive=True)
            seen = []
            handler = inbox.handler(name="h")(lambda message: bool(seen.append(message)))
            task = asyncio.create_task(consume(queue, handler))
            event = aio_pika.Message(b"", message_id="a")
            await channel.default_exchange.publish(event, routing_key=queue.name)
            await arrived(seen, 1)
            await connection.close()
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(task, 20)

    asyncio.run(main())


def test_a_consumer_leaves_nothing_behind_on_its_channel_for_each_message(tmp_path):
    seen = []

    async def main():
        async def on_message(message):
            seen.append(message)

        connection = await aio_pika.connect(rabbitmq().url)
        async with connection, Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c") as inbox:
            channel = await connection.channel()
            closed, calls, stop = channel.closed, [], asyncio.Event()
            channel.closed = lambda: calls.append(1) or closed()
            queue = await channel.declare_queue(rabbitmq().fresh_name(), exclusive=True)
            handler = inbox.handler(name="h")(on_message)
            task = asyncio.create_task(consume(queue, handler, stop=stop))
            for id in "abc":
                event = aio_pika.Message(b"", message_id=id)
                await channel.default_exchange.publish(event, routing_key=queue.name)
            await arrived(seen, 3)
            stop.set()
            await asyncio.wait_for(task, 20)
            return len(calls)

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize("steps", range(5))
def test_a_message_that_arrives_when_the_consumer_stops_is_not_forgotten(steps):
    async def main():
        received, closed = asyncio.Queue(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(_next(received, closed))
        for _ in range(5):  # it waits for a message
            await asyncio.sleep(0)
        received.put_nowait("message")
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        return [] if task.cancelled() else [task.result()], received.qsize()

    returned, waiting = asyncio.run(main())
    assert len(returned) + waiting == 1


def source():
    name = rabbitmq().fresh_name()
    url = rabbitmq().url
    publish = functools.partial(published, url, name)
    return Source("rabbitmq", url, name, lambda events: asyncio.run(publish(events)))
