"""The floors on servers: bare loops that send all waiting calls at once, on one connection.

They have no versions and no leases, and compare nothing. They use asyncpg, and pipelines of
redis.asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeAlias

import asyncpg
import redis.asyncio

from benchmarks.comparison import DAY_MS, EXPIRES_MS

Perform: TypeAlias = Callable[[list[Any]], Awaitable[Sequence[Any]]]


class _Group:
    """The waiting calls of one kind."""

    def __init__(self, arrived: asyncio.Event) -> None:
        self._arrived = arrived
        self._calls: list[Any] = []
        self._futures: list[asyncio.Future[Any]] = []

    def add(self, call: object) -> asyncio.Future[Any]:
        """Return a future for the result of *call*."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.append(call)
        self._futures.append(future)
        self._arrived.set()
        return future

    async def perform(self, perform: Perform) -> None:
        """Perform all waiting calls at once, if there are any."""
        calls, futures = self._calls, self._futures
        if calls:
            self._calls, self._futures = [], []
            for future, result in zip(futures, await perform(calls), strict=True):
                future.set_result(result)


class _Loop:
    """Performs one round after another while calls arrive."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self._working = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            await self.perform()

    async def perform(self) -> None:
        """Perform one round."""
        raise NotImplementedError

    def end(self) -> None:
        """Stop."""
        self._working.cancel()


class GroupedPostgres(_Loop):
    """One statement for each group, through `unnest`."""

    def __init__(self, connection: asyncpg.Connection, table: str) -> None:
        super().__init__()
        self._connection = connection
        self._inserts = _Group(self.arrived)
        self._updates = _Group(self.arrived)
        self._gets = _Group(self.arrived)
        self._insert = (
            f"insert into {table} select id, 0, f, {EXPIRES_MS}, null from"
            " unnest($1::bytea[], $2::bytea[]) as g (id, f) on conflict do nothing"
        )
        self._update = (
            f"update {table} as r set state = 1, response = g.response from"
            " unnest($1::bytea[], $2::bytea[]) as g (id, response) where r.id = g.id"
        )
        self._select = f"select id, response from {table} where id = any($1::bytea[])"

    @classmethod
    async def open(cls, url: str, table: str) -> Self:
        """Connect, and create the table if it is missing."""
        connection = await asyncpg.connect(url)
        await connection.execute(table_of(table))
        return cls(connection, table)

    def insert(self, id: bytes, fingerprint: bytes) -> asyncio.Future[None]:
        """Claim; durable when the future is done."""
        return self._inserts.add((id, fingerprint))

    def update(self, id: bytes, response: bytes) -> asyncio.Future[None]:
        """Complete; durable when the future is done."""
        return self._updates.add((id, response))

    def get(self, id: bytes) -> asyncio.Future[bytes | None]:
        """Read the response of *id*."""
        return self._gets.add(id)

    async def perform(self) -> None:
        """Execute one statement for each kind of call."""
        await self._inserts.perform(lambda rows: self._write(self._insert, rows))
        await self._updates.perform(lambda rows: self._write(self._update, rows))
        await self._gets.perform(self._read)

    async def _write(self, statement: str, rows: list[tuple[bytes, bytes]]) -> Sequence[None]:
        await self._connection.execute(statement, *map(list, zip(*rows, strict=True)))
        return [None] * len(rows)

    async def _read(self, ids: list[bytes]) -> Sequence[bytes | None]:
        found = dict(await self._connection.fetch(self._select, ids))
        return [found.get(id) for id in ids]

    async def close(self) -> None:
        """Close the connection."""
        self.end()
        await self._connection.close()


class GroupedRedis(_Loop):
    """`SET … NX`, `SET` and `GET`, in one pipeline for each group."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._client: Any = redis.asyncio.Redis.from_url(url)
        self._commands = _Group(self.arrived)

    def insert(self, id: bytes, fingerprint: bytes) -> asyncio.Future[None]:
        """Claim; written when the future is done."""
        return self._commands.add((b"SET", id, fingerprint, b"NX", b"PX", DAY_MS))

    def update(self, id: bytes, response: bytes) -> asyncio.Future[None]:
        """Complete; written when the future is done."""
        return self._commands.add((b"SET", id, response, b"PX", DAY_MS))

    def get(self, id: bytes) -> asyncio.Future[bytes | None]:
        """Read the response of *id*."""
        return self._commands.add((b"GET", id))

    async def perform(self) -> None:
        """Send all commands, and read as many replies."""
        await self._commands.perform(self._send)

    async def _send(self, commands: list[tuple[Any, ...]]) -> Sequence[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: Sequence[Any] = await pipeline.execute()
        return replies

    async def close(self) -> None:
        """Close the connection."""
        self.end()
        await self._client.aclose()


def table_of(name: str) -> str:
    """Return the SQL for a floor's table on PostgreSQL, with half of each page free for updates."""
    return (
        f"create table if not exists {name} (id bytea primary key, state smallint not null,"
        " fingerprint bytea not null, expires_ms bigint not null, response bytea)"
        " with (fillfactor = 50)"
    )
