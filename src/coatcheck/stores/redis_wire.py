"""The wire of the Redis store: an event loop's own connections, without a thread between.

Beside `redis_line.py`, which is for threads; both perform the flows of `redis_flow.py`. The driver
opens a connection, in a thread; from then on its socket is used here, where a batch is one write
and what comes back is read by ourselves, and worked on where it comes: a task for it would cost
three more turns of the loop. What is sent is answered in the same order, so that batches follow
each other without waiting.

Invariants: an answer that does not come fails everybody who waits on that connection, in the time
that was allowed; no connection is used that has missed an answer.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from coatcheck.core.flow import Flow
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.connecting import open_in_thread, watching_loop
from coatcheck.stores.prompt import Prompt
from coatcheck.stores.redis_flow import NO_WAIT, Flows, Send, Wait, is_demoted
from coatcheck.stores.redis_line import Connection, connected, lost
from coatcheck.stores.redis_replies import NotRedis, Replies, Reply
from coatcheck.stores.sending import NOT_NOW, Sending

# 2: the server works on one batch while we answer the other, and a tenth to a fifth more operations
# come through than with one at a time.
LANES = 2
# 8: silence is counted in eighths of the time-out. An event loop that is held up counts one of
# them, however long it was, and so does not take its own absence for the server's.
_TICKS_MAX = 8
# 64 KiB: what a batch of answers takes, so that one reading is enough for most; and more than a
# record of TLS, whose rest would lie where nobody sees it. From 128 KiB on the system maps memory
# for each reading, which takes longer than the reading.
_READ_BYTES = 1 << 16

_Flow: TypeAlias = Flow["list[Record | None]"]
_Answer: TypeAlias = "Prompt[Sequence[Record | None]]"
# Who is told the replies, or why there are none.
_Hear: TypeAlias = Callable[["list[Reply]", "BaseException | None"], None]


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
        if not hasattr(select, "poll"):  # as on Windows
            raise NotImplementedError
        self._loop = watching_loop()
        self._flows = flows
        self._writer = _Link(connect, flows.name, wait.timeout_s, is_writer=True, wait=wait)
        # Beside it, because nobody is to wait for a replica but who has written.
        self._reader = _Link(connect, flows.name, wait.timeout_s)

    def swap(self, swaps: Sequence[Swap], /) -> _Answer:
        """Write each record if the version its caller saw still stands; see `Store.swap`."""
        return self._begin(self._flows.swap(swaps), self._writer)

    def get(self, ids: Sequence[bytes], /) -> _Answer:
        """The records that stand; see `Store.get`."""
        return self._begin(self._flows.get(ids), self._reader)

    def _begin(self, flow: _Flow, link: _Link) -> _Answer:
        answer: _Answer = Prompt(loop=self._loop)
        self._go_on(flow, link, answer, None, None)
        return answer

    def _go_on(
        self,
        flow: _Flow,
        link: _Link,
        answer: _Answer,
        replies: list[Reply] | None,
        error: BaseException | None,
    ) -> None:
        """Tell *flow* what has come, and ask what it wants next; or answer, if that was all."""
        if replies and any(replies) and link is self._writer and is_demoted(replies):
            self._writer.leave()
            self._reader.leave()
        try:
            effect = flow.send(replies) if error is None else flow.throw(error)
        except BaseException as ending:
            if not answer.done():  # done: who has asked was cancelled
                if isinstance(ending, StopIteration):
                    answer.set_result(ending.value)
                else:
                    answer.set_exception(ending)
            if not isinstance(ending, Exception):
                raise
            return
        assert isinstance(effect, Send)
        commands = [command.packed for command in effect.commands]
        link.ask(commands, partial(self._go_on, flow, link, answer))

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
        self._loop = asyncio.get_running_loop()
        self._line: _Line | None = None
        self._is_opening = False
        self._waiting: deque[tuple[Sequence[bytes], _Hear]] = deque()  # for the connection
        self._is_closed = False

    def ask(self, commands: Sequence[bytes], hear: _Hear) -> None:
        """Send *commands*, and have *hear* told their replies."""
        line = self._line
        if line is None or not line.is_ready():
            self._waiting.append((commands, hear))
            self._open()
            return
        if self._wait.replicas:
            commands = [*commands, self._wait.command()]
            hear = partial(self._hear_waited, hear)
        line.ask(b"".join(commands), len(commands), hear)

    def _hear_waited(self, hear: _Hear, replies: list[Reply], error: BaseException | None) -> None:
        if error is None:
            *replies, waited = replies
            replies = self._wait.judged(self._name, replies, waited)
        hear(replies, error)

    def _outage_of(self, error: Exception) -> StoreUnavailable:
        outage = lost(self._name, error, is_ambiguous=self._is_writer)
        outage.__cause__ = error
        return outage

    def _open(self) -> None:
        """Connect for those who wait; whoever comes meanwhile has the same connection."""
        while self._waiting and not self._is_opening:
            try:
                self._start_opening()
            except StoreUnavailable as error:
                self._refuse_first(error)

    def _start_opening(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self._name}: the store is closed")
        connect = partial(connected, self._connect, self._name)
        open_in_thread(self._loop, connect, _let_go, done=self._opened, failed=self._failed)
        self._is_opening = True

    def _opened(self, connection: Connection) -> None:
        self._is_opening = False
        if self._is_closed:  # meanwhile, and those who waited were told so
            _let_go(connection)
            return
        self._line = _Line(connection, self._timeout_s, self._outage_of)
        waiting, self._waiting = self._waiting, deque()
        for commands, hear in waiting:
            self.ask(commands, hear)

    def _failed(self, error: BaseException) -> None:
        self._is_opening = False
        self._refuse_first(error)
        self._open()

    def _refuse_first(self, error: BaseException) -> None:
        """Of those who wait: an error is for one caller, and the others have another try."""
        if self._waiting:  # else it was closed, and they were told
            _, hear = self._waiting.popleft()
            hear([], error)

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
        if self._is_opening and not self._loop.is_closed():
            self._is_opening = False
            self._open()


def _let_go(connection: Connection) -> None:
    connection.disconnect()


class _Line:
    """
    One connection: who asks, waits for as many replies as there were commands.

    Args:
        connection: the driver's.
        timeout_s: how long it may be silent while somebody waits.
        outage_of: what each of them is told when it is lost.
    """

    def __init__(
        self,
        connection: Connection,
        timeout_s: float,
        outage_of: Callable[[Exception], StoreUnavailable],
    ) -> None:
        self.is_lost = False
        self._outage_of = outage_of
        self._loop = asyncio.get_running_loop()
        self._connection = connection  # lets go of the socket when it is forgotten
        self._socket = connection._sock  # noqa: SLF001 - the driver has no other word for it
        self._socket.setblocking(False)  # noqa: FBT003 - the standard library
        self._news = select.poll()
        self._news.register(self._socket, select.POLLIN)
        self._tick_s = timeout_s / _TICKS_MAX
        self._silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._sending = Sending(
            self._loop, self._socket, moves=self._is_heard_from, lost=self.abandon
        )
        self._replies = Replies()
        self._unclaimed: list[Reply] = []  # some of those that the first in the queue waits for
        self._asked: deque[tuple[_Hear, int]] = deque()
        self._is_left = False
        self._loop.add_reader(self._socket, self._read)

    def is_ready(self) -> bool:
        """Whether it can be asked; what can be read before anything was asked is its end."""
        if not self._asked and not self.is_lost and self._news.poll(0):
            self._read()
        return not self.is_lost

    def ask(self, commands: bytes, count: int, hear: _Hear) -> None:
        """Send *count* commands; *hear* is told when all their replies are there."""
        assert not self.is_lost
        if not self._asked:
            self._silent_ticks = 0
        self._asked.append((hear, count))
        self._sending.send(commands)
        if self._timer is None and not self.is_lost:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _is_heard_from(self) -> None:
        self._silent_ticks = 0

    def _read(self) -> None:
        """Read what has come, and give it to those who wait for it."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except NOT_NOW:
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
        if self._unclaimed:
            replies = [*self._unclaimed, *replies]
        told: list[tuple[_Hear, list[Reply]]] = []
        while self._asked and len(replies) >= self._asked[0][1]:
            hear, count = self._asked.popleft()
            told.append((hear, replies[:count]))
            replies = replies[count:]
        self._unclaimed = replies
        # Before anybody hears: who does may ask again at once, and what is left is not for that.
        if not self._asked:
            if replies:
                self.abandon(NotRedis("it has said what nobody had asked"))
            elif self._is_left:
                self.leave()
        for hear, own in told:
            hear(own, None)

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
        self._connection.disconnect()
        asked, self._asked = self._asked, deque()
        if not self._loop.is_closed():
            for hear, _ in asked:
                hear([], self._outage_of(error))
