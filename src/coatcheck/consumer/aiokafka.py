"""Kafka, with aiokafka: an offset is committed after its record is completed.

    settings = {"bootstrap_servers": "…", "group_id": "billing", "auto_offset_reset": "earliest"}
    await consume(settings, on_paid, topics=["payments"])

It does what `coatcheck.consumer.kafka` does, without threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coatcheck.consumer.inbox import Handler
from coatcheck.consumer.kafka_loop import POLL_COUNT, POLL_S, Record, consume_records, record_of
from coatcheck.consumer.message import Message
from coatcheck.consumer.partitions import Changes, Key, Partitions
from coatcheck.consumer.running import CONCURRENCY
from coatcheck.consumer.stored_offsets import StoredOffsets, check_mode
from coatcheck.errors import Misconfigured, MissingExtra

try:
    from aiokafka import (  # type: ignore[import-untyped]  # it has no types
        AIOKafkaConsumer,
        AIOKafkaProducer,
        TopicPartition,
    )
    from aiokafka.abc import ConsumerRebalanceListener  # type: ignore[import-untyped]  # as above
    from aiokafka.errors import KafkaError  # type: ignore[import-untyped]  # as above
except ImportError as error:
    raise MissingExtra("aiokafka", "aiokafka") from error

__all__ = ["consume"]

logger = logging.getLogger("coatcheck")

# The settings that a consumer and a producer have in common begin with these.
OF_BOTH = (
    *("bootstrap_servers", "client_id", "metadata_max_age_ms", "request_timeout_ms"),
    *("api_version", "retry_backoff_ms", "security_protocol", "ssl_context", "sasl_"),
    "connections_max_idle_ms",
)
# 1 s: a broker that answers at all has done so by then; a cancelled consumer waits no longer.
START_S = 1.0


async def consume(
    settings: Mapping[str, Any],
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

    Then it waits for the handlers that run, commits, leaves the group, and returns. aiokafka
    connects again by itself.

    Args:
        settings: the arguments of `AIOKafkaConsumer`, with `bootstrap_servers` and `group_id`.
        handler: what `Inbox.handler` made.
        topics: the names of topics.
        concurrency: how many records are handled at one time, each of another partition.
        dead_letters: the topic for records that cannot be handled, each with its reason in the
            header `x-coatcheck-reason`; without it `<topic of the record>.dead-letters`.
        offsets_in_store: store the offset in the handler's transaction, with the record and the
            effect, and begin there after a restart; for handlers with `mode="transaction"`.
    """
    if settings.get("enable_auto_commit"):
        raise Misconfigured(
            "enable_auto_commit commits records before they are handled: leave it out"
        )
    if settings.get("value_deserializer") or settings.get("key_deserializer"):
        raise Misconfigured("a handler gets bytes: leave the deserializers out")
    if not settings.get("group_id"):
        raise Misconfigured("settings need a group_id: without it no offset is committed")
    group = check_mode(handler, settings["group_id"]) if offsets_in_store else None
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
    """A consumer of aiokafka."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._consumer = AIOKafkaConsumer(**{**settings, "enable_auto_commit": False})
        self._producer = _Producer(settings)

    async def subscribe(
        self, topics: Sequence[str], partitions: Partitions, stored: StoredOffsets | None
    ) -> None:
        """Ask for partitions."""
        listener = _Listener(self, self._consumer, partitions, stored)
        self._consumer.subscribe(list(topics), listener=listener)
        await _start(self._consumer)

    async def receive(self) -> list[Record]:
        """The next records, if there are any soon."""
        found = await self._consumer.getmany(timeout_ms=int(POLL_S * 1_000), max_records=POLL_COUNT)
        return [
            record_of((place.topic, place.partition), one.offset, one.value, one.headers, one)
            for place, natives in found.items()
            for one in natives
        ]

    async def fetch(self, changes: Changes) -> None:
        """Stop fetching records of some partitions, and go on with others."""
        self._consumer.pause(*_partitions_of(changes.pause))
        self._consumer.resume(*_partitions_of(changes.resume))

    async def commit(self, offsets: dict[Key, int]) -> None:
        """Commit *offsets*."""
        if not offsets:
            return
        places = {TopicPartition(*key): offset for key, offset in offsets.items()}
        try:
            await self._consumer.commit(places)
        except KafkaError as error:
            # The records come again, and are duplicates.
            logger.warning("coatcheck: offsets could not be committed: %s", error)

    async def produce(self, topic: str, message: Message, headers: dict[str, bytes]) -> None:
        """Produce a dead letter."""
        await self._producer.produce(topic, message.native, headers)

    async def close(self) -> None:
        """Leave the group."""
        try:
            await self._consumer.stop()
        finally:
            await self._producer.close()


async def _start(client: Any) -> None:  # noqa: ANN401 - it has no types
    """Start a consumer or a producer; if that fails or is cancelled, close its connections."""
    starting = asyncio.ensure_future(client.start())
    try:
        await asyncio.shield(starting)
    except BaseException:
        try:
            # aiokafka forgets a connection if it is cancelled while it starts.
            await asyncio.wait({starting}, timeout=START_S)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        finally:
            await client.stop()
        raise


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # it has no types
    """What happens when partitions come and go."""

    def __init__(
        self,
        client: _Client,
        consumer: Any,  # noqa: ANN401 - it has no types
        partitions: Partitions,
        stored: StoredOffsets | None,
    ) -> None:
        self._client = client
        self._consumer = consumer
        self._partitions = partitions
        self._stored = stored

    # aiokafka awaits both.
    async def on_partitions_revoked(  # pyright: ignore[reportIncompatibleMethodOverride] - see above
        self, revoked: Iterable[Any]
    ) -> None:
        """Wait for the handlers that run, and commit."""
        keys = [(one.topic, one.partition) for one in revoked]
        await self._client.commit(await self._partitions.revoke(keys))

    async def on_partitions_assigned(  # pyright: ignore[reportIncompatibleMethodOverride] - see above
        self, assigned: Iterable[Any]
    ) -> None:
        """Accept records of these partitions."""
        places = list(assigned)
        keys = [(one.topic, one.partition) for one in places]
        if self._stored is not None:
            # Nothing is fetched before the offsets are known; `Partitions.changes` resumes it.
            self._consumer.pause(*places)
            for key, offset in (await self._stored.read(keys)).items():
                await self._seek(TopicPartition(*key), offset)
        self._partitions.assign(keys)

    async def _seek(self, place: Any, stored: int) -> None:  # noqa: ANN401 - as above
        """Begin at the stored offset, unless Kafka has a later one."""
        try:
            committed = await self._consumer.committed(place)
        except KafkaError as error:
            logger.warning("coatcheck: Kafka's offset could not be read: %s", error)
            committed = None
        if committed is None or committed < stored:
            self._consumer.seek(place, stored)


class _Producer:
    """Produces dead letters, and waits until Kafka has confirmed them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        own = {name: one for name, one in settings.items() if name.startswith(OF_BOTH)}
        self._settings = {**own, "enable_idempotence": True, "acks": "all"}
        self._producer: Any = None
        self._mutex = asyncio.Lock()

    async def produce(self, topic: str, native: Any, headers: dict[str, bytes]) -> None:  # noqa: ANN401 - as above
        """Produce a record that was received, with more headers."""
        async with self._mutex:
            if self._producer is None:
                producer = AIOKafkaProducer(**self._settings)
                await _start(producer)
                self._producer = producer
        all_headers = [*native.headers, *headers.items()]
        await self._producer.send_and_wait(topic, native.value, key=native.key, headers=all_headers)

    async def close(self) -> None:
        """Close the connection."""
        if self._producer is not None:
            await self._producer.stop()


def _partitions_of(keys: list[Key]) -> list[Any]:
    return [TopicPartition(*key) for key in keys]
