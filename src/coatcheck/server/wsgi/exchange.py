"""One guarded WSGI request, from its claim to its response.

It runs in the server's own thread. What the application returns is kept until it is whole, stored
in the record, and then passed on; a response that cannot be kept is passed on as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType
from typing import Protocol, TypeAlias

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import ClaimRequest, Executed, Refuse, Replay
from coatcheck.core.policy import Policy
from coatcheck.core.problem import problem
from coatcheck.core.response import Response
from coatcheck.engine import Engine
from coatcheck.engine.attempts import OUTAGES
from coatcheck.engine.deferred import NOT_DEFERRED
from coatcheck.engine.outcomes import (
    OUTCOME_UNKNOWN,
    logger,
    outcome_of_partial,
    outcome_of_response,
)
from coatcheck.engine.transactions import Repeat
from coatcheck.errors import Misconfigured
from coatcheck.operation import Operation, enter
from coatcheck.server.body import Body, close_body
from coatcheck.server.guard import RequestGuard
from coatcheck.server.polling import preferred_wait
from coatcheck.server.request import Request
from coatcheck.server.responses import (
    has_length,
    is_endless,
    reference_header,
    refusal_passes,
)
from coatcheck.server.routes import is_refused_early, raised_instead
from coatcheck.server.wsgi.request import Environ, rewound

ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
)
StartResponse: TypeAlias = Callable[..., Callable[[bytes], object]]
App: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]


class Middleware(Protocol):
    """What an exchange needs of its middleware."""

    app: App
    engine: Engine
    guard: RequestGuard


class Exchange:
    """One guarded request and its response."""

    def __init__(
        self,
        middleware: Middleware,
        request: Request,
        start_response: StartResponse,
        *,
        claim: ClaimRequest,
        policy: Policy,
    ) -> None:
        self._app = middleware.app
        self._engine = middleware.engine
        self._guard = middleware.guard
        self._request = request
        self._start_response = start_response
        self._claim = claim
        self._policy = policy
        self._operation: Operation | None = None
        self._outer: Operation | None = request.native.get("coatcheck.operation")
        # What the application has returned so far.
        self._status_line = ""
        self._headers: list[tuple[str, str]] = []
        self._chunks: list[bytes] = []
        self._size = 0
        self._is_streaming = False
        self._is_deferred = False  # a worker finds the answer
        self._is_undeferred = False  # the handler could not defer, because of an outage

    def serve(self) -> Iterable[bytes]:
        """Claim, execute, answer; again, if the database asks for it and the policy allows it."""
        repeats, policy = 0, self._policy
        if policy.in_flight == "202":
            _, policy = preferred_wait(self._request, policy)
        while True:
            started = self._engine.begin(self._claim, policy, None, repeats)
            if not isinstance(started, Operation):
                return self.answer(started)
            self._operation = started
            try:
                return self._execute(started)
            except Repeat as again:
                repeats = again.repeats
                self._status_line, self._size = "", 0
                self._chunks.clear()
            finally:
                started.exchange = None

    def _execute(self, operation: Operation) -> Iterable[bytes]:
        if self._policy.mode == "record":
            operation.exchange = self
        enter(operation)
        returned: Iterable[bytes] = ()
        try:
            environ = rewound(self._request)
            operation.outer = self._outer
            environ["coatcheck.operation"] = operation
            returned = self._app(environ, self._start)
            chunks = iter(returned)
            rest = None if self._gather(chunks) else chunks
            response, outcome = self._outcome(is_whole=rest is None)
        except BaseException as error:
            with suppress(Exception):  # its first error matters more than this one
                close(returned)
            answer = self._fail(operation, error)
            if answer is None:
                raise
            return answer
        raised = raised_instead(response, outcome, operation)
        if raised is None:
            return self._complete(operation, response, outcome, returned=returned, rest=rest)
        try:
            answer = self._fail(operation, raised)
        except BaseException:
            close(returned)
            raise
        if answer is None:
            return self._pass_on(operation, response, returned, rest)
        close(returned)
        return answer

    def _fail(self, operation: Operation, error: BaseException) -> Iterable[bytes] | None:
        """End an operation whose handler raised *error*; None: the application's response is it."""
        answer = self._engine.fail(operation, error)
        if answer is None and self._is_undeferred and isinstance(error, OUTAGES):
            answer = self._not_deferred()
        if answer is not None:
            return self.answer(answer)
        if not operation.is_in_doubt or not isinstance(error, Exception):
            return None
        logger.error(OUTCOME_UNKNOWN, operation.reference, operation.label, exc_info=error)
        unknown = problem("outcome-unknown", key=self._claim.key, id=self._claim.id)
        response = self._guard.render(unknown, self._policy, self._request)
        return respond(self._start_response, response)

    def _gather(self, chunks: Iterator[bytes]) -> bool:
        """Take everything the application returns; False if it is too much to keep."""
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
        """`start_response` for the application: nothing is sent yet, so it may call it again."""
        if self._is_streaming:
            return self._start_response(status, headers, exc_info)
        if self._status_line and exc_info is None:
            raise AssertionError("start_response was called twice without exc_info")
        self._chunks.clear()
        self._size = 0
        self._status_line = status
        ours = self._policy.names_given  # a guarded service behind this one may have sent them
        self._headers = [
            (name, value) for name, value in headers if name.lower().encode("latin-1") not in ours
        ]
        return self._write

    def _write(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)

    def _outcome(self, *, is_whole: bool) -> tuple[Response, Outcome]:
        """What the application has returned, and what that means for its claim."""
        body = b"".join(self._chunks)
        response = Response(int(self._status_line[:3]), self._lowered(), body)
        assert self._operation is not None
        if is_refused_early(response, self._operation):
            return response, Outcome(OutcomeKind.REJECT)
        outcome_of = outcome_of_response if is_whole else outcome_of_partial
        return response, outcome_of(response, self._policy)

    def _complete(
        self,
        operation: Operation,
        response: Response,
        outcome: Outcome,
        *,
        returned: Iterable[bytes],
        rest: Iterator[bytes] | None,
    ) -> Iterable[bytes]:
        """Store the response, and only then pass it on."""
        if self._is_deferred and response.status < HTTPStatus.BAD_REQUEST:
            close(returned)
            self._engine.attempts.report(self._claim, Executed(operation.claim))
            accepted = self._guard.accepted(operation.claim, self._policy, self._request)
            return respond(self._start_response, accepted)
        try:
            answer = self._engine.complete(operation, outcome, status=response.status)
        except Exception as error:
            is_final = not isinstance(error, Repeat) and rest is None
            if not is_final or not refusal_passes(response, error):
                close(returned)
                raise
        except BaseException:
            close(returned)
            raise
        else:
            if self._is_undeferred and response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                answer = self._not_deferred()
            if not isinstance(answer, Executed):
                close(returned)
                return self.answer(answer)
        return self._pass_on(operation, response, returned, rest)

    def _pass_on(
        self,
        operation: Operation,
        response: Response,
        returned: Iterable[bytes],
        rest: Iterator[bytes] | None,
    ) -> Iterable[bytes]:
        """Pass the response on, and the *rest* as it comes, if it was not whole."""
        headers = list(self._headers)
        if operation.claim.version:  # without a record there is nothing to refer to
            name, reference = reference_header(operation.claim.id, self._policy)
            headers.append((_spelled(name), reference.decode()))
        if rest is None and not has_length(response):
            # Servers compute it for a list of one; we return none, so the connection would end.
            headers.append(("Content-Length", str(len(response.body))))
        self._start_response(self._status_line, headers)
        self._is_streaming = rest is not None
        return ResponseBody(response.body, rest or (), returned, self._request.body)

    def _lowered(self) -> list[tuple[bytes, bytes]]:
        return [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in self._headers]

    def answer(self, answer: Replay | Refuse) -> Iterable[bytes]:
        """Answer without the handler."""
        response = self._guard.response_of(answer, self._claim, self._policy, self._request)
        return respond(self._start_response, response)

    # --- long work ------------------------------------------------------------------------------

    def accept(self) -> None:
        """Refused: a WSGI handler cannot go on after its response."""
        raise Misconfigured(
            "over WSGI a handler cannot go on after its response: put operation.defer() on a "
            "queue, and let a worker call engine.run_deferred(...)"
        )

    def defer(self, lease_ms: int | None) -> str:
        """Leave the work to the process that takes the token."""
        assert self._operation is not None
        try:
            token = self._engine.defer(self._operation, lease_ms or self._policy.lease_ms)
        except OUTAGES:
            self._is_undeferred = True
            raise
        self._is_deferred = True
        return token

    def _not_deferred(self) -> Refuse:
        key, id = self._claim.key, self._claim.id
        return Refuse(problem("store-unavailable", key=key, id=id, reason=NOT_DEFERRED))


