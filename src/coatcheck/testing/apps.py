"""Requests to an application in this process, over ASGI and WSGI, without a server."""

from __future__ import annotations

import asyncio
import inspect
import io
import json as json_library
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import quote, unquote

from coatcheck.engine.runner import running_loop
from coatcheck.errors import Misconfigured

T = TypeVar("T")

# 10 s: an application that neither starts nor fails to start within that time hangs.
START_S_MAX = 10.0

_HOST = "testserver"


class Request:
    """
    A request for `assert_idempotent`, which adds the key.

    Args:
        method: such as "POST".
        path: with its query, if there is one.
        json: the body as a JSON value; or give *body*.
        body: the body as it is.
        headers: all others.
    """

    def __init__(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not path.startswith("/"):
            raise Misconfigured(f"path is {path!r}; it must begin with a slash")
        if json is not None and body:
            raise Misconfigured("give json or body, not both")
        self.method = method.upper()
        self.path = path
        self.headers = {name.lower(): value for name, value in (headers or {}).items()}
        self.body = body if json is None else json_library.dumps(json).encode()
        if json is not None:
            self.headers.setdefault("content-type", "application/json")

    def __repr__(self) -> str:
        return f"{self.method} {self.path}"

    def with_header(self, name: str, value: str) -> Request:
        """The same request with one more header."""
        headers = {**self.headers, name.lower(): value}
        return Request(self.method, self.path, body=self.body, headers=headers)


class Answer(NamedTuple):
    """What the application answered; *error*: what it raised after its response."""

    status: int
    body: bytes
    headers: frozenset[str] = frozenset()  # their names, in lower case
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.status} {self.body[:200].decode(errors='replace')}".rstrip()


class Sender(Protocol):
    """Sends requests to one application."""

    async def send(self, request: Request) -> Answer:
        """Send *request*, and return its answer."""
        ...

    async def send_and_hang_up(self, request: Request) -> None:
        """Send *request*, and close the connection before its answer has arrived."""
        ...

    async def send_at_once(self, request: Request, number: int) -> list[Answer]:
        """Send *request* this many times at the same time."""
        ...


def interface_of(app: object, given: Literal["asgi", "wsgi"] | None) -> Literal["asgi", "wsgi"]:
    """Which interface *app* has, unless it is *given*: a coroutine function is ASGI's."""
    if given is not None:
        return given
    if not callable(app):
        raise Misconfigured(f"{app!r} is neither an ASGI nor a WSGI application")
    is_async = inspect.iscoroutinefunction(app) or inspect.iscoroutinefunction(
        getattr(app, "__call__", None)  # noqa: B004 - its type matters, not whether it is there
    )
    return "asgi" if is_async else "wsgi"


