"""Kafka, with confluent-kafka: an offset is committed after its record is completed.

    settings = {"bootstrap.servers": "…", "group.id": "billing", "auto.offset.reset": "earliest"}
    await consume(settings, on_paid, topics=["payments"])

The records of a partition are handled in their order. A record that is to be handled again later
holds up its partition, and no other. When partitions are revoked, the consumer waits for the
handlers that run, and commits, before others get them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from coatcheck.consumer.inbox import Handler
from coatcheck.consumer.kafka_loop import POLL_COUNT, POLL_S, Record, consume_records, record_of
from coatcheck.consumer.message import Message
from coatcheck.consumer.partitions import Changes, Key, Partitions
from coatcheck.consumer.running import CONCURRENCY
from coatcheck.consumer.stored_offsets import StoredOffsets, check_mode
from coatcheck.errors import Misconfigured, MissingExtra

try:
    from confluent_kafka import (
        OFFSET_STORED,
        Consumer,
        KafkaException,
        Producer,
        TopicPartition,
    )
    from confluent_kafka import Message as Native
except ImportError as error:
    raise MissingExtra("kafka", "confluent-kafka") from error

__all__ = ["consume"]

logger = logging.getLogger("coatcheck")

T = TypeVar("T")
Settings: TypeAlias = Mapping[str, Any]

# The settings of a consumer that a producer does not have begin with these.
OF_CONSUMERS = (
    *("group.", "auto.", "enable.auto.", "enable.partition.eof", "fetch.", "queued."),
    *("session.", "heartbeat.", "max.poll.", "partition.assignment.", "isolation.level"),
    *("check.crcs", "coordinator.", "allow.auto.", "max.partition.fetch.", "default.topic."),
)
# 30 s: until Kafka has confirmed a dead letter.
CONFIRM_S = 30.0
# 10 s: until Kafka has said which offsets it has.
COMMITTED_S = 10.0


async def consume(
    settings: Settings,
    handler: Handler[..., Any],
    *,
    topics: Sequence[str],
    stop: asyncio.Event | None = None,
    concurrency: int = CONCURRENCY,
    dead_letters: str | None = None,
    offsets_in_store: bool = False,
) -> None:
    """
    Handle the records of *topics* until *stop* is set.

    Then it waits for the handlers that run, commits, leaves the group, and returns. librdkafka
    connects again by itself.

    Args:
        settings: of confluent-kafka's `Consumer`, with `bootstrap.servers` and `group.id`.
        handler: what `Inbox.handler` made.
        topics: the names of topics; one that begins with `^` is a regular expression.
        concurrency: how many records are handled at one time, each of another partition.
        dead_letters: the topic for records that cannot be handled, each with its reason in the
            header `x-coatcheck-reason`; without it `<topic of the record>.dead-letters`.
        offsets_in_store: store the offset in the handler's transaction, with the record and the
            effect, and begin there after a restart; for handlers with `mode="transaction"`.
    """
    if settings.get("enable.auto.commit") not in (None, False, "false"):
        raise Misconfigured(
            "enable.auto.commit commits records before they are handled: leave it out"
        )
    group = check_mode(handler, settings.get("group.id")) if offsets_in_store else None
    await consume_records(
        lambda: _Client(settings),
        handler,
        topics=topics,
        stop=stop,
        concurrency=concurrency,
        dead_letters=dead_letters,
        group=group,
    )


class _Client:
    """A consumer of confluent-kafka; all calls are in one thread, which also gets its callbacks."""

    def __init__(self, settings: Settings) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "coatcheck-kafka")
        self._consumer = Consumer({**settings, "enable.auto.commit": False})
        self._producer = _Producer(settings)
        self._partitions: Partitions
        self._stored: StoredOffsets | None = None
        self._is_incremental = (
            "cooperative" in str(settings.get("partition.assignment.strategy", ""))
            or str(settings.get("group.protocol", "")).lower() == "consumer"
        )

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call *function* in the thread."""
        return await self._loop.run_in_executor(self._thread, function, *arguments)

    async def subscribe(
        self, topics: Sequence[str], partitions: Partitions, stored: StoredOffsets | None
    ) -> None:
        """Ask for partitions."""
        self._partitions = partitions
        self._stored = stored
        subscribe = functools.partial(
            self._consumer.subscribe,
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )
        await self._call(subscribe, list(topics))

    async def receive(self) -> list[Record]:
        """The next records, if there are any soon."""
        natives = await self._call(self._consumer.consume, POLL_COUNT, POLL_S)
        return [found for native in natives if (found := _record_of(native)) is not None]

    async def fetch(self, changes: Changes) -> None:
        """Stop fetching records of some partitions, and go on with others."""
        if changes.pause:
            await self._call(self._consumer.pause, _partitions_of(changes.pause))
        if changes.resume:
            await self._call(self._consumer.resume, _partitions_of(changes.resume))

    async def commit(self, offsets: dict[Key, int]) -> None:
        """Commit *offsets*."""
        if offsets:
            await self._call(self._commit, offsets)

    async def produce(self, topic: str, message: Message, headers: dict[str, bytes]) -> None:
        """Produce a dead letter."""
        await asyncio.to_thread(self._producer.produce, topic, message.native, headers)

    async def close(self) -> None:
        """Leave the group."""
        try:
            await self._call(self._consumer.close)
        finally:
            self._thread.shutdown(wait=False)

    def _on_assign(self, _consumer: object, partitions: list[TopicPartition]) -> None:
        self._on_loop(self._partitions.assign, _keys_of(partitions))
        if self._stored is not None:
            self._assign_from_store(self._stored, partitions)

    def _assign_from_store(self, stored: StoredOffsets, partitions: list[TopicPartition]) -> None:
        """Begin at the stored offsets, or at Kafka's where those are later or the only ones."""
        reading = stored.read(_keys_of(partitions))
        found = asyncio.run_coroutine_threadsafe(reading, self._loop).result()
        for key, offset in self._committed(list(found)).items():
            found[key] = max(found[key], offset)
        for partition in partitions:
            partition.offset = found.get((partition.topic, partition.partition), OFFSET_STORED)
        if self._is_incremental:
            self._consumer.incremental_assign(partitions)
        else:
            self._consumer.assign(partitions)

    def _committed(self, keys: list[Key]) -> dict[Key, int]:
        """The offsets that Kafka has; none if it does not answer, because ours are not too far."""
        if not keys:
            return {}
        try:
            found = self._consumer.committed(_partitions_of(keys), timeout=COMMITTED_S)
        except KafkaException as error:
            logger.warning("coatcheck: Kafka's offsets could not be read: %s", error)
            return {}
        return {(one.topic, one.partition): one.offset for one in found}

    def _on_revoke(self, _consumer: object, partitions: list[TopicPartition]) -> None:
        revoking = self._partitions.revoke(_keys_of(partitions))
        offsets = asyncio.run_coroutine_threadsafe(revoking, self._loop).result()
        if offsets:
            self._commit(offsets)

    def _on_lost(self, _consumer: object, partitions: list[TopicPartition]) -> None:
        self._on_loop(self._partitions.lose, _keys_of(partitions))

    def _on_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call *function* on the event loop, which alone uses the partitions."""

        async def call() -> T:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def _commit(self, offsets: dict[Key, int]) -> None:
        try:
            self._consumer.commit(
                offsets=[TopicPartition(*key, offset) for key, offset in offsets.items()],
                asynchronous=False,
            )
        except KafkaException as error:
            # The records come again, and are duplicates.
            logger.warning("coatcheck: offsets could not be committed: %s", error)


class _Producer:
    """Produces dead letters, and waits until Kafka has confirmed them."""

    def __init__(self, settings: Settings) -> None:
        own = {name: one for name, one in settings.items() if not name.startswith(OF_CONSUMERS)}
        self._settings = {**own, "enable.idempotence": True, "acks": "all"}
        self._producer: Producer | None = None

    def produce(self, topic: str, native: Native, headers: dict[str, bytes]) -> None:
        """Produce a record that was received, with more headers."""
        errors: list[Any] = []
        if self._producer is None:
            self._producer = Producer(self._settings)
        self._producer.produce(
            topic,
            value=native.value(),
            key=native.key(),
            headers=[*_headers_of(native), *headers.items()],
            on_delivery=lambda error, _: errors.append(error),
        )
        self._producer.flush(CONFIRM_S)
        if errors != [None]:
            raise KafkaException(*errors or ["a dead letter was not confirmed in time"])


def _record_of(native: Native) -> Record | None:
    """A record; None if it is a report of an error."""
    error = native.error()
    if error is not None:
        if error.fatal():
            raise KafkaException(error)
        logger.warning("coatcheck: Kafka reports an error: %s", error)
        return None
    key = (str(native.topic()), int(native.partition() or 0))
    offset = int(native.offset() or 0)
    return record_of(key, offset, native.value(), _headers_of(native), native)


def _headers_of(native: Native) -> list[tuple[str, bytes | None]]:
    headers: Any = native.headers()
    return list(headers or ())


def _keys_of(partitions: list[TopicPartition]) -> list[Key]:
    return [(one.topic, one.partition) for one in partitions]


def _partitions_of(keys: list[Key]) -> list[TopicPartition]:
    return [TopicPartition(*key) for key in keys]
