"""NATS JetStream, with nats-py: a message is acknowledged after its record is completed.

    client = await nats.connect("nats://…")
    jetstream = client.jetstream()
    subscription = await jetstream.pull_subscribe("payments.*", durable="billing")
    await consume(subscription, on_paid)

While a handler runs, NATS is asked again and again to wait longer. A message that is to come again
later goes back to NATS with a delay.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from coatcheck.consumer import Acknowledge, Redeliver
from coatcheck.consumer.inbox import Handler
from coatcheck.consumer.message import CONSUMER, REASON, Headers, Message
from coatcheck.consumer.running import CONCURRENCY, Running, extending
from coatcheck.errors import Misconfigured, MissingExtra

try:
    from nats.aio.msg import Msg
    from nats.errors import TimeoutError as NatsTimeoutError
    from nats.js.api import AckPolicy, ConsumerInfo
    from nats.js.client import JetStreamContext
    from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError
except ImportError as error:
    raise MissingExtra("nats", "nats-py") from error

__all__ = ["consume"]

logger = logging.getLogger("coatcheck")

MESSAGE_ID = "Nats-Msg-Id"
# 30 s: how long NATS waits for an acknowledgement, unless the consumer says it.
ACK_WAIT_S = 30.0
# 5 s: an idle consumer asks NATS that often.
FETCH_S = 5.0
# 1 s: how often a NATS that restarts is asked.
RETRY_S = 1.0


async def consume(
    subscription: JetStreamContext.PullSubscription,
    handler: Handler[..., Any],
    *,
    stop: asyncio.Event | None = None,
    concurrency: int = CONCURRENCY,
    dead_letters: str | None = None,
) -> None:
    """
    Handle the messages of *subscription* until *stop* is set.

    Then it waits for the handlers that run, and returns. nats-py connects again by itself; if it
    gives up, its error is raised.

    Args:
        subscription: what `pull_subscribe` of a JetStream context returned.
        handler: what `Inbox.handler` made.
        concurrency: how many messages are handled at one time; more are not fetched either.
        dead_letters: the subject for messages that cannot be handled, each with its reason in the
            header `x-coatcheck-reason`; without it `dead-letters.<name of the stream>`. A stream
            must store this subject.
    """
    # nats-py has no public way from a subscription to its context.
    context = subscription._js  # noqa: SLF001 - see above
    info = await subscription.consumer_info()
    subject = dead_letters or f"dead-letters.{info.stream_name}"
    _check_consumer(info)
    await _check_dead_letters(context, info, subject)
    stream = await context.stream_info(info.stream_name)
    if stream.config.max_age:
        handler.inbox.check_window(stream.config.max_age, f"the stream {info.stream_name}")
    consumer = _Consumer(handler, context, subject, info.config.ack_wait or ACK_WAIT_S)
    async with Running(stop, concurrency=concurrency) as running:
        while not running.stop.is_set():
            await running.room()
            native = await running.until_stopped(_next(subscription))
            if native is not None:
                await running.start(consumer.deliver(native))


async def _next(subscription: JetStreamContext.PullSubscription) -> Msg:
    while True:
        try:
            (native,) = await subscription.fetch(1, timeout=FETCH_S)
        except NatsTimeoutError:
            continue
        except APIError as error:
            if not _is_of_restart(error):
                raise
            logger.warning("coatcheck: NATS cannot be read from: %s", error)
            await asyncio.sleep(RETRY_S)
            continue
        return native


def _is_of_restart(error: APIError) -> bool:
    """A server of NATS restarts, or another one takes over: the consumer is there soon."""
    text = (error.description or "").lower()
    is_moved = any(word in text for word in ("leadership change", "server shutdown"))
    return isinstance(error, ServiceUnavailableError) or is_moved


def _check_consumer(info: ConsumerInfo) -> None:
    """Refuse settings with which NATS would drop messages that are not handled."""
    if info.config.ack_policy != AckPolicy.EXPLICIT:
        raise Misconfigured(
            f"the consumer {info.name} has the ack policy {info.config.ack_policy}; with another "
            "than 'explicit' NATS drops messages that are not handled"
        )
    if (info.config.max_deliver or -1) > 0:
        raise Misconfigured(
            f"the consumer {info.name} has max_deliver={info.config.max_deliver}: NATS would drop "
            "a message after that, with no dead letter; leave it out, and set attempts_max of Inbox"
        )


async def _check_dead_letters(context: JetStreamContext, info: ConsumerInfo, subject: str) -> None:
    try:
        stream = await context.find_stream_name_by_subject(subject)
    except NotFoundError:
        raise Misconfigured(
            f"no stream stores the subject {subject} for dead letters: add one, or give "
            "dead_letters= another subject"
        ) from None
    wanted = info.config.filter_subjects or [info.config.filter_subject or ">"]
    if stream == info.stream_name and any(_is_matched(subject, one) for one in wanted):
        raise Misconfigured(
            f"the consumer {info.name} would get its own dead letters from {subject}: store them "
            "in another stream, or give dead_letters= another subject"
        )


def _is_matched(subject: str, pattern: str) -> bool:
    """*pattern* has wildcards: `*` for one word, `>` for the rest."""
    words, wanted = subject.split("."), pattern.split(".")
    if wanted[-1] == ">":
        words, wanted = words[: len(wanted) - 1], wanted[:-1]
    pairs = zip(words, wanted, strict=False)
    return len(words) == len(wanted) and all(b in ("*", a) for a, b in pairs)


class _Consumer:
    """Handles the messages of one subscription."""

    def __init__(
        self,
        handler: Handler[..., Any],
        context: JetStreamContext,
        dead_letters: str,
        ack_wait_s: float,
    ) -> None:
        self._handler = handler
        self._ack_wait_s = ack_wait_s
        self._context = context
        self._dead_letters = dead_letters

    async def deliver(self, native: Msg) -> None:
        """Handle one message, and answer to NATS."""
        async with extending(native.in_progress, self._ack_wait_s):
            action = await self._handler.handle(message_of(native))
        if isinstance(action, Acknowledge):
            await native.ack()
        elif isinstance(action, Redeliver):
            await native.nak(delay=action.after_s)
        else:
            await self._keep_dead_letter(native, action.reason)
            await native.term()

    async def _keep_dead_letter(self, native: Msg, reason: str) -> None:
        """Publish the message to the dead letters, and wait until a stream has stored it."""
        message = message_of(native)
        headers = {
            **(native.headers or {}),
            # Its own id: a second copy, made after a crash, is dropped by the stream.
            MESSAGE_ID: f"{self._handler.label} {message.source} {message.delivery_id}",
            REASON: " ".join(reason.split()),
            CONSUMER: self._handler.label,
        }
        if message.message_id:
            headers["x-coatcheck-message-id"] = message.message_id
        await self._context.publish(self._dead_letters, native.data, headers=headers)


def message_of(native: Msg) -> Message:
    """The message of nats-py as a handler gets it."""
    headers = native.headers or {}
    metadata = native.metadata
    return Message(
        native.data,
        Headers(headers.items()),
        source=native.subject,
        message_id=headers.get(MESSAGE_ID, ""),
        delivery_id=f"{metadata.stream} {metadata.sequence.stream}",
        deliveries=metadata.num_delivered,
        native=native,
    )
