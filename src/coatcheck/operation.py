"""The operation: one guarded execution, as its handler and the engine see it.

Handlers get it from their framework (`CurrentOperation`), from the ASGI scope or WSGI environ
under "coatcheck.operation", or from `current_operation()` anywhere below. The engine renews its
lease while the handler runs, and continues its lifecycle when the handler has ended.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast, overload

from coatcheck.core.callables import check_function
from coatcheck.core.flow import Flow
from coatcheck.core.identity import derive
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import ClaimRequest
from coatcheck.core.messages.event import OutgoingEvent, body_of
from coatcheck.core.messages.offset import PartitionOffset
from coatcheck.core.policy import Duration, Policy, positive_ms
from coatcheck.core.progress import Note, has_notes, origin_of, progress_of
from coatcheck.core.record import Record, Swap
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
    remembered_ms: int = 0  # how long the service that the step calls remembers its key
    is_parallel: bool = False  # other steps run beside it, which a retry may ask for later


class Exchange(Protocol):
    """The HTTP exchange that waits for the operation's response; see `server/asgi/exchange.py`."""

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

    def emit(self, event: OutgoingEvent) -> Any:  # noqa: ANN401 - None, or awaited
        """Write *event* in it."""
        ...

    def store_offset(self, offset: PartitionOffset) -> Any:  # noqa: ANN401 - as above
        """Write *offset* in it."""
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
            "emitted",
            "failure",
            "has_begun",
            "is_resumable",
            "outer",
            "policy",
            "raised",
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
        self.emitted = 0  # events
        self.repeats = 0  # how often the database had the handler run again before
        self.exchange: Exchange | None = None  # set by HTTP doors while the client waits
        self.outer: Operation | None = None  # of another guard further out, for the same request
        self.has_begun = False  # set by endpoints that are marked `idempotent`
        self.raised: Exception | None = None  # by the handler, and its framework answered for it
        # Whether this or an earlier attempt has noted anything, or called `resumable`: then the
        # handler's answer alone does not decide how the operation ends.
        self.has_notes = claim.progress is not None and has_notes(claim)
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

    def emit(
        self,
        topic: str,
        body: object,
        *,
        key: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """
        Have an event published if, and only if, the transaction of this operation commits.

        It is written in the transaction, and a `coatcheck.consumer.relay.Relay` publishes it
        afterwards, with a message id that stays the same. In async code it is awaited.

        Args:
            topic: a routing key, subject or topic of the broker.
            body: bytes, or a JSON value.
            key: events with the same key are published in the order in which they were emitted.
            headers: texts for the consumer.
        """
        if self._transaction is None:
            raise Misconfigured(
                "emit() writes in the transaction of the operation, and this one has none: write "
                "mode='transaction'"
            )
        content, content_type = body_of(body)
        self.emitted += 1
        event = OutgoingEvent(
            topic,
            content,
            self.derive(f"event {self.emitted}"),
            key,
            {"content-type": content_type, **(headers or {})},
        )
        return cast("None", self._transaction.emit(event))

    # --- what an attempt writes down for the next one -------------------------------------------

    def step(
        self,
        name: str,
        function: Callable[..., T],
        /,
        *args: Any,
        at_most_once: bool = False,
        probe: Callable[[Operation], Any] | None = None,
        remembered_for: Duration | None = None,
        **kwargs: Any,
    ) -> T:
        """
        Call *function* once for this operation, and remember its result, to 64 KiB.

        Its return annotation decides how the result is stored, as for a guarded function. A later
        attempt gets the result and does not call again. In async code it is awaited. If an attempt
        dies within the step, its outcome is unknown. Then *probe* is called, which returns
        `Happened(value=…)`, `DidNotHappen()` or `Unknown()`. Without a probe the step runs again,
        or, if it may happen *at_most_once*, the operation is in doubt.

        *remembered_for*: how long the service that the step calls remembers the key that it is
        sent (`operation.derive(name)`). Within that time, the step simply runs again.
        """
        call = functools.partial(function, *args, **kwargs)
        asks = None if probe is None else functools.partial(probe, self)
        remembered_ms = (
            0 if remembered_for is None else positive_ms("remembered_for", remembered_for)
        )
        # In async code, what these five return is awaited: `AsyncOperation` has the types of that.
        step = StepCall(name, call, at_most_once, asks, remembered_ms)
        return cast("T", self.record_step(step))

    def record_step(self, call: StepCall) -> Any:  # noqa: ANN401 - what the step returned
        """Call the function of *call* once for this operation; `step` for other packages."""
        return self._steps().step(self, call)

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
        awaited. Only ASGI applications can do this; a WSGI handler uses `defer`. It does nothing if
        the request is not recorded (observe mode, the kill switch, `on_outage="execute"`): there is
        nothing to poll for, so the client waits.
        """
        if self.exchange is None and not self.claim.version and self._step_writer is not None:
            return cast("None", self._step_writer.note(self, ""))  # writes nothing
        return cast("None", self._waiting_exchange("accept").accept())

    def defer(self, lease: Duration | None = None) -> str:
        """
        Leave the work to another process; the returned token names it for `engine.run_deferred`.

        Put the token on a queue, and return: the client gets 202. The claim is kept for *lease*
        (the policy's unless given). If no worker has taken it by then, the recovery policy
        decides. If the handler fails after all, or answers with an error, the token is void. In
        async code it is awaited. Raises `StoreUnavailable` while the store does not answer; the
        client then gets 503, unless the handler does the work itself.
        """
        exchange = self._waiting_exchange("defer")
        return cast("str", exchange.defer(None if lease is None else positive_ms("lease", lease)))

    def _waiting_exchange(self, name: str) -> Exchange:
        if self.exchange is None:
            why = "no client waits here" if self.claim.version else "this request has no record"
            raise Misconfigured(
                f"{name}() is for the handler of an HTTP request in record mode, before it has "
                f"answered: {why}"
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
        generation, fingerprint = claim.created_ms, origin_of(claim)
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
            remembered_for: Duration | None = None,
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
            remembered_for: Duration | None = None,
            **kwargs: Any,
        ) -> T: ...
        async def step(self, name: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            """See `Operation.step`."""
            ...

        async def emit(  # type: ignore[override]  # as above
            self,
            topic: str,
            body: object,
            *,
            key: str = "",
            headers: Mapping[str, str] | None = None,
        ) -> None:
            """See `Operation.emit`."""
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
