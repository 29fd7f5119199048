"""A visit whose handler may go on when its client has been answered (L10), over WSGI.

WSGI has one answer for each call and no way to go on after it. So the application runs in a thread
of ours, and the server's thread waits: for its answer, for `operation.accept`, or until the client
prefers to be told to ask later; whichever comes first is what the server gives to the client.

Such threads are bounded in number: whoever would need one more is told to come again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import copy_context
from typing import Any, NamedTuple

from coatcheck.core.policy import Policy
from coatcheck.core.problem import problem
from coatcheck.core.record import Record
from coatcheck.core.replay import Fate, Response
from coatcheck.core.serve import Ending, Ticket
from coatcheck.engine.desk import logger
from coatcheck.engine.keeping import ending_of_accepted
from coatcheck.server.answers import OUTAGES
from coatcheck.server.body import Body
from coatcheck.server.request import Request
from coatcheck.server.status import patience_left_s, patience_of
from coatcheck.server.wsgi_visit import (
    Guard,
    Said,
    StartResponse,
    Visit,
    close,
    respond,
)


class Started:
    """What `start_response` was called with, until the server's thread passes it on."""

    def __init__(self) -> None:
        self._arguments: tuple[Any, ...] = ()
        self._real: StartResponse | None = None

    def __call__(self, *arguments: Any) -> Callable[[bytes], object]:
        """`start_response`, for the visit."""
        if self._real is not None:
            return self._real(*arguments)
        self._arguments = arguments
        return _never_written

    def pass_on(self, start_response: StartResponse) -> None:
        """Begin the answer; whatever else is said goes there directly."""
        self._real = start_response
        start_response(*self._arguments)


def _never_written(_chunk: bytes) -> None:
    raise AssertionError  # a visit gives all it has to say as an iterable


class Told(NamedTuple):
    """What the client is to be told."""

    started: Started
    said: Iterable[bytes]


class AcceptingVisit(Visit):
    """One guarded request, whose handler has a thread of its own."""

    def __init__(
        self,
        guard: Guard,
        request: Request,
        start_response: StartResponse,
        *,
        ticket: Ticket,
        policy: Policy,
    ) -> None:
        self._patience_s, self._patient = patience_of(request, policy)
        super().__init__(guard, request, start_response, ticket=ticket, policy=policy)
        self._threads = guard.threads
        self._told: Future[Told] = Future()  # whoever is first to set it, answers
        # Whether the end of the claim is being written, with an answer that follows it.
        self._is_settled = False
        self._mutex = threading.Lock()
        self._unclosed: Iterable[bytes] = ()

    # --- the server's thread --------------------------------------------------------------------

    def _execute(self, claim: Record) -> Iterable[bytes]:
        self._claim = claim
        self._request.native["wsgi.multithread"] = True
        started, server_start = Started(), self._start_response
        if not self._is_begun(started):
            with suppress(*OUTAGES):
                self._engine.advance(self._flow, self._policy, Ending(Fate.RELEASE))
            return self._refuse(problem("too-much-work", id=claim.id))
        left_s = None
        if self._patience_s is not None:  # some of it may have gone for whoever was first
            came_ms, now_ms = self._ticket.now_ms, self._engine.desk.now_ms()
            left_s = patience_left_s(self._patience_s, came_ms, now_ms)
        try:
            told = self._told.result(left_s)
        except TimeoutError:
            self.accept()
            told = self._told.result()
        told.started.pass_on(server_start)
        return told.said

    def _is_begun(self, started: Started) -> bool:
        """The work has a thread; False where there are as many as may be, or as can be."""
        if not self._threads.acquire(blocking=False):
            return False
        thread = threading.Thread(
            target=copy_context().run, args=(self._work, started), name="coatcheck-work"
        )
        try:
            thread.start()
        except RuntimeError as error:
            self._threads.release()
            logger.error("no thread can be started: %s", error)
            return False
        return True

    # --- the handler's thread -------------------------------------------------------------------

    def _work(self, started: Started) -> None:
        """Execute; tell the client how that ended, if it is still there."""
        self._start_response = started
        try:
            said = super()._execute(self._claim)
            if not self._tell(Told(started, said)):
                close(said)
                self._request.body.close()
            close(self._unclosed)
        except BaseException as error:  # noqa: BLE001 - handed on to the server, or logged
            self._fail_alone(error)
        finally:
            self._threads.release()

    def _fail_alone(self, error: BaseException) -> None:
        try:
            self._told.set_exception(error)
        except InvalidStateError:
            logger.error("a request that nobody waited for any more failed", exc_info=error)
            self._request.body.close()

    def _give(
        self, claim: Record, response: Response, said: Iterable[bytes], rest: Iterator[bytes] | None
    ) -> Iterable[bytes]:
        if rest is None:  # all is said; it may hold what is local to its thread, so that closes it
            self._unclosed, said = said, ()
        return super()._give(claim, response, said, rest)

    def _ending(self, *, is_whole: bool) -> tuple[Response, Ending]:
        with self._mutex:  # what is kept goes by whether the client was told to ask for it
            self._is_settled, is_accepted = True, self._told.done()
        response, ending = super()._ending(is_whole=is_whole)
        if is_whole and is_accepted:
            ending = ending_of_accepted(response, self._policy)
        return response, ending

    # --- either ---------------------------------------------------------------------------------

    def accept(self) -> None:
        """Tell the client to ask later; nothing if its answer is on its way."""
        started = Started()
        said = respond(started, self._accepted(self._claim))
        with self._mutex:
            if not self._is_settled:
                # The request's body is still read, and not closed with this answer.
                self._tell(Told(started, Said(b"".join(said), (), (), Body())))

    def _tell(self, told: Told) -> bool:
        try:
            self._told.set_result(told)
        except InvalidStateError:
            return False
        return True
