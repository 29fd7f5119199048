"""Places where records live: one server, or the one that Sentinels name.

Between `redis.py`, which says what is to be asked, and `redis_line.py`, which asks. A cluster is
made of single servers: see `redis_cluster.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from coatcheck.core.scope import ID_BYTES
from coatcheck.stores.contract import Wire
from coatcheck.stores.redis_dangers import Watch
from coatcheck.stores.redis_flow import Flows, Wait, is_demoted
from coatcheck.stores.redis_line import Connection, Line, checked
from coatcheck.stores.redis_replies import Reply
from coatcheck.stores.redis_values import Command
from coatcheck.stores.redis_wire import RedisWire


class Place(Protocol):
    """Servers, as the store sees them."""

    @property
    def is_spread(self) -> bool:
        """Whether every key may be on a server of its own."""
        ...

    def write(self, commands: Sequence[Command]) -> list[Reply]:
        """
        Send what may change something; an answer for each, a `Refusal` where it did not.

        Where one of several servers is away, its `StoreUnavailable` is the answer to its share.
        """
        ...

    def read(self, commands: Sequence[Command]) -> list[Reply]:
        """Send what changes nothing; an answer for each, as of `write`."""
        ...

    def servers(self) -> Iterable[Line]:
        """A line to each server that holds records, for operators."""
        ...

    def an_id_each(self) -> Sequence[bytes]:
        """For each server an id that nobody has, and whose record would live there."""
        ...

    def wire(self, flows: Flows) -> Wire:
        """Connections of the running event loop's own; see `HasWire.wire`."""
        ...

    def refuse_if_closed(self) -> None:
        """Raise, if nothing can be asked any more."""
        ...

    def close(self) -> None:
        """Let go of all connections."""
        ...


class Single:
    """
    One server, or whichever server is the master.

    One line writes, one reads beside it, one is for operators: nobody waits for a replica but who
    has written, and nobody for a search. Whom the operators reach is not asked whether it could
    forget: they are about to.
    """

    is_spread = False

    def __init__(
        self, connect: Callable[[], Connection], name: str, wait: Wait, watch: Watch
    ) -> None:
        self._connect = checked(connect, name, watch)
        self._wait = wait
        self.writer = Line(self._connect, name, is_writer=True, wait=wait)
        self.reader = Line(self._connect, name)
        self.operator = Line(connect, name)

    def write(self, commands: Sequence[Command]) -> list[Reply]:
        """Send what may change something."""
        replies = _ask(self.writer, commands)
        if is_demoted(replies):
            self.hang_up()
        return replies

    def read(self, commands: Sequence[Command]) -> list[Reply]:
        """Send what changes nothing."""
        return _ask(self.reader, commands)

    def servers(self) -> Iterable[Line]:
        """The one line for operators."""
        return (self.operator,)

    def an_id_each(self) -> Sequence[bytes]:
        """Any id."""
        return (os.urandom(ID_BYTES),)

    def wire(self, flows: Flows) -> Wire:
        """Connections of the running event loop's own."""
        return RedisWire(flows, self._connect, self._wait)

    def refuse_if_closed(self) -> None:
        """Raise, if nothing can be asked any more."""
        self.operator.refuse_if_closed()

    def hang_up(self) -> None:
        """Let go of all connections until the next use."""
        for line in (self.writer, self.reader, self.operator):
            line.hang_up()

    def close(self) -> None:
        """Let go of all connections."""
        for line in (self.writer, self.reader, self.operator):
            line.close()


def _ask(line: Line, commands: Sequence[Command]) -> list[Reply]:
    if len(commands) > 1:
        return line.ask_all(commands)
    line.send(commands[0].packed)
    return line.receive(1)
