"""The wire of the Redis store: an event loop's own connections, without a thread between.

Beside `redis_line.py`, which is for threads; both perform the flows of `redis_flow.py`. The driver
opens a connection, in a thread; from then on its socket is used here, where a batch is one write
and what comes back is read by ourselves. What is sent is answered in the same order, so that
batches follow each other without waiting.

Invariants: an answer that does not come fails everybody who waits on that connection, in the time
that was allowed; no connection is used that has missed an answer.
"""

from __future__ import annotations

import asyncio
import os
import select
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from coatcheck.core.flow import Effect, run_async
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.redis_flow import NO_WAIT, Flows, Send, Wait, is_demoted
from coatcheck.stores.redis_line import Connection, connected, lost
from coatcheck.stores.redis_replies import NotRedis, Replies, Reply
from coatcheck.stores.scarce import outage_without_thread

# 1: with two batches on their way each is half as large, and a tenth fewer operations come through,
# also where a round trip takes a millisecond.
LANES = 1
# 8: silence is counted in eighths of the time-out. An event loop that is held up counts one of
# them, however long it was, and so does not take its own absence for the server's.
_TICKS_MAX = 8
# 256 KiB: what a batch of answers takes, so that one reading is enough for most; and more than a
# record of TLS, whose rest would lie where nobody sees it.
_READ_BYTES = 1 << 18
_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class RedisWire:
    """
    One event loop's connections to one server, or to whichever server is the master.

    Args:
        flows: what to send, and what the replies mean.
        connect: makes a connection that is ready to be asked; it may block.
        wait: how long to wait for each answer, and for how many replicas.
    """

    lanes = LANES

    def __init__(self, flows: Flows, connect: Callable[[], Connection], wait: Wait) -> None:
        loop = asyncio.get_running_loop()
        if type(loop).add_reader is asyncio.AbstractEventLoop.add_reader or os.name == "nt":
            raise NotImplementedError  # it cannot tell when a socket can be read
        self._flows = flows
        self._writer = _Link(connect, flows.name, wait.timeout_s, is_writer=True, wait=wait)
        # Beside it, because nobody is to wait for a replica but who has written.
        self._reader = _Link(connect, flows.name, wait.timeout_s)

    async def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if the version its caller saw still stands; see `Store.swap`."""
        return await run_async(self._flows.swap(swaps), self._write)

    async def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand; see `Store.get`."""
        return await run_async(self._flows.get(ids), self._read)

    async def _write(self, effect: Effect[list[Reply]]) -> list[Reply]:
        assert isinstance(effect, Send)
        replies = await self._writer.ask([command.packed for command in effect.commands])
        if is_demoted(replies):
            self._writer.leave()
            self._reader.leave()
        return replies

    def _read(self, effect: Effect[list[Reply]]) -> Awaitable[list[Reply]]:
        assert isinstance(effect, Send)
        return self._reader.ask([command.packed for command in effect.commands])

    async def close(self) -> None:
        """Let go of the connections for good."""
        self._writer.close()
        self._reader.close()


