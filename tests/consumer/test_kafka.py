"""Kafka, with both clients: order, offsets, rebalances and dead letters (E1)."""

from __future__ import annotations

import asyncio
import gc
import warnings
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from coatcheck import Misconfigured
from coatcheck.consumer import Inbox, aiokafka
from coatcheck.consumer import kafka as confluent
from coatcheck.consumer.kafka_loop import ORIGIN
from coatcheck.consumer.message import REASON
from coatcheck.consumer.partitions import Partitions
from tests.consumer.law import Source
from tests.consumer.waits import arrived, until
from tests.support.servers.kafka import JARS, KafkaStandIn, kafka

CLIENTS = {"kafka": confluent, "aiokafka": aiokafka}
GROUP = "ledger of the tests"


@pytest.fixture(params=CLIENTS)
def client(request):
    return request.param


@cache
def broken_off():
    """A broker for clients that break off: the mock cluster sometimes ends when they do."""
    return kafka() if JARS else KafkaStandIn()


def settings_of(client, broker=kafka):
    """The settings of a consumer, as the library of *client* spells them."""
    settings = {
        "bootstrap.servers": broker().address,
        "group.id": GROUP,
        "auto.offset.reset": "earliest",
        "session.timeout.ms": kafka().session_ms,
        "heartbeat.interval.ms": kafka().session_ms // 4,
    }
    if client == "kafka":
        return settings
    return {name.replace(".", "_"): value for name, value in settings.items()}


def published(name, events, partition=None):
    """Produce events, to one partition or to that of their key."""
    producer = Producer({"bootstrap.servers": kafka().address, "acks": "all"})
    place = {} if partition is None else {"partition": partition}
    for id, body in events:
        headers = [("message-id", id.encode())] if id else []
        producer.produce(name, value=body, key=id.encode(), headers=headers, **place)
    assert producer.flush(30) == 0


def committed(name):
    """The offsets that the group has committed."""
    consumer = Consumer({"bootstrap.servers": kafka().address, "group.id": GROUP})
    try:
        places = [TopicPartition(name, number) for number in range(4)]
        found = consumer.committed(places, timeout=20)
        return {one.partition: one.offset for one in found if one.offset >= 0}
    finally:
        consumer.close()


def dead_letter(name):
    """The first record of the dead letters."""
    settings = {
        "bootstrap.servers": kafka().address,
        "group.id": f"reader of {name}",
        "auto.offset.reset": "earliest",
        "topic.metadata.refresh.interval.ms": 200,  # it may not exist yet
    }
    consumer = Consumer(settings)
    consumer.subscribe([f"{name}.dead-letters"])
    try:
        for _ in range(100):
            found = consumer.poll(0.2)
            if found is not None and found.error() is None:
                return found
    finally:
        consumer.close()
    raise AssertionError("there is no dead letter")


class Site:
    """A topic, its consumer in a task, and its dead letters."""

    def __init__(self, name):
        self.name = name
        self.stop = asyncio.Event()

    async def publish(self, *events, partition=0):
        await asyncio.to_thread(published, self.name, events, partition)


@asynccontextmanager
async def consuming(client, function, tmp_path, *, name="", options=None, **settings):
    """A consumer of a topic, which is stopped at the end."""
    url = f"sqlite:///{tmp_path}/inbox.db"
    async with Inbox(url, consumer="c", **settings) as inbox:
        site = Site(name or kafka().fresh_name())
        if not name:
            # A consumer that asks for a topic before it exists looks for it again much later.
            await asyncio.to_thread(published, site.name, [("first", b"first")], 3)
        handler = inbox.handler(name="h", **(options or {}))(function)
        consume = CLIENTS[client].consume
        task = asyncio.create_task(
            consume(settings_of(client), handler, topics=[site.name], stop=site.stop)
        )
        try:
            yield site
        finally:
            site.stop.set()
            await asyncio.wait_for(task, 20)


