"""A visit: one guarded WSGI request that memory could not answer, from its claim to its answer.

In the server's own thread. What the application says is kept until it is whole, settled in the
record, and then given on; what cannot be kept is settled as such, and streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType
from typing import Protocol, TypeAlias

from coatcheck.core.policy import Policy
from coatcheck.core.problem import Problem, problem
from coatcheck.core.record import Record
from coatcheck.core.replay import Response
from coatcheck.core.serve import Answer, Ending, Execute, Executed, Refuse, Replay, Ticket
from coatcheck.engine import Engine
from coatcheck.engine.desk import ending_of_error, judged, logger
from coatcheck.engine.keeping import ending_of, ending_of_part
from coatcheck.engine.resuming import hand_over
from coatcheck.errors import ClaimLost, Misconfigured
from coatcheck.operation import enter
from coatcheck.server.answers import (
    OUTAGES,
    RAN_UNRECORDED,
    has_length,
    is_endless,
    reference_header,
    refused,
    unrun,
)
from coatcheck.server.body import Body
from coatcheck.server.counter import Counter
from coatcheck.server.request import Request
from coatcheck.server.wsgi_input import Environ, rewound

ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
)
StartResponse: TypeAlias = Callable[..., Callable[[bytes], object]]
App: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]


class Guard(Protocol):
    """What a visit needs of the middleware that it comes through."""

    app: App
    engine: Engine
    counter: Counter
    threads: threading.Semaphore


class Visit:
    """One guarded request."""

    _patient: Policy | None = None  # the policy for its flow, where its client waits longer

    def __init__(
        self,
        guard: Guard,
        request: Request,
        start_response: StartResponse,
        *,
        ticket: Ticket,
        policy: Policy,
    ) -> None:
        self._app = guard.app
        self._engine = guard.engine
        self._counter = guard.counter
        self._request = request
        self._start_response = start_response
        self._ticket = ticket
        self._policy = policy
        self._flow = guard.engine.flow(ticket, self._patient or policy)
        # What the application has said so far.
        self._status_line = ""
        self._headers: list[tuple[str, str]] = []
        self._chunks: list[bytes] = []
        self._size = 0
        self._is_streaming = False
        # Whether somebody else finds the answer.
        self._is_handed_over = False

    def serve(self) -> Iterable[bytes]:
        """Claim, execute, answer."""
        try:
            step = self._engine.advance(self._flow, self._policy, as_value=False)
        except OUTAGES as error:
            return self._refuse(unrun(error, self._ticket.id))
        if isinstance(step, Execute):
            return self._execute(step.claim)
        return self.answer(step)

    def _execute(self, claim: Record) -> Iterable[bytes]:
        self._held = held = self._engine.heart.hold(claim, self._policy.lease_ms)
        self._operation = operation = self._engine.operation(held)
        operation.client = self
        environ = rewound(self._request)
        environ["coatcheck.operation"] = operation
        enter(operation)
        said: Iterable[bytes] = ()
        try:
            try:
                said = self._app(environ, self._start)
                chunks = iter(said)
                rest = None if self._gather(chunks) else chunks
                response, ending = self._ending(is_whole=rest is None)
            except BaseException as error:
                standing = self._fail(error, said)
                if isinstance(error, ClaimLost) and isinstance(standing, (Replay, Refuse)):
                    return self.answer(standing)
                if not operation.is_in_doubt:
                    raise
                logger.error("an operation is in doubt", exc_info=error)
                return respond(self._start_response, refused(self._unknown(), self._policy))
            return self._settle(claim, response, ending, said=said, rest=rest)
        finally:  # not before the end is written: who waits here for it need not look for it
            self._engine.heart.let_go(held)
            operation.client = None

    def _fail(self, error: BaseException, said: Iterable[bytes]) -> Answer | Execute | None:
        """Close what the application has begun to say, and give its claim back; what stands."""
        with suppress(Exception):  # its first error matters more than this one
            close(said)
        standing: Answer | Execute | None = None
        if isinstance(error, Exception):
            ending = ending_of_error(self._operation, error, self._policy)
            with suppress(*OUTAGES):  # and more than ours
                standing = self._engine.advance(self._flow, self._policy, ending)
            if not (isinstance(error, ClaimLost) and isinstance(standing, (Replay, Refuse))):
                self._engine.desk.tell(self._ticket, None)
        return standing

    def _unknown(self) -> Problem:
        return problem("outcome-unknown", key=self._ticket.key, id=self._ticket.id)

    def _gather(self, chunks: Iterator[bytes]) -> bool:
        """Take all the application says; False where it is too much to keep."""
        for chunk in chunks:
            self._write(chunk)
            if self._size > self._policy.response_bytes_max or is_endless(self._lowered()):
                return False
        if not self._status_line:
            raise RuntimeError("the application ended without calling start_response")
        return True

    def _start(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None
    ) -> Callable[[bytes], object]:
        """`start_response` for the application: nothing has left yet, so it may change its mind."""
        if self._is_streaming:
            return self._start_response(status, headers, exc_info)
        if self._status_line and exc_info is None:
            raise AssertionError("start_response was called twice without exc_info")
        self._chunks.clear()
        self._size = 0
        self._status_line = status
        ours = self._policy.names_given  # else it is of a guarded service behind this one
        self._headers = [h for h in headers if h[0].lower().encode("latin-1") not in ours]
        return self._write

    def _write(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)

    def _settle(
        self,
        claim: Record,
        response: Response,
        ending: Ending,
        *,
        said: Iterable[bytes],
        rest: Iterator[bytes] | None,
    ) -> Iterable[bytes]:
        if self._is_handed_over and response.status < HTTPStatus.BAD_REQUEST:
            close(said)
            self._engine.desk.tell(self._ticket, Executed(claim))
            return respond(self._start_response, self._accepted(self._held.claim))
        ending = judged(self._operation, ending, status=response.status)
        try:
            step = self._engine.advance(self._flow, self._policy, ending)
        except OUTAGES as error:
            logger.error("executed, but the store is unavailable: %s", error)
            if self._policy.unrecorded == "503" or self._operation.is_in_doubt:
                close(said)
                refusal = problem("store-unavailable", id=claim.id, reason=RAN_UNRECORDED)
                return self._refuse(refusal)
            step = Executed(claim)  # and the heart writes it down
        except BaseException:
            close(said)
            raise
        assert not isinstance(step, Execute)
        if self._operation.is_in_doubt:  # whatever the handler made of it
            close(said)
            return self._refuse(self._unknown())
        if not isinstance(step, Executed):
            close(said)
            return self.answer(step)
        self._engine.desk.tell(self._ticket, step)
        return self._give(claim, response, said, rest)

    def _ending(self, *, is_whole: bool) -> tuple[Response, Ending]:
        """What the application has said, and what that means for its claim."""
        body = b"".join(self._chunks)
        response = Response(int(self._status_line[:3]), self._lowered(), body)
        judge = ending_of if is_whole else ending_of_part
        return response, judge(response, self._policy)

    def _give(
        self,
        claim: Record,
        response: Response,
        said: Iterable[bytes],
        rest: Iterator[bytes] | None,
    ) -> Iterable[bytes]:
        """Give the client what was said, and the *rest* as it comes, where it was not all."""
        name, reference = reference_header(claim.id, self._policy)
        headers = [*self._headers, (name.decode("latin-1"), reference.decode())]
        if rest is None and not has_length(response):
            # Servers work it out of a list of one; we return none, so a connection would end.
            headers.append(("Content-Length", str(len(response.body))))
        self._start_response(self._status_line, headers)
        self._is_streaming = rest is not None
        return Said(response.body, rest or (), said, self._request.body)

    def _lowered(self) -> list[tuple[bytes, bytes]]:
        return [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in self._headers]

    def answer(self, answer: Answer) -> Iterable[bytes]:
        """Answer without the handler."""
        assert not isinstance(answer, Executed)
        self._engine.desk.tell(self._ticket, answer)
        response = self._counter.answered(answer, self._ticket, self._policy, self._request)
        return respond(self._start_response, response)

    def _refuse(self, refusal: Problem) -> Iterable[bytes]:
        self._engine.desk.tell(self._ticket, Refuse(refusal))
        return respond(self._start_response, refused(refusal, self._policy))

    # --- when it takes long (L10) -------------------------------------------------------------

    def accept(self) -> None:
        """Tell the client to ask later: that takes another thread than the server's."""
        raise Misconfigured(
            "over WSGI accept() needs in_flight='202': only then has the handler a thread of its "
            "own, in which it can go on when its client has been answered"
        )

    def hand_over(self, lease_ms: int | None) -> str:
        """Let somebody else find the answer."""
        text = hand_over(self._engine, self._held, lease_ms or self._policy.lease_ms)
        self._is_handed_over = True
        return text

    def _accepted(self, claim: Record) -> Response:
        return self._counter.accepted(claim, self._policy, self._request)


class Said:
    """What the application said: what was kept back, then the rest as it comes; then its close."""

    def __init__(
        self, body: bytes, rest: Iterable[bytes], said: Iterable[bytes], asked: Body
    ) -> None:
        self._body = body
        self._rest = rest
        self._said = said
        self._asked = asked

    def __iter__(self) -> Iterator[bytes]:
        if self._body:
            yield self._body
        yield from self._rest

    def close(self) -> None:
        """All is said, or nobody listens any more."""
        try:
            close(self._said)
        finally:
            self._asked.close()


def close(said: Iterable[bytes]) -> None:
    """Tell the application that nobody listens any more."""
    tell = getattr(said, "close", None)
    if tell is not None:
        tell()


def respond(start_response: StartResponse, response: Response) -> Iterable[bytes]:
    """Answer with *response*."""
    try:
        phrase = HTTPStatus(response.status).phrase
    except ValueError:
        phrase = "Unknown"
    headers = [(n.decode("latin-1").title(), v.decode("latin-1")) for n, v in response.headers]
    start_response(f"{response.status} {phrase}", headers)
    return [response.body] if response.body else []
