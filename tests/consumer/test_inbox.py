"""The inbox: an event has its effect once, and a message is acknowledged after its record (E1)."""

from __future__ import annotations

import asyncio
import sqlite3
import threading

import pytest

from coatcheck import Misconfigured, Uncertain, current_operation
from coatcheck.consumer import (
    Acknowledge,
    DeadLetter,
    Headers,
    Inbox,
    Message,
    Redeliver,
    Reject,
    event_ids,
)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/inbox.db"


@pytest.fixture
def inbox(url):
    with Inbox(url, consumer="billing", attempts_max=3) as inbox:
        yield inbox


@pytest.fixture(params=["sync", "async"])
def handled(request, inbox):
    """Makes a handler of a function of the message, sync or async; what it returns is called."""
    stop = []

    def make(function, **settings):
        if request.param == "sync":

            def on_message_in_thread(message):
                function(message)

            return inbox.handler(name="handler", **settings)(on_message_in_thread).handle_blocking

        async def on_message(message):
            return function(message)

        handler = inbox.handler(name="handler", **settings)(on_message)
        loop = asyncio.new_event_loop()
        stop.append(loop)
        return lambda message: loop.run_until_complete(handler.handle(message))

    yield make
    for loop in stop:
        loop.run_until_complete(inbox.aclose())
        loop.close()


def message(id="event-1", body=b'{"order": 7}', **more):
    return Message(body, message_id=id, source="orders", **more)


def test_a_message_that_is_delivered_twice_is_handled_once(handled):
    """E1: and it is acknowledged each time, after its record is completed."""
    seen = []
    handle = handled(seen.append)
    assert handle(message()) == Acknowledge()
    assert handle(message()) == Acknowledge(is_duplicate=True)
    assert handle(message("event-2")) == Acknowledge()
    assert [one.message_id for one in seen] == ["event-1", "event-2"]


def test_a_message_whose_handler_fails_is_not_marked_as_handled(handled):
    failures = [ValueError(), ValueError()]

    def fail_twice(_message):
        if failures:
            raise failures.pop()

    handle = handled(fail_twice)
    assert isinstance(handle(message()), Redeliver)
    assert isinstance(handle(message()), Redeliver)
    assert handle(message()) == Acknowledge()
    assert handle(message()) == Acknowledge(is_duplicate=True)


def test_a_message_that_keeps_failing_becomes_a_dead_letter_with_the_reason(handled, caplog):
    def fail(_message):
        raise KeyError("price")

    handle = handled(fail)
    actions = [handle(message()) for _ in range(4)]
    assert [type(action) for action in actions[:2]] == [Redeliver, Redeliver]
    assert [action.after_s for action in actions[:2]] == [1, 2]
    assert isinstance(actions[2], DeadLetter)
    assert "KeyError in attempt 3" in actions[2].reason
    assert isinstance(actions[3], DeadLetter)  # it is not run once more
    assert "all 3 attempts have failed" in actions[3].reason
    assert "Traceback" in caplog.text


def test_the_same_id_with_another_payload_becomes_a_dead_letter(handled):
    seen = []
    handle = handled(seen.append)
    handle(message())
    action = handle(message(body=b'{"order": 8}'))
    assert isinstance(action, DeadLetter)
    assert "another payload" in action.reason
    assert len(seen) == 1


def test_json_payloads_are_compared_by_value(handled):
    handle = handled(lambda _: None)
    as_json = Headers([("Content-Type", "application/json")])
    handle(message(body=b'{"a": 1, "b": 2}', headers=as_json))
    again = handle(message(body=b'{"b":2,"a":1}', headers=as_json))
    assert again == Acknowledge(is_duplicate=True)


def test_a_message_without_an_id_becomes_a_dead_letter_and_is_not_handled(handled, caplog):
    seen = []
    handle = handled(seen.append)
    action = handle(message(""))
    assert isinstance(action, DeadLetter)
    assert "no event id" in action.reason
    assert "no event id" in caplog.text
    assert seen == []


def test_a_missing_header_is_named_as_the_reason(handled):
    handle = handled(lambda _: None, event_id=event_ids.header("message-id"))
    action = handle(message())
    assert isinstance(action, DeadLetter)
    assert "message-id" in action.reason