def test_a_record_is_handled_once_and_its_offset_committed(client, tmp_path):
    seen = []

    async def main():
        async def on_message(message):
            seen.append((message.message_id, message.body, message.delivery_id))

        async with consuming(client, on_message, tmp_path) as site:
            await site.publish(("a", b"1"), ("a", b"1"), ("b", b"2"))
            await arrived(seen, 3)
            return site.name

    name = asyncio.run(main())
    assert sorted(seen) == [
        ("a", b"1", f"{name}/0/0"),
        ("b", b"2", f"{name}/0/2"),
        ("first", b"first", f"{name}/3/0"),
    ]
    assert committed(name) == {0: 3, 3: 1}


def test_a_failed_record_is_handled_again_before_the_next_of_its_partition(client, tmp_path):
    seen = []

    async def main():
        async def fail_twice(message):
            seen.append(message.message_id)
            if message.message_id == "a" and seen.count("a") < 3:
                raise ValueError

        async with consuming(client, fail_twice, tmp_path, backoff="10ms") as site:
            await site.publish(("a", b"1"), ("b", b"1"))
            await arrived(seen, 5)

    asyncio.run(main())
    assert [one for one in seen if one != "first"] == ["a", "a", "a", "b"]


def test_a_record_that_fails_is_not_committed_when_the_consumer_stops(client, tmp_path):
    seen = []

    async def main():
        async def fail(message):
            seen.append(message.message_id)
            if message.message_id == "b":
                raise ValueError

        async with consuming(client, fail, tmp_path, backoff="5m") as site:
            await site.publish(("a", b"1"), ("b", b"1"), ("c", b"1"))
            await arrived(seen, 3)
            return site.name

    name = asyncio.run(main())
    assert committed(name)[0] == 1
    assert "c" not in seen


@pytest.mark.parametrize(("id", "reason"), [("a", "ValueError in attempt 2"), ("", "no event id")])
def test_a_record_that_cannot_be_handled_is_kept_with_its_reason(client, tmp_path, id, reason):
    async def main():
        seen = []

        async def fail(message):
            seen.append(message)
            if message.message_id != "first":
                raise ValueError

        async with consuming(client, fail, tmp_path, attempts_max=2, backoff="10ms") as site:
            await site.publish((id, b"poison"))
            letter = await asyncio.to_thread(dead_letter, site.name)
            return site.name, letter

    name, letter = asyncio.run(main())
    headers = {header: value.decode() for header, value in letter.headers()}
    assert letter.value() == b"poison"
    assert (letter.key() or b"").decode() == id
    assert headers.get("message-id", "") == id
    assert reason in headers[REASON]
    assert headers[ORIGIN] == f"{name}/0/0"
    assert committed(name)[0] == 1


# The stand-in refuses to commit during a rebalance, and refuses the synchronisation of aiokafka's
# groups with several members; a real broker does neither.
@pytest.mark.parametrize("client", CLIENTS if JARS else ["kafka"])
def test_a_rebalance_waits_for_the_handler_that_runs_and_nothing_runs_twice(client, tmp_path):
    """On a real broker the other consumer has another inbox, so that Kafka alone prevents it."""
    seen, others = [], []

    async def main():
        may_end = asyncio.Event()

        async def wait(message):
            seen.append(message.message_id)
            if message.message_id != "first":
                await may_end.wait()

        async def on_message(message):
            others.append(message.message_id)

        elsewhere = tmp_path / "elsewhere" if JARS else tmp_path
        elsewhere.mkdir(exist_ok=True)
        async with consuming(client, wait, tmp_path) as site:
            for number in range(4):
                await site.publish((f"before-{number}", b"1"), partition=number)
            await arrived(seen, 5)
            async with consuming(client, on_message, elsewhere, name=site.name):
                may_end.set()

                async def is_shared():
                    events = [(f"after-{len(seen)}-{len(others)}", b"1")]
                    for number in range(4):
                        await site.publish(*events, partition=number)
                    return others

                await until(is_shared)

    asyncio.run(main())
    assert sorted(one for one in seen if one.startswith("before")) == [
        f"before-{number}" for number in range(4)
    ]
    assert [one for one in others if not one.startswith("after")] == []


def joined_and_left(name):
    """Another consumer of the group gets partitions, and leaves without having committed."""
    settings = {**settings_of("kafka"), "enable.auto.commit": False}
    consumer = Consumer(settings)
    assigned = []
    consumer.subscribe([name], on_assign=lambda _, partitions: assigned.append(partitions))
    try:
        for _ in range(200):
            if assigned:
                return
            consumer.poll(0.1)
    finally:
        consumer.close()
    raise AssertionError("there was no rebalance")


