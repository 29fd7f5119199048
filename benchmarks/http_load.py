"""The load: keep-alive connections, each of which sends one request after another.

It does not use an HTTP library, because that would need more processor time than the server. It
checks the status of every response, and whether it is a replay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

from benchmarks.machine import processor_s

REPLAYED = b"-replayed: true"  # after "idempotent" here, after "idempotency" in idemkit
CREATED = b"HTTP/1.1 201"

# Longer than the slowest response; only a hang takes longer.
ANSWER_S_MAX = 10
# How often to check for the first response, if there is none yet.
LOOK_S = 0.01


class Address(NamedTuple):
    """Where a server listens, and which process it is."""

    port: int
    pid: int


class Loaded(NamedTuple):
    """How many responses came in which time."""

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
        """Warm up, and count the responses within *wall_s* seconds."""
        loop = asyncio.get_running_loop()
        await self._start()
        await asyncio.sleep(warm_up_s)
        before, start_s, start_cpu_s = self._answers, loop.time(), processor_s(self._address.pid)
        await asyncio.sleep(wall_s)
        # No response yet: the machine is busy with other work, and the time counts.
        while self._answers == before and loop.time() - start_s < ANSWER_S_MAX:  # noqa: ASYNC110 - setting an event at each response would be measured
            await asyncio.sleep(LOOK_S)
        end_cpu_s = processor_s(self._address.pid)
        loaded = Loaded(self._answers - before, loop.time() - start_s, end_cpu_s - start_cpu_s)
        self._is_over = True
        await self._end()
        return loaded

    async def run_out(self) -> None:
        """Send all requests."""
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
            raise RuntimeError(f"unexpected response: {self.failure!r}")

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
        # A cast and not an assertion: uvloop's transport is not a subclass.
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
    """Return whether *received* is a complete response, with a length or in chunks."""
    head, gap, body = received.partition(b"\r\n\r\n")
    if not gap:
        return False
    _, declared, rest = head.partition(b"\r\ncontent-length: ")
    if not declared:  # idemkit replays without a length, so the server sends chunks
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(rest.partition(b"\r\n")[0])


def request_of(key: bytes | None) -> bytes:
    """Return a request with a small JSON order, different for each key."""
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
