"""The relay: emitted events are published in order, at least once, with stable ids (E5)."""

from __future__ import annotations

import asyncio
import sqlite3

import aio_pika
import pytest

from coatcheck import Engine, Misconfigured, current_operation
from coatcheck.consumer import Inbox, rabbitmq
from coatcheck.consumer import relay as relay_module
from coatcheck.consumer.relay import Relay
from coatcheck.stores.event_table import EventTable
from tests.support.servers.rabbitmq import rabbitmq as rabbitmq_server
from tests.support.times import eventually


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/shop.db"


def emitted(url, *events):
    """Emit (key, payload) pairs, each in a transaction of its own."""

    def emit(key, payload):
        current_operation().emit("orders", payload, key=key)

    async def create():
        relay = Relay(url, published_to([]))
        await relay.publish_all()
        await relay.close()

    asyncio.run(create())
    with Engine(url) as engine:
        for number, (key, payload) in enumerate(events):
            engine.transaction(f"{number}", emit, key, payload, scope="emit")


def published_to(events, fails=()):
    """Publishes to a list; payloads in *fails* fail once each."""
    left = list(fails)

    async def publish(event):
        if event.body in left:
            left.remove(event.body)
            raise ConnectionError("the broker is away")
        events.append(event)

    return publish


def relayed(url, publish):
    async def main():
        relay = Relay(url, publish)
        try:
            return await relay.publish_all()
        finally:
            await relay.close()

    return asyncio.run(main())


def test_events_are_published_once_and_in_order_of_each_key(url):
    """E5."""
    emitted(url, ("a", b"1"), ("b", b"2"), ("a", b"3"), ("", b"4"))
    events = []
    assert relayed(url, published_to(events)) == 4
    assert relayed(url, published_to(events)) == 0
    assert [event.body for event in events if event.key == "a"] == [b"1", b"3"]
    assert sorted(event.body for event in events) == [b"1", b"2", b"3", b"4"]


def test_an_event_that_fails_holds_back_only_those_of_its_key(url, caplog):
    emitted(url, ("a", b"1"), ("a", b"2"), ("b", b"3"))
    events = []
    publish = published_to(events, fails=[b"1"])
    assert relayed(url, publish) == 0  # not everything was published
    assert [event.body for event in events] == [b"3"]
    assert "could not be published, and is tried again" in caplog.text
    assert relayed(url, publish) == 2
    assert [event.body for event in events] == [b"3", b"1", b"2"]


