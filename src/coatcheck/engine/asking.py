"""Asking: a reconcile function is the application's own, and is waited for only so long (L6).

It may hang, and the claim of whoever asks would be renewed for ever. So what is async is cancelled
when its time is over, and what blocks is asked in a thread that can be abandoned: never in that of
a request, and never on an event loop. An answer that comes too late finds nobody who listens.

Invariant: whoever asks goes on after the limit, whatever the function does. One that ends with
`SystemExit` has failed like any other: all else that is to be recovered must not wait for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final, NamedTuple

from coatcheck.core.key import reference_of
from coatcheck.core.policy import Policy
from coatcheck.core.record import Record
from coatcheck.core.replay import Fate
from coatcheck.core.serve import Ending
from coatcheck.operation import Operation
from coatcheck.stores.fork import renew_after_fork

logger = logging.getLogger("coatcheck")

# As many as Python's own pools have at most. So many may also hang: who comes then waits in line.
ASKERS_MAX = 32
# How often to see whether the event loop that was to answer is still there.
LOOP_EVERY_S = 0.5

# How an attempt ends of which nobody has told in time; known by its identity.
UNANSWERED: Final = Ending(Fate.DOUBT)


class Unanswered(Exception):
    """A question has got no answer in its time."""


class Exited(Exception):
    """A question was answered with what is no error: `SystemExit`, or a framework's own."""


class Question(NamedTuple):
    """What is asked, and how long its answer is waited for."""

    ask: Callable[[], Any]
    limit_s: float

    def unanswered(self) -> Unanswered:
        """Its time is over."""
        return Unanswered(f"no answer within {self.limit_s:g} s")


def question_of(claim: Record, policy: Policy, secret: bytes) -> Question:
    """What became of the attempt before *claim*?"""
    assert policy.reconcile is not None
    operation = Operation(claim, secret)
    return Question(partial(policy.reconcile, operation), policy.reconcile_timeout_ms / 1_000)


def doubt_of(error: Exception, claim: Record) -> Ending:
    """What the *error* of a reconcile function means: whatever it was, nobody knows."""
    logger.error("reconcile failed; %s stays in doubt", reference_of(claim.id), exc_info=error)
    return UNANSWERED if isinstance(error, Unanswered) else Ending(Fate.DOUBT)


class Asker:
    """Asks, for one engine; its threads end when nothing is left to be asked."""

    def __init__(self) -> None:
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        """Make what belongs to one process."""
        self._mutex = threading.Lock()
        self._threads = 0
        self._line: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    async def answer(self, question: Question) -> Any:  # noqa: ANN401 - what a user's function answers
        """The answer to *question*, which is asked beside the running event loop if it blocks."""
        return await _within(_Ending(self._answer(question.ask)), question)

    async def _answer(self, ask: Callable[[], Any]) -> Any:  # noqa: ANN401 - as above
        is_async = inspect.iscoroutinefunction(ask)
        answer = ask() if is_async else await asyncio.wrap_future(self._begin(ask))
        return await answer if inspect.isawaitable(answer) else answer

    def wait(self, question: Question, loop: asyncio.AbstractEventLoop | None) -> Any:  # noqa: ANN401 - as above
        """
        The answer to *question*, waited for in this thread.

        What is async is awaited on the application's *loop* if that runs, because that knows it.
        """
        until_s = time.monotonic() + question.limit_s
        if loop is None or not loop.is_running():
            return _result(self._begin(partial(_in_full, question)), question, until_s)
        answer = _result(self._begin(question.ask), question, until_s)
        if inspect.isawaitable(answer):
            begun = asyncio.run_coroutine_threadsafe(_coroutine_of(answer), loop)
            answer = _result(begun, question, until_s, loop)
        return answer

    def _begin(self, ask: Callable[[], Any]) -> Future[Any]:
        """Ask in a thread, as soon as there is one."""
        future: Future[Any] = Future()
        in_context = partial(contextvars.copy_context().run, ask)
        with self._mutex:
            while self._line and self._line[0][0].cancelled():  # nobody waits for these any more
                self._line.popleft()
            if self._threads < ASKERS_MAX:
                threading.Thread(target=self._work, name="coatcheck-asker", daemon=True).start()
                self._threads += 1
            self._line.append((future, in_context))
        return future

    def _work(self) -> None:
        while True:
            with self._mutex:
                if not self._line:
                    self._threads -= 1
                    return
                future, ask = self._line.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(ask())
                except Exception as error:  # noqa: BLE001 - handed to whoever asked
                    future.set_exception(error)
                except BaseException as error:  # noqa: BLE001 - as above
                    future.set_exception(Exited(repr(error)))


def _in_full(question: Question) -> Any:  # noqa: ANN401 - as above
    """The answer to *question*, on an event loop of its own if it needs one."""
    answer = question.ask()
    if inspect.isawaitable(answer):
        answer = asyncio.run(_within(_coroutine_of(answer), question))
    return answer


async def _within(answer: Coroutine[Any, Any, Any], question: Question) -> Any:  # noqa: ANN401 - as above
    """*answer*, unless it takes too long; its end is not waited for, as it may not care for it."""
    task = asyncio.ensure_future(answer)
    try:
        await asyncio.wait((task,), timeout=question.limit_s)
        if not task.done() or task.cancelled():
            raise question.unanswered()
        return task.result()
    finally:
        task.cancel()
        task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # else asyncio would complain that nobody has looked at it


def _result(
    begun: Future[Any],
    question: Question,
    until_s: float,
    loop: asyncio.AbstractEventLoop | None = None,
) -> Any:  # noqa: ANN401 - as above
    """What was *begun*, unless it takes too long, or nobody is left on its *loop* to answer."""
    while not begun.done():
        left_s = until_s - time.monotonic()
        if left_s <= 0 or (loop is not None and not loop.is_running()):
            begun.cancel()
            raise question.unanswered()
        wait((begun,), min(left_s, LOOP_EVERY_S))
    return begun.result()


def _coroutine_of(answer: Awaitable[Any]) -> Coroutine[Any, Any, Any]:
    return _Ending(answer if inspect.iscoroutine(answer) else _awaited(answer))


class _Ending(Coroutine[Any, Any, Any]):
    """
    *answer*, of which an event loop does not end: `SystemExit` in a task would end it.

    No coroutine around another: one that is cancelled before it has begun must itself be told, or
    Python would complain.
    """

    def __init__(self, answer: Coroutine[Any, Any, Any]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._answer.__await__()

    def send(self, value: Any) -> Any:  # noqa: ANN401 - what the event loop and a coroutine exchange
        return _without_exit(self._answer.send, value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401 - as above
        return _without_exit(self._answer.throw, *error)

    def close(self) -> None:
        self._answer.close()


def _without_exit(advance: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - as above
    try:
        return advance(*args)
    except (Exception, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise Exited(repr(error)) from error


async def _awaited(answer: Awaitable[Any]) -> Any:  # noqa: ANN401 - as above
    return await answer
