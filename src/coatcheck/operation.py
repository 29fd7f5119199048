"""The operation: one guarded execution, as its handler and the engine see it.

Handlers get it from their framework (`CurrentOperation`), from the ASGI scope or WSGI environ
under "coatcheck.operation", or from `current_operation()` anywhere below. The engine renews its
lease while the handler runs, and continues its lifecycle when the handler has ended.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast, overload

from coatcheck.core.callables import check_function
from coatcheck.core.flow import Flow
from coatcheck.core.identity import derive
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import ClaimRequest
from coatcheck.core.policy import Duration, Policy, duration_ms, header_name
from coatcheck.core.progress import Note, progress_of
from coatcheck.core.record import Record, Swap
from coatcheck.core.response import NO_CONTENT
from coatcheck.core.steps import StepProblem, missing_steps
from coatcheck.errors import Misconfigured

logger = logging.getLogger("coatcheck")

T = TypeVar("T")

# Renewed after a third of its length: two renewals may fail before a lease is lost.
RENEWALS_PER_LEASE = 3

# The heartbeat and a step of the handler may write, or lose, the same claim at the same time.
_CLAIM_LOCK = threading.Lock()


def _renew_claim_lock() -> None:
    global _CLAIM_LOCK  # noqa: PLW0603 - another thread of the parent may have held it
    _CLAIM_LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_claim_lock)


class Loop(Protocol):
    """An event loop, as far as a lease needs it."""

    def is_running(self) -> bool:
        """It is running."""
        ...


class Lease:
    """
    A claim that this process holds, and that the engine renews.

    Either its handler runs, or a reconcile function does, or its completion could not be written
    yet (`pending`).
    """

    __slots__ = (
        *("_on_lost", "_on_renewed", "claim", "failures", "is_ending", "is_lost", "lease_ms"),
        *("loop", "pending"),
    )

    def __init__(self, claim: Record, lease_ms: int, loop: Loop | None = None) -> None:
        self.claim = claim  # as last written by this process
        self.lease_ms = lease_ms
        self.loop = loop  # the event loop on which the handler runs, if it runs on one
        self.pending: Swap | None = None  # the completion that is still to be written
        self.failures = 0  # failed writes of the lease renewer in a row, each of this claim alone
        self.is_ending = False  # its end is being written, which finds out if it is lost
        self.is_lost = False
        self._on_lost: list[Callable[[], object]] | None = None
        self._on_renewed: list[Callable[[], object]] | None = None

    def is_stopped(self) -> bool:
        """Its handler can never end, because its event loop has stopped."""
        return self.loop is not None and self.pending is None and not self.loop.is_running()

    def is_due(self, now_ms: int) -> bool:
        """A third of its lease has passed."""
        left_ms = self.claim.lease_until_ms - now_ms
        return left_ms <= self.lease_ms - self.lease_ms // RENEWALS_PER_LEASE

    def advance_to(self, claim: Record) -> None:
        """Note that *claim* is written, unless a newer version of it is known here already."""
        with _CLAIM_LOCK:
            if claim.version > self.claim.version:
                self.claim = claim

    def renewed(self, claim: Record) -> None:
        """Note that the lease is renewed; runs the `on_renewed` callbacks in a thread."""
        self.advance_to(claim)
        if self._on_renewed:
            _call_in_thread(self._on_renewed, "on_renewed")

    def lose(self) -> None:
        """Note that another attempt owns the claim; runs the `on_lost` callbacks in a thread."""
        self.is_lost = True
        with _CLAIM_LOCK:  # several threads may find it out at once, but each callback runs once
            callbacks, self._on_lost = self._on_lost, None
        if callbacks:
            _call_in_thread(callbacks, "on_lost")


def _call_in_thread(callbacks: Sequence[Callable[[], object]], name: str) -> None:
    """Call each of *callbacks*: they are the application's, and may block or fail."""

    def call() -> None:
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("coatcheck: an %s callback raised; the operation goes on", name)

    try:
        threading.Thread(target=call, name=f"coatcheck-{name}", daemon=True).start()
    except RuntimeError:  # no thread can be started, or the interpreter is ending
        logger.exception(
            "coatcheck: the %s callbacks could not be called, because no thread can be started",
            name,
        )


