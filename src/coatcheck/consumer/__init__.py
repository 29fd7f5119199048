"""Message consumers: each event has its effect once, however often the broker delivers it.

    inbox = Inbox("postgresql://…", consumer="billing")

    @inbox.handler(event_id=lambda message: message.headers["message-id"])
    async def on_paid(message, operation): ...

    await rabbitmq.consume(queue, on_paid)

`inbox` claims, handles and completes a message, `message` has what is the same for all brokers,
and each broker has a module of its own.
"""

from coatcheck.consumer import event_ids
from coatcheck.consumer.inbox import Handler, Inbox, Reject
from coatcheck.consumer.message import Headers, Message
from coatcheck.core.messages.delivery import Acknowledge, Action, DeadLetter, Redeliver

__all__ = [
    "Acknowledge",
    "Action",
    "DeadLetter",
    "Handler",
    "Headers",
    "Inbox",
    "Message",
    "Redeliver",
    "Reject",
    "event_ids",
]
