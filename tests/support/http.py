"""Requests as a server makes them of bytes, sent to an application without a server.

`AsgiExchange` and `exchange_wsgi` watch that the application keeps to its protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes
from wsgiref.util import setup_testing_defaults

Headers = Sequence[tuple[str, str]]

ORDER = b'{"item": 1}'


class Response(NamedTuple):
    """What the client got; where the application's error reached the server, a bare 500."""

    status: int
    headers: list[tuple[str, str]]  # names in lower case, one entry for each line
    body: bytes
    error: Exception | None = None

    def all(self, name: str) -> list[str]:
        return [value for found, value in self.headers if found == name]

    def header(self, name: str) -> str | None:
        values = self.all(name)
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None

    @property
    def is_replay(self) -> bool:
        return self.header("idempotent-replayed") == "true"

    @property
    def reference(self) -> str:
        reference = self.header("idempotency-reference")
        assert reference is not None, self
        return reference

    @property
    def problem(self) -> dict[str, Any]:
        """The problem document that this answer is."""
        assert self.header("content-type") == "application/problem+json", self
        document: dict[str, Any] = json.loads(self.body)
        assert document["status"] == self.status
        return document

    @property
    def code(self) -> str:
        return self.problem["code"]


def with_key(key: str | None, headers: Headers = ()) -> Headers:
    """*headers*, with a content type and a key where they have none."""
    given = {name.lower() for name, _ in headers}
    defaults = [] if "content-type" in given else [("Content-Type", "application/json")]
    if key is not None:
        defaults.append(("Idempotency-Key", key))
    return [*defaults, *headers]


# --- ASGI -----------------------------------------------------------------------------------


class AsgiExchange:
    """One request to an ASGI application, and what came back; it watches the order of messages."""

    def __init__(self, method: str, target: str, headers: Headers, body: bytes) -> None:
        path, _, query = target.partition("?")
        self.asgi_scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote_to_bytes(path).decode("utf-8", "replace"),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in headers],
            "client": ("192.0.2.1", 50_000),
            "server": ("shop.example", 80),
        }
        half = len(body) // 2
        self._incoming = [(body[:half], True), (body[half:], False)] if half else [(body, False)]
        self.messages: list[dict[str, Any]] = []
        self.is_done = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._incoming:
            chunk, more_body = self._incoming.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": more_body}
        await self.is_done.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        is_first = not self.messages
        assert message["type"] == f"http.response.{'start' if is_first else 'body'}"
        assert not self.is_done.is_set(), "a message after the last one"
        self.messages.append(message)
        if not is_first and not message.get("more_body", False):
            self.is_done.set()

    async def run(self, app: Callable[..., Any]) -> Response:
        try:
            await app(self.asgi_scope, self.receive, self.send)
        except Exception as error:
            if not self.messages:
                return Response(500, [], b"", error)
            raise
        assert self.is_done.is_set(), "the response never ended"
        return self.response()

    def response(self) -> Response:
        start, *bodies = self.messages
        lines = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in start["headers"]]
        body = b"".join(message.get("body", b"") for message in bodies)
        return Response(start["status"], [(name.lower(), value) for name, value in lines], body)


# --- WSGI -----------------------------------------------------------------------------------

# What follows a body on the same connection, which must not be read.
NEXT_REQUEST = b"GET /secret HTTP/1.1\r\n\r\n"


def environ_of(method: str, target: str, headers: Headers, body: bytes) -> dict[str, Any]:
    """The environ that a server makes of a request."""
    path, _, query = target.partition("?")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": query,
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "192.0.2.1",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body + NEXT_REQUEST),
    }
    setup_testing_defaults(environ)
    for name, value in headers:
        field = name.upper().replace("-", "_")
        field = field if field in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{field}"
        is_repeated = field.startswith("HTTP_") and field in environ
        environ[field] = f"{environ[field]},{value}" if is_repeated else value
    return environ


def exchange_wsgi(app: Callable[..., Any], environ: dict[str, Any]) -> Response:
    """One request to a WSGI application, and what came back."""
    started: list[tuple[str, list[tuple[str, str]]]] = []
    written: list[bytes] = []

    def start_response(
        status: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Callable[[bytes], object]:
        if started:
            assert exc_info is not None
            if written:
                raise exc_info[1]
            started.clear()
        started.append((status, headers))
        return written.append

    try:
        said = app(environ, start_response)
        with contextlib.ExitStack() as after:
            if hasattr(said, "close"):
                after.callback(said.close)
            for chunk in said:
                assert started, "a body before its headers"
                written.append(chunk)
    except Exception as error:
        if written:
            raise
        return Response(500, [], b"", error)
    ((status, headers),) = started
    return Response(int(status[:3]), [(n.lower(), v) for n, v in headers], b"".join(written))
