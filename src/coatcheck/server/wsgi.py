"""The WSGI adapter: any WSGI application, guarded by one line.

    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, store="sqlite:///orders.db")

Requests that are not guarded pass untouched. A guarded one is read to the end of its body and not
a byte further, claimed, and executed in the server's own thread. The response leaves when its
record is safe. PEP 3333 is kept in full: `write()`, generators, late and repeated
`start_response`, `close()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from types import TracebackType
from typing import TypeAlias

from coatcheck.core.policy import SAFE_METHODS, Policy
from coatcheck.core.problem import Problem, problem
from coatcheck.core.record import Record
from coatcheck.core.replay import Response, fate_of
from coatcheck.core.serve import Answer, Ending, Execute, Executed, Ticket
from coatcheck.engine import Engine
from coatcheck.engine.desk import logger
from coatcheck.errors import Misconfigured
from coatcheck.operation import Operation, enter
from coatcheck.server.answers import (
    OUTAGES,
    RAN_NOT,
    RAN_UNRECORDED,
    ending_of,
    has_length,
    is_endless,
    reference_header,
    refused,
)
from coatcheck.server.body import Body
from coatcheck.server.callers import Caller
from coatcheck.server.counter import Counter, NaturalKey
from coatcheck.server.request import Request
from coatcheck.server.status import Asked, status_of
from coatcheck.server.wsgi_input import (
    Environ,
    drain,
    give,
    read,
    request_of,
    rewound,
)
from coatcheck.stores import Store

ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
)
StartResponse: TypeAlias = Callable[..., Callable[[bytes], object]]
App: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]


class IdempotencyMiddleware:
    """
    Guards a WSGI application.

    Args:
        app: the application.
        store: a URL or a store; or give *engine*.
        policy: a `Policy`, the name of a preset, or None for the default.
        caller: whose key it is, a function of the request; see `coatcheck.server.callers`.
        key: takes the key from the request itself where no header brings one (K4).
        secret: makes operation ids unguessable; the same on every node.
        engine: an `Engine` that is shared with other doors.
    """

    def __init__(
        self,
        app: App,
        *,
        store: str | Store | None = None,
        policy: Policy | str | None = None,
        caller: Caller | None = None,
        key: NaturalKey | None = None,
        secret: bytes | str = b"",
        engine: Engine | None = None,
    ) -> None:
        if engine is not None and (store is not None or policy is not None or secret):
            raise Misconfigured("engine= brings its own store, policy and secret; give only it")
        self.app = app
        self.engine = engine or Engine(store or "sqlite:///coatcheck.db", policy, secret=secret)
        self.counter = Counter(self.engine.desk, caller, key)
        self._environ_name = "HTTP_" + self.engine.desk.policy.key_header.upper().replace("-", "_")

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request; only those with unsafe methods concern us."""
        policy = self.engine.desk.policy
        method = environ["REQUEST_METHOD"]
        if method in SAFE_METHODS and policy.status_path in environ.get("PATH_INFO", ""):
            return self._tell_status(environ, start_response)
        if method not in policy.methods:
            return self.app(environ, start_response)
        value = environ.get(self._environ_name)
        values = () if value is None else (value.encode("latin-1"),)
        key = self.counter.key_of(values, policy)
        if key is None and not self.counter.has_natural_keys:
            return self.app(environ, start_response)
        if isinstance(key, Problem):
            drain(environ)
            return _respond(start_response, refused(key, policy))
        return self._guard(environ, start_response, policy, key)

    def _guard(
        self, environ: Environ, start_response: StartResponse, policy: Policy, key: str | None
    ) -> Iterable[bytes]:
        body = read(environ, policy)
        if isinstance(body, Problem):
            return _respond(start_response, refused(body, policy))
        give(environ, body)
        said: Iterable[bytes] = ()
        try:
            said = self._serve(request_of(environ, body), start_response, policy, key)
        finally:
            if not isinstance(said, _Said):  # nobody reads the request any more
                body.close()
        return said

    def _serve(
        self, request: Request, start_response: StartResponse, policy: Policy, key: str | None
    ) -> Iterable[bytes]:
        if key is None:
            found = self.counter.natural_key_of(request, policy)
            if found is None:
                return self._pass(request, start_response)
            if isinstance(found, Problem):
                return _respond(start_response, refused(found, policy))
            key = found
        if not self.engine.is_started:
            try:
                self.engine.start()
            except OUTAGES as error:
                return _refuse_unrun(start_response, policy, error)
        ticket = self.counter.ticket(request, policy, key, None)
        if self.counter.is_held_by(request, ticket):
            return self._pass(request, start_response)
        answer = self.engine.desk.recall(ticket, policy)
        visit = _Visit(self, request, start_response, ticket=ticket, policy=policy)
        try:
            return visit.serve() if answer is None else visit.answer(answer)
        finally:
            enter(None)

    def _pass(self, request: Request, start_response: StartResponse) -> Iterable[bytes]:
        """Serve a request that is not for us to guard, as it is."""
        said = self.app(rewound(request), start_response)
        return _Said(b"", said, said, request.body)

    def _tell_status(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a client that asks how its operation is doing; whatever else goes on."""
        policy = self.engine.desk.policy
        request = request_of(environ, Body())
        start, _, token = environ["PATH_INFO"].partition(policy.status_path)
        id = None if start else self.counter.polled_id(token, request)
        if id is None:
            return self.app(environ, start_response)
        try:
            if not self.engine.is_started:
                self.engine.start()
            (record,) = self.engine.store.get((id,))
        except OUTAGES as error:
            return _refuse_unrun(start_response, policy, error)
        accepted = request.header(b"accept-encoding")
        asked = Asked(request.path, self.engine.desk.now_ms(), accepted)
        return _respond(start_response, status_of(record, asked, policy))


class _Visit:
    """One guarded request."""

    def __init__(
        self,
        middleware: IdempotencyMiddleware,
        request: Request,
        start_response: StartResponse,
        *,
        ticket: Ticket,
        policy: Policy,
    ) -> None:
        self._app = middleware.app
        self._engine = middleware.engine
        self._counter = middleware.counter
        self._request = request
        self._start_response = start_response
        self._ticket = ticket
        self._policy = policy
        self._flow = middleware.engine.flow(ticket, policy)
        # What the application has said so far.
        self._status_line = ""
        self._headers: list[tuple[str, str]] = []
        self._chunks: list[bytes] = []
        self._size = 0
        self._is_streaming = False

    def serve(self) -> Iterable[bytes]:
        """Claim, execute, answer."""
        try:
            step = self._engine.advance(self._flow, self._policy, as_value=False)
        except OUTAGES as error:
            return _refuse_unrun(self._start_response, self._policy, error)
        if isinstance(step, Execute):
            return self._execute(step.claim)
        return self.answer(step)

    def _execute(self, claim: Record) -> Iterable[bytes]:
        operation = Operation(claim, self._engine.desk.secret)
        environ = rewound(self._request)
        environ["coatcheck.operation"] = operation
        enter(operation)
        held = self._engine.heart.hold(claim, self._policy.lease_ms)
        said: Iterable[bytes] = ()
        try:
            try:
                said = self._app(environ, self._start)
                chunks = iter(said)
                is_whole = self._gather(chunks)
            except BaseException as error:
                self._fail(error, said)
                raise
            return self._settle(claim, said, chunks, is_whole=is_whole)
        finally:  # not before the end is written: who waits here for it need not look for it
            self._engine.heart.let_go(held)

    def _fail(self, error: BaseException, said: Iterable[bytes]) -> None:
        """Close what the application has begun to say, and give its claim back."""
        try:
            _close(said)
        finally:
            if isinstance(error, Exception):
                self._engine.desk.tell(self._ticket, self._policy, None)
                self._engine.advance(self._flow, self._policy, error=error)

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
        self._headers = list(headers)
        return self._write

    def _write(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)

    def _settle(
        self, claim: Record, said: Iterable[bytes], rest: Iterator[bytes], *, is_whole: bool
    ) -> Iterable[bytes]:
        body = b"".join(self._chunks)
        response = Response(int(self._status_line[:3]), self._lowered(), body if is_whole else b"")
        if is_whole:
            ending = ending_of(response, self._policy)
        else:
            fate = fate_of(response, self._policy.keep, reruns=self._policy.reruns)
            ending = Ending(fate, None)
        try:
            step = self._engine.advance(self._flow, self._policy, ending)
        except OUTAGES as error:
            logger.error("executed, but the store is unavailable: %s", error)
            _close(said)
            return self._refuse(problem("store-unavailable", id=claim.id, reason=RAN_UNRECORDED))
        assert not isinstance(step, Execute)
        if not isinstance(step, Executed):
            _close(said)
            return self.answer(step)
        self._engine.desk.tell(self._ticket, self._policy, step)
        name, reference = reference_header(claim.id, self._policy)
        headers = [*self._headers, (name.decode("latin-1"), reference.decode())]
        if is_whole and not has_length(response):
            # Servers work it out of a list of one; we return none, so a connection would end.
            headers.append(("Content-Length", str(len(body))))
        self._start_response(self._status_line, headers)
        self._is_streaming = not is_whole
        return _Said(body, () if is_whole else rest, said, self._request.body)

    def _lowered(self) -> list[tuple[bytes, bytes]]:
        return [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in self._headers]

    def answer(self, answer: Answer) -> Iterable[bytes]:
        """Answer without the handler."""
        assert not isinstance(answer, Executed)
        self._engine.desk.tell(self._ticket, self._policy, answer)
        response = self._counter.answered(answer, self._ticket, self._policy, self._request)
        return _respond(self._start_response, response)

    def _refuse(self, refusal: Problem) -> Iterable[bytes]:
        return _respond(self._start_response, refused(refusal, self._policy))


class _Said:
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
        try:
            _close(self._said)
        finally:
            self._asked.close()


def _close(said: Iterable[bytes]) -> None:
    close = getattr(said, "close", None)
    if close is not None:
        close()


def _respond(start_response: StartResponse, response: Response) -> Iterable[bytes]:
    try:
        phrase = HTTPStatus(response.status).phrase
    except ValueError:
        phrase = "Unknown"
    headers = [(n.decode("latin-1").title(), v.decode("latin-1")) for n, v in response.headers]
    start_response(f"{response.status} {phrase}", headers)
    return [response.body] if response.body else []


def _refuse_unrun(
    start_response: StartResponse, policy: Policy, error: Exception
) -> Iterable[bytes]:
    """Fail closed: without the store nothing runs (D2)."""
    logger.error("refused, the store is unavailable: %s", error)
    return _respond(start_response, refused(problem("store-unavailable", reason=RAN_NOT), policy))
