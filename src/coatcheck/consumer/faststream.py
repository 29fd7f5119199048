"""FastStream: a middleware that handles each event once, with any of its brokers.

    guard = InboxMiddleware(inbox, dead_letter=keep_dead_letter)
    broker = NatsBroker("nats://…", middlewares=[guard])

    @broker.subscriber("payments", stream="PAYMENTS", durable="billing", pull_sub=True)
    async def on_paid(order: Order): ...

    app = FastStream(broker, on_startup=[lambda: guard.check(broker)])

The middleware itself acknowledges a message, after its record is completed. `check` refuses
subscribers that acknowledge before, which is FastStream's default for Kafka.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, Unpack

from coatcheck.consumer import Acknowledge, DeadLetter
from coatcheck.consumer.event_ids import published_id
from coatcheck.consumer.inbox import Handler, Inbox
from coatcheck.consumer.message import Headers, Message
from coatcheck.consumer.running import extending
from coatcheck.core.callables import is_async_function
from coatcheck.core.policy import PolicyOptions
from coatcheck.errors import Misconfigured, MissingExtra

try:
    from faststream import AckPolicy, BaseMiddleware
    from faststream.exceptions import AckMessage, StopConsume
    from faststream.message import StreamMessage
except ImportError as error:
    raise MissingExtra("faststream", "faststream") from error

__all__ = ["InboxMiddleware"]

logger = logging.getLogger("coatcheck")

# The headers in which publishers set the id of a message. FastStream's own `message_id` is another
# for each delivery if the publisher has set none.
IDS = ("message-id", "message_id", "nats-msg-id")
# How brokers call what a message came from.
SOURCES = ("subject", "queue", "topic", "channel", "stream")


class InboxMiddleware:
    """
    A middleware of FastStream: a subscriber handles each event once.

    A handler finds its operation with `coatcheck.current_async_operation()`.

    Args:
        inbox: where the records are.
        dead_letter: keeps a message that cannot be handled: it is awaited with the message of
            FastStream and the reason, and the message is acknowledged when it returns.
        event_id: returns the id of the event in a message; see `coatcheck.consumer.event_ids`.
        changes: of the inbox's policy, such as `mode="transaction"`.
    """

    def __init__(
        self,
        inbox: Inbox,
        *,
        dead_letter: Callable[[Any, str], Awaitable[object]],
        event_id: Callable[[Message], object] = published_id,
        **changes: Unpack[PolicyOptions],
    ) -> None:
        if not is_async_function(dead_letter):
            raise Misconfigured("dead_letter= is awaited, so it must be an async function")
        self.inbox = inbox
        self.dead_letter = dead_letter
        self._event_id = event_id
        self._changes = changes
        self._handlers: dict[str, Handler[..., Any]] = {}
        self._functions: dict[str, list[object]] = {}  # of the subscribers of each name

    def check(self, broker: Any) -> None:  # noqa: ANN401 - of any of FastStream's brokers
        """Refuse subscribers of *broker* that acknowledge a message before it is handled."""
        for subscriber in broker.subscribers:
            self.check_subscriber(subscriber)

    def check_subscriber(self, subscriber: Any) -> None:  # noqa: ANN401 - as above
        """Refuse one that acknowledges too early, or another function with a name in use."""
        _check(subscriber)
        name, functions = _name_of(subscriber), _functions_of(subscriber)
        if self._functions.setdefault(name, functions) != functions:
            raise Misconfigured(
                f"two subscribers are called {name}, so that an event which both get would be "
                "handled by one of them only: rename a function"
            )

    def handler_of(self, name: str) -> Handler[..., Any]:
        """The handler of the subscriber *name*; its records have this name."""
        if name not in self._handlers:
            decorate = self.inbox.handler(event_id=self._event_id, name=name, **self._changes)
            self._handlers[name] = decorate(_run)
        return self._handlers[name]

    def __call__(self, msg: Any, /, *, context: Any) -> BaseMiddleware:  # noqa: ANN401 - its own
        """Called by FastStream for each message."""
        return _Guarded(msg, context=context, settings=self)


def _check(subscriber: Any) -> None:  # noqa: ANN401 - as above
    # For push subscriptions of NATS, FastStream leaves the acknowledgement to nats-py.
    options = getattr(subscriber, "extra_options", {})
    if subscriber.ack_policy is AckPolicy.ACK_FIRST or options.get("manual_ack") is False:
        raise Misconfigured(
            f"the subscriber {_name_of(subscriber)} acknowledges a message before it is handled: "
            "give it ack_policy=AckPolicy.NACK_ON_ERROR"
        )


def _functions_of(subscriber: Any) -> list[object]:  # noqa: ANN401 - as above
    # FastStream has no public way from a subscriber to its functions.
    return [call.handler._original_call for call in subscriber.calls]  # noqa: SLF001 - see above


def _name_of(subscriber: Any) -> str:  # noqa: ANN401 - as above
    return str(subscriber.specification.call_name)


class _Guarded(BaseMiddleware):
    """The middleware for one message."""

    def __init__(self, msg: Any, /, *, context: Any, settings: InboxMiddleware) -> None:  # noqa: ANN401 - its own
        super().__init__(msg, context=context)
        self._settings = settings

    async def consume_scope(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]
    ) -> Any:  # noqa: ANN401 - what the subscriber returns
        """Handle a message, and answer to the broker."""
        subscriber = self.context.get("handler_")
        try:
            self._settings.check_subscriber(subscriber)
        except Misconfigured as error:
            logger.error("coatcheck: %s", error)  # noqa: TRY400 - the stack says nothing more
            raise StopConsume from error
        call = _Call(call_next, msg)
        _call.set(call)
        if await self._is_settled(self._settings.handler_of(_name_of(subscriber)), call):
            return call.result
        raise AckMessage  # nothing was handled, so nothing is to be published as its result

    async def _is_settled(self, handler: Handler[..., Any], call: _Call) -> bool:
        """Handle a message until it has an end; whether it was handled here and now."""
        msg = call.msg
        message = message_of(msg, self.context.get("handler_").get_log_context(msg))
        # Only NATS can be asked to wait, and to deliver again later.
        in_progress = getattr(msg, "in_progress", None)
        lease_s = handler.policy.lease_ms / 1_000
        while True:
            async with extending(in_progress, lease_s) if in_progress else nullcontext():
                action = await handler.handle(message)
            if isinstance(action, Acknowledge):
                await msg.ack()
                return not action.is_duplicate
            if isinstance(action, DeadLetter):
                await self._settings.dead_letter(msg, action.reason)
                await msg.ack()
                return False
            if in_progress is not None:
                delayed: Any = msg
                await delayed.nack(delay=action.after_s)
                return False
            await asyncio.sleep(action.after_s)


class _Call:
    """The call of a subscriber for one message."""

    def __init__(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> None:
        self._call_next = call_next
        self.msg = msg
        self.result: Any = None

    async def run(self) -> None:
        """Run the subscriber."""
        self.result = await self._call_next(self.msg)


_call: ContextVar[_Call] = ContextVar("coatcheck_faststream_call")


async def _run(_message: Message) -> None:
    """The handler of all subscribers."""
    await _call.get().run()


def message_of(msg: StreamMessage[Any], log_context: dict[str, str]) -> Message:
    """The message of FastStream as `event_id=` gets it."""
    headers = Headers(msg.headers.items())
    ids = [headers[name] for name in IDS if headers.get(name)]
    ids.append(getattr(msg.raw_message, "message_id", None) or "")
    sources = [log_context[name] for name in SOURCES if log_context.get(name)]
    return Message(
        msg.body if isinstance(msg.body, bytes) else repr(msg.body).encode(),
        headers,
        source=sources[0] if sources else "",
        message_id=ids[0],
        native=msg,
    )
