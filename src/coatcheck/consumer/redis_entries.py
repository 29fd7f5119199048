"""Entries of Redis Streams: what redis-py returns of them, and the messages that they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from coatcheck.consumer.message import MESSAGE_ID, Headers, Message

# The field with the body of the message.
BODY = "body"


class Entry(NamedTuple):
    """One entry of a stream, and how often it was delivered."""

    id: str
    fields: dict[str, bytes]
    deliveries: int


def entries_of(found: Any) -> Iterator[tuple[str, dict[str, bytes]]]:  # noqa: ANN401 - of redis-py
    """The entries in what redis-py returns, which has another shape in each protocol."""
    lists = found.values() if isinstance(found, Mapping) else [entries for _, entries in found]
    for entries in lists:
        for inner in entries:
            for id, fields in inner if isinstance(inner, list) else [inner]:
                yield (
                    text_of(id),
                    {text_of(name): _bytes_of(value) for name, value in fields.items()},
                )


def message_of(entry: Entry, stream: str) -> Message:
    """An entry as a handler gets it."""
    headers = Headers((name, value) for name, value in entry.fields.items() if name != BODY)
    body = entry.fields.get(BODY)
    if body is None:
        body = json.dumps(dict(headers), sort_keys=True).encode()
    return Message(
        body,
        headers,
        source=stream,
        message_id=headers.get(MESSAGE_ID, ""),
        delivery_id=entry.id,
        deliveries=entry.deliveries,
        native=entry,
    )


def text_of(value: str | bytes) -> str:
    """Text, or bytes, as the client is set."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _bytes_of(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