def test_a_partition_for_which_fetching_was_stopped_goes_on_after_a_rebalance(
    tmp_path, monkeypatch
):
    """Librdkafka remembers that a partition is paused, also when it is assigned again."""
    monkeypatch.setattr("coatcheck.consumer.partitions.WAITING_MAX", 5)
    seen, pauses = [], []

    async def main():
        turns = asyncio.Semaphore(0)

        async def wait(message):
            if message.message_id != "first":
                await turns.acquire()
            seen.append(message.message_id)

        changes = Partitions.changes

        def noted(partitions):
            found = changes(partitions)
            pauses.extend(found.pause)
            return found

        monkeypatch.setattr(Partitions, "changes", noted)
        async with consuming("kafka", wait, tmp_path) as site:
            await site.publish(*((f"event-{number}", b"1") for number in range(150)))
            await arrived(pauses, 1)
            joining = asyncio.create_task(asyncio.to_thread(joined_and_left, site.name))

            async def is_rebalanced():
                turns.release()  # the record that runs ends, and the revocation with it
                return joining.done()

            await until(is_rebalanced, pause_s=0.05)
            await joining
            for _ in range(300):
                turns.release()
            await arrived(seen, 151)

    asyncio.run(main())
    assert sorted(seen) == sorted(["first", *(f"event-{number}" for number in range(150))])


@pytest.mark.parametrize("value", [True, "true"])
def test_commits_before_records_are_handled_are_refused(client, tmp_path, value):
    name = "enable.auto.commit" if client == "kafka" else "enable_auto_commit"

    async def main():
        with Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c") as inbox:
            handler = inbox.handler(name="h")(lambda message: None)
            settings = {**settings_of(client), name: value}
            with pytest.raises(Misconfigured, match="leave it out"):
                await CLIENTS[client].consume(settings, handler, topics=["orders"])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"group_id": None}, "group_id"), ({"value_deserializer": str}, "deserializers")],
)
def test_settings_of_aiokafka_that_cannot_work_are_refused(tmp_path, settings, reason):
    async def main():
        with Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c") as inbox:
            handler = inbox.handler(name="h")(lambda message: None)
            given = {**settings_of("aiokafka"), **settings}
            with pytest.raises(Misconfigured, match=reason):
                await aiokafka.consume(given, handler, topics=["orders"])

    asyncio.run(main())


def test_the_key_of_a_record_can_be_its_event_id(tmp_path):
    seen = []

    async def main():
        async def on_message(message):
            seen.append(message.body)

        options = {"event_id": lambda message: message.native.key()}
        async with consuming("kafka", on_message, tmp_path, options=options) as site:
            await site.publish(("a", b"1"), ("a", b"1"), ("b", b"2"))
            await arrived(seen, 3)

    asyncio.run(main())
    assert sorted(seen) == [b"1", b"2", b"first"]


def source(client):
    name = kafka().fresh_name()
    return Source(client, kafka().address, name, lambda events: published(name, events))


@pytest.mark.parametrize("steps", [1, 3, 9, 27, 81])
def test_a_dead_letter_that_is_cancelled_leaves_no_connection_open(steps):
    async def main():
        producer = aiokafka._Producer(settings_of("aiokafka", broken_off))
        native = SimpleNamespace(value=b"", key=None, headers=[])
        task = asyncio.create_task(producer.produce("orders.dead-letters", native, {}))
        for _ in range(steps):  # the producer starts
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await producer.close()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert [str(one.message) for one in warned] == []


@pytest.mark.parametrize("steps", [1, 3, 9, 27, 81])
def test_a_consumer_that_is_cancelled_while_it_starts_leaves_no_connection_open(client, steps):
    async def main():
        async with Inbox("memory://", consumer="c") as inbox:
            handler = inbox.handler(name="h")(lambda message: None)
            settings = settings_of(client, broken_off)
            consuming = CLIENTS[client].consume(settings, handler, topics=["orders"])
            task = asyncio.create_task(consuming)
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert [str(one.message) for one in warned] == []
