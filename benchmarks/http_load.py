"""The load: keep-alive connections that send one request after another, as fast as answered.

Written on the bare protocol, because an HTTP library for clients costs more than the server that
is to be measured. Every answer is checked: its status, and whether it is a replay or not, so that
no slot can measure something else than it says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

from benchmarks.machine import processor_s

REPLAYED = b"-replayed: true"  # after "idempotent" here, after "idempotency" in idemkit
CREATED = b"HTTP/1.1 201"

# Long enough for the slowest answer of the slowest contender; only a hang takes longer.
ANSWER_S_MAX = 10
# How often to look for the first answer, where there is none yet.
LOOK_S = 0.01


class Address(NamedTuple):
    """Where a server listens, and which process it is."""

    port: int
    pid: int


class Loaded(NamedTuple):
    """How many answers came in how long a time."""

    answers: int
    wall_s: float
    server_s: float  # processor time of the server

    @property
    def per_second(self) -> float:
        """Requests a second."""
        return self.answers / self.wall_s

    @property
    def server_us(self) -> float:
        """Processor time of the server for one request."""
        return self.server_s / self.answers * 1e6


class Load:
    """One slot: *requests* to one server over *connections* connections."""

    def __init__(
        self,
        address: Address,
        requests: Iterator[bytes],
        *,
        connections: int,
        replayed: bool | None,
    ) -> None:
        self._address = address
        self._requests = requests
        self._connections = connections
        self._replayed = replayed
        self._answers = 0
        self._open: list[_Connection] = []
        self._all_idle = asyncio.Event()
        self._is_over = False
        self.failure: bytes | None = None

    async def run(self, wall_s: float, warm_up_s: float) -> Loaded:
        """Warm up, and count what is answered within *wall_s* seconds."""
        loop = asyncio.get_running_loop()
        await self._start()
        await asyncio.sleep(warm_up_s)
        before, start_s, start_cpu_s = self._answers, loop.time(), processor_s(self._address.pid)
        await asyncio.sleep(wall_s)
        # Nothing yet: the machine is busy with other things, and the time counts.
        while self._answers == before and loop.time() - start_s < ANSWER_S_MAX:  # noqa: ASYNC110 - to set an event at each answer would be measured, too
            await asyncio.sleep(LOOK_S)
        end_cpu_s = processor_s(self._address.pid)
        loaded = Loaded(self._answers - before, loop.time() - start_s, end_cpu_s - start_cpu_s)
        self._is_over = True
        await self._end()
        return loaded

    async def run_out(self) -> None:
        """Send every request there is."""
        await self._start()
        await self._end()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self._connections):
            _, connection = await loop.create_connection(
                lambda: _Connection(self._next, self._answered), "127.0.0.1", self._address.port
            )
            self._open.append(connection)
        for connection in self._open:
            connection.ask()

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                await self._all_idle.wait()
        except TimeoutError:
            self.failure = self.failure or b"no answer"
        for connection in self._open:
            connection.close()
        if self.failure is not None:
            raise RuntimeError(f"not the answer that was to be measured: {self.failure!r}")

    def _next(self) -> bytes | None:
        request = None if self._is_over else next(self._requests, None)
        if request is None:
            self._connections -= 1
            if self._connections == 0:
                self._all_idle.set()
        return request

    def _answered(self, answer: bytes) -> None:
        self._answers += 1
        is_right = answer.startswith(CREATED) and (
            self._replayed is None or (REPLAYED in answer) == self._replayed
        )
        if not is_right:
            self.failure = self.failure or answer


class _Connection(asyncio.Protocol):
    def __init__(
        self, next_request: Callable[[], bytes | None], answered: Callable[[bytes], None]
    ) -> None:
        self._next = next_request
        self._answered = answered
        self._received = b""
        self._is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is one in all but the name, so a cast and not an assertion.
        self._transport = cast("asyncio.Transport", transport)

    def ask(self) -> None:
        request = self._next()
        if request is not None:
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        received = self._received + data if self._received else data
        if is_whole(received):
            self._received = b""
            self._answered(received)
            self.ask()
        else:
            self._received = received

    def connection_lost(self, _: Exception | None) -> None:
        if not self._is_closed:
            self._answered(b"the server closed the connection")

    def close(self) -> None:
        self._is_closed = True
        self._transport.close()


def is_whole(received: bytes) -> bool:
    """*received* is one whole answer, of a declared length or in chunks."""
    head, gap, body = received.partition(b"\r\n\r\n")
    if not gap:
        return False
    _, declared, rest = head.partition(b"\r\ncontent-length: ")
    if not declared:  # idemkit replays without a length, so that the server sends chunks
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(rest.partition(b"\r\n")[0])


def request_of(key: bytes | None) -> bytes:
    """A small JSON order, with *key* or without; another order for each key."""
    order = key or b"none"
    body = b'{"amount": 1999, "currency": "EUR", "items": [{"sku": "A-17"}], "order": "%b"}' % order
    lines = [
        b"POST /orders HTTP/1.1",
        b"host: 127.0.0.1",
        b"content-type: application/json",
        b"content-length: %d" % len(body),
    ]
    if key is not None:
        lines.append(b"idempotency-key: " + key)
    return b"\r\n".join([*lines, b"", body])