class _Link:
    """
    One connection to one server, opened at first use and again when it was lost.

    Args:
        connect: makes a connection that is ready to be asked; it may block.
        name: the server, for people.
        timeout_s: how long to wait for each answer.
        is_writer: what is sent may change something, so that losing its answer matters.
        wait: how many replicas must have acknowledged what was written.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        name: str,
        timeout_s: float,
        *,
        is_writer: bool = False,
        wait: Wait = NO_WAIT,
    ) -> None:
        self._connect = connect
        self._name = name
        self._timeout_s = timeout_s
        self._is_writer = is_writer
        self._wait = wait
        self._line: _Line | None = None
        self._opening = asyncio.Lock()
        self._is_closed = False

    async def ask(self, commands: Sequence[bytes]) -> list[Reply]:
        """Send *commands*, and wait for their replies."""
        line = self._line
        if line is None or not line.is_ready():
            line = await self._opened()
        if self._wait.replicas:
            commands = [*commands, self._wait.command()]
        try:
            replies = await line.ask(b"".join(commands), len(commands))
        except (OSError, ValueError) as error:
            raise lost(self._name, error, is_ambiguous=self._is_writer) from error
        if self._wait.replicas:
            self._wait.refuse_too_few(self._name, replies, replies.pop())
        return replies

    async def _opened(self) -> _Line:
        async with self._opening:  # whoever comes meanwhile has the same connection
            if self._line is None or self._line.is_lost:
                self._refuse_if_closed()
                self._line = _Line(await self._connected(), self._timeout_s)
                if self._is_closed:  # meanwhile
                    self.close()
            self._refuse_if_closed()
            return self._line

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self._name}: the store is closed")

    async def _connected(self) -> Connection:
        # In a thread of its own: those that the loop has may all be waiting for us.
        executor = ThreadPoolExecutor(1, "coatcheck-connect")
        try:
            loop = asyncio.get_running_loop()
            with outage_without_thread():
                opening = loop.run_in_executor(executor, connected, self._connect, self._name)
            return await opening
        finally:
            executor.shutdown(wait=False)

    def leave(self) -> None:
        """Connect anew at the next use; who waits already has an answer first."""
        line, self._line = self._line, None
        if line is not None:
            line.leave()

    def close(self) -> None:
        """Let go of the connection for good."""
        self._is_closed = True
        line, self._line = self._line, None
        if line is not None:
            line.abandon(ConnectionError("the store is closed"))


class _Line:
    """One connection: who asks, waits for as many replies as there were commands."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self.is_lost = False
        self._loop = asyncio.get_running_loop()
        self._connection = connection  # lets go of the socket when it is forgotten
        self._socket = connection._sock  # noqa: SLF001 - the driver has no other word for it
        self._socket.setblocking(False)  # noqa: FBT003 - the standard library
        self._news = select.poll()
        self._news.register(self._socket, select.POLLIN)
        self._tick_s = timeout_s / _TICKS_MAX
        self._silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = b""
        self._replies = Replies()
        self._unclaimed: list[Reply] = []  # some of those that the first in the queue waits for
        self._asked: deque[tuple[asyncio.Future[list[Reply]], int]] = deque()
        self._is_left = False
        self._loop.add_reader(self._socket, self._read)

    def is_ready(self) -> bool:
        """Whether it can be asked; what can be read before anything was asked is its end."""
        if not self._asked and not self.is_lost and self._news.poll(0):
            self._read()
        return not self.is_lost

    def ask(self, commands: bytes, count: int) -> asyncio.Future[list[Reply]]:
        """Send *count* commands; done when all their replies are there."""
        assert not self.is_lost
        future: asyncio.Future[list[Reply]] = self._loop.create_future()
        if not self._asked:
            self._silent_ticks = 0
        self._asked.append((future, count))
        if self._unsent:
            self._unsent += commands
        else:
            self._send(commands)
        if self._timer is None and not self.is_lost:
            self._timer = self._loop.call_later(self._tick_s, self._tick)
        return future

    def _send(self, data: bytes) -> None:
        """Send what the socket takes; the rest when it takes more."""
        try:
            data = data[self._socket.send(data) :]
        except _NOT_NOW:
            pass
        except OSError as error:
            self.abandon(error)
            return
        if data and not self._unsent:
            self._loop.add_writer(self._socket, self._send_more)
        elif self._unsent and not data:
            self._loop.remove_writer(self._socket)
        self._unsent = data

    def _send_more(self) -> None:
        self._silent_ticks = 0  # who takes something is not silent
        self._send(self._unsent)

    def _read(self) -> None:
        """Read what has come, and give it to those who wait for it."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except _NOT_NOW:
            return
        except OSError as error:
            self.abandon(error)
            return
        if not data:
            self.abandon(ConnectionError("the server has closed the connection"))
            return
        self._silent_ticks = 0
        try:
            self._give(self._replies.feed(data))
        except ValueError as error:
            self.abandon(error)

    def _give(self, replies: list[Reply]) -> None:
        """Replies come in the order in which was asked."""
        self._unclaimed += replies
        while self._asked and len(self._unclaimed) >= self._asked[0][1]:
            future, count = self._asked.popleft()
            given, self._unclaimed = self._unclaimed[:count], self._unclaimed[count:]
            if not future.done():  # done: who has asked was cancelled
                future.set_result(given)
        if self._asked:
            return
        if self._unclaimed:
            self.abandon(NotRedis("it has said what nobody had asked"))
        elif self._is_left:
            self.leave()

    def _tick(self) -> None:
        """Look whether the server has fallen silent, as long as somebody waits for it."""
        self._timer = None
        if not self._asked:
            return
        self._silent_ticks += 1
        if self._silent_ticks > _TICKS_MAX:
            self.abandon(TimeoutError(f"no answer within {self._tick_s * _TICKS_MAX:g} s"))
        else:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def leave(self) -> None:
        """End as soon as nobody waits any more."""
        self._is_left = True
        if not self._asked:
            self.abandon(ConnectionError("it was left"))

    def abandon(self, error: Exception) -> None:
        """Use it no more, and tell everybody who waits why."""
        if self.is_lost:
            return
        self.is_lost = True
        if not self._loop.is_closed():  # else nobody waits, and nobody listens
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            if self._timer is not None:
                self._timer.cancel()
            for future, _ in self._asked:
                if not future.done():
                    future.set_exception(error)
        self._asked.clear()
        self._connection.disconnect()
