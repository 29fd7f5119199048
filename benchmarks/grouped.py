"""The floors on servers: bare loops that send whatever has gathered, on one connection.

No versions, no leases, nothing compared. asyncpg is the quickest driver for PostgreSQL; for Redis
nothing is quicker than the bare protocol on asyncio's streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeAlias

import asyncpg

from benchmarks.contest import DAY_MS, EXPIRES_MS

Perform: TypeAlias = Callable[[list[Any]], Awaitable[Sequence[Any]]]


class _Group:
    """What has gathered for one statement, and who waits for it."""

    def __init__(self, arrived: asyncio.Event) -> None:
        self._arrived = arrived
        self._asked: list[Any] = []
        self._futures: list[asyncio.Future[Any]] = []

    def add(self, asked: object) -> asyncio.Future[Any]:
        """Ask; done when there is an answer."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._futures.append(future)
        self._arrived.set()
        return future

    async def perform(self, perform: Perform) -> None:
        """Ask all that has gathered at once, if anything has."""
        asked, futures = self._asked, self._futures
        if asked:
            self._asked, self._futures = [], []
            for future, answer in zip(futures, await perform(asked), strict=True):
                future.set_result(answer)


class _Loop:
    """Looks again and again what has gathered."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self._working = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            await self.perform()

    async def perform(self) -> None:
        """One round."""
        raise NotImplementedError

    def end(self) -> None:
        """Look no more."""
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
        """Connect, and make the table where it is missing."""
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
        """The response of *id*."""
        return self._gets.add(id)

    async def perform(self) -> None:
        """One statement for each kind."""
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
        """Let go of the connection."""
        self.end()
        await self._connection.close()


class GroupedRedis(_Loop):
    """`SET … NX`, `SET` and `GET`, as many at once as have gathered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self._reader = reader
        self._writer = writer
        self._commands = _Group(self.arrived)

    @classmethod
    async def open(cls, port: int) -> Self:
        """Connect."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def insert(self, id: bytes, fingerprint: bytes) -> asyncio.Future[None]:
        """Claim; written when the future is done."""
        command = _packed(b"SET", id, fingerprint, b"NX", b"PX", b"%d" % DAY_MS)
        return self._commands.add(command)

    def update(self, id: bytes, response: bytes) -> asyncio.Future[None]:
        """Complete; written when the future is done."""
        return self._commands.add(_packed(b"SET", id, response, b"PX", b"%d" % DAY_MS))

    def get(self, id: bytes) -> asyncio.Future[bytes | None]:
        """The response of *id*."""
        return self._commands.add(_packed(b"GET", id))

    async def perform(self) -> None:
        """Send all, and read as many answers."""
        await self._commands.perform(self._send)

    async def _send(self, commands: list[bytes]) -> Sequence[bytes | None]:
        self._writer.write(b"".join(commands))
        return [await self._answer() for _ in commands]

    async def _answer(self) -> bytes | None:
        line = await self._reader.readline()
        if line == b"+OK\r\n":
            return None
        assert line.startswith(b"$"), line
        length = int(line[1:])
        return None if length < 0 else (await self._reader.readexactly(length + 2))[:-2]

    async def close(self) -> None:
        """Let go of the connection."""
        self.end()
        self._writer.close()


def table_of(name: str) -> str:
    """A table for a floor on PostgreSQL; half of a page stays free, for the completions."""
    return (
        f"create table if not exists {name} (id bytea primary key, state smallint not null,"
        " fingerprint bytea not null, expires_ms bigint not null, response bytea)"
        " with (fillfactor = 50)"
    )


def _packed(*words: bytes) -> bytes:
    spelt = b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
    return b"*%d\r\n%b" % (len(words), spelt)