def run_anywhere(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run *coroutine* on an event loop of its own; in a thread, if this one has a loop."""
    if running_loop() is None:
        return run_on_new_loop(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run_on_new_loop, coroutine).result()


def run_on_new_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run *coroutine*, and leave the event loop that a plugin may have set for this thread."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def run_without_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run *coroutine*, which waits for nothing: WSGI applications may use loops of their own."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    coroutine.close()
    raise Misconfigured("for a WSGI application, effects must be a plain function")


# ---------------------------------------------------------------------------------------- ASGI


class AsgiSender:
    """Calls an ASGI application on the running event loop."""

    def __init__(self, app: Callable[..., Awaitable[None]], state: Mapping[str, Any]) -> None:
        self._app = app
        self._state = state

    async def send(self, request: Request) -> Answer:
        """Send *request*, and return its answer."""
        exchange = _AsgiExchange(request)
        return await exchange.run(self._app, self._state)

    async def send_and_hang_up(self, request: Request) -> None:
        """Send *request*; the application is then disconnected, and its answer is dropped."""
        exchange = _AsgiExchange(request, hangs_up=True)
        with suppress(Exception):  # frameworks may raise that the client is gone
            await exchange.run(self._app, self._state)

    async def send_at_once(self, request: Request, number: int) -> list[Answer]:
        """Send *request* in this many tasks."""
        return await asyncio.gather(*(self.send(request) for _ in range(number)))


class _AsgiExchange:
    """One request and its answer."""

    def __init__(self, request: Request, *, hangs_up: bool = False) -> None:
        self._request = request
        self._hangs_up = hangs_up
        self._is_read = False
        self._is_over = asyncio.Event()
        self._status = 0
        self._headers: frozenset[str] = frozenset()
        self._body = bytearray()

    async def run(self, app: Callable[..., Awaitable[None]], state: Mapping[str, Any]) -> Answer:
        error = None
        try:
            await app(_asgi_scope(self._request, state), self._receive, self._send)
        except Exception as raised:
            if not self._status:
                raise
            error = raised  # Starlette answers 500, and then raises for the server's log
        return Answer(self._status, bytes(self._body), self._headers, error)

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        if not self._hangs_up:
            await self._is_over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            names = (name for name, _ in message.get("headers", ()))
            self._headers = frozenset(name.decode("latin-1").lower() for name in names)
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                self._is_over.set()


def _asgi_scope(request: Request, state: Mapping[str, Any]) -> dict[str, Any]:
    path, _, query = request.path.partition("?")
    headers = {"host": _HOST, **request.headers, "content-length": str(len(request.body))}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": quote(path, safe="/%:@!$&'()*+,;=~").encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ],
        "client": ("127.0.0.1", 50_000),
        "server": (_HOST, 80),
        "state": dict(state),
    }


@asynccontextmanager
async def lifespan_of(app: Callable[..., Awaitable[None]]) -> AsyncIterator[dict[str, Any]]:
    """Start *app* and shut it down, as a server does; its state. Many have no lifespan."""
    state: dict[str, Any] = {}
    to_app: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def send(message: Mapping[str, Any]) -> None:
        if not started.done() and message["type"].startswith("lifespan.startup."):
            failed = message["type"] == "lifespan.startup.failed"
            started.set_result(message.get("message") or "no reason given" if failed else "")

    asgi_scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": state}
    serving = asyncio.ensure_future(app(asgi_scope, to_app.get, send))
    to_app.put_nowait({"type": "lifespan.startup"})
    done, _ = await asyncio.wait(
        (serving, started), timeout=START_S_MAX, return_when=asyncio.FIRST_COMPLETED
    )
    if not done:
        serving.cancel()
        raise AssertionError(f"the application did not start within {START_S_MAX:.0f} s")
    if started.done() and started.result():
        serving.exception() if serving.done() else serving.cancel()
        raise AssertionError(f"the application did not start: {started.result()}")
    try:
        yield state
    finally:
        to_app.put_nowait({"type": "lifespan.shutdown"})
        if started.done():
            await serving
        else:
            serving.exception()  # it has no lifespan, and may have said so


# ---------------------------------------------------------------------------------------- WSGI


class WsgiSender:
    """Calls a WSGI application in the calling thread, and for `send_at_once` in others."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app

    async def send(self, request: Request) -> Answer:
        """Send *request*, and return its answer."""
        return self._call(request)

    async def send_and_hang_up(self, request: Request) -> None:
        """Send *request*; the server closes the response after its first part."""
        self._call(request, hangs_up=True)

    async def send_at_once(self, request: Request, number: int) -> list[Answer]:
        """Send *request* in this many threads."""
        barrier = threading.Barrier(number)

        def call() -> Answer:
            barrier.wait()
            return self._call(request)

        with ThreadPoolExecutor(number) as pool:
            return [calling.result() for calling in [pool.submit(call) for _ in range(number)]]

    def _call(self, request: Request, *, hangs_up: bool = False) -> Answer:
        body = bytearray()
        started: list[tuple[str, list[tuple[str, str]]]] = []

        def start_response(
            status: str, headers: list[tuple[str, str]], *_: object
        ) -> Callable[[bytes], object]:
            started.append((status, headers))
            return body.extend

        parts = self._app(_environ(request), start_response)
        try:
            for part in parts:
                body += part
                if hangs_up:
                    break
        finally:
            close = getattr(parts, "close", None)
            if close is not None:
                close()
        status, headers = started[-1]
        names = frozenset(name.lower() for name, _ in headers)
        return Answer(int(status.split()[0]), bytes(body), names)


def _environ(request: Request) -> dict[str, Any]:
    path, _, query = request.path.partition("?")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote(path, "latin-1"),
        "QUERY_STRING": query,
        "CONTENT_LENGTH": str(len(request.body)),
        "CONTENT_TYPE": request.headers.get("content-type", ""),
        "SERVER_NAME": _HOST,
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "HTTP_HOST": _HOST,
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(request.body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for name, value in request.headers.items():
        if name not in ("content-type", "content-length"):
            environ[f"HTTP_{name.upper().replace('-', '_')}"] = value
    return environ
