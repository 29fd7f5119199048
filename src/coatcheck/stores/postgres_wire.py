"""An event loop's own connections to a PostgreSQL server.

Beside `postgres_link.py`, whose connections these are: they are opened by its code, in a thread,
because that is rare, and a name server may take its time. From then on the loop watches the socket
itself, all the time and not anew for each statement, and what comes is worked on where it comes: a
task for it would cost another turn of the loop.

Invariants: as in `postgres_link.py`. Every future that was given out is done in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg.pq.abc import PGresult

from coatcheck.core.flow import Flow
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.connecting import open_in_thread
from coatcheck.stores.postgres_link import (
    NO_ANSWER,
    Connection,
    conversation,
    is_hurt,
    let_go,
    opened,
    outage_of,
)
from coatcheck.stores.postgres_talk import Talk
from coatcheck.stores.prompt import Prompt

T = TypeVar("T")
_Answer: TypeAlias = Prompt[Sequence[Record | None]]
_Flow: TypeAlias = Flow[Sequence[Record | None]]


class PostgresWire:
    """
    Two connections that write, so that the server works while we do, and one that reads.

    Args:
        talk: what to say.
        conninfo: where to, in the driver's words.
        timeout_s: how long connecting may take, and each statement.
    """

    lanes = 2

    def __init__(self, talk: Talk, conninfo: str, timeout_s: float) -> None:
        self._talk = talk
        new_connection = partial(opened, conninfo, timeout_s, prepares=True)
        loop = asyncio.get_running_loop()
        self._reader = _Line(loop, new_connection, timeout_s, writes=False)
        self._writers = [
            _Line(loop, new_connection, timeout_s, writes=True) for _ in range(self.lanes)
        ]

    def swap(self, swaps: Sequence[Swap], /) -> _Answer:
        """Write each record if the version its caller saw still stands."""
        line = next(line for line in self._writers if line.is_free)
        return line.talk(self._talk.swap(swaps))

    def get(self, ids: Sequence[bytes], /) -> _Answer:
        """The records that stand, in the order of *ids*."""
        return self._reader.talk(self._talk.get(ids))

    async def close(self) -> None:
        """Close the connections."""
        for line in (*self._writers, self._reader):
            line.close()


class _Line:
    """One connection on an event loop, for one caller at a time; opened when it is needed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        new_connection: Callable[[], Connection],
        timeout_s: float,
        *,
        writes: bool,
    ) -> None:
        self._loop = loop
        self._new_connection = new_connection
        self._timeout_s = timeout_s
        self._writes = writes
        self._is_closed = False
        self._connection: Connection | None = None
        self._socket = -1
        # Of the caller: what is to be said, as far as it got, and what has come.
        self.is_free = True
        self._answer: _Answer = Prompt(loop=loop)
        self._flow: _Flow | None = None
        self._conversation: Generator[None, Any, Sequence[Record | None]] | None = None
        self._results: list[PGresult] = []
        # When the server should have answered; and the one timer that looks at it.
        self._deadline_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def talk(self, flow: _Flow) -> _Answer:
        """Say what *flow* yields."""
        assert self.is_free
        self.is_free = False
        self._answer = Prompt(loop=self._loop)
        self._flow = flow
        if self._is_closed:
            self._end([], StoreUnavailable("the store is closed"))
        else:
            self._begin()
        return self._answer

    def _begin(self) -> None:
        if self._connection is None:
            try:
                open_in_thread(
                    self._loop, self._new_connection, let_go, done=self._opened, failed=self._fail
                )
            except StoreUnavailable as error:
                self._end([], error)
            return
        assert self._flow is not None
        self._conversation = conversation(self._connection, self._flow)
        self._go_on(None)

    def _opened(self, connection: Connection) -> None:
        if self._is_closed:  # and whoever waited was told so
            let_go(connection)
            return
        self._connection = connection
        self._socket = connection.pgconn.socket
        self._loop.add_reader(self._socket, self._read, connection)
        self._begin()

    def _go_on(self, results: Sequence[PGresult] | None) -> None:
        """Say the next thing."""
        assert self._connection is not None
        assert self._conversation is not None
        self._results = []
        try:
            self._conversation.send(results)
            if self._connection.pgconn.flush():
                self._loop.add_writer(self._socket, self._flush, self._connection)
        except StopIteration as done:
            self._end(done.value, None)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._deadline_s = self._loop.time() + self._timeout_s
            if self._timer is None:
                self._timer = self._loop.call_at(self._deadline_s, self._look_at_clock)

    def _read(self, connection: Connection) -> None:
        """Something has come: perhaps all of an answer, perhaps the end of the connection."""
        pgconn = connection.pgconn
        try:
            pgconn.consume_input()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    if self._results:
                        self._go_on(self._results)
                    return
                self._results.append(result)
        except psycopg.Error as error:
            self._fail(error)

    def _flush(self, connection: Connection) -> None:
        """There is room again for what could not be sent at once."""
        try:
            if not connection.pgconn.flush():
                self._loop.remove_writer(self._socket)
        except psycopg.Error as error:
            self._fail(error)

    def _look_at_clock(self) -> None:
        """One timer for many answers. A loop that was held up reads first what has come since."""
        self._timer = None
        if self._conversation is None:
            return
        if self._loop.time() < self._deadline_s:
            self._timer = self._loop.call_at(self._deadline_s, self._look_at_clock)
        else:
            self._fail(psycopg.OperationalError(NO_ANSWER))

    def _fail(self, error: BaseException) -> None:
        if self._connection is not None and is_hurt(self._connection, error):
            self._drop()
        if self.is_free:  # nobody waits: the server has ended the connection by itself
            return
        self._end([], outage_of(error, writes=self._writes))

    def _end(self, results: Sequence[Record | None], error: BaseException | None) -> None:
        self.is_free = True
        self._flow = self._conversation = None
        if self._answer.done():
            return
        if error is None:
            self._answer.set_result(results)
        else:
            self._answer.set_exception(error)

    def close(self) -> None:
        """Let go of the connection for good; whoever still waits is told."""
        self._is_closed = True
        self._drop()
        if not self.is_free and not self._loop.is_closed():
            closed = psycopg.OperationalError("the store was closed")
            self._end([], outage_of(closed, writes=self._writes))

    def _drop(self) -> None:
        """Let go of the connection; the next caller opens another."""
        connection, self._connection = self._connection, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if connection is None:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        let_go(connection)
