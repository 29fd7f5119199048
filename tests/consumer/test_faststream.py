"""FastStream: its subscribers handle each event once, and acknowledge after the record (E1)."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import asynccontextmanager

import pytest
from faststream import AckPolicy
from faststream.confluent import KafkaBroker
from faststream.nats import JStream, NatsBroker, PullSub
from faststream.redis import RedisBroker, StreamSub
from nats.js.api import ConsumerConfig

from coatcheck import Misconfigured, current_async_operation
from coatcheck.consumer import Inbox
from coatcheck.consumer.faststream import InboxMiddleware
from tests.consumer.test_nats import source as nats_source
from tests.consumer.waits import arrived, until
from tests.support.servers.nats import nats_server
from tests.support.servers.redis import redis_server


class OnNats:
    """A stream of NATS, and a subscriber of FastStream."""

    def __init__(self, guard):
        self.name = nats_server().fresh_name()
        self.broker = NatsBroker(nats_server().url, middlewares=[guard], logger=None)

    def subscribe(self, function, **more):
        self.broker.subscriber(
            self.name,
            stream=JStream(self.name),
            durable="billing",
            pull_sub=PullSub(timeout=0.2),
            config=ConsumerConfig(ack_wait=1),
            **more,
        )(function)

    async def publish(self, id, body):
        await self.broker.publish(body, self.name, headers={"message-id": id} if id else {})

    async def is_settled(self):
        info = await self.broker.connection.jetstream().consumer_info(self.name, "billing")
        return info.num_pending == info.num_ack_pending == 0


class OnRedis:
    """The same with a stream of Redis."""

    def __init__(self, guard):
        self.name = f"faststream-{id(self)}"
        self.broker = RedisBroker(redis_server().url, middlewares=[guard], logger=None)

    def subscribe(self, function, **more):
        place = StreamSub(self.name, group="billing", consumer="one", polling_interval=50)
        self.broker.subscriber(stream=place, **more)(function)

    async def publish(self, id, body):
        headers = {"message-id": id} if id else {}
        await self.broker.publish(body, stream=self.name, headers=headers)

    async def is_settled(self):
        found = await redis_groups(self.broker, self.name)
        return found["pending"] == 0 and found["lag"] == 0


async def redis_groups(broker, name):
    from redis.asyncio import Redis

    async with Redis.from_url(redis_server().url) as client:
        (found,) = await client.xinfo_groups(name)
        return found


async def keep_nothing(message, reason):
    pytest.fail(reason)


PLACES = {"nats": OnNats, "redis": OnRedis}


@pytest.fixture(params=PLACES)
def place(request):
    return PLACES[request.param]


@asynccontextmanager
async def consuming(place, function, tmp_path, *, options=None, more=None, **settings):
    """A subscriber, which is stopped at the end; its dead letters are in a list."""
    letters = []

    async def keep(message, reason):
        letters.append((message.body, reason))

    async with Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c", **settings) as inbox:
        guard = InboxMiddleware(inbox, dead_letter=keep, **(options or {}))
        site = place(guard)
        site.letters = letters
        site.subscribe(function, **(more or {}))
        guard.check(site.broker)
        async with site.broker:
            await site.broker.start()
            yield site


def test_a_message_is_handled_once_and_acknowledged(place, tmp_path):
    seen = []

    async def main():
        async def on_message(body: str):
            seen.append((body, current_async_operation().key))

        async with consuming(place, on_message, tmp_path) as site:
            for id, body in (("a", b"one"), ("a", b"one"), ("b", b"two")):
                await site.publish(id, body)
            await arrived(seen, 2)
            await until(site.is_settled)

    asyncio.run(main())
    assert sorted(seen) == [("one", "a"), ("two", "b")]


def test_a_failed_message_is_handled_again(place, tmp_path):
    seen = []

    async def main():
        async def fail_once(body: str):
            seen.append(body)
            if len(seen) == 1:
                raise ValueError

        async with consuming(place, fail_once, tmp_path, backoff="10ms") as site:
            await site.publish("a", b"one")
            await arrived(seen, 2)
            await until(site.is_settled)

    asyncio.run(main())
    assert seen == ["one", "one"]


@pytest.mark.parametrize(("id", "reason"), [("a", "ValueError in attempt 2"), ("", "no event id")])
def test_a_message_that_cannot_be_handled_is_kept_with_its_reason(place, tmp_path, id, reason):
    async def main():
        async def fail(body: str):
            raise ValueError

        async with consuming(place, fail, tmp_path, attempts_max=2, backoff="10ms") as site:
            await site.publish(id, b"poison")
            await until(site.is_settled)
            return site.letters

    ((body, why),) = asyncio.run(main())
    assert body == b"poison"
    assert reason in why


def test_the_marker_and_the_effect_commit_together(place, tmp_path):
    with sqlite3.connect(tmp_path / "inbox.db") as database:
        database.execute("create table paid (id text)")
    failures = [ValueError()]

    async def main():
        async def pay(body: str):
            operation = current_async_operation()
            await operation.connection.execute("insert into paid values (?)", (body,))
            if failures:
                raise failures.pop()

        options = {"mode": "transaction"}
        async with consuming(place, pay, tmp_path, options=options, backoff="10ms") as site:
            await site.publish("a", b"order 17")
            await site.publish("a", b"order 17")
            await until(site.is_settled)

    asyncio.run(main())
    with sqlite3.connect(tmp_path / "inbox.db") as database:
        assert database.execute("select id from paid").fetchall() == [("order 17",)]


def test_what_a_subscriber_returns_is_published_for_the_first_delivery_only(tmp_path):
    replies = []

    async def main():
        async def answer(body: str):
            return b"done"

        async with consuming(OnNats, answer, tmp_path) as site:

            async def on_reply(message):
                replies.append(message.data)

            connection = site.broker.connection
            await connection.subscribe("replies", cb=on_reply)
            for _ in range(2):
                headers = {"message-id": "a", "reply_to": "replies"}
                await site.broker.publish(b"one", site.name, headers=headers)
            await until(site.is_settled)
            await connection.flush()

    asyncio.run(main())
    assert replies == [b"done"]


def test_a_function_for_dead_letters_that_cannot_be_awaited_is_refused(tmp_path):
    with (
        Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c") as inbox,
        pytest.raises(Misconfigured, match="must be an async function"),
    ):
        InboxMiddleware(inbox, dead_letter=lambda message, reason: None)


def test_two_subscribers_of_one_name_are_refused_unless_they_have_one_function(tmp_path):
    """Their records would be the same: an event that both get would be handled by one of them."""

    def another():
        async def on_paid(body: str): ...

        return on_paid

    with Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c") as inbox:
        guard = InboxMiddleware(inbox, dead_letter=keep_nothing)
        broker = NatsBroker("nats://127.0.0.1:1", middlewares=[guard])
        of_both = another()
        for subject in ("orders", "refunds"):
            broker.subscriber(subject, stream=subject, pull_sub=True, durable="d")(of_both)
        guard.check(broker)
        guard.check(broker)
        broker.subscriber("mail", stream="mail", pull_sub=True, durable="d")(another())
        with pytest.raises(Misconfigured, match="two subscribers are called OnPaid"):
            guard.check(broker)


@pytest.mark.parametrize("kind", ["kafka", "nats"])
def test_a_subscriber_that_acknowledges_first_is_refused_when_the_application_starts(
    tmp_path, kind
):
    """FastStream's default for Kafka commits the offset before the handler runs."""
    with Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c") as inbox:
        guard = InboxMiddleware(inbox, dead_letter=keep_nothing)
        if kind == "kafka":
            broker = KafkaBroker("127.0.0.1:1", middlewares=[guard])
            subscriber = broker.subscriber("orders", group_id="billing")
        else:
            broker = NatsBroker("nats://127.0.0.1:1", middlewares=[guard])
            subscriber = broker.subscriber(
                "orders", stream="orders", ack_policy=AckPolicy.ACK_FIRST
            )

        @subscriber
        async def on_paid(body: str): ...

        with pytest.raises(Misconfigured, match="OnPaid acknowledges a message before"):
            guard.check(broker)


def test_a_subscriber_that_acknowledges_first_stops_at_its_first_message(tmp_path, caplog):
    async def main():
        async def on_message(body: str):
            pytest.fail("it ran")

        async with Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c") as inbox:
            guard = InboxMiddleware(inbox, dead_letter=keep_nothing)
            site = OnNats(guard)
            stream = JStream(site.name)
            policy = AckPolicy.ACK_FIRST
            site.broker.subscriber(site.name, stream=stream, ack_policy=policy)(on_message)
            async with site.broker:
                await site.broker.start()
                await site.publish("a", b"one")

                async def is_reported():
                    return "acknowledges a message before" in caplog.text

                await until(is_reported)

    asyncio.run(main())


def source():
    return nats_source()._replace(broker="faststream")