def test_an_event_that_is_published_again_has_the_same_id(url, monkeypatch):
    emitted(url, ("a", b"1"))
    events = []

    async def publish_and_die():
        relay = Relay(url, published_to(events))
        table = await relay._events()
        monkeypatch.setattr(table, "delete", lambda numbers: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await relay.publish_all()
        await relay.close()

    asyncio.run(publish_and_die())
    relayed(url, published_to(events))
    first, second = events
    assert first == second


def test_of_two_relays_one_publishes_and_the_other_takes_over(url):
    emitted(url, ("a", b"1"))

    async def main():
        first, second = [], []
        stop_first, stop_second = asyncio.Event(), asyncio.Event()
        one = asyncio.create_task(Relay(url, published_to(first)).run(stop_first))
        await until(lambda: first)
        other = asyncio.create_task(Relay(url, published_to(second)).run(stop_second))
        await asyncio.to_thread(emit_more, url, "2")
        await until(lambda: len(first) == 2)
        stop_first.set()
        await asyncio.wait_for(one, 20)
        await asyncio.to_thread(emit_more, url, "3")
        await until(lambda: second)
        stop_second.set()
        await asyncio.wait_for(other, 20)
        return len(first), len(second)

    assert asyncio.run(main()) == (2, 1)


def emit_more(url, key):
    with Engine(url) as engine:
        engine.transaction(
            key, lambda: current_operation().emit("orders", key.encode()), scope="more"
        )


async def until(is_true):
    await asyncio.to_thread(eventually, is_true)


def test_a_function_that_is_not_async_cannot_publish(url):
    with pytest.raises(Misconfigured, match="async"):
        Relay(url, lambda event: None)


def test_an_emitted_event_goes_through_rabbitmq_to_a_handler_once(url, tmp_path):
    """E5: from the transaction of one service to the inbox of another."""
    emitted(url, ("order-7", {"order": 7}))
    name = rabbitmq_server().fresh_name()
    seen = []

    async def main():
        connection = await aio_pika.connect(rabbitmq_server().url)
        stop = asyncio.Event()
        async with connection, Inbox(f"sqlite:///{tmp_path}/other.db", consumer="mail") as inbox:
            channel = await connection.channel()
            queue = await channel.declare_queue(name, durable=True)
            exchange = await channel.declare_exchange(f"{name}-x", durable=True)
            publish = rabbitmq.publisher(exchange)
            relay = Relay(url, publish)
            assert await relay.publish_all() == 0  # no queue takes it yet, so that it stays
            await queue.bind(exchange, "orders")
            assert await relay.publish_all() == 1
            await relay.close()

            @inbox.handler()
            async def on_order(message):
                seen.append(message)
                stop.set()

            await rabbitmq.consume(queue, on_order, stop=stop)

    asyncio.run(asyncio.wait_for(main(), 30))
    (message,) = seen
    assert message.json() == {"order": 7}
    assert message.content_type == "application/json"
    assert message.message_id


def run_until(relay, is_done):
    """Run *relay* until *is_done*; fails if it ends by itself."""

    async def main():
        stop = asyncio.Event()
        running = asyncio.create_task(relay().run(stop))
        await until(lambda: is_done() or running.done())
        assert is_done()
        stop.set()
        await asyncio.wait_for(running, 20)

    asyncio.run(main())


def test_a_relay_goes_on_after_its_database_was_down(url, monkeypatch, caplog):
    """E5: the errors of a driver are not ours, and there are many kinds of them."""
    emitted(url, ("a", b"1"))
    monkeypatch.setattr(relay_module, "PAUSE_S", 0.05)
    events, failures = [], [sqlite3.OperationalError("database is locked"), OSError("no route")]
    read = EventTable.read

    def fail_first(table, *args):
        if failures:
            raise failures.pop()
        return read(table, *args)

    monkeypatch.setattr(EventTable, "read", fail_first)
    run_until(lambda: Relay(url, published_to(events)), lambda: events)
    assert "events are not published now: OSError" in caplog.text


def test_a_broker_that_never_confirms_does_not_stop_the_relay(url, monkeypatch):
    emitted(url, ("a", b"1"))
    monkeypatch.setattr(relay_module, "PAUSE_S", 0.05)
    monkeypatch.setattr(relay_module, "PUBLISH_S", 0.05)
    tries = []

    async def publish(event):
        tries.append(event)
        if len(tries) < 3:
            await asyncio.Event().wait()

    run_until(lambda: Relay(url, publish), lambda: len(tries) == 3)


def test_events_that_cannot_be_published_do_not_keep_others_from_being_published(url, monkeypatch):
    """E5: also if there are more of them than the relay reads at a time, and in order of keys."""
    monkeypatch.setattr(relay_module, "BATCH", 2)
    monkeypatch.setattr(relay_module, "PAUSE_S", 0.05)
    bad = [("", b"bad"), ("a", b"bad"), ("", b"bad"), ("", b"bad")]
    emitted(url, *bad, ("a", b"after a bad one"), ("b", b"1"), ("b", b"2"))
    events = []

    async def publish(event):
        if event.body == b"bad":
            raise ConnectionError("no queue takes it")
        events.append(event.body)

    run_until(lambda: Relay(url, publish), lambda: len(events) == 2)
    assert events == [b"1", b"2"]


def test_an_event_whose_transaction_committed_late_comes_before_the_next_one_of_its_key(
    url, monkeypatch
):
    """E5: it has a lower number, which the relay has passed; here it is taken out and put back."""
    monkeypatch.setattr(relay_module, "BATCH", 2)
    monkeypatch.setattr(relay_module, "PAUSE_S", 0.05)
    emitted(url, ("", b"bad"), ("a", b"1"), ("", b"bad"), ("a", b"2"))
    database = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=20)
    take, put = (
        "select event from coatcheck_events where n = 2",
        "insert into coatcheck_events values",
    )
    late = [database.execute(take).fetchone()]
    database.execute("delete from coatcheck_events where n = 2")
    events = []

    async def publish(event):
        if event.body == b"bad":
            if late:
                database.execute(f"{put} (2, ?)", late.pop())
            raise ConnectionError("no queue takes it")
        events.append(event.body)

    run_until(lambda: Relay(url, publish), lambda: len(events) == 2)
    assert events == [b"1", b"2"]
