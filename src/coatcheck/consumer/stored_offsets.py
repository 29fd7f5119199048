"""Offsets of Kafka in the store: written in the handler's transaction, read at an assignment.

A consumer begins after the records that the store or Kafka knows as completed, whichever has more
of them. Neither has too many: a row is written with the effect, and Kafka gets an offset later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from coatcheck.consumer.inbox import STORE_DOWN_S, Handler
from coatcheck.consumer.partitions import Key
from coatcheck.consumer.running import Running
from coatcheck.errors import Misconfigured
from coatcheck.stores.offset_table import GROUP_CHARS_MAX, OffsetTable
from coatcheck.stores.transaction_statements import transaction_statements_of

logger = logging.getLogger("coatcheck")


def check_mode(handler: Handler[..., Any], group: object) -> str:
    """The name of the consumer group; raises if its offsets cannot be stored with the effects."""
    if handler.policy.mode != "transaction":
        raise Misconfigured(
            "offsets_in_store=True stores the offset in the handler's transaction, and "
            f"{handler.label} has none: write mode='transaction'"
        )
    if not isinstance(group, str) or not 0 < len(group) <= GROUP_CHARS_MAX:
        raise Misconfigured(
            f"offsets_in_store=True needs a consumer group with 1 to {GROUP_CHARS_MAX} characters"
        )
    return group


class StoredOffsets:
    """The offsets of one consumer group, in the store of *handler*."""

    def __init__(self, handler: Handler[..., Any], group: str, running: Running) -> None:
        self.group = group
        self._handler = handler
        self._running = running
        self._table: OffsetTable | None = None

    async def create(self) -> None:
        """Open the store, and create the table if there is none and the URL has no `create=0`."""
        inbox, policy = self._handler.inbox, self._handler.policy
        if self._handler.is_async:
            await inbox.async_engine.ensure_started(policy)
            store = inbox.async_engine.store.blocking
        else:
            await asyncio.to_thread(inbox.engine.ensure_started, policy)
            store = inbox.engine.store
        self._table = OffsetTable(await asyncio.to_thread(transaction_statements_of, store))
        await asyncio.to_thread(self._table.create_if_allowed)

    async def read(self, keys: Iterable[Key]) -> dict[Key, int]:
        """
        The stored offsets of these partitions; waits while the store is down.

        To begin without them could mean to begin at the end of a partition.
        """
        assert self._table is not None
        while not self._running.stop.is_set():
            try:
                found = await asyncio.to_thread(self._table.read, self.group)
            except Exception as error:  # noqa: BLE001 - of any driver
                logger.warning("coatcheck: the stored offsets cannot be read now: %s", error)
                await self._running.pause(STORE_DOWN_S)
                continue
            return {key: found[key] for key in keys if key in found}
        return {}
