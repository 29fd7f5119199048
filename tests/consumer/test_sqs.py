"""SQS: what is deleted, what comes again, what becomes a dead letter, and order in groups (E1)."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest

from coatcheck import Misconfigured
from coatcheck.consumer import Inbox
from coatcheck.consumer.message import REASON
from coatcheck.consumer.sqs import consume
from coatcheck.consumer.sqs_client import BATCH_MAX
from tests.consumer.failing import BEHIND_POISON, fail, failing_for_poison, failing_once
from tests.consumer.law import Source
from tests.consumer.waits import arrived, until
from tests.support.servers.sqs import JARS, sqs


def published(queue, events):
    """Send events; in a FIFO queue the group of an event is the first letter of its id."""
    for first in range(0, len(events), BATCH_MAX):
        entries = [
            entry_of(queue, number, *event)
            for number, event in enumerate(events[first : first + BATCH_MAX])
        ]
        sent = queue.send_messages(Entries=entries)
        assert not sent.get("Failed"), sent


def entry_of(queue, number, id, body):
    entry = {"Id": str(number), "MessageBody": body.decode()}
    if id:
        entry["MessageAttributes"] = {"message-id": {"DataType": "String", "StringValue": id}}
    if queue.url.endswith(".fifo"):
        entry["MessageGroupId"] = id[:1] or "none"
        entry["MessageDeduplicationId"] = f"{time.monotonic_ns()}-{number}"
    return entry


class Site:
    """A queue, its consumer in a task, and its dead letters."""

    def __init__(self, queue, letters):
        self.queue = queue
        self.letters = letters
        self.stop = asyncio.Event()

    async def publish(self, *events):
        await asyncio.to_thread(published, self.queue, events)

    async def dead_letter(self):
        def look():
            return self.letters.receive_messages(
                MessageAttributeNames=["All"], AttributeNames=["All"]
            )

        (letter,) = await until(lambda: asyncio.to_thread(look))
        return letter

    async def is_settled(self):
        """The queue is empty."""

        def is_empty():
            self.queue.load()
            found = self.queue.attributes
            names = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
            return all(found[name] == "0" for name in names)

        await until(lambda: asyncio.to_thread(is_empty))


@asynccontextmanager
async def consuming(function, tmp_path, *, queues=None, options=None, **settings):
    """A consumer of a fresh queue, which is stopped at the end."""
    url = f"sqlite:///{tmp_path}/inbox.db"
    async with Inbox(url, consumer="c", **settings) as inbox:
        site = Site(*(queues or sqs().fresh_queues()))
        handler = inbox.handler(name="h", **(options or {}))(function)
        task = asyncio.create_task(consume(site.queue, handler, stop=site.stop, wait_s=1))
        try:
            yield site
        finally:
            site.stop.set()
            await asyncio.wait_for(task, 20)


@pytest.mark.parametrize("is_fifo", [False, True], ids=["standard", "fifo"])
def test_a_message_is_handled_once_and_deleted(tmp_path, is_fifo):
    seen = []

    async def main():
        async def on_message(message):
            seen.append((message.message_id, message.body, message.deliveries))

        queues = sqs().fresh_queues(is_fifo=is_fifo)
        async with consuming(on_message, tmp_path, queues=queues) as site:
            await site.publish(("a", b"1"), ("a", b"1"), ("b", b"2"))
            await arrived(seen, 2)
            await site.is_settled()

    asyncio.run(main())
    assert sorted(seen) == [("a", b"1", 1), ("b", b"2", 1)]


def test_the_deduplication_id_of_a_fifo_queue_is_the_event_id(tmp_path):
    """Not one that SQS made of the content, which is the same for many events."""
    ids = []

    async def main(**attributes):
        async def on_message(message):
            ids.append(message.message_id)

        queues = sqs().fresh_queues(is_fifo=True, **attributes)
        options = {"event_id": lambda message: message.delivery_id}
        async with consuming(on_message, tmp_path, queues=queues, options=options) as site:
            own = {} if attributes else {"MessageDeduplicationId": "paid-17"}
            site.queue.send_message(MessageBody="1", MessageGroupId="g", **own)
            await site.is_settled()

    asyncio.run(main())
    asyncio.run(main(ContentBasedDeduplication="true"))
    assert ids == ["paid-17", ""]


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


def test_later_messages_of_a_group_wait_for_the_one_that_failed(tmp_path):
    seen = []

    async def main():
        async def fail_once(message):
            seen.append(message.message_id)
            if seen.count("a1") == 1 and message.message_id == "a1":
                raise ValueError

        queues = sqs().fresh_queues(is_fifo=True)
        await asyncio.to_thread(
            published, queues[0], [("a1", b"1"), ("a2", b"2"), ("b1", b"3"), ("a3", b"4")]
        )
        async with consuming(fail_once, tmp_path, queues=queues, backoff="10ms") as site:
            await site.is_settled()

    asyncio.run(main())
    assert [one for one in seen if one.startswith("a")] == ["a1", "a1", "a2", "a3"]
    assert seen.count("b1") == 1


@pytest.mark.parametrize("is_fifo", [False, True], ids=["standard", "fifo"])
@pytest.mark.parametrize(("id", "reason"), [("a", "ValueError in attempt 1"), ("", "no event id")])
def test_a_message_that_cannot_be_handled_is_kept_with_its_reason(tmp_path, is_fifo, id, reason):
    async def main():
        queues = sqs().fresh_queues(is_fifo=is_fifo)
        options = {} if id else {"event_id": lambda message: ""}
        async with consuming(
            fail, tmp_path, queues=queues, options=options, attempts_max=1
        ) as site:
            await site.publish((id, b"poison"))
            letter = await site.dead_letter()
            assert letter.body == "poison"
            assert reason in letter.message_attributes[REASON]["StringValue"]
            assert ("message-id" in letter.message_attributes) == bool(id)
            await site.is_settled()

    asyncio.run(main())


def test_a_dead_letter_with_as_many_attributes_as_sqs_allows_has_its_reason(tmp_path):
    async def main():
        options = {"event_id": lambda message: "a"}
        async with consuming(fail, tmp_path, options=options, attempts_max=1) as site:
            many = {f"n{i}": {"DataType": "String", "StringValue": "v"} for i in range(10)}
            site.queue.send_message(MessageBody="1", MessageAttributes=many)
            letter = await site.dead_letter()
            assert "ValueError" in letter.message_attributes[REASON]["StringValue"]
            assert len(letter.message_attributes) == 10

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["record", "transaction"])
def test_a_handler_that_takes_longer_than_the_visibility_timeout_keeps_its_message(tmp_path, mode):
    seen = []

    async def main():
        may_end = asyncio.Event()

        async def wait(message):
            seen.append(message.deliveries)
            await may_end.wait()

        queues = sqs().fresh_queues(VisibilityTimeout="1")
        options = {"mode": mode}
        async with consuming(wait, tmp_path, queues=queues, options=options) as site:
            await site.publish(("a", b"1"))
            await arrived(seen, 1)
            deadline = time.monotonic() + 2.2  # SQS would have delivered again twice

            async def is_over():
                return time.monotonic() > deadline

            def received():
                return site.queue.receive_messages(WaitTimeSeconds=0)

            while not await is_over():
                assert await asyncio.to_thread(received) == []
            may_end.set()
            await site.is_settled()

    asyncio.run(main())
    assert seen == [1]


def test_messages_of_a_group_that_wait_for_earlier_ones_are_kept(tmp_path):
    """Another consumer would else handle a later message of the group before an earlier one."""
    seen, of_others = [], []

    async def main():
        queues = sqs().fresh_queues(is_fifo=True, VisibilityTimeout="2")

        def receive():
            return queues[0].receive_messages(WaitTimeSeconds=1)

        async def take_a_second(message):
            of_others.extend(await asyncio.to_thread(receive))
            seen.append((message.message_id, message.deliveries))

        ids = ["a1", "a2", "a3", "a4"]
        await asyncio.to_thread(published, queues[0], [(id, b"1") for id in ids])
        async with consuming(take_a_second, tmp_path, queues=queues) as site:
            await arrived(seen, 4)
            await site.is_settled()

    asyncio.run(main())
    assert of_others == []
    assert seen == [("a1", 1), ("a2", 1), ("a3", 1), ("a4", 1)]


def test_a_message_whose_deletion_fails_comes_again_and_is_a_duplicate(tmp_path):
    seen, failures = [], []

    async def main():
        async def on_message(message):
            seen.append(message.deliveries)

        queues = sqs().fresh_queues(VisibilityTimeout="1")
        client = queues[0].meta.client
        delete = client.delete_message_batch

        def fail_once(**arguments):
            if failures:
                return delete(**arguments)
            failures.append(arguments)
            return {"Failed": [{"Id": "0", "Message": "try again"}]}

        with patch.object(client, "delete_message_batch", fail_once):
            async with consuming(on_message, tmp_path, queues=queues) as site:
                await site.publish(("a", b"1"))
                await site.is_settled()

    asyncio.run(main())
    assert len(failures) == 1
    assert seen == [1]


def refused(tmp_path, queue, **settings):
    async def main():
        with Inbox(f"sqlite:///{tmp_path}/inbox.db", consumer="c") as inbox:
            stop = asyncio.Event()
            stop.set()
            handler = inbox.handler(name="h")(lambda message: None)
            await consume(queue, handler, stop=stop, **settings)

    asyncio.run(main())


def test_a_queue_without_a_queue_for_dead_letters_is_refused(tmp_path):
    _, letters = sqs().fresh_queues()
    with pytest.raises(Misconfigured, match="redrive policy"):
        refused(tmp_path, letters)
    refused(tmp_path, letters, dead_letter_queue=sqs().fresh_queues()[0])


def test_a_queue_that_delivers_a_message_again_while_it_is_handled_is_refused(tmp_path):
    queue, _ = sqs().fresh_queues(VisibilityTimeout="0")
    with pytest.raises(Misconfigured, match="visibility timeout of 0"):
        refused(tmp_path, queue)


if not JARS:  # ElasticMQ keeps messages for ever

    def test_a_queue_that_keeps_messages_for_longer_than_duplicates_are_known_is_warned_of(
        tmp_path, caplog
    ):
        queue, _ = sqs().fresh_queues(MessageRetentionPeriod="1209600")
        refused(tmp_path, queue)
        assert "keeps messages for 1209600" in caplog.text


def source():
    queue, letters = sqs().fresh_queues(VisibilityTimeout="1")
    return Source(
        "sqs",
        sqs().url,
        queue.url.rpartition("/")[2],
        lambda events: published(queue, events),
        WAITING_MAX,
        lambda: asyncio.run(Site(queue, letters).is_settled()),
    )


# moto looks at all messages of a queue for each that it sends or deletes: 5 000 at once take it
# longer than the law may. It also loses a message that it gets while it deletes another.
WAITING_MAX = 10_000 if JARS else 250
