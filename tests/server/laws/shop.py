"""A scripted application: the laws say what it answers where, and it counts what it did.

One handler for both flavours: a function from a `Call` to what is `Said`. Over ASGI it runs in a
thread, so that a handler may wait for a test without holding up the event loop.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from coatcheck import Operation

# 20 s: a hundred times what any of these waits takes; past it something hangs, and says so.
WAIT_S_MAX = 20.0

JSON = ("Content-Type", "application/json")
TEXT = ("Content-Type", "text/plain")
# Neither may carry a content type, as they carry no content.
WITHOUT_CONTENT = (204, 304)


class Call(NamedTuple):
    """What reached the handler."""

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str]
    operation: Operation | None


class Said(NamedTuple):
    """What a handler answers; chunks may be made while they are sent."""

    status: int = 201
    headers: Sequence[tuple[str, str]] = (JSON,)
    chunks: Iterable[bytes] = (b"{}",)


Handler = Callable[[Call], Said]


def says(status: int = 200, *chunks: bytes, headers: Sequence[tuple[str, str]] = ()) -> Handler:
    """A handler that always answers the same."""
    if status not in WITHOUT_CONTENT and not any(n.lower() == "content-type" for n, _ in headers):
        headers = (TEXT, *headers)
    return lambda _call: Said(status, headers, list(chunks))


def raises(error: Exception) -> Handler:
    """A handler that fails."""

    def handler(_call: Call) -> Said:
        raise error

    return handler


def in_turn(*handlers: Handler) -> Handler:
    """The first call is for the first handler, and so on; the last one stays."""
    left = list(handlers)

    def handler(call: Call) -> Said:
        current = left.pop(0) if len(left) > 1 else left[0]
        return current(call)

    return handler


class Gate:
    """A handler that waits inside until the test opens it."""

    def __init__(self, handler: Handler | None = None) -> None:
        self._handler = handler or says(201, b"done")
        self._entered = threading.Semaphore(0)
        self._opened = threading.Event()

    def __call__(self, call: Call) -> Said:
        self._entered.release()
        assert self._opened.wait(WAIT_S_MAX), "the gate was never opened"
        return self._handler(call)

    def wait_until_entered(self) -> None:
        assert self._entered.acquire(timeout=WAIT_S_MAX), "no request came to the gate"

    def open(self) -> None:
        self._opened.set()


class Shop:
    """The application; `shop.answers[path]` is the handler there, and an order taken elsewhere."""

    def __init__(self) -> None:
        self.effects: list[Call] = []
        self.errors: list[Exception] = []  # what handlers raised
        self.answers: dict[str, Handler] = {}
        self._count = threading.Lock()

    def handle(self, call: Call) -> Said:
        with self._count:
            self.effects.append(call)
            number = len(self.effects)
        handler = self.answers.get(call.path)
        if handler is not None:
            try:
                return handler(call)
            except Exception as error:
                self.errors.append(error)
                raise
        location = ("Location", f"/orders/{number}")
        return Said(201, (JSON, location), [json.dumps({"order": number}).encode()])

    async def asgi(
        self,
        asgi_scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        body = b""
        while True:
            message = await receive()
            assert message["type"] == "http.request", message
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in asgi_scope["headers"]}
        operation = asgi_scope.get("coatcheck.operation")
        call = Call(asgi_scope["method"], asgi_scope["path"], body, headers, operation)
        said = await asyncio.to_thread(self.handle, call)
        await send(
            {
                "type": "http.response.start",
                "status": said.status,
                "headers": [(n.encode("latin-1"), v.encode("latin-1")) for n, v in said.headers],
            }
        )
        chunks = said.chunks
        if isinstance(chunks, list) and len(chunks) == 1:  # most answers are one message
            await send({"type": "http.response.body", "body": chunks[0]})
            return
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})

    def wsgi(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        headers = {
            name[5:].replace("_", "-").lower(): value
            for name, value in environ.items()
            if name.startswith("HTTP_")
        }
        path = environ["SCRIPT_NAME"] + environ["PATH_INFO"]
        operation = environ.get("coatcheck.operation")
        said = self.handle(Call(environ["REQUEST_METHOD"], path, body, headers, operation))
        start_response(f"{said.status} {HTTPStatus(said.status).phrase}", list(said.headers))
        return said.chunks
