"""A network that loses requests and answers, as a test says."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from types import ModuleType
from typing import Any, Literal, Self, TypeAlias

from coatcheck.errors import Misconfigured

AsgiApp: TypeAlias = Callable[..., Awaitable[None]]
WsgiApp: TypeAlias = Callable[..., Iterable[bytes]]
Loss: TypeAlias = Literal["request", "answer"]

# The libraries whose transports can be wrapped.
LIBRARIES = ("httpx2", "httpx")


class RequestLost(ConnectionError):
    """The request was lost: it has not reached the application."""


class AnswerLost(ConnectionError):
    """The answer was lost: the application has handled the request."""


class LossyNetwork:
    """
    Loses what the test asks for, in that order, and delivers everything after that.

        lossy_network.lose_answers(1)
        client = TestClient(lossy_network.asgi(app))
        with pytest.raises(AnswerLost):
            client.post("/orders", …)  # handled by the application
        client.post("/orders", …)  # the retry

    Put it around the application as the outermost part, or around the transport of a client.
    `delivered`, `requests_lost` and `answers_lost` count what happened.
    """

    def __init__(self) -> None:
        self._script: deque[Loss] = deque()
        self._mutex = threading.Lock()
        self.delivered = 0  # requests that have reached the application
        self.requests_lost = 0
        self.answers_lost = 0

    def lose_requests(self, number: int = 1) -> None:
        """Lose this many requests on their way to the application."""
        self._script.extend(itertools.repeat("request", number))

    def lose_answers(self, number: int = 1) -> None:
        """Lose this many answers: the application handles the request, and the client fails."""
        self._script.extend(itertools.repeat("answer", number))

    def _next_loss(self) -> Loss | None:
        """What happens to the request that arrives now."""
        with self._mutex:
            loss = self._script.popleft() if self._script else None
            if loss == "request":
                self.requests_lost += 1
            else:
                self.delivered += 1
            if loss == "answer":
                self.answers_lost += 1
            return loss

    def asgi(self, app: AsgiApp) -> AsgiApp:
        """*app* behind this network; a loss raises `RequestLost` or `AnswerLost` in the client."""

        async def lossy_app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's own
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            loss = self._next_loss()
            if loss == "request":
                raise RequestLost(_REQUEST)
            if loss is None:
                await app(scope, receive, send)
                return
            await app(scope, receive, _drop)
            raise AnswerLost(_ANSWER)

        return lossy_app

    def wsgi(self, app: WsgiApp) -> WsgiApp:
        """*app* behind this network; a loss raises `RequestLost` or `AnswerLost` in the client."""

        def lossy_app(environ: Any, start_response: Any) -> Iterable[bytes]:  # noqa: ANN401 - WSGI's own
            loss = self._next_loss()
            if loss == "request":
                raise RequestLost(_REQUEST)
            if loss is None:
                return app(environ, start_response)
            body = app(environ, lambda *_: _write_nothing)
            try:
                for _part in body:
                    pass
            finally:
                close = getattr(body, "close", None)
                if close is not None:
                    close()
            raise AnswerLost(_ANSWER)

        return lossy_app

    def transport(self, transport: Any) -> Any:  # noqa: ANN401 - of httpx or httpx2
        """
        *transport* of httpx or httpx2, sync or async, behind this network.

        `httpx2.Client(transport=lossy_network.transport(httpx2.HTTPTransport()))`. A loss raises
        the library's own errors: `ConnectError` for a request, `ReadError` for an answer.
        """
        return _LossyTransport(transport, self._next_loss)


_REQUEST = "the test has lost this request: it has not reached the application"
_ANSWER = "the test has lost this answer: the application has handled the request"


async def _drop(_message: object) -> None:
    pass


def _write_nothing(_data: bytes) -> None:
    pass


class _LossyTransport:
    """Sync and async, as the transport inside is; neither library asks for its own class."""

    def __init__(self, transport: Any, next_loss: Callable[[], Loss | None]) -> None:  # noqa: ANN401 - as above
        self._transport = transport
        self._next_loss = next_loss
        self._library = _library_of(transport)

    def handle_request(self, request: Any) -> Any:  # noqa: ANN401 - the library's own
        loss = self._next_loss()
        if loss == "request":
            raise self._library.ConnectError(_REQUEST, request=request)
        response = self._transport.handle_request(request)
        if loss is None:
            return response
        response.read()  # the application may make its answer while it is read
        response.close()
        raise self._library.ReadError(_ANSWER, request=request)

    async def handle_async_request(self, request: Any) -> Any:  # noqa: ANN401 - the library's own
        loss = self._next_loss()
        if loss == "request":
            raise self._library.ConnectError(_REQUEST, request=request)
        response = await self._transport.handle_async_request(request)
        if loss is None:
            return response
        await response.aread()
        await response.aclose()
        raise self._library.ReadError(_ANSWER, request=request)

    def close(self) -> None:
        self._transport.close()

    async def aclose(self) -> None:
        await self._transport.aclose()

    def __enter__(self) -> Self:
        self._transport.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._transport.__exit__(*error)

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._transport.__aexit__(*error)


def _library_of(transport: object) -> ModuleType:
    """The library whose transport this is, by its base class."""
    for base in type(transport).__mro__:
        name = base.__module__.partition(".")[0]
        if name in LIBRARIES:
            return sys.modules[name]
    raise Misconfigured(
        f"{transport!r} is no transport of httpx2 or httpx; for an application write "
        "lossy_network.asgi(app) or lossy_network.wsgi(app)"
    )
