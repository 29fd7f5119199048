"""Lines of an event loop: one connection each, for one caller at a time.

Beneath the wires of servers that are told one thing, and then the next. A connection is opened when
it is needed, in a thread, because that is rare, and a driver or a name server may block. From then
on the loop watches the socket itself, and what comes is worked on where it comes: a task for it
would cost another turn of the loop.

Invariants: every future that was given out is done in the end; a connection that may be hurt is
dropped, and the next caller opens another.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from coatcheck.core.record import Record
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.connecting import open_in_thread
from coatcheck.stores.prompt import Prompt

C = TypeVar("C")  # a connection
W = TypeVar("W")  # what is to be done on one

Results: TypeAlias = Sequence[Record | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner(Generic[C, W]):
    """
    How one kind of connection is treated.

    Args:
        connect: makes one that is ready to be asked; it may block.
        let_go: closes one, whatever has become of it.
        conversation: does work on one; yields what to say, and is sent the reply.
        is_hurt: whether one is of no use after an error.
        outage_of: what an error is to whoever has asked.
        timeout_s: how long the server may be silent while somebody waits for it.
        silence: what they are told when it was.
    """

    connect: Callable[[], C]
    let_go: Callable[[C], None]
    conversation: Callable[[C, W], Generator[Any, Any, Results]]
    is_hurt: Callable[[C, BaseException], bool]
    outage_of: Callable[[BaseException], BaseException]
    timeout_s: float
    silence: str


class LoopLine(ABC, Generic[C, W]):
    """One connection on an event loop, for one caller at a time; opened when it is needed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, manner: Manner[C, W]) -> None:
        self.is_free = True
        self._loop = loop
        self._manner = manner
        self._is_closed = False
        self._connection: C | None = None
        self._descriptor = -1
        # Of the caller: what is to be done, and as far as it got.
        self._answer: Prompt[Results] = Prompt(loop=loop)
        self._work: W | None = None
        self._conversation: Generator[Any, Any, Results] | None = None
        # Whether the server owes an answer, when it is late, and the one timer that looks at it.
        self._is_asked = False
        self._deadline_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def _watched(self, connection: C, /) -> int:
        """The descriptor of *connection*, which is new, and on which nothing blocks from now on."""

    @abstractmethod
    def _say(self, told: Any, /) -> None:  # noqa: ANN401 - whatever its conversations yield
        """Do what the conversation has yielded."""

    @abstractmethod
    def _read(self, connection: C, /) -> None:
        """Something has come: perhaps all of a reply, perhaps the end of the connection."""

    @abstractmethod
    def _lose(self, why: str) -> None:
        """Tell whoever waits that no answer will come."""

    def talk(self, work: W) -> Prompt[Results]:
        """Do *work*."""
        assert self.is_free
        self.is_free = False
        self._answer = Prompt(loop=self._loop)
        self._work = work
        if self._is_closed:
            self._end([], StoreUnavailable("the store is closed"))
        else:
            self._begin()
        return self._answer

    def _begin(self) -> None:
        if self._connection is None:
            connect, let_go = self._manner.connect, self._manner.let_go
            try:
                open_in_thread(self._loop, connect, let_go, done=self._opened, failed=self._fail)
            except StoreUnavailable as error:
                self._end([], error)
            return
        assert self._work is not None
        self._conversation = self._manner.conversation(self._connection, self._work)
        self._go_on(None)

    def _opened(self, connection: C) -> None:
        if self._is_closed:  # and whoever waited was told so
            self._manner.let_go(connection)
            return
        self._connection = connection
        self._descriptor = self._watched(connection)
        self._loop.add_reader(self._descriptor, self._read, connection)
        self._begin()

    def _go_on(self, reply: object) -> None:
        """Tell the conversation what has come, and say what it wants next."""
        assert self._conversation is not None
        self._is_asked = False
        try:
            told = self._conversation.send(reply)
        except StopIteration as done:
            self._end(done.value, None)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._say(told)

    def _expect(self) -> None:
        """The server owes an answer from now on."""
        self._is_asked = True
        self._is_heard_from()
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline_s, self._look_at_clock)

    def _is_heard_from(self) -> None:
        self._deadline_s = self._loop.time() + self._manner.timeout_s

    def _look_at_clock(self) -> None:
        """One timer for many answers. A loop that was held up reads first what has come since."""
        self._timer = None
        if not self._is_asked:
            return
        if self._loop.time() < self._deadline_s:
            self._timer = self._loop.call_at(self._deadline_s, self._look_at_clock)
        else:
            self._lose(self._manner.silence)

    def _fail(self, error: BaseException) -> None:
        if self._connection is not None and self._manner.is_hurt(self._connection, error):
            self._drop()
        if not self.is_free:  # else nobody waits: the server has ended the connection by itself
            self._end([], self._manner.outage_of(error))

    def _end(self, results: Results, error: BaseException | None) -> None:
        self.is_free = True
        self._is_asked = False
        self._work = self._conversation = None
        if self._answer.done():
            return
        if error is None:
            self._answer.set_result(results)
        else:
            self._answer.set_exception(error)

    def close(self) -> None:
        """Let go of the connection for good; whoever still waits is told."""
        self._is_closed = True
        if not self.is_free and not self._loop.is_closed():
            self._lose("the store was closed")
        self._drop()

    def _drop(self) -> None:
        """Let go of the connection; the next caller opens another."""
        connection, self._connection = self._connection, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if connection is None:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_writer(self._descriptor)
        self._manner.let_go(connection)
