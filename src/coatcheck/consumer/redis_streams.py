"""Redis Streams, with redis-py: an entry is acknowledged after its record is completed.

    client = redis.asyncio.Redis.from_url("redis://…")
    await consume(client, on_paid, stream="payments", group="billing")

An entry that is to come again later stays here, pending, and is handled again after its pause. If
this process dies, another consumer of the group claims the entry when it was idle for `idle`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from typing import Any

from coatcheck.consumer import Acknowledge, DeadLetter
from coatcheck.consumer.inbox import Handler
from coatcheck.consumer.message import CONSUMER, REASON
from coatcheck.consumer.redis_entries import Entry, entries_of, message_of, text_of
from coatcheck.consumer.running import CONCURRENCY, Running, extending
from coatcheck.core.policy import Duration, duration_ms
from coatcheck.errors import Misconfigured, MissingExtra

try:
    from redis.asyncio import Redis
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import ResponseError
    from redis.exceptions import TimeoutError as RedisTimeoutError
except ImportError as error:
    raise MissingExtra("redis", "redis") from error

__all__ = ["consume"]

logger = logging.getLogger("coatcheck")

ENTRY = "x-coatcheck-entry"
# 1 s: an idle consumer asks Redis that often, and tries again that often while Redis is down.
BLOCK_MS = 1_000
OUTAGES = (RedisConnectionError, RedisTimeoutError)


async def consume(
    client: Redis,
    handler: Handler[..., Any],
    *,
    stream: str,
    group: str,
    stop: asyncio.Event | None = None,
    concurrency: int = CONCURRENCY,
    idle: Duration = "1m",
    dead_letters: str | None = None,
) -> None:
    """
    Handle the entries of *stream* until *stop* is set.

    Then it waits for the handlers that run, and returns. While Redis is down, it tries again every
    second.

    Args:
        client: of `redis.asyncio`.
        handler: what `Inbox.handler` made.
        stream: the key of the stream. The field `body` of an entry is the body of the message, and
            the other fields are its headers, `message-id` among them; without a field `body`, the
            body is all fields as a JSON object.
        group: the consumer group; it is made, from the beginning of the stream, if there is none.
        concurrency: how many entries are handled at one time; more are not fetched either. Those
            that pause do not count, up to 1 000.
        idle: after this time, entries of a consumer that has died go to another one. A handler that
            runs for longer keeps its entry.
        dead_letters: the stream for entries that cannot be handled, each with its reason in the
            field `x-coatcheck-reason`; without it `<stream>:dead-letters`.
    """
    idle_ms = duration_ms(idle)
    if idle_ms <= 0:
        raise Misconfigured(f"idle is {idle!r}; it must be longer than zero")
    await _make_group(client, stream, group)
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    pending = _Pending(client, stream, group, name, idle_ms=idle_ms)
    consumer = _Consumer(handler, pending, dead_letters or f"{stream}:dead-letters")
    async with Running(stop, concurrency=concurrency) as running:
        while not running.stop.is_set():
            count = await running.room()
            try:
                entries = await running.until_stopped(pending.receive(count))
            except OUTAGES as error:
                logger.warning("coatcheck: Redis cannot be read from: %s", error)
                await running.pause(BLOCK_MS / 1_000)
                continue
            for entry in entries or ():
                await running.start(consumer.deliver(entry, running))
    await pending.leave()


async def _make_group(client: Redis, stream: str, group: str) -> None:
    try:
        await client.xgroup_create(stream, group, id="0", mkstream=True)
    except ResponseError as error:
        if not str(error).startswith("BUSYGROUP"):  # it exists
            raise


class _Pending:
    """The entries of one consumer of a group: received, claimed from others, kept, acknowledged."""

    def __init__(self, client: Redis, stream: str, group: str, name: str, *, idle_ms: int) -> None:
        self.client = client
        self.stream = stream
        self.group = group
        self._name = name
        self.idle_s = idle_ms / 1_000
        self._claim_at = 0.0
        self._claim_from: str | bytes = "0-0"
        self.handled_now: set[str] = set()

    async def receive(self, count: int) -> list[Entry]:
        """At most *count* entries: those of consumers that have died, or else new ones."""
        if time.monotonic() >= self._claim_at and (claimed := await self._claim(count)):
            return claimed
        found = await self.client.xreadgroup(
            self.group, self._name, {self.stream: ">"}, count=count, block=BLOCK_MS
        )
        return [Entry(id, fields, 1) for id, fields in entries_of(found)]

    async def _claim(self, count: int) -> list[Entry]:
        """Claim entries that were idle for too long; a part of the list at a time."""
        self._claim_from, found, *deleted = await self.client.xautoclaim(
            *(self.stream, self.group, self._name, int(self.idle_s * 1_000), self._claim_from),
            count=count,
        )
        if deleted and deleted[0]:
            logger.error(
                "coatcheck: %d entries of %s were trimmed from the stream before they were handled",
                *(len(deleted[0]), self.stream),
            )
        if text_of(self._claim_from) == "0-0":  # the end of the list: again after half the time
            self._claim_at = time.monotonic() + self.idle_s / 2
        entries = [entry for entry in found if entry[0] is not None and entry[1] is not None]
        return [
            Entry(id, fields, await self._deliveries_of(id))
            for id, fields in entries_of([(self.stream, entries)])
            if id not in self.handled_now
        ]

    async def _deliveries_of(self, id: str) -> int:
        """How often Redis has delivered an entry."""
        found = await self.client.xpending_range(self.stream, self.group, min=id, max=id, count=1)
        return int(found[0]["times_delivered"]) if found else 1

    async def keep(self, id: str) -> None:
        """Have an entry not be idle, so that no other consumer claims it."""
        ids: list[Any] = [id]
        await self.client.xclaim(
            self.stream,
            self.group,
            self._name,
            min_idle_time=0,
            message_ids=ids,
            idle=0,
            justid=True,
        )

    async def leave(self) -> None:
        """Remove this consumer from the group, unless it still has entries, which would be lost."""
        try:
            left = await self.client.xpending_range(
                self.stream, self.group, min="-", max="+", count=1, consumername=self._name
            )
            if not left:
                await self.client.xgroup_delconsumer(self.stream, self.group, self._name)
        except OUTAGES as error:
            logger.info("coatcheck: the consumer %s stays in its group: %s", self._name, error)


class _Consumer:
    """Handles the entries of one stream."""

    def __init__(self, handler: Handler[..., Any], pending: _Pending, dead_letters: str) -> None:
        self._handler = handler
        self._pending = pending
        self._dead_letters = dead_letters

    async def deliver(self, entry: Entry, running: Running) -> None:
        """Handle one entry, and acknowledge it."""
        self._pending.handled_now.add(entry.id)
        try:
            await self._deliver(entry, running)
        except OUTAGES as error:
            # It stays pending, and the record says whether it is handled.
            logger.info("coatcheck: an entry could not be acknowledged: %s", error)
        finally:
            self._pending.handled_now.discard(entry.id)

    async def _deliver(self, entry: Entry, running: Running) -> None:
        pending = self._pending
        message = message_of(entry, pending.stream)
        # Also while it waits for its next attempt.
        async with extending(lambda: pending.keep(entry.id), pending.idle_s):
            while True:
                action = await self._handler.handle(message)
                if isinstance(action, Acknowledge):
                    await pending.client.xack(pending.stream, pending.group, entry.id)
                    return
                if isinstance(action, DeadLetter):
                    await self._keep_dead_letter(entry, action.reason)
                    return
                await running.step_aside(action.after_s)
                if running.stop.is_set():
                    return

    async def _keep_dead_letter(self, entry: Entry, reason: str) -> None:
        """Add the entry to the dead letters, and acknowledge it, in one transaction."""
        pending = self._pending
        # Names as they came: redis-py would refuse those that are not UTF-8.
        fields = {n.encode("utf-8", "surrogateescape"): v for n, v in entry.fields.items()}
        added = {REASON: reason, CONSUMER: self._handler.label, ENTRY: entry.id}
        letter: dict[Any, Any] = {**fields, **{n.encode(): v for n, v in added.items()}}
        async with pending.client.pipeline(transaction=True) as pipe:
            pipe.xadd(self._dead_letters, letter)
            pipe.xack(pending.stream, pending.group, entry.id)
            await pipe.execute()