def test_a_rejected_message_becomes_a_dead_letter_at_once(handled):
    def reject(_message):
        raise Reject("no such customer")

    action = handled(reject)(message())
    assert action == DeadLetter("the handler rejected it: no such customer")


def test_a_message_whose_effect_is_not_known_becomes_a_dead_letter_and_stays_one(handled):
    seen = []

    def charge(one):
        seen.append(one)
        raise Uncertain("the gateway timed out")

    handle = handled(charge)
    first, second = handle(message()), handle(message())
    assert isinstance(first, DeadLetter)
    assert "not known" in first.reason
    assert isinstance(second, DeadLetter)
    assert len(seen) == 1


def test_a_message_that_another_worker_handles_is_delivered_again_later(url):
    running, may_end = threading.Event(), threading.Event()

    def wait(_message):
        running.set()
        assert may_end.wait(30)

    with Inbox(url, consumer="billing") as one, Inbox(url, consumer="billing") as other:
        first = one.handler(name="h")(wait)
        second = other.handler(name="h")(wait)
        thread = threading.Thread(target=first.handle_blocking, args=(message(),))
        thread.start()
        assert running.wait(30)
        action = second.handle_blocking(message())
        assert isinstance(action, Redeliver)
        assert action.after_s >= 1
        may_end.set()
        thread.join()
        assert second.handle_blocking(message()) == Acknowledge(is_duplicate=True)


def test_consumers_and_handlers_of_other_names_handle_the_same_event_each(url):
    seen = []
    with Inbox(url, consumer="billing") as billing, Inbox(url, consumer="mail") as mail:
        for inbox, name in ((billing, "a"), (billing, "b"), (mail, "a")):
            inbox.handler(name=name)(lambda m: bool(seen.append(m))).handle_blocking(message())
    assert len(seen) == 3


def test_two_handlers_of_one_name_are_refused(inbox):
    inbox.handler(name="on_paid")(lambda message: None)
    with pytest.raises(Misconfigured, match="already"):
        inbox.handler(name="on_paid")(lambda message: None)


def test_a_handler_gets_its_operation_if_it_has_a_parameter_for_it(inbox):
    derived = []

    @inbox.handler()
    def on_paid(message, operation):
        assert operation is current_operation()
        derived.append(operation.derive("refund"))

    on_paid.handle_blocking(message())
    assert len(derived) == 1


@pytest.mark.parametrize("function", [lambda: None, lambda a, b, c: None])
def test_a_function_with_another_number_of_parameters_is_refused(inbox, function):
    with pytest.raises(Misconfigured, match="a handler takes the message"):
        inbox.handler(name="odd")(function)


def test_a_handler_that_is_called_directly_is_the_function_itself(inbox):
    @inbox.handler()
    def on_paid(message):
        return message.json()["order"]

    assert on_paid(message()) == 7


def test_a_sync_handler_runs_in_a_thread_of_an_async_consumer(inbox):
    threads = []
    handler = inbox.handler(name="sync")(lambda _: threads.append(threading.current_thread()))
    assert asyncio.run(handler.handle(message())) == Acknowledge()
    assert threads != [threading.main_thread()]


def test_an_async_handler_is_not_handled_by_sync_code(inbox):
    @inbox.handler()
    async def on_paid(message): ...

    with pytest.raises(Misconfigured, match="await"):
        on_paid.handle_blocking(message())


def test_a_store_that_is_down_keeps_every_message_with_the_broker(handled, inbox, monkeypatch):
    handle = handled(lambda _: pytest.fail("it ran"))
    monkeypatch.setattr(inbox, "_store", "postgresql://127.0.0.1:1/nothing?connect_timeout=1")
    action = handle(message())
    assert isinstance(action, Redeliver)
    assert "store is unavailable" in action.reason


def paid(path):
    with sqlite3.connect(path) as connection:
        return connection.execute("select id from paid").fetchall()


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "inbox.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table paid (id text)")
    return path


