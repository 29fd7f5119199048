"""NATS JetStream: what is acknowledged, what comes again, what becomes a dead letter (E1)."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress

import nats as nats_py
import pytest
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from coatcheck import Misconfigured
from coatcheck.consumer import Inbox, event_ids
from coatcheck.consumer import nats as nats_module
from coatcheck.consumer.message import REASON
from coatcheck.consumer.nats import consume
from tests.consumer.failing import BEHIND_POISON, fail, failing_for_poison, failing_once
from tests.consumer.law import Source
from tests.consumer.waits import arrived, until
from tests.support.servers.nats import nats_server

ACK_WAIT_S = 1.0


@asynccontextmanager
async def jetstream():
    client = await nats_py.connect(nats_server().url)
    try:
        yield client.jetstream()
    finally:
        await client.close()


async def made(context, name, **settings):
    """A stream for messages, and one for dead letters."""
    await context.add_stream(name=name, subjects=[name], duplicate_window=0.1, **settings)
    await context.add_stream(name=f"{name}-dead", subjects=[f"{name}.dead-letters"])


async def published(context, name, events):
    for id, body in events:
        await context.publish(name, body, headers={"Nats-Msg-Id": id, "event": id} if id else {})


class Site:
    """A stream, its consumer in a task, and its dead letters."""

    def __init__(self, name, context, inbox):
        self.name = name
        self.context = context
        self.inbox = inbox
        self.stop = asyncio.Event()

    async def publish(self, *events):
        await published(self.context, self.name, events)

    async def dead_letter(self):
        async def look():
            try:
                return await self.context.get_msg(f"{self.name}-dead", seq=1)
            except NotFoundError:
                return None

        return await until(look)

    async def is_settled(self):
        """NATS has an answer for each message."""

        async def is_empty():
            info = await self.context.consumer_info(self.name, "billing")
            return info.num_pending == info.num_ack_pending == 0

        await until(is_empty)


@asynccontextmanager
async def consuming(function, tmp_path, *, ack_wait=30.0, options=None, **settings):
    """A consumer of a fresh stream, which is stopped at the end."""
    name = nats_server().fresh_name()
    url = f"sqlite:///{tmp_path}/inbox.db"
    async with jetstream() as context, Inbox(url, consumer="c", **settings) as inbox:
        await made(context, name)
        config = ConsumerConfig(ack_wait=ack_wait)
        subscription = await context.pull_subscribe(name, durable="billing", config=config)
        site = Site(name, context, inbox)
        handler = inbox.handler(name="h", **(options or {}))(function)
        task = asyncio.create_task(
            consume(subscription, handler, stop=site.stop, dead_letters=f"{name}.dead-letters")
        )
        try:
            yield site
        finally:
            site.stop.set()
            await asyncio.wait_for(task, 20)


def test_a_message_is_handled_once_and_acknowledged(tmp_path):
    seen = []

    async def main():
        async def on_message(message):
            seen.append((message.headers["event"], message.body, message.deliveries))

        by_header = {"event_id": event_ids.header("event")}
        async with consuming(on_message, tmp_path, options=by_header) as site:
            await site.context.publish(site.name, b"1", headers={"event": "a"})
            await site.context.publish(site.name, b"1", headers={"event": "a"})
            await site.publish(("b", b"2"))
            await arrived(seen, 2)
            await site.is_settled()

    asyncio.run(main())
    assert sorted(seen) == [("a", b"1", 1), ("b", b"2", 1)]


def test_the_id_that_the_publisher_set_is_the_event_id(tmp_path):
    seen = []

    async def main():
        async def on_message(message):
            seen.append((message.message_id, message.source))

        async with consuming(on_message, tmp_path) as site:
            await site.publish(("a", b"1"))
            await arrived(seen, 1)
            return site.name

    name = asyncio.run(main())
    assert seen == [("a", name)]


def test_a_failed_message_is_delivered_again_after_its_pause(tmp_path):
    seen = []

    async def main():
        async with consuming(failing_once(seen, "deliveries"), tmp_path, backoff="10ms") as site:
            await site.publish(("a", b"1"))
            await arrived(seen, 2)
            await site.is_settled()

    asyncio.run(main())
    assert seen == [1, 2]


def test_poisoned_messages_that_pause_do_not_hold_up_the_healthy_one_behind_them(tmp_path):
    seen = []

    async def main():
        async with consuming(failing_for_poison(seen), tmp_path, backoff="5m") as site:
            await site.publish(*BEHIND_POISON)
            await arrived(seen, len(BEHIND_POISON))

    asyncio.run(main())
    assert sorted(seen) == sorted(id for id, _ in BEHIND_POISON)


@pytest.mark.parametrize(("id", "reason"), [("a", "ValueError in attempt 2"), ("", "no event id")])
def test_a_message_that_cannot_be_handled_is_kept_with_its_reason(tmp_path, id, reason):
    async def main():
        async with consuming(fail, tmp_path, attempts_max=2, backoff="10ms") as site:
            await site.publish((id, b"poison"))
            letter = await site.dead_letter()
            assert letter.data == b"poison"
            assert letter.headers.get("x-coatcheck-message-id", "") == id
            assert reason in letter.headers[REASON]
            await site.is_settled()

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["record", "transaction"])
def test_a_handler_that_takes_longer_than_nats_waits_keeps_its_message(tmp_path, mode):
    seen = []

    async def main():
        may_end = asyncio.Event()

        async def wait(message):
            seen.append(message.deliveries)
            await may_end.wait()

        async with consuming(wait, tmp_path, ack_wait=ACK_WAIT_S, options={"mode": mode}) as site:
            await site.publish(("a", b"1"))
            await arrived(seen, 1)
            deadline = time.monotonic() + 2 * ACK_WAIT_S  # NATS would have delivered again twice

            async def is_over():
                return time.monotonic() > deadline

            await until(is_over)
            may_end.set()
            await site.is_settled()
            info = await site.context.consumer_info(site.name, "billing")
            return info.delivered.consumer_seq

    assert asyncio.run(main()) == 1
    assert seen == [1]


def refused(tmp_path, **settings):
    """What `consume` says to a consumer with these settings."""
    dead_letters = settings.pop("dead_letters", None)
    subjects = settings.pop("subjects", None)

    async def main():
        name = nats_server().fresh_name()
        url = f"sqlite:///{tmp_path}/inbox.db"
        async with jetstream() as context, Inbox(url, consumer="c") as inbox:
            await context.add_stream(name=name, subjects=subjects or [name])
            config = ConsumerConfig(**settings)
            subscription = await context.pull_subscribe(
                "" if subjects else name, durable="billing", stream=name, config=config
            )
            handler = inbox.handler(name="h")(lambda message: None)
            with pytest.raises(Misconfigured) as refusal:
                await consume(subscription, handler, dead_letters=dead_letters)
            return str(refusal.value)

    return asyncio.run(main())


async def without_dead_letters():
    """Delete the stream that the example has made on this server: it stores all dead letters."""
    async with jetstream() as context:
        with suppress(NotFoundError):
            await context.delete_stream("dead-letters")


def test_a_consumer_that_would_lose_messages_is_refused(tmp_path):
    asyncio.run(without_dead_letters())
    assert "no stream stores the subject dead-letters." in refused(tmp_path)
    assert "max_deliver=5" in refused(tmp_path, max_deliver=5)
    assert "ack policy" in refused(tmp_path, ack_policy=AckPolicy.ALL)


def test_a_consumer_that_would_get_its_own_dead_letters_is_refused(tmp_path):
    subjects = ["everything.>"]
    text = refused(tmp_path, subjects=subjects, dead_letters="everything.dead")
    assert "its own dead letters" in text


def test_a_stream_that_keeps_messages_for_longer_than_duplicates_are_known_is_warned_of(
    tmp_path, caplog
):
    async def main():
        name = nats_server().fresh_name()
        url = f"sqlite:///{tmp_path}/inbox.db"
        async with jetstream() as context, Inbox(url, consumer="c") as inbox:
            await made(context, name, max_age=30 * 86_400)
            subscription = await context.pull_subscribe(name, durable="billing")
            stop = asyncio.Event()
            stop.set()
            handler = inbox.handler(name="h")(lambda message: None)
            await consume(subscription, handler, stop=stop, dead_letters=f"{name}.dead-letters")

    asyncio.run(main())
    assert "keeps messages for" in caplog.text


def source():
    name = nats_server().fresh_name()

    async def make():
        async with jetstream() as context:
            await made(context, name)

    async def publish(events):
        async with jetstream() as context:
            for id, body in events:
                # Without the header, NATS itself would drop the duplicates.
                await context.publish(name, body, headers={"ce-id": id, "ce-source": "law"})

    asyncio.run(make())
    return Source("nats", nats_server().url, name, lambda events: asyncio.run(publish(events)))


class Restarts:
    """A subscription whose server restarts; then it has a message."""

    def __init__(self, *errors):
        self.errors = list(errors)

    async def fetch(self, _count, **_options):
        if self.errors:
            raise self.errors.pop(0)
        return ["message"]


def test_a_consumer_goes_on_when_a_server_of_nats_restarts(monkeypatch):
    monkeypatch.setattr(nats_module, "RETRY_S", 0.01)
    subscription = Restarts(
        APIError(code=409, description="Server Shutdown"),
        ServiceUnavailableError(),
        APIError(code=409, description="Leadership Change"),
    )
    assert asyncio.run(nats_module._next(subscription)) == "message"


def test_a_consumer_of_nats_that_is_deleted_ends_with_an_error():
    with pytest.raises(APIError, match="Consumer Deleted"):
        asyncio.run(nats_module._next(Restarts(APIError(code=409, description="Consumer Deleted"))))