class ResponseBody:
    """The response for the server: what was kept back, then the rest as it comes; then `close`."""

    def __init__(
        self, body: bytes, rest: Iterable[bytes], returned: Iterable[bytes], request_body: Body
    ) -> None:
        self._body = body
        self._rest = rest
        self._returned = returned
        self._request_body = request_body

    def __iter__(self) -> Iterator[bytes]:
        if self._body:
            yield self._body
        yield from self._rest

    def close(self) -> None:
        """The server has sent it, or the client has hung up."""
        try:
            close(self._returned)
        finally:
            close_body(self._request_body)


def close(returned: Iterable[bytes]) -> None:
    """Call the `close` of what the application *returned*, if it has one."""
    method = getattr(returned, "close", None)
    if method is not None:
        method()


def respond(start_response: StartResponse, response: Response) -> Iterable[bytes]:
    """Answer with *response*."""
    try:
        phrase = HTTPStatus(response.status).phrase
    except ValueError:
        phrase = "Unknown"
    headers = [(_spelled(name), value.decode("latin-1")) for name, value in response.headers]
    start_response(f"{response.status} {phrase}", headers)
    return [response.body] if response.body else []


# The usual names that are not in title case.
_USUAL = {n.lower(): n for n in ("Content-MD5", "ETag", "WWW-Authenticate", "X-XSS-Protection")}


def _spelled(name: bytes) -> str:
    """*name* as applications spell it: a record has it in lower case."""
    text = name.decode("latin-1")
    return _USUAL.get(text) or text.title()