class StepCall(NamedTuple):
    """A step as a handler asks for it."""

    name: str
    call: functools.partial[Any]
    at_most_once: bool = False
    probe: Callable[[], Any] | None = None


class Exchange(Protocol):
    """The HTTP exchange that waits for the operation's response; see `server/asgi_exchange.py`."""

    def accept(self) -> Any:  # noqa: ANN401 - None, awaited in async code
        """Answer 202 with a polling address now; the handler goes on."""
        ...

    def defer(self, lease_ms: int | None, /) -> Any:  # noqa: ANN401 - the token, awaited as above
        """Leave the work to the process that takes the token within *lease_ms*."""
        ...


class Transaction(Protocol):
    """The open transaction of an operation in transaction mode."""

    @property
    def connection(self) -> Any:  # noqa: ANN401 - the application's own
        """The connection or session that it is open on."""
        ...


class Steps(Protocol):
    """Writes steps, notes and progress into the claim; see `engine/steps.py`."""

    def step(self, operation: Operation, call: StepCall, /) -> Any:  # noqa: ANN401 - what it returned
        """Run a step once."""
        ...

    def note(self, operation: Operation, what: object, /) -> Any:  # noqa: ANN401 - None, or awaited
        """Write down what is about to be done."""
        ...

    def report_progress(
        self,
        operation: Operation,
        fraction: float | None,
        words: str,
        /,
    ) -> Any:  # noqa: ANN401 - as above
        """Write down how far the work is."""
        ...


# For `Operation(record)`, which shows a record that was found in the store.
_DEFAULT_POLICY = Policy()


