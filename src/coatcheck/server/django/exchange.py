"""One request of Django's on its way through the WSGI or ASGI middleware, and its response back.

The middlewares know environs, scopes and bytes. `Turn` translates: it makes the environ or the
scope of a request, runs the rest of the project when the middleware calls its application, and
makes a response of Django's from what the middleware sends. The view's own response stays the same
object, with what tests and other middlewares find in it, unless another one replaces it.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from http.cookies import CookieError
from typing import IO, Any, TypeAlias

from django.http import HttpResponse

from coatcheck.errors import Misconfigured
from coatcheck.operation import Operation
from coatcheck.operation import current_operation as guarded_operation
from coatcheck.server.asgi.exchange import Exchange as AsgiExchange
from coatcheck.server.asgi.request import AsgiScope, Message, Receive, Send
from coatcheck.server.body import CHUNK_BYTES, MEMORY_BYTES_MAX, Body, LargeBody
from coatcheck.server.routes import unclaimed_operation_of_request
from coatcheck.server.wsgi.exchange import Exchange as WsgiExchange
from coatcheck.server.wsgi.exchange import ResponseBody, StartResponse, close
from coatcheck.server.wsgi.request import Environ

# Django has no types. The one is an `HttpRequest`, which gets attributes of ours, and the other an
# `HttpResponseBase`, which may be streamed.
NativeRequest: TypeAlias = Any
NativeResponse: TypeAlias = Any

# Where the request of Django's is in an environ or a scope; `caller=` and `key=` functions find it
# as `request.native["django.request"]`.
REQUEST = "django.request"
_TURN = "coatcheck.turn"

_BODY_IS_READ = (
    "the body of this request was read before coatcheck could compare it: put "
    "coatcheck.server.django.IdempotencyMiddleware before the middleware that reads request.POST"
)


def current_operation() -> Operation | None:
    """The operation of the present request; None: it is not guarded."""
    return guarded_operation() or unclaimed_operation_of_request()


def give_body(request: NativeRequest, body: Body) -> None:
    """Give *request* its *body* back, which was read already."""
    turn: Turn = request._coatcheck_turn
    if isinstance(body, bytes):
        turn.give_body(io.BytesIO(body), str(len(body)))
    else:
        turn.give_body(body.stream(), str(body.size))
        request._coatcheck_body = body  # which is deleted with its last reference


class _ReadBody(io.BytesIO):
    """The body that a middleware before ours has parsed; only a guarded request needs it."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Raise: it is gone."""
        del size
        raise Misconfigured(_BODY_IS_READ)


