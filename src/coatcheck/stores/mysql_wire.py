"""An event loop's own connections to a MySQL server.

Beside `mysql_line.py`, whose sessions these are: they are opened by its code, in a thread, because
that is rare, and the driver can only block. From then on the loop watches the socket itself, and
what comes is worked on where it comes: a task for it would cost another turn of the loop.

Invariants: as in `mysql_flow.py`. Every future that was given out is done in the end.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.connecting import open_in_thread
from coatcheck.stores.mysql_faults import SERVER_GONE, SERVER_LOST
from coatcheck.stores.mysql_flow import Conversation, Work, conversation
from coatcheck.stores.mysql_line import LANES, Address, Session, opened
from coatcheck.stores.mysql_packets import Hearing, Refusal, Reply
from coatcheck.stores.mysql_talk import Talk
from coatcheck.stores.prompt import Prompt

_Results: TypeAlias = Sequence[Record | None]
_Answer: TypeAlias = Prompt[_Results]

_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class MysqlWire:
    """
    Two connections that write, so that the server works while we do, and one that reads.

    Args:
        talk: what to say.
        address: where to.
    """

    lanes = LANES

    def __init__(self, talk: Talk, address: Address) -> None:
        self._talk = talk
        loop = asyncio.get_running_loop()
        self._reader = _Line(loop, partial(opened, address))
        writes = partial(opened, address, talk.statements.kept)
        self._writers = [_Line(loop, writes) for _ in range(self.lanes)]

    def swap(self, swaps: Sequence[Swap], /) -> _Answer:
        """Write each record if the version its caller saw still stands."""
        line = next(line for line in self._writers if line.is_free)
        return line.talk(lambda terms: self._talk.swap(terms, swaps))

    def get(self, ids: Sequence[bytes], /) -> _Answer:
        """The records that stand, in the order of *ids*."""
        return self._reader.talk(lambda _: self._talk.get(ids))

    async def close(self) -> None:
        """Close the connections."""
        for line in (*self._writers, self._reader):
            line.close()


class _Line:
    """One connection on an event loop, for one caller at a time; opened when it is needed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, new_session: Callable[[], Session]) -> None:
        self._loop = loop
        self._new_session = new_session
        self._is_closed = False
        self._session: Session | None = None
        self._descriptor = -1
        # Of the caller: what is to be done, as far as it got, and what has come.
        self.is_free = True
        self._answer: _Answer = Prompt(loop=loop)
        self._work: Work[_Results] | None = None
        self._conversation: Conversation[_Results] | None = None
        self._pause: asyncio.TimerHandle | None = None
        # Of what was sent: what the socket did not take yet, whether it was answered, and when it
        # should have been; and the one timer that looks at it.
        self._unsent = b""
        self._hearing = Hearing(b"")
        self._is_asked = False
        self._deadline_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def talk(self, work: Work[_Results]) -> _Answer:
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
        if self._session is not None and self._session.is_stale():
            self._drop()
        if self._session is None:
            try:
                open_in_thread(
                    self._loop,
                    self._new_session,
                    Session.close,
                    done=self._opened,
                    failed=self._fail,
                )
            except StoreUnavailable as error:
                self._end([], error)
            return
        assert self._work is not None
        self._conversation = conversation(self._session, self._work)
        self._go_on(None)

    def _opened(self, session: Session) -> None:
        if self._is_closed:  # and whoever waited was told so
            session.close()
            return
        session.socket.setblocking(False)  # noqa: FBT003 - the standard library
        self._session = session
        self._descriptor = session.socket.fileno()
        self._loop.add_reader(self._descriptor, self._read, session)
        self._begin()

    def _go_on(self, reply: Reply | None) -> None:
        """Say the next thing."""
        assert self._conversation is not None
        self._is_asked = False
        self._pause = None
        try:
            told = self._conversation.send(reply)
        except StopIteration as done:
            self._end(done.value, None)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            if isinstance(told, bytes):
                self._ask(told)
            else:
                self._pause = self._loop.call_later(told, self._go_on, None)

    def _ask(self, sent: bytes) -> None:
        assert self._session is not None
        self._is_asked = True
        self._hearing = Hearing(sent)
        self._is_heard_from()
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline_s, self._look_at_clock)
        self._send(self._session, sent)

    def _send(self, session: Session, data: bytes) -> None:
        """Send what the socket takes; the rest when it takes more."""
        try:
            data = data[session.socket.send(data) :]
        except _NOT_NOW:
            pass
        except OSError as error:
            self._unsent = b""
            self._lose(SERVER_GONE, error)
            return
        if data and not self._unsent:
            self._loop.add_writer(self._descriptor, self._send_more, session)
        elif self._unsent and not data:
            self._loop.remove_writer(self._descriptor)
        self._unsent = data

    def _send_more(self, session: Session) -> None:
        self._is_heard_from()
        self._send(session, self._unsent)

    def _read(self, session: Session) -> None:
        """Something has come: perhaps all of a reply, perhaps the end of the connection."""
        try:
            reply = self._hearing.feed(session.heard())
        except _NOT_NOW:
            return
        except (OSError, ValueError) as error:
            self._lose(SERVER_LOST, error)
            return
        if not self._is_asked:
            self._drop()
        elif reply is None:
            self._is_heard_from()
        else:
            self._go_on(reply)

    def _is_heard_from(self) -> None:
        assert self._session is not None
        self._deadline_s = self._loop.time() + self._session.timeout_s

    def _look_at_clock(self) -> None:
        """One timer for many answers. A loop that was held up reads first what has come since."""
        self._timer = None
        if not self._is_asked:
            return
        if self._loop.time() < self._deadline_s:
            self._timer = self._loop.call_at(self._deadline_s, self._look_at_clock)
        else:
            self._lose(SERVER_LOST, TimeoutError("timed out"))

    def _lose(self, code: int, error: Exception) -> None:
        """The connection is of no use any more."""
        if self._is_asked:
            self._go_on(Refusal(code, str(error)))
        else:  # nobody waits: the server has ended the connection by itself
            self._drop()

    def _fail(self, error: BaseException) -> None:
        if self._session is not None and not self._session.is_fit:
            self._drop()
        if not self.is_free:
            self._end([], error)

    def _end(self, results: _Results, error: BaseException | None) -> None:
        self.is_free = True
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
        if self._pause is not None:
            self._pause.cancel()
        if self._is_asked and not self._loop.is_closed():
            self._go_on(Refusal(SERVER_LOST, "the store was closed"))
        elif not self.is_free and not self._loop.is_closed():
            self._end([], StoreUnavailable("the store was closed"))
        self._drop()

    def _drop(self) -> None:
        """Let go of the connection; the next caller opens another."""
        session, self._session = self._session, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if session is None:
            return
        self._unsent = b""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_writer(self._descriptor)
        session.close()
