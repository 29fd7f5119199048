"""An event loop's own connections to a MySQL server.

Beside `mysql_line.py`, whose sessions these are, opened by its code; each is on a line as in
`loop_line.py`.

Invariants: as in `mysql_flow.py`, and as there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from coatcheck.core.record import Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.connecting import watching_loop
from coatcheck.stores.loop_line import LoopLine, Manner, Results
from coatcheck.stores.mysql_faults import SERVER_GONE, SERVER_LOST
from coatcheck.stores.mysql_flow import Work, conversation
from coatcheck.stores.mysql_line import LANES, Address, Session, opened
from coatcheck.stores.mysql_packets import Hearing, Refusal
from coatcheck.stores.mysql_talk import Talk
from coatcheck.stores.prompt import Prompt
from coatcheck.stores.sending import NOT_NOW, Sending


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
        loop = watching_loop()
        self._reader = _Line(loop, _manner(address))
        writes = _manner(address, talk.statements.kept)
        self._writers = [_Line(loop, writes) for _ in range(self.lanes)]

    def swap(self, swaps: Sequence[Swap], /) -> Prompt[Results]:
        """Write each record if the version its caller saw still stands."""
        line = next(line for line in self._writers if line.is_free)
        return line.talk(lambda terms: self._talk.swap(terms, swaps))

    def get(self, ids: Sequence[bytes], /) -> Prompt[Results]:
        """The records that stand, in the order of *ids*."""
        return self._reader.talk(lambda _: self._talk.get(ids))

    async def close(self) -> None:
        """Close the connections."""
        for line in (*self._writers, self._reader):
            line.close()


def _manner(address: Address, keeps: Sequence[bytes] = ()) -> Manner[Session, Work[Results]]:
    return Manner(
        connect=partial(opened, address, keeps),
        let_go=Session.close,
        conversation=conversation,
        is_hurt=lambda session, _: not session.is_fit,
        outage_of=lambda error: error,  # the conversation has said already what it means
        timeout_s=address.timeout_s,
        silence="timed out",
    )


class _Line(LoopLine[Session, Work[Results]]):
    """A session on an event loop."""

    _hearing: Hearing
    _sending: Sending
    _pause: asyncio.TimerHandle | None = None

    def _begin(self) -> None:
        if self._connection is not None and self._connection.is_stale():
            self._drop()
        super()._begin()

    def _watched(self, session: Session, /) -> int:
        session.socket.setblocking(False)  # noqa: FBT003 - the standard library
        self._hearing = Hearing(b"")
        self._sending = Sending(
            self._loop,
            session.socket,
            moves=self._is_heard_from,
            lost=partial(self._refuse, SERVER_GONE),
        )
        return session.socket.fileno()

    def _say(self, told: bytes | float, /) -> None:
        if isinstance(told, bytes):
            self._hearing = Hearing(told)
            self._expect()
            self._sending.send(told)
        else:
            self._pause = self._loop.call_later(told, self._try_again)

    def _try_again(self) -> None:
        """Nothing was on its way meanwhile; so where the server has hung up, on another."""
        if self._connection is None:
            self._begin()
        else:
            self._go_on(None)

    def _read(self, session: Session, /) -> None:
        try:
            reply = self._hearing.feed(session.heard())
        except NOT_NOW:
            return
        except (OSError, ValueError) as error:
            self._refuse(SERVER_LOST, error)
            return
        if not self._is_asked:
            self._drop()
        elif reply is None:
            self._is_heard_from()
        else:
            self._go_on(reply)

    def _refuse(self, code: int, error: Exception) -> None:
        """The connection is of no use any more."""
        if self._is_asked:
            self._go_on(Refusal(code, str(error)))
        else:  # nobody waits: the server has ended the connection by itself
            self._drop()

    def _lose(self, why: str) -> None:
        if self._is_asked:
            self._go_on(Refusal(SERVER_LOST, why))
            return
        if self._pause is not None:
            self._pause.cancel()
        self._end([], StoreUnavailable(why))