def test_in_transaction_mode_the_marker_and_the_effect_commit_together(inbox, ledger):
    failures = [ValueError()]

    @inbox.handler(mode="transaction")
    def pay(message, operation):
        operation.connection.execute("insert into paid values (?)", (message.message_id,))
        if failures:
            raise failures.pop()

    assert isinstance(pay.handle_blocking(message()), Redeliver)
    assert paid(ledger) == []
    assert pay.handle_blocking(message()) == Acknowledge()
    assert pay.handle_blocking(message()) == Acknowledge(is_duplicate=True)
    assert paid(ledger) == [("event-1",)]


def test_in_transaction_mode_an_async_handler_writes_on_an_async_connection(url, ledger):
    async def main():
        async with Inbox(url, consumer="billing") as inbox:

            @inbox.handler(mode="transaction")
            async def pay(message, operation):
                await operation.connection.execute("insert into paid values (?)", ("a",))

            return [await pay.handle(message()) for _ in range(2)]

    assert asyncio.run(main()) == [Acknowledge(), Acknowledge(is_duplicate=True)]
    assert paid(ledger) == [("a",)]


def test_in_transaction_mode_attempts_are_counted_although_nothing_is_stored(inbox, ledger):
    @inbox.handler(mode="transaction", name="counted")
    def fail(_message):
        raise ValueError

    actions = [fail.handle_blocking(message()) for _ in range(3)]
    assert [type(action) for action in actions] == [Redeliver, Redeliver, DeadLetter]
    # Another process has failed before: the broker has counted that.
    redelivered = fail.handle_blocking(message("event-2", deliveries=3))
    assert isinstance(redelivered, DeadLetter)


def test_a_window_that_is_shorter_than_the_broker_keeps_messages_is_warned_of(inbox, caplog):
    inbox.check_window("7d", "the queue orders")
    assert caplog.text == ""
    inbox.check_window("14d", "the queue orders")
    assert "the queue orders keeps messages for 14d" in caplog.text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"consumer": ""}, "consumer="),
        ({"consumer": "a", "store": 7}, "URL"),
        ({"consumer": "a", "backoff": "soon"}, "backoff"),
        ({"consumer": "a", "backoff": 0}, "longer than zero"),
        ({"consumer": "a", "window": "1ms"}, "window"),
    ],
)
def test_wrong_settings_are_refused_when_the_inbox_is_made(settings, reason, url):
    with pytest.raises(Misconfigured, match=reason):
        Inbox(**{"store": url, **settings})


def test_a_handler_that_awaits_something_cancelled_has_failed_and_gets_the_message_again(handled):
    """Without an answer, the broker would never deliver the message again."""
    failures = [asyncio.CancelledError()]

    def fail_once(_message):
        if failures:
            raise failures.pop()

    handle = handled(fail_once)
    action = handle(message())
    assert isinstance(action, Redeliver)
    assert "raised AwaitedCancelled in attempt 1" in action.reason
    assert handle(message()) == Acknowledge()


def test_a_consumer_that_is_cancelled_still_cancels_its_async_handler(url):
    async def main():
        async with Inbox(url, consumer="billing") as inbox:
            started, ended = asyncio.Event(), []

            @inbox.handler()
            async def on_paid(_message):
                started.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append(True)

            handling = asyncio.create_task(on_paid.handle(message()))
            await started.wait()
            handling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await handling
            return ended

    assert asyncio.run(main()) == [True]


def test_a_sync_handler_that_runs_when_its_consumer_is_cancelled_has_its_effect_once(url):
    """The inbox is closed right afterwards, and the record must be completed before that."""
    effects = []

    async def main(started, may_end):
        async with Inbox(url, consumer="billing") as inbox:

            @inbox.handler(name="on_paid")
            def on_paid(_message):
                started.set()
                assert may_end.wait(10)
                effects.append("paid")

            handling = asyncio.create_task(on_paid.handle(message()))
            await asyncio.to_thread(started.wait, 10)
            handling.cancel()
            asyncio.get_running_loop().call_later(0.1, may_end.set)
            with pytest.raises(asyncio.CancelledError):
                await handling

    asyncio.run(main(threading.Event(), threading.Event()))
    with Inbox(url, consumer="billing") as inbox:
        again = inbox.handler(name="on_paid")(lambda _message: effects.append("paid"))
        assert again.handle_blocking(message()) == Acknowledge(is_duplicate=True)
    assert effects == ["paid"]
