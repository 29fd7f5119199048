"""Redis Streams: what is acknowledged, what comes again, what becomes a dead letter (E1)."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import count

import pytest
import redis
from redis.asyncio import Redis

from coatcheck import Misconfigured
from coatcheck.consumer import Inbox
from coatcheck.consumer.message import REASON
from coatcheck.consumer.redis_streams import consume
from tests.consumer.failing import BEHIND_POISON, fail, failing_for_poison, failing_once
from tests.consumer.law import Source
from tests.consumer.waits import arrived, until
from tests.support.servers.redis import Redis as Server
from tests.support.servers.redis import redis_server

NUMBERS = count()


def fresh_name():
    return f"orders-{next(NUMBERS)}"


def published(name, events):
    with redis.Redis.from_url(redis_server().url) as client:
        for id, body in events:
            client.xadd(name, {"body": body, **({"message-id": id} if id else {})})


class Site:
    """A stream, its consumer in a task, and its dead letters."""

    def __init__(self, name, client):
        self.name = name
        self.client = client
        self.stop = asyncio.Event()

    def publish(self, *events):
        published(self.name, events)

    async def dead_letter(self):
        ((_, fields),) = await until(lambda: self.client.xrange(f"{self.name}:dead-letters"))
        return {_text(name): _text(value) for name, value in fields.items()}

    async def is_settled(self):
        """Every entry is acknowledged."""

        async def is_empty():
            return (await self.client.xpending(self.name, "billing"))["pending"] == 0

        await until(is_empty)


def _text(value):
    return value.decode() if isinstance(value, bytes) else value


@asynccontextmanager
async def consuming(
    function, tmp_path, *, idle="1m", client=None, options=None, before=None, **settings
):
    """A consumer of a fresh stream, which is stopped at the end."""
    url = f"sqlite:///{tmp_path}/inbox.db"
    async with (
        Redis.from_url(redis_server().url, **(client or {})) as redis_client,
        Inbox(url, consumer="c", **settings) as inbox,
    ):
        site = Site(fresh_name(), redis_client)
        if before is not None:
            await before(redis_client, site.name)
        handler = inbox.handler(name="h", **(options or {}))(function)
        task = asyncio.create_task(
            consume(
                *(redis_client, handler),
                stream=site.name,
                group="billing",
                stop=site.stop,
                idle=idle,
            )
        )
        try:
            yield site
        finally:
            site.stop.set()
            await asyncio.wait_for(task, 20)


@pytest.mark.parametrize(
    "client", [{}, {"protocol": 3}, {"decode_responses": True}], ids=["bytes", "resp3", "text"]
)
def test_an_entry_is_handled_once_and_acknowledged(tmp_path, client):
    seen = []

    async def main():
        async def on_message(message):
            seen.append((message.message_id, message.body, message.deliveries, message.source))

        async with consuming(on_message, tmp_path, client=client) as site:
            site.publish(("a", b"1"), ("a", b"1"), ("b", b"2"))
            await arrived(seen, 2)
            await site.is_settled()
            return site.name

    name = asyncio.run(main())
    assert sorted(seen) == [("a", b"1", 1, name), ("b", b"2", 1, name)]


def test_an_entry_without_a_body_has_its_fields_as_json(tmp_path):
    seen = []

    async def main():
        async def on_message(message):
            seen.append(message.json())

        async with consuming(on_message, tmp_path) as site:
            await site.client.xadd(site.name, {"message-id": "a", "cents": "100"})
            await arrived(seen, 1)

    asyncio.run(main())
    assert seen == [{"cents": "100", "message-id": "a"}]


def test_a_failed_entry_is_handled_again_after_its_pause(tmp_path):
    seen = []

    async def main():
        async with consuming(failing_once(seen, "message_id"), tmp_path, backoff="10ms") as site:
            site.publish(("a", b"1"))
            await arrived(seen, 2)
            await site.is_settled()

    asyncio.run(main())
    assert seen == ["a", "a"]


def test_poisoned_messages_that_pause_do_not_hold_up_the_healthy_one_behind_them(tmp_path):
    seen = []

    async def main():
        async with consuming(failing_for_poison(seen), tmp_path, backoff="5m") as site:
            site.publish(*BEHIND_POISON)
            await arrived(seen, len(BEHIND_POISON))

    asyncio.run(main())
    assert sorted(seen) == sorted(id for id, _ in BEHIND_POISON)


@pytest.mark.parametrize(("id", "reason"), [("a", "ValueError in attempt 2"), ("", "no event id")])
def test_an_entry_that_cannot_be_handled_is_kept_with_its_reason(tmp_path, id, reason):
    async def main():
        async with consuming(fail, tmp_path, attempts_max=2, backoff="10ms") as site:
            site.publish((id, b"poison"))
            letter = await site.dead_letter()
            assert letter["body"] == "poison"
            assert letter.get("message-id", "") == id
            assert reason in letter[REASON]
            await site.is_settled()

    asyncio.run(main())


async def handle_nothing(_message):
    pytest.fail("it has no id")


def test_an_entry_with_a_field_that_is_not_utf_8_is_kept_as_it_came(tmp_path):
    """The consumer would end with an error, and get the same entry again and again."""

    async def main():
        async with consuming(handle_nothing, tmp_path) as site:
            await site.client.xadd(site.name, {b"\xff": b"\xfe", "body": b"poison"})
            ((_, fields),) = await until(lambda: site.client.xrange(f"{site.name}:dead-letters"))
            assert fields[b"\xff"] == b"\xfe"
            assert fields[b"body"] == b"poison"
            await site.is_settled()

    asyncio.run(main())


async def read_by_a_consumer_that_dies(client, name):
    await client.xgroup_create(name, "billing", id="0", mkstream=True)
    id = await client.xadd(name, {"message-id": "a", "body": "1"})
    await client.xreadgroup("billing", "dead", {name: ">"})
    return id


def test_an_entry_of_a_consumer_that_died_goes_to_another(tmp_path):
    seen = []

    async def main():
        async def on_message(message):
            seen.append((message.message_id, message.deliveries))

        before = read_by_a_consumer_that_dies
        async with consuming(on_message, tmp_path, idle="100ms", before=before) as site:
            await arrived(seen, 1)
            await site.is_settled()

    asyncio.run(main())
    assert seen == [("a", 2)]


def test_entries_that_were_trimmed_before_they_were_handled_are_reported(tmp_path, caplog):
    async def trimmed(client, name):
        await client.xdel(name, await read_by_a_consumer_that_dies(client, name))

    async def is_reported():
        return "1 entries of orders" in caplog.text

    async def main():
        async with consuming(lambda message: None, tmp_path, idle="100ms", before=trimmed):
            await until(is_reported)

    asyncio.run(main())
    assert "were trimmed from the stream before they were handled" in caplog.text


@pytest.mark.parametrize("mode", ["record", "transaction"])
@pytest.mark.parametrize("is_paused", [False, True], ids=["handler", "pause"])
def test_an_entry_that_takes_longer_than_the_idle_time_stays_here(tmp_path, is_paused, mode):
    """While its handler runs, and while it waits for its next attempt."""
    seen = []

    async def main():
        may_end = asyncio.Event()

        async def work(message):
            seen.append(message)
            if is_paused:
                raise ValueError
            await may_end.wait()

        options = {"mode": mode}
        async with consuming(work, tmp_path, idle="500ms", options=options, backoff="30s") as site:
            site.publish(("a", b"1"))
            await arrived(seen, 1)
            idle_ms = []
            async with asyncio.timeout(20):
                while len(idle_ms) < 30:
                    (one,) = await site.client.xpending_range(
                        site.name, "billing", min="-", max="+", count=5
                    )
                    idle_ms.append(one["time_since_delivered"])
                    assert one["times_delivered"] == 1
                    await asyncio.sleep(0.04)
            may_end.set()
            return idle_ms

    idle_ms = asyncio.run(main())
    assert max(idle_ms) < 500
    assert len(seen) == 1


def test_a_consumer_that_ends_leaves_its_group_but_not_its_entries(tmp_path):
    async def main():
        seen = []

        async def fail(message):
            seen.append(message)
            raise ValueError

        async def consumers(client, name):
            return await client.xinfo_consumers(name, "billing")

        async with Redis.from_url(redis_server().url) as client:
            async with consuming(fail, tmp_path, backoff="5m") as failing:
                failing.publish(("a", b"1"))
                await arrived(seen, 1)
            async with consuming(lambda message: None, tmp_path / "..") as idle:
                await until(lambda: client.exists(idle.name))
            return await consumers(client, failing.name), await consumers(client, idle.name)

    failing, idle = asyncio.run(main())
    assert [one["pending"] for one in failing] == [1]
    assert idle == []


def test_a_consumer_goes_on_when_redis_comes_back(tmp_path):
    seen = []

    async def main():
        server = Server()
        url = f"sqlite:///{tmp_path}/inbox.db"
        async with Redis.from_url(server.url) as client, Inbox(url, consumer="c") as inbox:
            stop = asyncio.Event()

            async def on_message(message):
                seen.append(message.message_id)

            handler = inbox.handler(name="h")(on_message)
            task = asyncio.create_task(
                consume(client, handler, stream="orders", group="billing", stop=stop)
            )
            await client.xadd("orders", {"message-id": "a", "body": "1"})
            await arrived(seen, 1)
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            await client.xadd("orders", {"message-id": "b", "body": "1"})
            await arrived(seen, 2)
            stop.set()
            await asyncio.wait_for(task, 20)
        server.remove()

    asyncio.run(main())
    assert seen == ["a", "b"]


def test_an_idle_time_of_zero_is_refused(tmp_path):
    async def main():
        async with Redis.from_url(redis_server().url) as client:
            with Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c") as inbox:
                handler = inbox.handler(name="h")(lambda message: None)
                with pytest.raises(Misconfigured, match="longer than zero"):
                    await consume(client, handler, stream="s", group="g", idle=0)

    asyncio.run(main())


def source():
    name = fresh_name()
    return Source("redis_streams", redis_server().url, name, lambda events: published(name, events))
