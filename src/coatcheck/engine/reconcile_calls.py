"""Reconcile calls: the application's function is called with a time limit.

A reconcile function may hang, and the claim of the caller would be renewed for ever. So an async
function is cancelled when its time is over, and a blocking one runs in a thread that can be
abandoned: never in the thread of a request, and never on an event loop. An answer that comes too
late is dropped.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError, wait
from functools import partial
from typing import Any, Final, NamedTuple

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.key import reference_of
from coatcheck.core.policy import Policy
from coatcheck.core.record import Record
from coatcheck.errors import Uncertain
from coatcheck.operation import Operation
from coatcheck.stores.fork import renew_after_fork

logger = logging.getLogger("coatcheck")

# As many threads as Python's own pools have at most. So many calls may hang; others then wait.
CALLS_MAX = 32
# How often to check for a free thread, and whether the event loop that runs the call is alive.
POLL_S = 0.05

# The outcome when the function did not answer in time; known by its identity.
UNANSWERED: Final = Outcome(OutcomeKind.IN_DOUBT)


class Unanswered(Exception):
    """The reconcile function did not answer in time."""


class ReconcileCall(NamedTuple):
    """A call of a reconcile function, and how long to wait for its answer."""

    ask: Callable[[], Any]
    limit_s: float

    def unanswered(self) -> Unanswered:
        """The error when its time is over."""
        return Unanswered(f"the reconcile function did not answer within {self.limit_s:g} s")


def reconcile_call(claim: Record, policy: Policy, secret: bytes) -> ReconcileCall:
    """The call that asks what became of the attempt before *claim*."""
    assert policy.reconcile is not None
    operation = Operation(claim, policy, secret)
    return ReconcileCall(partial(policy.reconcile, operation), policy.reconcile_timeout_ms / 1_000)


def outcome_of_failure(error: Exception, claim: Record) -> Outcome:
    """What the *error* of a reconcile function means: what happened is still not known."""
    logger.error(
        "coatcheck: the reconcile function of operation %s (%s) failed",
        *(reference_of(claim.id), claim.label),
        exc_info=error,
    )
    return UNANSWERED if isinstance(error, Unanswered) else Outcome(OutcomeKind.IN_DOUBT)


class ReconcileCalls:
    """Makes the calls of one engine."""

    def __init__(self) -> None:
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        """Make what belongs to one process."""
        self._free = threading.Semaphore(CALLS_MAX)

    def wait(self, call: ReconcileCall, loop: asyncio.AbstractEventLoop | None) -> Any:  # noqa: ANN401 - what the function answers
        """
        Return the answer to *call*; this thread waits for it.

        An awaitable is awaited on the application's *loop* if that runs, because it may need it.
        """
        until_s = time.monotonic() + call.limit_s
        if not self._free.acquire(timeout=call.limit_s):
            raise call.unanswered()
        if loop is None or not loop.is_running():
            return _result(self._start(partial(_awaited_here, call)), call, until_s)
        answer = _result(self._start(call.ask), call, until_s)
        if inspect.isawaitable(answer):
            started = asyncio.run_coroutine_threadsafe(_coroutine(answer), loop)
            answer = _result(started, call, until_s, loop)
        return answer

    async def answer(self, call: ReconcileCall) -> Any:  # noqa: ANN401 - as above
        """Return the answer to *call*; a blocking function runs beside the event loop."""
        return await _within_limit(self._answer(call), call)

    async def _answer(self, call: ReconcileCall) -> Any:  # noqa: ANN401 - as above
        if inspect.iscoroutinefunction(call.ask):
            return await call.ask()
        while not self._free.acquire(blocking=False):  # noqa: ASYNC110 - released by threads
            await asyncio.sleep(POLL_S)
        answer = await asyncio.wrap_future(self._start(call.ask))
        return await answer if inspect.isawaitable(answer) else answer

    def _start(self, ask: Callable[[], Any]) -> Future[Any]:
        """Call *ask* in a thread of its own; the caller has acquired a place for it."""
        future: Future[Any] = Future()
        free, context = self._free, contextvars.copy_context()

        def call() -> None:
            try:
                result = context.run(ask)
            except Exception as error:  # noqa: BLE001 - raised to the caller
                _set(future.set_exception, error)
            except BaseException as error:  # noqa: BLE001 - as above; it must not end the caller
                _set(future.set_exception, Uncertain(f"it raised {type(error).__name__}"))
            else:
                _set(future.set_result, result)
            finally:
                free.release()

        try:
            threading.Thread(target=call, name="coatcheck-reconcile", daemon=True).start()
        except RuntimeError:
            free.release()
            raise
        return future


def _set(setter: Callable[[Any], None], value: object) -> None:
    try:
        setter(value)
    except InvalidStateError:  # its caller did not wait any longer
        pass


def _awaited_here(call: ReconcileCall) -> Any:  # noqa: ANN401 - as above
    """The answer to *call*, on an event loop of its own if it needs one."""
    answer = call.ask()
    if inspect.isawaitable(answer):
        answer = asyncio.run(_within_limit(_coroutine(answer), call))
    return answer


async def _within_limit(answer: Awaitable[Any], call: ReconcileCall) -> Any:  # noqa: ANN401 - as above
    """*answer*, unless it takes too long; it may ignore its cancellation, so it is not awaited."""
    task = asyncio.ensure_future(answer)
    try:
        await asyncio.wait((task,), timeout=call.limit_s)
        if not task.done() or task.cancelled():
            raise call.unanswered()
        return task.result()
    finally:
        task.cancel()
        task.add_done_callback(_ignore_result)


def _ignore_result(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # read, or asyncio logs that it never was


def _result(
    future: Future[Any],
    call: ReconcileCall,
    until_s: float,
    loop: asyncio.AbstractEventLoop | None = None,
) -> Any:  # noqa: ANN401 - as above
    """The result of *future*, unless it takes too long or the *loop* that runs it has stopped."""
    while not future.done():
        left_s = until_s - time.monotonic()
        if left_s <= 0 or (loop is not None and not loop.is_running()):
            future.cancel()
            raise call.unanswered()
        wait((future,), left_s if loop is None else min(left_s, POLL_S))
    return future.result()


async def _coroutine(answer: Awaitable[Any]) -> Any:  # noqa: ANN401 - as above
    return await answer
