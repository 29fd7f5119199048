"""How one talks with a MySQL server: statement by statement, and again after a collision.

Between the flows of `mysql_talk.py` and `mysql_schema.py`, which yield what is to be said, and
those who send it: `mysql_line.py` for threads, `mysql_wire.py` for event loops.

Invariants: an error is ambiguous if, and only if, something of what was sent may have taken effect;
work that collided with somebody else's is undone and done again; a session on which anything is
open or unanswered is not fit to be used again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from coatcheck.core.flow import Effect, Flow
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.mysql_faults import COLLISIONS, MADE_ALREADY, PASSING, explained
from coatcheck.stores.mysql_packets import Answer, Refusal, Reply, framed, query

R = TypeVar("R")

# 10 times: enough for a crowd, of which one comes through each time.
_TRIES_MAX = 10
# Up to 10 ms before the next try, some commits long, so that the same two do not meet again.
_PAUSE_MS_MAX = 10


@dataclass(slots=True)
class Say(Effect[Answer]):
    """
    Send *command*.

    *commits*: what it changes is committed with it, so that nobody knows it if the answer is lost.
    """

    command: bytes
    commits: bool = False


def reads(statement: str) -> Say:
    """Find rows."""
    return Say(query(statement.encode()))


def writes(statement: bytes) -> Say:
    """Change rows, or a table, once and for all."""
    return Say(query(statement), commits=True)


def holds(statement: bytes) -> Say:
    """Change rows in a transaction that is open; or open one."""
    return Say(query(statement))


def writes_once(statement: bytes) -> Flow[None]:
    """A change of a table, unless somebody has made it and was cut off before saying so."""
    try:
        yield from writes(statement)
    except Refusal as refusal:
        if refusal.code not in MADE_ALREADY:
            raise


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session takes: how long a statement may be, and which it keeps (perhaps none)."""

    statement_bytes_max: int
    kept: tuple[int, ...] = ()
    is_encrypted: bool = False


Work: TypeAlias = Callable[[Terms], Flow[R]]
# Yields what to send, and is sent the reply; or for how many seconds to pause.
Conversation: TypeAlias = Generator[bytes | float, Reply | None, R]


class Spoken(Protocol):
    """A session, as far as it matters here."""

    is_fit: bool  # everything was answered, and no transaction is open
    is_opening: bool  # a store is just being opened
    terms: Terms
    where: str
    timeout_s: float
    lock_timeout_s: int


def conversation(session: Spoken, work: Work[R]) -> Conversation[R]:
    """Do *work*, again where it collides with somebody else's."""
    # The server has waited for a lock already; after the last time we have, too.
    deadline_s = time.monotonic() + session.timeout_s - session.lock_timeout_s
    tries = 0
    while True:
        tries += 1
        attempt = _Attempt(session)
        try:
            return (yield from attempt.at(work(session.terms)))
        except Refusal as refusal:
            yield from attempt.undone_after(refusal)
            is_last = tries == _TRIES_MAX or time.monotonic() > deadline_s
            if refusal.code not in COLLISIONS or not session.is_fit or is_last:
                raise attempt.failed_by(refusal) from refusal
        yield secrets.randbelow(_PAUSE_MS_MAX) / 1_000


class _Attempt:
    """Some work, as far as it got."""

    def __init__(self, session: Spoken) -> None:
        self._session = session
        self._is_unsure = False  # what was said last commits
        self._has_committed = False

    def at(self, flow: Flow[R]) -> Conversation[R]:
        """Say what *flow* yields."""
        session = self._session
        try:
            say = next(flow)
            while True:
                assert isinstance(say, Say)
                session.is_fit, self._is_unsure = False, say.commits
                reply = yield framed(say.command)
                if isinstance(reply, Answer):
                    self._has_committed |= say.commits and reply.affected > 0
                    session.is_fit = not reply.is_open
                    say = flow.send(reply)
                else:
                    assert reply is not None
                    say = flow.throw(reply)
        except StopIteration as done:
            value: R = done.value
            return value

    def undone_after(self, refusal: Refusal) -> Conversation[None]:
        """Be as before, if that can be."""
        self._session.is_fit = False
        if refusal.code in PASSING:
            reply = yield framed(query(b"rollback"))
            self._session.is_fit = isinstance(reply, Answer)

    def failed_by(self, refusal: Refusal) -> Exception:
        """What *refusal* means to whoever has asked for it."""
        session = self._session
        failure = explained(
            refusal.code,
            refusal.text,
            session.where,
            opening=session.is_opening,
            is_unsure=self._is_unsure,
        )
        if self._has_committed:  # and what came after it failed
            return StoreUnavailable(str(failure), is_ambiguous=True)
        return failure
