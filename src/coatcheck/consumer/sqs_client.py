"""The calls of boto3 for one queue of SQS. They run in threads."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from coatcheck.errors import Misconfigured

logger = logging.getLogger("coatcheck")

# Limits of SQS: messages in a batch, and the longest visibility timeout.
BATCH_MAX = 10
VISIBILITY_S_MAX = 43_200


class SqsClient:
    """The calls for one queue."""

    def __init__(self, queue: Any, threads: ThreadPoolExecutor) -> None:  # noqa: ANN401 - boto3 makes its classes when it runs
        self.url: str = queue.url
        self._client = queue.meta.client  # clients may be used in threads, resources may not
        self._threads = threads
        self._deletions: list[str] = []
        self._deleting = asyncio.Lock()

    async def _call(self, function: Callable[..., Any], **arguments: Any) -> Any:  # noqa: ANN401 - of boto3
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(**arguments))

    async def attributes(self) -> dict[str, str]:
        """The settings of the queue."""
        found = await self._call(
            self._client.get_queue_attributes, QueueUrl=self.url, AttributeNames=["All"]
        )
        return dict(found["Attributes"])

    async def dead_letters_url(self, attributes: dict[str, str], given: Any) -> str:  # noqa: ANN401 - of boto3
        """The URL of the queue for dead letters."""
        if given is not None:
            return str(given.url)
        policy = json.loads(attributes.get("RedrivePolicy", "{}"))
        if not policy.get("deadLetterTargetArn"):
            raise Misconfigured(
                f"the queue {attributes['QueueArn']} has no redrive policy, so its dead letters "
                "have no queue: set one, or give dead_letter_queue="
            )
        account, name = policy["deadLetterTargetArn"].split(":")[-2:]
        found = await self._call(
            self._client.get_queue_url, QueueName=name, QueueOwnerAWSAccountId=account
        )
        return str(found["QueueUrl"])

    async def receive(self, count: int, wait_s: int) -> list[dict[str, Any]]:
        """At most *count* messages."""
        found = await self._call(
            self._client.receive_message,
            QueueUrl=self.url,
            MaxNumberOfMessages=count,
            WaitTimeSeconds=wait_s,
            AttributeNames=["All"],
            MessageAttributeNames=["All"],
        )
        return list(found.get("Messages", ()))

    async def hide(self, natives: Sequence[dict[str, Any]], seconds: float) -> None:
        """Have SQS deliver messages again after this time."""
        entries = [
            {
                "Id": str(number),
                "ReceiptHandle": native["ReceiptHandle"],
                "VisibilityTimeout": min(math.ceil(seconds), VISIBILITY_S_MAX),
            }
            for number, native in enumerate(natives)
        ]
        function = self._client.change_message_visibility_batch
        _log_failures(await self._call(function, QueueUrl=self.url, Entries=entries), "hidden")

    async def delete(self, native: dict[str, Any]) -> None:
        """Delete a message; those that come while others are deleted go together."""
        self._deletions.append(native["ReceiptHandle"])
        async with self._deleting:
            batch, self._deletions = self._deletions[:BATCH_MAX], self._deletions[BATCH_MAX:]
            if not batch:  # it went with those before
                return
            entries = [{"Id": str(n), "ReceiptHandle": handle} for n, handle in enumerate(batch)]
            function = self._client.delete_message_batch
            _log_failures(await self._call(function, QueueUrl=self.url, Entries=entries), "deleted")

    async def send(self, url: str, **arguments: Any) -> None:
        """Send a message."""
        await self._call(self._client.send_message, QueueUrl=url, **arguments)


def _log_failures(response: dict[str, Any], what: str) -> None:
    """Log the part of a batch that has failed: these messages come again, and are duplicates."""
    for failure in response.get("Failed", ()):
        logger.info("coatcheck: a message could not be %s: %s", what, failure.get("Message"))
