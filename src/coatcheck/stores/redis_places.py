"""Places where records live: one server, or the one that Sentinels name.

Between `redis.py`, which says what is to be asked, and `redis_line.py`, which asks. A cluster is
made of single servers: see `redis_cluster.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from coatcheck.stores.redis_line import Line, Refusal, Reply
from coatcheck.stores.redis_values import Command

# Half of the time-out: the server, which looks ten times a second whose wait is over, says how many
# replicas have answered before we stop listening for it.
_WAIT_SHARE = 0.5


class Place(Protocol):
    """Servers, as the store sees them."""

    @property
    def is_spread(self) -> bool:
        """Whether every key may be on a server of its own."""
        ...

    def write(self, commands: Sequence[Command]) -> list[Reply]:
        """Send what may change something; an answer for each, a `Refusal` where it did not."""
        ...

    def read(self, commands: Sequence[Command]) -> list[Reply]:
        """Send what changes nothing; an answer for each."""
        ...

    def servers(self) -> Iterable[Line]:
        """A line to each server that holds records, for operators."""
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
    has written, and nobody for a search.
    """

    is_spread = False

    def __init__(self, new_line: Callable[..., Line], *, wait: int, timeout_s: float) -> None:
        self.writer = new_line(is_writer=True, wait=(wait, timeout_s * _WAIT_SHARE))
        self.reader = new_line()
        self.operator = new_line()

    def write(self, commands: Sequence[Command]) -> list[Reply]:
        """Send what may change something."""
        replies = _ask(self.writer, commands)
        if any(type(reply) is Refusal and reply.code == "READONLY" for reply in replies):
            self.hang_up()  # it is the master no longer; connecting anew finds who is
        return replies

    def read(self, commands: Sequence[Command]) -> list[Reply]:
        """Send what changes nothing."""
        return _ask(self.reader, commands)

    def servers(self) -> Iterable[Line]:
        """The one line for operators."""
        return (self.operator,)

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
    line.send(commands[0].packed if len(commands) == 1 else b"".join(c.packed for c in commands))
    return line.receive(len(commands))
