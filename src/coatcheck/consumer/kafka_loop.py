"""The loop of both clients for Kafka: receive records, handle them, commit their offsets.

A library is used through a `Client`; `kafka` and `aiokafka` have one each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from coatcheck.consumer.inbox import Handler
from coatcheck.consumer.message import CONSUMER, MESSAGE_ID, REASON, Headers, Message
from coatcheck.consumer.partitions import Changes, Key, Partitions
from coatcheck.consumer.running import Running
from coatcheck.consumer.stored_offsets import StoredOffsets

# Where a dead letter was: topic, partition and offset.
ORIGIN = "x-coatcheck-record"
# 1 s: after a crash, at most the records of this time come again, as duplicates.
COMMIT_S = 1.0
# How long one call of a client waits for records, and how many it returns.
POLL_S = 0.2
POLL_COUNT = 100


class Record(NamedTuple):
    """A record that was received."""

    key: Key
    offset: int
    message: Message


class Client(Protocol):
    """A consumer of one library, and its producer of dead letters."""

    async def subscribe(
        self, topics: Sequence[str], partitions: Partitions, stored: StoredOffsets | None
    ) -> None:
        """Ask for partitions; the client notifies *partitions* of those that come and go."""
        ...

    async def receive(self) -> list[Record]:
        """The next records, if there are any soon."""
        ...

    async def fetch(self, changes: Changes) -> None:
        """Stop fetching records of some partitions, and go on with others."""
        ...

    async def commit(self, offsets: dict[Key, int]) -> None:
        """Commit *offsets*; logs if that fails, because the records then come as duplicates."""
        ...

    async def produce(self, topic: str, message: Message, headers: dict[str, bytes]) -> None:
        """Produce the record of *message* with more headers, and wait until Kafka confirms it."""
        ...

    async def close(self) -> None:
        """Leave the group."""
        ...


async def consume_records(
    connect: Callable[[], Client],
    handler: Handler[..., Any],
    *,
    topics: Sequence[str],
    stop: asyncio.Event | None,
    concurrency: int,
    dead_letters: str | None,
    group: str | None,
) -> None:
    """
    Handle the records of *topics* until *stop* is set.

    *connect* makes the client. *group* is the consumer group whose offsets are in the store; None:
    they are only in Kafka.
    """
    async with Running(stop, concurrency=concurrency) as running:
        stored = None if group is None else StoredOffsets(handler, group, running)
        if stored is not None:
            await stored.create()
        client = connect()

        async def keep_dead_letter(message: Message, reason: str) -> None:
            added = {REASON: reason, CONSUMER: handler.label, ORIGIN: message.delivery_id}
            topic = dead_letters or f"{message.source}.dead-letters"
            headers = {name: value.encode() for name, value in added.items()}
            await client.produce(topic, message, headers)

        partitions = Partitions(
            handler, running, keep_dead_letter, concurrency=concurrency, group=group
        )
        try:
            await client.subscribe(topics, partitions, stored)
            await _receive(client, partitions, running)
            await client.commit(await partitions.revoke())
        finally:
            await client.close()


async def _receive(client: Client, partitions: Partitions, running: Running) -> None:
    """Have records handled, and commit what is completed, until the application stops."""
    commit_at = 0.0
    while not running.stop.is_set():
        for record in await client.receive():
            partitions.add(*record)
        await client.fetch(partitions.changes())
        if time.monotonic() >= commit_at:
            commit_at = time.monotonic() + COMMIT_S
            await client.commit(partitions.offsets())


def record_of(
    key: Key,
    offset: int,
    value: bytes | None,
    headers: Iterable[tuple[str, object]],
    native: object,
) -> Record:
    """A record as a handler gets it."""
    topic, number = key
    found = Headers(headers)
    message = Message(
        value or b"",
        found,
        source=topic,
        message_id=found.get(MESSAGE_ID, ""),
        delivery_id=f"{topic}/{number}/{offset}",
        native=native,
    )
    return Record(key, offset, message)
