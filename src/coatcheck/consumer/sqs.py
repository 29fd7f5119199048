"""SQS, with boto3: a message is deleted after its record is completed.

    queue = boto3.resource("sqs").get_queue_by_name(QueueName="payments")
    await consume(queue, on_paid)

While a handler runs, the visibility timeout of its message is renewed. In a FIFO queue, the
messages of a group are handled in their order. Calls of boto3 run in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from coatcheck.consumer import Acknowledge, Redeliver
from coatcheck.consumer.inbox import Handler
from coatcheck.consumer.message import CONSUMER, MESSAGE_ID, REASON, Headers, Message
from coatcheck.consumer.running import CONCURRENCY, Running, extending
from coatcheck.consumer.sqs_client import BATCH_MAX, SqsClient
from coatcheck.errors import Misconfigured, MissingExtra

try:
    from botocore.exceptions import BotoCoreError, ClientError
except ImportError as error:
    raise MissingExtra("sqs", "boto3") from error

__all__ = ["consume"]

logger = logging.getLogger("coatcheck")

ERRORS = (BotoCoreError, ClientError)
# A limit of SQS: attributes of a message.
ATTRIBUTES_MAX = 10
# 5 s: how long SQS waits for messages; a consumer takes as long to stop. SQS allows 20 s.
WAIT_S = 5
# 1 s: how often an unreachable SQS is asked.
RETRY_S = 1.0


async def consume(
    queue: Any,  # noqa: ANN401 - boto3 makes its classes when it runs
    handler: Handler[..., Any],
    *,
    stop: asyncio.Event | None = None,
    concurrency: int = CONCURRENCY,
    dead_letter_queue: Any = None,  # noqa: ANN401 - as above
    wait_s: int = WAIT_S,
) -> None:
    """
    Handle the messages of *queue* until *stop* is set.

    Then it waits for the handlers that run, and returns. While SQS cannot be reached, it tries
    again every second.

    Args:
        queue: a `Queue` of `boto3.resource("sqs")`, standard or FIFO.
        handler: what `Inbox.handler` made.
        concurrency: how many messages are handled at one time; more are not received either.
        dead_letter_queue: the queue for messages that cannot be handled, each with its reason in
            the attribute `x-coatcheck-reason`; without it that of the queue's redrive policy.
        wait_s: how long one call waits for messages; up to 20 s. A consumer takes as long to stop.
    """
    with ThreadPoolExecutor(concurrency + 2, "coatcheck-sqs") as threads:
        client = SqsClient(queue, threads)
        attributes = await client.attributes()
        if attributes["VisibilityTimeout"] == "0":
            raise Misconfigured(
                f"the queue {attributes['QueueArn']} has a visibility timeout of 0: SQS would "
                "deliver each message again while it is handled; the default is 30 s"
            )
        letters_url = await client.dead_letters_url(attributes, dead_letter_queue)
        if "MessageRetentionPeriod" in attributes:  # not all servers of this interface have it
            kept_s = int(attributes["MessageRetentionPeriod"])
            handler.inbox.check_window(kept_s, f"the queue {attributes['QueueArn']}")
        consumer = _Consumer(client, handler, attributes, letters_url)
        async with Running(stop, concurrency=concurrency) as running:
            while not running.stop.is_set():
                count = min(BATCH_MAX, await running.room())
                try:
                    natives = await client.receive(count, wait_s)
                except ERRORS as error:
                    logger.warning("coatcheck: SQS cannot be read from: %s", error)
                    await running.pause(RETRY_S)
                    continue
                for group in _groups_of(natives):
                    await running.start(consumer.deliver(group))


def _groups_of(natives: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The messages of each group of a FIFO queue, in their order; others are alone."""
    groups: dict[object, list[dict[str, Any]]] = {}
    for number, native in enumerate(natives):
        groups.setdefault(native["Attributes"].get("MessageGroupId", number), []).append(native)
    return list(groups.values())


class _Consumer:
    """Handles the messages of one queue."""

    def __init__(
        self,
        client: SqsClient,
        handler: Handler[..., Any],
        attributes: dict[str, str],
        letters_url: str,
    ) -> None:
        self._client = client
        self._handler = handler
        self._letters_url = letters_url
        self._name = attributes["QueueArn"].rpartition(":")[2]
        self._visibility_s = int(attributes["VisibilityTimeout"])
        self._is_id_of_content = attributes.get("ContentBasedDeduplication") == "true"

    async def deliver(self, natives: Sequence[dict[str, Any]]) -> None:
        """Handle messages one after the other, and answer to SQS."""
        left = list(natives)

        async def extend() -> None:
            # With the messages that wait here for the earlier ones of their group.
            await self._client.hide(left, self._visibility_s)

        try:
            async with extending(extend, self._visibility_s):
                again = None
                while left and (again := await self._handle(left[0])) is None:
                    await self._client.delete(left[0])
                    left.pop(0)
            if again is not None:
                await self._client.hide(left[:1], again.after_s)
                if left[1:]:  # later messages of the group wait for this one
                    await self._client.hide(left[1:], 0)
        except ERRORS as error:
            # SQS delivers them again, and their records say whether they are handled.
            logger.info("coatcheck: a message could not be deleted: %s", error)

    async def _handle(self, native: dict[str, Any]) -> Redeliver | None:
        """Handle one message; returns when SQS is to deliver it again, or None: never."""
        message = message_of(native, self._name, is_id_of_content=self._is_id_of_content)
        action = await self._handler.handle(message)
        if isinstance(action, Redeliver):
            return action
        if not isinstance(action, Acknowledge):
            await self._keep_dead_letter(native, action.reason)
        return None

    async def _keep_dead_letter(self, native: dict[str, Any], reason: str) -> None:
        """Send the message to the dead letters."""
        added = {REASON: reason, CONSUMER: self._handler.label}
        given = dict(native.get("MessageAttributes", {}))
        left = dict(list(given.items())[: ATTRIBUTES_MAX - len(added)])
        texts = {k: {"DataType": "String", "StringValue": v} for k, v in added.items()}
        of_fifo = {}
        if self._letters_url.endswith(".fifo"):
            of_fifo = {
                "MessageGroupId": native["Attributes"].get("MessageGroupId", self._name),
                # A second copy, made after a crash, is dropped.
                "MessageDeduplicationId": native["MessageId"],
            }
        await self._client.send(
            self._letters_url,
            MessageBody=native["Body"],
            MessageAttributes={**left, **texts},
            **of_fifo,
        )


def message_of(native: dict[str, Any], source: str, *, is_id_of_content: bool = False) -> Message:
    """The message of boto3 as a handler gets it."""
    pairs = [
        (name, one.get("StringValue", one.get("BinaryValue")))
        for name, one in native.get("MessageAttributes", {}).items()
    ]
    headers = Headers(pairs)
    attributes = native["Attributes"]
    # An id that SQS made of the content is the same for all events with this content.
    own_id = "" if is_id_of_content else attributes.get("MessageDeduplicationId", "")
    return Message(
        native["Body"].encode(),
        headers,
        source=source,
        message_id=headers.get(MESSAGE_ID, own_id),
        delivery_id=native["MessageId"],
        deliveries=int(attributes.get("ApproximateReceiveCount", 1)),
        native=native,
    )