class Turn:
    """One request and its response; *get_response* is the rest of the project."""

    def __init__(
        self, request: NativeRequest, get_response: Callable[[NativeRequest], Any]
    ) -> None:
        self.request = request
        self._get_response = get_response
        # Then the request keeps its body; otherwise the body is given back before the view runs.
        self._has_body = "_body" in request.__dict__
        self._input: IO[bytes] = request._stream
        if self._has_body:
            self._input = io.BytesIO(request.body)
        elif request._read_started:
            self._input = _ReadBody()
        self.response: NativeResponse | None = None  # of the view
        self.is_untouched = False  # the response was not guarded
        # What the middleware sends.
        self._status = 0
        self._headers: list[tuple[str, str]] = []
        self._chunks: list[bytes] = []
        self._is_streaming = False
        self._rest: AsyncIterator[bytes] | None = None
        request._coatcheck_turn = self

    # --- to the middleware ----------------------------------------------------------------------

    def environ(self) -> Environ:
        """The request as WSGI has it; Django has decoded the paths."""
        request = self.request
        environ: Environ = {**request.META, REQUEST: request, _TURN: self}
        environ["REQUEST_METHOD"] = request.method
        environ["PATH_INFO"] = request.path_info.encode().decode("latin-1")
        environ["SCRIPT_NAME"] = request.META.get("SCRIPT_NAME", "").encode().decode("latin-1")
        scope = getattr(request, "scope", None)
        if scope is not None:
            environ["QUERY_STRING"] = _bytes(scope.get("query_string", b"")).decode("latin-1")
        if scope is None and not request._read_started:
            self._input = environ["wsgi.input"]
            return environ
        environ.pop("CONTENT_LENGTH", None)  # the whole body is there
        environ["wsgi.input"], environ["wsgi.input_terminated"] = self._input, True
        return environ

    def scope(self) -> AsgiScope:
        """The request as ASGI has it."""
        scope = self.request.scope
        query = _bytes(scope.get("query_string", b""))  # Django's test client sends text
        return {**scope, "query_string": query, REQUEST: self.request, _TURN: self}

    async def receive(self) -> Message:
        """The next piece of the body."""
        chunk = self._input.read(CHUNK_BYTES)
        return {"type": "http.request", "body": chunk, "more_body": bool(chunk)}

    # --- from the middleware --------------------------------------------------------------------

    def start(self, status: str, headers: list[tuple[str, str]], *_: object) -> Any:  # noqa: ANN401 - the write function
        """`start_response` for the middleware."""
        self._status, self._headers = int(status[:3]), headers
        return self._chunks.append

    async def send(self, message: Message) -> None:
        """Take what the middleware sends."""
        if message["type"] == "http.response.start":
            self._status, self._chunks = message["status"], []
            self._headers = [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in message["headers"]
            ]
        else:
            self._chunks.append(message.get("body", b""))
            self._is_streaming = message.get("more_body", False)

    def answer(self, body: Iterable[bytes]) -> NativeResponse:
        """The response for Django, whose content the WSGI middleware has returned: *body*."""
        response = self.response
        is_own = isinstance(body, ResponseBody)
        if response is not None and is_own and response.streaming and not self.is_untouched:
            response.streaming_content = body
            return self._with_headers(response)
        content = b"".join(body)
        close(body)
        return self._answer(content)

    def answer_async(self) -> NativeResponse:
        """The response for Django, which the ASGI middleware has sent."""
        response, content = self.response, b"".join(self._chunks)
        if response is not None and self._rest is not None:
            response.streaming_content = _joined(content, self._rest)
            return self._with_headers(response)
        return self._answer(content)

    def _answer(self, content: bytes) -> NativeResponse:
        response = self.response
        if response is not None and (self.is_untouched or self._is_same(response, content)):
            return response if self.is_untouched else self._with_headers(response)
        return new_response(self._status, self._headers, content)

    def _is_same(self, response: NativeResponse, content: bytes) -> bool:
        """What the middleware sent is the view's own *response*, with headers of ours."""
        if response.streaming or response.status_code != self._status:
            return False
        sent = {(name.lower(), value) for name, value in self._headers}
        own = {(name.lower(), value) for name, value in headers_of(response)}
        return bool(content == response.content) and own <= sent

    def _with_headers(self, response: NativeResponse) -> NativeResponse:
        for name, value in self._headers:
            if name.lower() != "set-cookie" and name not in response:
                response[name] = value
        return response

    # --- the rest of the project ----------------------------------------------------------------

    def run(self) -> NativeResponse:
        """Run the rest of the project."""
        self._begin()
        response: NativeResponse = self._get_response(self.request)
        self.response = response
        return response

    async def run_async(self) -> NativeResponse:
        """Run the rest of the project on an event loop."""
        self._begin()
        running: Awaitable[NativeResponse] = self._get_response(self.request)
        self.response = response = await running
        return response

    def _begin(self) -> None:
        self.response = None
        self.request.coatcheck = current_operation()

    def give_body(self, body: IO[bytes], size: str) -> None:
        """
        Give the request its body back, to be read by the view or by `caller=`.

        *size* is as the request has it, which may be no number if the body was not read.
        """
        request = self.request
        if self._has_body or body is self._input:
            return
        for name in ("_body", "_post", "_files"):
            request.__dict__.pop(name, None)
        request._stream, request._read_started = body, False
        request.META["CONTENT_LENGTH"] = size

    async def give_received_body(self, receive: Receive) -> None:
        """The same for a body that *receive* returns in pieces."""
        if self._has_body or receive == self.receive:
            return
        chunks: list[bytes] = []
        large: LargeBody | None = None
        message: Message = {"more_body": True}
        while message.get("more_body", False):
            message = await receive()
            chunks.append(message.get("body", b""))
            if sum(map(len, chunks)) > MEMORY_BYTES_MAX or large is not None:
                large = large or LargeBody()
                await asyncio.to_thread(large.add, b"".join(chunks))
                chunks.clear()
        give_body(self.request, b"".join(chunks) if large is None else large)


# --- the applications for the middlewares ----------------------------------------------------


def wsgi_app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    """Run the rest of the project for the WSGI middleware."""
    turn: Turn = environ[_TURN]
    turn.give_body(environ["wsgi.input"], environ.get("CONTENT_LENGTH") or "0")
    response = turn.run()
    turn.is_untouched = not isinstance(getattr(start_response, "__self__", None), WsgiExchange)
    start_response(f"{response.status_code} {response.reason_phrase}", headers_of(response))
    if turn.is_untouched:
        return ()
    return iter(response) if response.streaming else (response.content,)


async def asgi_app(asgi_scope: AsgiScope, receive: Receive, send: Send) -> None:
    """Run the rest of the project for the ASGI middleware."""
    turn: Turn = asgi_scope[_TURN]
    await turn.give_received_body(receive)
    response = await turn.run_async()
    turn.is_untouched = not isinstance(getattr(send, "__self__", None), AsgiExchange)
    lines = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers_of(response)]
    await send({"type": "http.response.start", "status": response.status_code, "headers": lines})
    if turn.is_untouched or not response.streaming:
        body = b"" if turn.is_untouched else response.content
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return
    chunks = aiter(response)
    async for chunk in chunks:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if turn._is_streaming:
            turn._rest = chunks
            return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


# --- responses -------------------------------------------------------------------------------


def headers_of(response: NativeResponse) -> list[tuple[str, str]]:
    """The headers of *response*, as Django sends them."""
    cookies = [("Set-Cookie", c.output(header="").strip()) for c in response.cookies.values()]
    return [*response.items(), *cookies]


def new_response(status: int, headers: list[tuple[str, str]], content: bytes) -> HttpResponse:
    """A response that is not the view's own."""
    response = HttpResponse(content, status=status)
    del response["Content-Type"]  # Django's default
    for name, value in headers:
        if name.lower() == "set-cookie":
            try:
                response.cookies.load(value)
            except CookieError:  # Django could not have sent it
                continue
        elif name in response:
            response[name] = f"{response[name]}, {value}"
        else:
            response[name] = value
    return response


async def _joined(content: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield content
    async for chunk in rest:
        yield chunk


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value
