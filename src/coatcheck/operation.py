"""The operation: what a handler sees of the request it is executing for.

Handlers get it from their framework (`CurrentOperation`), from the ASGI scope or WSGI environ
under "coatcheck.operation", or from `current_operation()` anywhere below.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

from coatcheck.core.key import reference_of
from coatcheck.core.record import Record
from coatcheck.core.scope import derive


class Operation:
    """One guarded operation, as its present attempt sees it."""

    __slots__ = ("_claim", "_secret")

    def __init__(self, claim: Record, secret: bytes = b"") -> None:
        self._claim = claim
        self._secret = secret

    def __repr__(self) -> str:
        return f"<Operation {self.reference} {self.label!r} attempt {self.attempt}>"

    @property
    def reference(self) -> str:
        """The short name for people: on the response, in the log, for `coatcheck lookup`."""
        return reference_of(self._claim.id)

    @property
    def key(self) -> str:
        """What the client sent."""
        return self._claim.key

    @property
    def label(self) -> str:
        """What it is: "POST /orders", or the scope of a guarded function."""
        return self._claim.label

    @property
    def attempt(self) -> int:
        """1 for the first, more after a failure or a crash."""
        return self._claim.attempt

    @property
    def fence(self) -> int:
        """
        A number that only grows from attempt to attempt.

        A downstream that remembers the highest it has seen and refuses lower ones cannot be
        changed by an attempt that lost its claim without knowing it.
        """
        return self._claim.version

    def derive(self, name: str) -> str:
        """
        A key for a call to another service that is part of this operation (L8).

        The same for every attempt, another for every *name*, and shaped like a UUID, so that
        every provider accepts it.
        """
        return derive(self._claim.id, name, life=self._claim.created_ms, secret=self._secret)


_CURRENT: ContextVar[Operation | None] = ContextVar("coatcheck.operation", default=None)


def current_operation() -> Operation | None:
    """The operation that the calling code is part of; None outside a guarded request."""
    return _CURRENT.get()


def enter(operation: Operation | None) -> Token[Operation | None]:
    """Make *operation* the current one of this context, until it is left."""
    return _CURRENT.set(operation)


def leave(entered: Token[Operation | None]) -> None:
    """Make the one current again that was so before."""
    _CURRENT.reset(entered)


@dataclass(frozen=True, slots=True)
class Happened:
    """A reconcile function's answer: it happened, and this is what the client should get."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] | list[tuple[str, str]] = ()
    body: bytes = b""
    # For guarded functions: what the function would have returned.
    value: Any = field(default=None)


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """A reconcile function's answer: nothing happened, so it may run."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A reconcile function's answer: it cannot be told; a person must look."""
