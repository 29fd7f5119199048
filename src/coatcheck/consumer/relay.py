"""The relay: publishes the events that handlers have emitted, after their commit.

    relay = Relay("postgresql://…", rabbitmq.publisher(channel.default_exchange))
    await relay.run()

A row is deleted after the broker has confirmed its event. If the relay dies in between, the event
is published again with the same message id, by which an inbox recognises it. Of several relays on
one store one publishes at a time, because two would not keep the order; it holds a lease, and
another takes over when that expires.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from coatcheck.consumer.running import Running
from coatcheck.core.callables import is_async_function
from coatcheck.core.messages.event import OutgoingEvent
from coatcheck.core.policy import Duration, Policy
from coatcheck.engine import AsyncEngine
from coatcheck.engine.functions import fingerprint_given, request_of_call
from coatcheck.errors import Misconfigured, Resumable
from coatcheck.operation import Operation
from coatcheck.stores.event_table import EventTable
from coatcheck.stores.transaction_statements import transaction_statements_of

__all__ = ["OutgoingEvent", "Publish", "Relay"]

logger = logging.getLogger("coatcheck")

# Publishes one event, and returns when the broker has confirmed it.
Publish = Callable[[OutgoingEvent], Awaitable[object]]

# 100 events are read, published and deleted at a time.
BATCH = 100
# How often the table is read while nothing is in it.
POLL_S = 0.5
# A broker or a store that is down is tried again after this time.
PAUSE_S = 2.0
# A broker that has not confirmed an event after this time is taken to be down.
PUBLISH_S = 30.0
# 10 000 events that failed, or wait for one of their key; then the relay begins with the oldest
# events again.
HELD_MAX = 10_000
# The lease is given back and taken again, so that it never outlives the window of its record.
TURN_S = 3_600.0


class Relay:
    """
    Publishes the outgoing events of one store.

    Args:
        store: the URL of the store, in PostgreSQL, MySQL or SQLite; its table of events is created
            if there is none, unless the URL has `create=0`.
        publish: an async function that publishes one event and returns when the broker has
            confirmed it, such as `rabbitmq.publisher(exchange)`.
        lease: how long after its death another relay takes over.
    """

    def __init__(self, store: str, publish: Publish, *, lease: Duration = "20s") -> None:
        if not is_async_function(publish):
            raise Misconfigured("publish= is an async function of an event")
        self._engine = AsyncEngine(store, Policy(lease=lease, in_flight="409", wait=0))
        self._publish = publish
        self._table: EventTable | None = None
        # Events that fail stay in the table. So that they do not keep others from being read, the
        # next batches are read without them, until the end of the table; their keys are held back.
        # They are left out by their numbers: an event whose transaction commits late has a lower
        # number than events that were read before it.
        self._held: set[int] = set()
        self._held_keys: set[str] = set()

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Publish events as they come, until *stop* is set."""
        async with Running(stop) as running:
            try:
                while not running.stop.is_set():
                    try:
                        await self._take_turn(running)
                    except Exception as error:  # noqa: BLE001 - of any driver: the store is down
                        logger.error("coatcheck: events are not published now: %r", error)  # noqa: TRY400 - its trace says nothing more
                        await running.pause(PAUSE_S)
            finally:
                await self._engine.close()

    async def publish_all(self) -> int:
        """Publish what is there now, and return how many events; for tests and jobs."""
        published = 0
        self._begin_again()
        while (done := await self._publish_batch()) is not None and done:
            published += done
        return published

    async def close(self) -> None:
        """Close the store; `run` does so by itself."""
        await self._engine.close()

    # --- one relay at a time ----------------------------------------------------------------------

    async def _take_turn(self, running: Running) -> None:
        """Publish while this relay holds the lease; wait while another one does."""
        await self._engine.ensure_started()
        attempts, policy = self._engine.attempts, self._engine.policy
        request = request_of_call(attempts, "relay", "relay", fingerprint_given("relay"), policy)
        started = await self._engine.begin(request, policy)
        if not isinstance(started, Operation):
            await running.pause(PAUSE_S)
            return
        try:
            await self._publish_until_turn_ends(started, running)
        finally:
            # Released, so that the next turn need not wait for the lease.
            await self._engine.fail(started, Resumable("the relay has stopped"))

    async def _publish_until_turn_ends(self, turn: Operation, running: Running) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + TURN_S
        while not running.stop.is_set() and not turn.is_lost and loop.time() < until_s:
            done = await self._publish_batch()
            if done is None:
                await running.pause(PAUSE_S)
            elif done == 0:
                await running.pause(POLL_S)

    # --- publishing -------------------------------------------------------------------------------

    async def _publish_batch(self) -> int | None:
        """Publish the oldest events; how many, or None if the broker did not take all of them."""
        table = await self._events()
        rows = await asyncio.to_thread(table.read, BATCH, self._held)
        if not rows and not self._held:
            return 0
        lanes = _by_key(row for row in rows if row[1].key not in self._held_keys)
        confirmed = await asyncio.gather(*(self._publish_in_order(lane) for lane in lanes))
        numbers = [number for lane in confirmed for number in lane]
        if numbers:
            await asyncio.to_thread(table.delete, numbers)
        self._go_on(rows, set(numbers))
        return len(numbers) if rows and len(numbers) == len(rows) else None

    def _go_on(self, rows: Sequence[tuple[int, OutgoingEvent]], confirmed: set[int]) -> None:
        """Leave out the events of this batch that failed, until all others were read."""
        failed = {number: event for number, event in rows if number not in confirmed}
        self._held.update(failed)
        self._held_keys.update(event.key for event in failed.values() if event.key)
        if len(rows) < BATCH or len(self._held) > HELD_MAX:
            self._begin_again()

    def _begin_again(self) -> None:
        """Begin the next batch with the oldest events."""
        self._held.clear()
        self._held_keys.clear()

    async def _publish_in_order(self, lane: Sequence[tuple[int, OutgoingEvent]]) -> list[int]:
        """Publish events of one key; stops at the first that fails."""
        confirmed: list[int] = []
        for number, event in lane:
            try:
                async with asyncio.timeout(PUBLISH_S):
                    await self._publish(event)
            except Exception as error:  # noqa: BLE001 - of any broker; the event stays in its table
                logger.error(  # noqa: TRY400 - its trace says nothing more
                    "coatcheck: the event %s for %s could not be published, and is tried again: %r",
                    *(event.message_id, event.topic, error),
                )
                break
            confirmed.append(number)
        return confirmed

    async def _events(self) -> EventTable:
        if self._table is None:
            statements = await asyncio.to_thread(
                transaction_statements_of, self._engine.store.blocking
            )
            table = EventTable(statements)
            await asyncio.to_thread(table.create_if_allowed)
            self._table = table
        return self._table


def _by_key(
    rows: Iterable[tuple[int, OutgoingEvent]],
) -> list[list[tuple[int, OutgoingEvent]]]:
    """The events of each key, in order; each event without a key is a lane of its own."""
    lanes: dict[str, list[tuple[int, OutgoingEvent]]] = {}
    single = []
    for number, event in rows:
        if event.key:
            lanes.setdefault(event.key, []).append((number, event))
        else:
            single.append([(number, event)])
    return [*lanes.values(), *single]
