"""Messages: what a handler gets, the same for every broker."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# The header with the id that the publisher set, for brokers that have no place of their own for it.
MESSAGE_ID = "message-id"
# Headers of a dead letter: why it is one, and for which consumer.
REASON = "x-coatcheck-reason"
CONSUMER = "x-coatcheck-consumer"


class Headers(Mapping[str, str]):
    """The headers of a message; their names are found in any spelling of upper and lower case."""

    def __init__(self, pairs: Iterable[tuple[str, object]] = ()) -> None:
        self._values = {name.lower(): _text_of(value) for name, value in pairs}

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Headers({self._values!r})"


def _text_of(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return "" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Message:
    """
    One delivery of a message.

    Args:
        body: the payload.
        headers: of the message; RabbitMQ's properties `message-id` and `content-type` are there,
            too.
        source: the queue, subject, topic or stream that it came from.
        message_id: what the publisher set, or "": `message_id` of RabbitMQ, `Nats-Msg-Id` of NATS.
        delivery_id: what the broker calls this message. It stays the same when the broker delivers
            again, but not when the publisher publishes again.
        deliveries: how often the broker has delivered it, this time included; None: unknown.
        native: the object of the broker's own library.
    """

    body: bytes
    headers: Headers = field(default_factory=Headers)
    source: str = ""
    message_id: str = ""
    delivery_id: str = ""
    deliveries: int | None = None
    native: Any = field(default=None, repr=False, compare=False)

    @property
    def content_type(self) -> str:
        """The content type, or ""."""
        return self.headers.get("content-type", "")

    def json(self) -> Any:  # noqa: ANN401 - what the publisher sent
        """The payload, read as JSON."""
        return json.loads(self.body)
