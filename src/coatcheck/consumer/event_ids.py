"""Event ids: which messages are the same event.

An event id comes from the publisher, so that an event which is published twice has one id. What the
broker calls a message (`delivery_id`) only finds deliveries of one publication.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from coatcheck.consumer.message import Message

# 200: shorter than the longest key (255 characters); the source of a CloudEvent may be longer.
ID_CHARS_MAX = 200

# How the id and source of a CloudEvent are called in the headers of Kafka, NATS and HTTP, and AMQP.
_PREFIXES = ("ce_", "ce-", "cloudevents:", "cloudevents_")
_STRUCTURED = "application/cloudevents+json"


def header(name: str) -> Callable[[Message], str]:
    """The event id is in the header *name*."""

    def event_id(message: Message) -> str:
        return message.headers[name]

    return event_id


def message_id(message: Message) -> str:
    """The event id is the message id that the publisher set."""
    return message.message_id


def delivery_id(message: Message) -> str:
    """
    The event id is what the broker calls the message.

    Only for publishers that set no id: an event that is published twice is then handled twice.
    """
    return f"{message.source} {message.delivery_id}" if message.delivery_id else ""


def cloudevent(message: Message) -> str:
    """
    The event id is the id of a CloudEvent, with its source: both make an event unique.

    They are in the headers (binary mode) or in the body (structured mode).
    """
    for prefix in _PREFIXES:
        if prefix + "id" in message.headers:
            return _joined(
                message.headers.get(prefix + "source", ""), message.headers[prefix + "id"]
            )
    if message.content_type.partition(";")[0].strip().lower() == _STRUCTURED:
        event: Any = json.loads(message.body)
        if isinstance(event, dict) and event.get("id"):
            return _joined(str(event.get("source", "")), str(event["id"]))
    return ""


def published_id(message: Message) -> str:
    """The default: the id of a CloudEvent, or else the message id that the publisher set."""
    return cloudevent(message) or message.message_id


def _joined(source: str, id: str) -> str:
    joined = f"{source} {id}"
    if len(joined) <= ID_CHARS_MAX:
        return joined
    return sha256(f"{len(source)} {joined}".encode("utf-8", "surrogatepass")).hexdigest()
