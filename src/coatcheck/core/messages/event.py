"""Outgoing events: written in the handler's transaction, and published after its commit."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from coatcheck.errors import Misconfigured, Unreadable


@dataclass(frozen=True, slots=True)
class OutgoingEvent:
    """
    An event that a relay publishes.

    Args:
        topic: where to: a routing key, subject or topic of the broker.
        body: its bytes.
        message_id: the same each time that it is published, so that consumers recognise it.
        key: events with the same key are published in order.
        headers: texts for the consumer.
    """

    topic: str
    body: bytes
    message_id: str
    key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def body_of(value: object) -> tuple[bytes, str]:
    """The bytes of a body, and its content type; a value that is not bytes becomes JSON."""
    if isinstance(value, bytes):
        return value, "application/octet-stream"
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode(), "application/json"
    except (TypeError, ValueError, RecursionError) as error:
        kind = type(value).__name__
        raise Misconfigured(f"the body is a {kind}, which is neither bytes nor JSON") from error


def encode_event(event: OutgoingEvent) -> bytes:
    """*event* as a row stores it."""
    return json.dumps(
        {
            "id": event.message_id,
            "topic": event.topic,
            "key": event.key,
            "headers": dict(event.headers),
            "body": base64.b64encode(event.body).decode(),
        },
        separators=(",", ":"),
    ).encode()


def decode_event(stored: bytes) -> OutgoingEvent:
    """The event in a row; raises `Unreadable` if it is none."""
    try:
        members = json.loads(stored)
        return OutgoingEvent(
            topic=members["topic"],
            body=base64.b64decode(members["body"]),
            message_id=members["id"],
            key=members["key"],
            headers=members["headers"],
        )
    except (ValueError, TypeError, LookupError) as error:
        raise Unreadable("an outgoing event cannot be read: a newer release wrote it") from error