class Operation(Lease):
    """One guarded operation, as its present attempt sees it."""

    __slots__ = (
        *("_problem", "_secret", "_step_writer", "_transaction", "exchange", "flow", "has_notes"),
        *(
            "failure",
            "has_begun",
            "is_resumable",
            "policy",
            "repeats",
            "request",
            "step_problem",
            "steps_asked",
        ),
        *("steps_done", "steps_running"),
    )

    def __init__(
        self,
        claim: Record,
        policy: Policy = _DEFAULT_POLICY,
        secret: bytes = b"",
        *,
        request: ClaimRequest | None = None,
        flow: Flow[Any] | None = None,
        steps: Steps | None = None,
        transaction: Transaction | None = None,
        loop: Loop | None = None,
    ) -> None:
        self.claim = claim
        self.lease_ms = policy.lease_ms
        self.loop = loop
        self.pending = None
        self.failures = 0
        self.is_ending = False
        self.is_lost = False
        self._on_lost = self._on_renewed = None
        self.policy = policy
        self.request = request
        self.flow = flow  # the lifecycle, suspended at the execution
        self.repeats = 0  # how often the database had the handler run again before
        self.exchange: Exchange | None = None  # set by HTTP doors while the client waits
        self.has_begun = False  # set by endpoints that are marked `idempotent`
        # Whether this or an earlier attempt has noted anything, or called `resumable`: then the
        # handler's answer alone does not decide how the operation ends.
        self.has_notes = claim.progress is not None
        self.is_resumable = False
        self.failure = ""  # how it ended, for the log: "attempt 1 raised TimeoutError"
        self.step_problem: StepProblem | None = None  # found while a step ran
        self._problem: StepProblem | None = None  # found at the end
        self._secret = secret
        self._step_writer = steps
        self._transaction = transaction

    def __repr__(self) -> str:
        return f"<Operation {self.reference} {self.label!r} attempt {self.attempt}>"

    @property
    def reference(self) -> str:
        """The short reference: on the response, in the log, for `coatcheck lookup`."""
        return reference_of(self.claim.id)

    @property
    def key(self) -> str:
        """What the client sent."""
        return self.claim.key

    @property
    def label(self) -> str:
        """What it is: "POST /orders", or the scope of a guarded function."""
        return self.claim.label

    @property
    def attempt(self) -> int:
        """1 for the first, more after a failure or a crash."""
        return self.claim.attempt

    @property
    def fence(self) -> int:
        """
        A number that only grows from attempt to attempt.

        A downstream that remembers the highest number it has seen and refuses lower ones cannot be
        changed by an attempt that lost its claim without knowing it. 0: nothing guards this one.
        """
        return self.claim.version

    @property
    def connection(self) -> Any:  # noqa: ANN401 - the application's own
        """
        In transaction mode, the connection or session on which everything commits at once.

        Neither commit nor roll back on it; a savepoint is fine.
        """
        if self._transaction is None:
            raise Misconfigured(
                "this operation has no connection: it is not in transaction mode; write "
                "@idempotent(mode='transaction') or engine.transaction(...)"
            )
        return self._transaction.connection

    # --- what an attempt writes down for the next one -------------------------------------------

    def step(
        self,
        name: str,
        function: Callable[..., T],
        /,
        *args: Any,
        at_most_once: bool = False,
        probe: Callable[[Operation], Any] | None = None,
        **kwargs: Any,
    ) -> T:
        """
        Call *function* once for this operation, and remember its result, to 64 KiB.

        Its return annotation decides how the result is stored, as for a guarded function. A later
        attempt gets the result and does not call again. In async code it is awaited. If an attempt
        dies within the step, its outcome is unknown. Then *probe* is called, which returns
        `Happened(value=…)`, `DidNotHappen()` or `Unknown()`. Without a probe the step runs again,
        or, if it may happen *at_most_once*, the operation is in doubt.
        """
        call = functools.partial(function, *args, **kwargs)
        asks = None if probe is None else functools.partial(probe, self)
        # In async code, what these five return is awaited: `AsyncOperation` has the types of that.
        return cast("T", self._steps().step(self, StepCall(name, call, at_most_once, asks)))

    def note(self, what: object) -> None:
        """
        Write down what is about to be done, as text or another JSON value, before it is done.

        Reconcile functions read it (`operation.notes`), and operators see it. In async code it is
        awaited.
        """
        return cast("None", self._steps().note(self, what))

    def progress(self, fraction: float | None = None, words: str = "") -> None:
        """
        Report how far it is, from 0 to 1 and in words; a client that polls sees it.

        In async code it is awaited.
        """
        if fraction is not None and not 0 <= fraction <= 1:
            raise Misconfigured(f"progress goes from 0 to 1, not {fraction!r}")
        return cast("None", self._steps().report_progress(self, fraction, words))

    @property
    def notes(self) -> Sequence[Note]:
        """What this and earlier attempts have noted."""
        return progress_of(self.claim).notes

    @property
    def steps(self) -> Sequence[str]:
        """The names of the steps that are done."""
        return [step.name for step in progress_of(self.claim).steps if step.value is not None]

    def resumable(self) -> None:
        """Declare that the handler may simply run again however it ends, whatever the policy is."""
        self.is_resumable = self.has_notes = True

    # --- long work ------------------------------------------------------------------------------

    def accept(self) -> None:
        """
        Answer the client now, with 202 and a polling address; the handler goes on.

        The handler's answer is stored, and served there and to every retry. In async code it is
        awaited. Only ASGI applications can do this; a WSGI handler uses `defer`.
        """
        return cast("None", self._waiting_exchange("accept").accept())

    def defer(self, lease: Duration | None = None) -> str:
        """
        Leave the work to another process; the returned token names it for `engine.run_deferred`.

        Put the token on a queue, and return: the client gets 202. The claim is kept for *lease*
        (the policy's unless given). If no worker has taken it by then, the recovery policy
        decides. If the handler fails after all, or answers with an error, the token is void. In
        async code it is awaited.
        """
        exchange = self._waiting_exchange("defer")
        return cast("str", exchange.defer(None if lease is None else _lease_ms(lease)))

    def _waiting_exchange(self, name: str) -> Exchange:
        if self.exchange is None:
            raise Misconfigured(
                f"{name}() is for the handler of an HTTP request in record mode, before it has "
                "answered: no client waits here"
            )
        return self.exchange

    # --- does this attempt still hold the claim -------------------------------------------------

    @property
    def is_in_doubt(self) -> bool:
        """A step's outcome is unknown, or was not asked for: the handler's answer cannot count."""
        return self._problem is not None or self.step_problem is not None

    def check_steps(self, *, may_differ: bool) -> StepProblem | None:
        """Return why this attempt may not give the final answer; it is in doubt then."""
        asked = self.steps_asked if self._has_steps() else ()
        self._problem = self.step_problem or missing_steps(self.claim, asked, may_differ=may_differ)
        return self._problem

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Call *callback*, in a thread, when another attempt has taken over."""
        check_function("on_lost", callback)
        with _CLAIM_LOCK:
            self._on_lost = [*(self._on_lost or ()), callback]
        if self.is_lost:
            self.lose()

    def on_renewed(self, callback: Callable[[], object]) -> None:
        """Call *callback*, in a thread, each time the lease of this operation was renewed."""
        check_function("on_renewed", callback)
        self._on_renewed = [*(self._on_renewed or ()), callback]

    def _has_steps(self) -> bool:
        return hasattr(self, "steps_asked")

    def _steps(self) -> Steps:
        if self._step_writer is None:
            raise Misconfigured(
                "nothing can be written down here: steps, notes and progress are for handlers in "
                "record mode, while they run"
            )
        if not self._has_steps():
            self.steps_asked: set[str] = set()  # by this attempt, also those that failed
            self.steps_done: set[str] = set()
            self.steps_running: set[str] = set()
            self.has_notes = True
        return self._step_writer

    # --- for others -----------------------------------------------------------------------------

    def derive(self, name: str) -> str:
        """
        A key for a call to another service that is part of this operation.

        The same for every attempt, different for every *name*, and shaped like a UUID, so that
        every provider accepts it.
        """
        claim = self.claim
        generation, fingerprint = claim.created_ms, claim.fingerprint
        return derive(
            claim.id, name, generation=generation, request=fingerprint, secret=self._secret
        )


if TYPE_CHECKING:

    class AsyncOperation(Operation):
        """
        An operation as async code sees it: what is written down is awaited.

        It exists for type checkers, which then report a forgotten `await`. When the program runs,
        it is another name of `Operation`, which serves both.
        """

        @overload  # type: ignore[override]  # awaited, as all of these
        async def step(
            self,
            name: str,
            function: Callable[..., Awaitable[T]],
            /,
            *args: Any,
            at_most_once: bool = False,
            probe: Probe | None = None,
            **kwargs: Any,
        ) -> T: ...
        @overload
        async def step(
            self,
            name: str,
            function: Callable[..., T],
            /,
            *args: Any,
            at_most_once: bool = False,
            probe: Probe | None = None,
            **kwargs: Any,
        ) -> T: ...
        async def step(self, name: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            """See `Operation.step`."""
            ...

        async def note(self, what: object) -> None:  # type: ignore[override]  # as above
            """See `Operation.note`."""
            ...

        async def progress(  # type: ignore[override]  # as above
            self, fraction: float | None = None, words: str = ""
        ) -> None:
            """See `Operation.progress`."""
            ...

        async def accept(self) -> None:  # type: ignore[override]  # as above
            """See `Operation.accept`."""
            ...

        async def defer(  # type: ignore[override]  # as above
            self, lease: Duration | None = None
        ) -> str:
            """See `Operation.defer`."""
            ...

    Probe: TypeAlias = Callable[[Operation], Any] | Callable[[AsyncOperation], Any]
else:
    AsyncOperation = Operation


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


def current_async_operation() -> AsyncOperation | None:
    """The same for async code, where a type checker then reports a forgotten `await`."""
    operation: AsyncOperation | None = cast("Any", _CURRENT.get())
    return operation


# Make an operation the current one of this context; `leave` takes what this returns.
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
        """Refuse what could not be sent as a response: every retry would fail."""
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
    """A reconcile function's answer: it is not known; an operator must look."""
