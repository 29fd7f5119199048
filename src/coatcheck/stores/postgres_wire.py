"""An event loop's own connections to a PostgreSQL server.

Beside `postgres_link.py`, whose connections these are, opened by its code; each is on a line as in
`loop_line.py`, so that the loop watches it all the time, and not anew for each statement.

Invariants: as in `postgres_link.py`, and as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import psycopg
from psycopg.pq.abc import PGresult

from coatcheck.core.flow import Flow
from coatcheck.core.record import Swap
from coatcheck.stores.connecting import watching_loop
from coatcheck.stores.loop_line import LoopLine, Manner, Results
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

_Flow: TypeAlias = Flow[Results]


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
        loop = watching_loop()
        self._reader = _Line(loop, _manner(conninfo, timeout_s, writes=False))
        writes = _manner(conninfo, timeout_s, writes=True)
        self._writers = [_Line(loop, writes) for _ in range(self.lanes)]

    def swap(self, swaps: Sequence[Swap], /) -> Prompt[Results]:
        """Write each record if the version its caller saw still stands."""
        line = next(line for line in self._writers if line.is_free)
        return line.talk(self._talk.swap(swaps))

    def get(self, ids: Sequence[bytes], /) -> Prompt[Results]:
        """The records that stand, in the order of *ids*."""
        return self._reader.talk(self._talk.get(ids))

    async def close(self) -> None:
        """Close the connections."""
        for line in (*self._writers, self._reader):
            line.close()


def _manner(conninfo: str, timeout_s: float, *, writes: bool) -> Manner[Connection, _Flow]:
    return Manner(
        connect=partial(opened, conninfo, timeout_s, prepares=True),
        let_go=let_go,
        conversation=conversation,
        is_hurt=is_hurt,
        outage_of=partial(outage_of, writes=writes),
        timeout_s=timeout_s,
        silence=NO_ANSWER,
    )


class _Line(LoopLine[Connection, _Flow]):
    """A connection on an event loop."""

    _results: list[PGresult]  # what has come of an answer

    def _watched(self, connection: Connection, /) -> int:
        self._results = []
        return connection.pgconn.socket

    def _say(self, _told: None, /) -> None:
        """It is said already, as far as the socket took it."""
        assert self._connection is not None
        try:
            if self._connection.pgconn.flush():
                self._loop.add_writer(self._descriptor, self._flush, self._connection)
        except psycopg.Error as error:
            self._fail(error)
        else:
            self._expect()

    def _flush(self, connection: Connection) -> None:
        """There is room again for what could not be sent at once."""
        try:
            if not connection.pgconn.flush():
                self._loop.remove_writer(self._descriptor)
        except psycopg.Error as error:
            self._fail(error)

    def _read(self, connection: Connection, /) -> None:
        pgconn = connection.pgconn
        try:
            pgconn.consume_input()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    if self._results:
                        results, self._results = self._results, []
                        self._go_on(results)
                    return
                self._results.append(result)
        except psycopg.Error as error:
            self._fail(error)

    def _lose(self, why: str) -> None:
        self._fail(psycopg.OperationalError(why))
