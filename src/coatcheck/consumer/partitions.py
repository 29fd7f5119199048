"""Partitions of Kafka: the records of each are handled in order, those of others at the same time.

Invariant: an offset is committed only after all records before it are completed, and only while
the partition is assigned to this consumer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from coatcheck.consumer import Acknowledge, DeadLetter
from coatcheck.consumer.inbox import Handler
from coatcheck.consumer.message import Message
from coatcheck.consumer.running import Running
from coatcheck.core.messages.offset import PartitionOffset

# A topic and the number of a partition.
Key: TypeAlias = tuple[str, int]

# 200 records of one partition wait here at most; fetching goes on when half of them are handled.
WAITING_MAX = 200


class Changes(NamedTuple):
    """For which partitions the client is to stop fetching, and for which to go on."""

    pause: list[Key]
    resume: list[Key]


class Partitions:
    """
    The partitions that are assigned to one consumer.

    Args:
        handler: what `Inbox.handler` made.
        running: where the tasks run, one for each partition that has records.
        keep_dead_letter: produces a record to the dead letters, and returns when it is stored.
        concurrency: how many records are handled at one time.
        group: the consumer group whose offsets are stored in the handler's transactions; without
            it none are.
    """

    def __init__(
        self,
        handler: Handler[..., Any],
        running: Running,
        keep_dead_letter: Callable[[Message, str], Awaitable[None]],
        *,
        concurrency: int,
        group: str | None = None,
    ) -> None:
        self._handler = handler
        self._running = running
        self._keep_dead_letter = keep_dead_letter
        self._free = asyncio.Semaphore(concurrency)
        self._group = group
        self._assigned: dict[Key, _Partition] = {}

    def assign(self, keys: Iterable[Key]) -> None:
        """Accept records of these partitions from now on."""
        for key in keys:
            self._assigned.setdefault(key, _Partition(key))

    async def revoke(self, keys: Iterable[Key] | None = None) -> dict[Key, int]:
        """
        Start no more records of these partitions, and wait for those that run; without *keys*: all.

        Returns the offsets to commit.
        """
        ending = self._taken_away(self._assigned if keys is None else keys)
        for partition in ending.values():
            await partition.idle.wait()
        return {key: found for key, one in ending.items() if (found := one.offset()) is not None}

    def lose(self, keys: Iterable[Key]) -> None:
        """Start no more records of these partitions: others handle them already."""
        self._taken_away(keys)

    def _taken_away(self, keys: Iterable[Key]) -> dict[Key, _Partition]:
        found = {key: self._assigned.pop(key) for key in list(keys) if key in self._assigned}
        for partition in found.values():
            partition.is_over.set()
        return found

    def add(self, key: Key, offset: int, message: Message) -> None:
        """Have a record handled after all others of its partition."""
        partition = self._assigned.get(key)
        if partition is None:  # fetched before the partition was revoked
            return
        partition.waiting.append((offset, message))
        if partition.idle.is_set():
            partition.idle.clear()
            self._running.start_soon(self._run(partition))

    def offsets(self) -> dict[Key, int]:
        """The offsets to commit: those that were completed since the last call."""
        pairs = ((key, partition.offset()) for key, partition in self._assigned.items())
        return {key: offset for key, offset in pairs if offset is not None}

    def changes(self) -> Changes:
        """For which partitions too many records wait, and for which no longer."""
        changes = Changes([], [])
        for key, partition in self._assigned.items():
            count = len(partition.waiting)
            if partition.is_paused is not True and count >= WAITING_MAX:
                changes.pause.append(key)
                partition.is_paused = True
            elif partition.is_paused is not False and count <= WAITING_MAX // 2:
                changes.resume.append(key)
                partition.is_paused = False
        return changes

    async def _run(self, partition: _Partition) -> None:
        """Handle the records that wait, one after the other."""
        try:
            while partition.waiting and not partition.is_over.is_set():
                offset, message = partition.waiting[0]
                if await self._is_handled(partition, message, offset + 1):
                    partition.waiting.popleft()
                    partition.completed = offset + 1
        finally:
            partition.idle.set()

    async def _is_handled(self, partition: _Partition, message: Message, next: int) -> bool:
        """Handle one record until it has an end; False if the partition is taken away before."""
        offset = None if self._group is None else PartitionOffset(self._group, *partition.key, next)
        while True:
            async with self._free:
                action = await self._handler.handle(message, offset=offset)
                if isinstance(action, Acknowledge):
                    return True
                if isinstance(action, DeadLetter):
                    await self._keep_dead_letter(message, action.reason)
                    return True
            try:
                async with asyncio.timeout(action.after_s):
                    await partition.is_over.wait()
            except TimeoutError:
                continue
            return False


class _Partition:
    """The records of one partition that wait, and how far it is."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.waiting: deque[tuple[int, Message]] = deque()
        self.completed: int | None = None  # the offset after the last completed record
        self._returned: int | None = None
        # None: not known, because librdkafka remembers a pause when a partition is assigned again.
        self.is_paused: bool | None = None
        self.is_over = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    def offset(self) -> int | None:
        """The offset to commit; None if that was returned before."""
        if self.completed == self._returned:
            return None
        self._returned = self.completed
        return self.completed
