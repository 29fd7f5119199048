"""RabbitMQ, with aio-pika: a message is acknowledged after its record is completed.

    connection = await aio_pika.connect_robust("amqp://…")
    channel = await connection.channel()
    queue = await channel.declare_queue("payments", durable=True)
    await rabbitmq.consume(queue, on_paid)

A message that is to come again later stays here, unacknowledged, and is handled again after its
pause: RabbitMQ itself would deliver it again at once, and a quorum queue drops a message that was
returned to it too often. Others are handled meanwhile. If this process dies, RabbitMQ delivers the
message to another one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from coatcheck.consumer.inbox import Handler
from coatcheck.consumer.message import CONSUMER, REASON, Headers, Message
from coatcheck.consumer.running import CONCURRENCY, Running
from coatcheck.core.messages.delivery import Acknowledge, DeadLetter
from coatcheck.core.messages.event import OutgoingEvent
from coatcheck.errors import Misconfigured, MissingExtra

try:
    import aio_pika
    from aio_pika.abc import (
        AbstractChannel,
        AbstractExchange,
        AbstractIncomingMessage,
        AbstractQueue,
    )
    from aio_pika.exceptions import CONNECTION_EXCEPTIONS, AMQPError
    from pamqp.commands import Basic
except ImportError as error:
    raise MissingExtra("rabbitmq", "aio-pika") from error

__all__ = ["consume", "publisher"]

logger = logging.getLogger("coatcheck")

ERRORS = (AMQPError, *CONNECTION_EXCEPTIONS)
# Set by quorum queues: how often the message was delivered before.
DELIVERY_COUNT = "x-delivery-count"
# 1 s: how often a subscription is tried that a lost connection has ended.
RETRY_S = 1.0
# 10 minutes: no longer pauses, and a message that was kept here for longer is returned after its
# pause. RabbitMQ closes the channel of a consumer that has kept one for 30 minutes.
KEPT_S_MAX = 600.0


async def consume(
    queue: AbstractQueue,
    handler: Handler[..., Any],
    *,
    stop: asyncio.Event | None = None,
    concurrency: int = CONCURRENCY,
    dead_letters: str | None = None,
) -> None:
    """
    Handle the messages of *queue* until *stop* is set.

    Then it waits for the handlers that run, and returns. If the connection is lost, aio-pika's
    robust connections connect again; with others it raises `ConnectionError`.

    Args:
        queue: of a channel with publisher confirms, which is aio-pika's default.
        handler: what `Inbox.handler` made.
        concurrency: how many messages are handled at one time. Those that pause do not count, up to
            1 000; otherwise no more are fetched than are handled.
        dead_letters: the name of the queue for messages that cannot be handled, each with its
            reason in the header `x-coatcheck-reason`; by default `<name of queue>.dead-letters`.
            It is declared as durable if there is none.
    """
    channel = queue.channel
    if not getattr(channel, "publisher_confirms", True):
        raise Misconfigured("a dead letter could be lost: open the channel with publisher confirms")
    received: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    fetching = _Fetching(queue, received, concurrency)
    letters = dead_letters or f"{queue.name}.dead-letters"
    consumer = _Consumer(queue.name, handler, channel, letters, fetching)
    async with Running(stop, concurrency=concurrency) as running:
        await consumer.declare()
        await channel.set_qos(prefetch_count=concurrency)
        # Made once: each call of `closed` leaves something behind on the channel.
        closed = asyncio.shield(channel.closed())
        await fetching.start()
        try:
            while (native := await running.until_stopped(_next(received, closed))) is not None:
                await fetching.make_room(running)
                await running.start(consumer.deliver(native, running))
        finally:
            closed.cancel()
            if not channel.is_closed:
                await fetching.end()
                while not received.empty():
                    await received.get_nowait().nack(requeue=True)


def publisher(exchange: AbstractExchange) -> Callable[[OutgoingEvent], Awaitable[None]]:
    """
    Return what a `Relay` publishes events with: to *exchange*, with their topic as routing key.

    The exchange is of a channel with publisher confirms, which is aio-pika's default. An event that
    no queue takes is not confirmed, and is published again later.
    """

    async def publish(event: OutgoingEvent) -> None:
        message = aio_pika.Message(
            event.body,
            headers=dict(event.headers),
            content_type=event.headers.get("content-type"),
            message_id=event.message_id,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        await _confirmed(exchange, message, event.topic)

    return publish


async def _confirmed(exchange: AbstractExchange, message: aio_pika.Message, topic: str) -> None:
    """Publish *message*; raises unless a queue has taken it."""
    confirmation = await exchange.publish(message, routing_key=topic, mandatory=True)
    if not isinstance(confirmation, Basic.Ack):  # it came back
        raise ConnectionError(f"no queue of RabbitMQ takes {topic!r}")


async def _next(
    received: asyncio.Queue[AbstractIncomingMessage], closed: asyncio.Future[Any]
) -> AbstractIncomingMessage:
    """The next message; raises if the channel is closed for good."""
    getting = asyncio.ensure_future(received.get())
    try:
        await asyncio.wait({getting, closed}, return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return getting.result()
    except asyncio.CancelledError:
        if getting.done():  # the consumer stops: the message goes back to RabbitMQ
            received.put_nowait(getting.result())
        raise
    finally:
        getting.cancel()
    raise ConnectionError("the channel to RabbitMQ is closed")


class _Fetching:
    """
    Fetches as many messages as are handled at one time, beside those that pause.

    RabbitMQ sends a consumer no more messages than that without an answer. When half of them pause,
    this subscribes anew, and RabbitMQ sends as many again; those that pause can still be answered.
    """

    def __init__(
        self,
        queue: AbstractQueue,
        received: asyncio.Queue[AbstractIncomingMessage],
        concurrency: int,
    ) -> None:
        self._queue = queue
        self._received = received
        self._concurrency = concurrency
        self._tag = ""
        self._pausing: set[AbstractIncomingMessage] = set()  # those of this tag
        self._is_over = False
        self._lock = asyncio.Lock()  # one subscription begins or ends at a time

    async def start(self) -> None:
        """Subscribe to the queue."""
        self._tag = f"coatcheck-{secrets.token_hex(8)}"
        self._pausing = set()
        await self._queue.consume(self._received.put, consumer_tag=self._tag)

    async def end(self) -> None:
        """Fetch no more."""
        self._is_over = True
        async with self._lock:
            await self._queue.cancel(self._tag)

    async def pause(self, native: AbstractIncomingMessage, seconds: float, to: Running) -> None:
        """Pause in the handling of *native*; others are handled meanwhile."""
        pausing = self._pausing
        if native.consumer_tag == self._tag:
            pausing.add(native)
        await self.make_room(to)
        await to.step_aside(seconds)
        pausing.discard(native)

    async def make_room(self, running: Running) -> None:
        """Subscribe anew if half of the messages pause, and none waits here to be handled."""
        async with self._lock:
            is_half = 2 * len(self._pausing) >= self._concurrency
            if is_half and self._received.empty() and running.may_step_aside and not self._is_over:
                await self._start_anew(running)

    async def _start_anew(self, running: Running) -> None:
        """
        Subscribe once more, after the end of the first subscription.

        In the other order, a queue with a single active consumer would send nothing any more.
        """
        with suppress(*ERRORS):  # it has ended with its connection
            await self._queue.cancel(self._tag)
        while not (self._is_over or running.stop.is_set() or self._queue.channel.is_closed):
            try:
                await self.start()
            except ERRORS as error:
                logger.warning("coatcheck: a queue of RabbitMQ cannot be subscribed to: %s", error)
                await running.pause(RETRY_S)
            else:
                return


class _Consumer:
    """Handles the messages of one queue."""

    def __init__(
        self,
        queue: str,
        handler: Handler[..., Any],
        channel: AbstractChannel,
        dead_letters: str,
        fetching: _Fetching,
    ) -> None:
        self._queue = queue
        self._handler = handler
        self._channel = channel
        self._dead_letters = dead_letters
        self._fetching = fetching

    async def declare(self) -> None:
        """Have a queue for dead letters: a message is never dropped."""
        await self._channel.declare_queue(self._dead_letters, durable=True)

    async def deliver(self, native: AbstractIncomingMessage, running: Running) -> None:
        """Handle one message, and answer to RabbitMQ."""
        message = message_of(native, self._queue)
        return_at = time.monotonic() + KEPT_S_MAX
        while True:
            action = await self._handler.handle(message)
            if isinstance(action, Acknowledge):
                break
            if isinstance(action, DeadLetter):
                await self._keep_dead_letter(native, action.reason)
                break
            await self._fetching.pause(native, min(action.after_s, KEPT_S_MAX), running)
            if running.stop.is_set() or time.monotonic() >= return_at:
                await _answer(native, is_handled=False)
                return
        await _answer(native, is_handled=True)

    async def _keep_dead_letter(self, native: AbstractIncomingMessage, reason: str) -> None:
        """Publish the message to the dead letters, and wait for RabbitMQ's confirmation."""
        headers = {**native.headers, REASON: reason, CONSUMER: self._handler.label}
        letter = aio_pika.Message(
            native.body,
            headers=headers,
            content_type=native.content_type,
            content_encoding=native.content_encoding,
            correlation_id=native.correlation_id,
            message_id=native.message_id,
            type=native.type,
            app_id=native.app_id,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        await _confirmed(self._channel.default_exchange, letter, self._dead_letters)


async def _answer(native: AbstractIncomingMessage, *, is_handled: bool) -> None:
    try:
        await (native.ack() if is_handled else native.nack(requeue=True))
    except ERRORS as error:
        # RabbitMQ delivers it again, and the record says whether it is handled.
        logger.info("coatcheck: a message could not be acknowledged: %s", error)


def message_of(native: AbstractIncomingMessage, source: str) -> Message:
    """The message of aio-pika as a handler gets it."""
    properties = {
        "message-id": native.message_id,
        "content-type": native.content_type,
        "correlation-id": native.correlation_id,
    }
    pairs = [(name, value) for name, value in properties.items() if value]
    count: Any = native.headers.get(DELIVERY_COUNT)
    return Message(
        native.body,
        Headers([*pairs, *native.headers.items()]),
        source=source,
        message_id=native.message_id or "",
        deliveries=count + 1 if isinstance(count, int) else None,
        native=native,
    )
