"""The operation: what a handler sees of the request it is executing for.

Handlers get it from their framework (`CurrentOperation`), from the ASGI scope or WSGI environ
under "coatcheck.operation", or from `current_operation()` anywhere below.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from coatcheck.core.key import reference_of
from coatcheck.core.not_awaited import check_function
from coatcheck.core.policy import Duration, duration_ms, header_name
from coatcheck.core.progress import Note, progress_of
from coatcheck.core.record import Record
from coatcheck.core.replay import NO_CONTENT
from coatcheck.core.scope import derive
from coatcheck.core.steps import Unmet, unmet
from coatcheck.errors import Misconfigured


class Hand(Protocol):
    """What an operation writes with; see `engine/hand.py`."""

    doubt: Unmet | None

    @property
    def asked(self) -> Collection[str]:
        """The steps that this attempt has asked for."""
        ...

    @property
    def claim(self) -> Record:
        """The claim as it stands."""
        ...

    @property
    def is_lost(self) -> bool:
        """Another attempt has taken over."""
        ...

    def step(self, asked: StepAsked, /) -> Any:  # noqa: ANN401 - what the step returned
        """Take a step once."""
        ...

    def note(self, what: object, /) -> Any:  # noqa: ANN401 - None, awaited where that has to be
        """Write down what is about to be done."""
        ...

    def report(self, fraction: float | None, words: str, /) -> Any:  # noqa: ANN401 - as above
        """Write down how far it is."""
        ...

    def on_lost(self, callback: Callable[[], object], /) -> None:
        """Have *callback* called when another attempt has taken over."""
        ...


class Client(Protocol):
    """Whoever waits for the answer of a request; see `server/asgi_visit.py`."""

    def accept(self) -> Any:  # noqa: ANN401 - None, awaited where that has to be
        """Tell it where to ask for the answer, and that it comes later."""
        ...

    def hand_over(self, lease_ms: int | None, /) -> Any:  # noqa: ANN401 - the text, awaited as above
        """Let somebody else find the answer, within *lease_ms*."""
        ...


class StepAsked(NamedTuple):
    """A step as a handler asks for it."""

    name: str
    call: Callable[[], Any]
    at_most_once: bool = False
    probe: Callable[[], Any] | None = None


class Transacted(Protocol):
    """A transaction, as a handler sees it."""

    @property
    def connection(self) -> Any:  # noqa: ANN401 - whatever the application lends
        """What was lent for it."""
        ...


class Operation:
    """One guarded operation, as its present attempt sees it."""

    __slots__ = (
        *("_claim", "_doubt", "_hand", "_make_hand", "_secret", "_transaction"),
        *("client", "has_more_to_say", "is_resumable"),
    )

    def __init__(
        self,
        claim: Record,
        secret: bytes = b"",
        transaction: Transacted | None = None,
        hand: Callable[[], Hand] | None = None,
    ) -> None:
        self._claim = claim
        self._secret = secret
        self._transaction = transaction
        self._make_hand = hand
        self._hand: Hand | None = None
        # Who waits for the answer of its request, as long as that is not there; for the adapters.
        self.client: Client | None = None
        # Whether the handler has said that it may simply run again, however it ends.
        self.is_resumable = False
        # Why it may not end as it wants to.
        self._doubt: Unmet | None = None
        # Whether it or an attempt before it has written or said anything, so that its answer alone
        # may not tell its end.
        self.has_more_to_say = claim.progress is not None

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

    @property
    def connection(self) -> Any:  # noqa: ANN401 - whatever the application lends
        """
        In transaction mode, the connection or session on which all of it commits at once (L9).

        Neither commit nor roll back on it; a savepoint is all right.
        """
        if self._transaction is None:
            raise Misconfigured(
                "this operation has no connection: it is not in transaction mode; write "
                "@idempotent(mode='transaction') or engine.transaction(...)"
            )
        return self._transaction.connection

    # --- what an attempt writes down for the next one (L7) -------------------------------------

    def step(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        at_most_once: bool = False,
        probe: Callable[[Operation], Any] | None = None,
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401 - what the function returned
        """
        Call *function* once for this operation, and remember its result: JSON or bytes, to 64 KiB.

        A later attempt gets the result and does not call again. In async code it is awaited. An
        attempt that died within it leaves its outcome unknown: then *probe* is asked, which
        answers `Happened(value=…)`, `DidNotHappen()` or `Unknown()`; without one it is called
        again, or, if it may happen *at_most_once*, the operation is parked in doubt.
        """
        call = functools.partial(function, *args, **kwargs)
        asks = None if probe is None else functools.partial(probe, self)
        return self._writing().step(StepAsked(name, call, at_most_once, asks))

    def note(self, what: object) -> Any:  # noqa: ANN401 - None, awaited in async code
        """
        Write down what is about to be done, text or another JSON value, before it is done.

        For a reconcile function (`operation.notes`), and for people. In async code it is awaited.
        """
        return self._writing().note(what)

    def progress(self, fraction: float | None = None, words: str = "") -> Any:  # noqa: ANN401 - as above
        """Report how far it is, from 0 to 1 and in words; a client that polls sees it (L10)."""
        if fraction is not None and not 0 <= fraction <= 1:
            raise Misconfigured(f"progress goes from 0 to 1, not {fraction!r}")
        return self._writing().report(fraction, words)

    @property
    def notes(self) -> Sequence[Note]:
        """What this and earlier attempts have noted."""
        return progress_of(self._standing()).notes

    @property
    def steps(self) -> Sequence[str]:
        """The names of the steps that are done."""
        return [step.name for step in progress_of(self._standing()).steps if step.value is not None]

    def resumable(self) -> None:
        """Declare that the handler may simply run again however it ends, whatever the policy is."""
        self.is_resumable = self.has_more_to_say = True

    # --- when it takes long (L10) ---------------------------------------------------------------

    def accept(self) -> Any:  # noqa: ANN401 - None, awaited in async code
        """
        Answer the client now, with 202 and the address where it can ask; the handler goes on.

        What the handler answers in the end is kept, and served there and to every retry. In async
        code it is awaited. Over WSGI it needs `in_flight="202"`, because only then the handler has
        a thread of its own; guarded functions have no client, and may not call it.
        """
        return self._waiting("accept").accept()

    def hand_over(self, lease: Duration | None = None) -> Any:  # noqa: ANN401 - text, awaited as above
        """
        Give the work to another process; what is returned names it, for `engine.resume` there.

        Put that text on a queue, and return: the client gets 202. The claim is kept for *lease*
        (the policy's unless given); if nobody has taken it by then, the recovery policy decides.
        A handler that fails after all, or answers with an error, takes it back.
        """
        return self._waiting("hand_over").hand_over(None if lease is None else _lease_ms(lease))

    def _waiting(self, name: str) -> Client:
        if self.client is None:
            raise Misconfigured(
                f"{name}() is for the handler of a request in record mode, until it has answered: "
                "here is no client that could be told to ask later"
            )
        return self.client

    # --- whether it is still ours ---------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Another attempt has taken over: what this one does no longer counts."""
        return self._make_hand is not None and self._writing().is_lost

    @property
    def is_in_doubt(self) -> bool:
        """A step's outcome is not known, or is known and was not asked for: nobody goes on."""
        return self._doubt is not None or (self._hand is not None and self._hand.doubt is not None)

    def unmet(self, *, may_differ: bool) -> Unmet | None:
        """Why this attempt may not give the final answer; it is in doubt then. See `core/steps`."""
        hand = self._hand
        if hand is None:
            self._doubt = unmet(self._claim, (), may_differ=may_differ)
        else:
            self._doubt = hand.doubt or unmet(hand.claim, hand.asked, may_differ=may_differ)
        return self._doubt

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Have *callback* called, in some thread, when another attempt has taken over."""
        check_function("on_lost", callback)
        self._writing().on_lost(callback)

    def _standing(self) -> Record:
        return self._claim if self._hand is None else self._hand.claim

    def _writing(self) -> Hand:
        if self._hand is None:
            if self._make_hand is None:
                raise Misconfigured(
                    "nothing can be written down here: steps, notes and progress are for handlers "
                    "in record mode, while they run"
                )
            self._hand = self._make_hand()
            self.has_more_to_say = True
        return self._hand

    # --- for others -----------------------------------------------------------------------------

    def derive(self, name: str) -> str:
        """
        A key for a call to another service that is part of this operation (L8).

        The same for every attempt, another for every *name*, and shaped like a UUID, so that
        every provider accepts it.
        """
        claim = self._claim
        life, request = claim.created_ms, claim.fingerprint
        return derive(claim.id, name, life=life, request=request, secret=self._secret)


def _lease_ms(lease: Duration) -> int:
    try:
        lease_ms = duration_ms(lease)
    except (ValueError, OverflowError) as error:
        raise Misconfigured(f"lease: {error}") from error
    if lease_ms <= 0:
        raise Misconfigured(f"lease is {lease!r}; it must be longer than zero")
    return lease_ms


_CURRENT: ContextVar[Operation | None] = ContextVar("coatcheck.operation", default=None)


def current_operation() -> Operation | None:
    """The operation that the calling code is part of; None outside a guarded request."""
    return _CURRENT.get()


# Make an operation the current one of this context, until it is left with what this returns.
enter: Callable[[Operation | None], Token[Operation | None]] = _CURRENT.set
leave: Callable[[Token[Operation | None]], None] = _CURRENT.reset


@dataclass(frozen=True, slots=True)
class Happened:
    """A reconcile function's answer: it happened, and this is what the client should get."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] | list[tuple[str, str]] = ()
    body: bytes = b""
    # For guarded functions: what the function would have returned.
    value: Any = field(default=None)

    def __post_init__(self) -> None:
        """Refuse what could not be served: every retry would meet it, and nobody else."""
        status: object = self.status
        headers: object = self.headers
        body: object = self.body
        if not isinstance(status, int) or not 200 <= status <= 599:
            raise Misconfigured(f"status is {status!r}; it is a number from 200 to 599")
        if not isinstance(headers, (tuple, list)):
            raise Misconfigured(f"headers is {headers!r}; it is a list of pairs of texts")
        for header in headers:
            _check_header(header)
        if not isinstance(body, bytes):
            raise Misconfigured(f"body is a {type(body).__name__}; it is bytes")
        if body and status in NO_CONTENT:  # servers fail with it, or take it for the next answer
            raise Misconfigured(f"a response of status {int(status)} has no body")


# RFC 9110 §5.5: no control characters but tabs, and what Latin-1 can say.
_HEADER_VALUE = re.compile(r"[\t -~\x80-\xff]*")


def _check_header(header: object) -> None:
    match header:
        case (name, str(value)):
            header_name(name)
            if _HEADER_VALUE.fullmatch(value) is None:
                raise Misconfigured(f"{value!r} cannot be the value of the header {name}")
        case _:
            raise Misconfigured(f"{header!r} is no header; it is a pair of texts")


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """A reconcile function's answer: nothing happened, so it may run."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A reconcile function's answer: it cannot be told; a person must look."""
