"""The application behind real servers, in both flavours: the shop, and answers that are hard to keep.

    SHOP_DIRECTORY=… uvicorn tests.server.web_app:asgi_app
    SHOP_DIRECTORY=… gunicorn tests.server.web_app:wsgi_app

The path says through what a request comes, and what it asks for: `/zipped/text` is the text, coded
inside of ours. `?name=…` is what a test calls its request. What happened to it is in `events`, a
line each; and what waits waits for `POST /bare/open?name=…`, in whatever process that arrives.
All other paths are those of the shop in `laws/app.py`.
"""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from coatcheck import AsyncEngine, Engine, Policy
from coatcheck.server.asgi import IdempotencyMiddleware as AsgiMiddleware
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from tests.server.laws.app import STORE as SHOP_STORE
from tests.server.laws.app import shop
from tests.support.times import WAIT_S_MAX

DIRECTORY = Path(os.environ.get("SHOP_DIRECTORY", ""))
STORE = f"sqlite:///{DIRECTORY}/records.db"
# 1 MiB: over it nothing is kept, and that should be tried often.
POLICY = Policy(response_bytes_max=1024 * 1024)

TEXT = b"".join(b"line %d\n" % number for number in range(2_000))
BINARY = bytes(range(256)) * 257 + b"\r\n0\r\n\r\n"
PART = bytes(range(256)) * 256
KEPT_PARTS, STREAMED_PARTS = 15, 17
Headers = list[tuple[str, str]]
PLAIN: Headers = [("Content-Type", "text/plain; charset=utf-8")]
BYTES: Headers = [("Content-Type", "application/octet-stream")]
EVENTS: Headers = [("Content-Type", "text/event-stream"), ("Cache-Control", "no-cache")]
COOKIES: Headers = [("Set-Cookie", "a=1; Path=/"), ("Set-Cookie", "b=2; Path=/; HttpOnly")]
SAVED: Headers = [*BYTES, ("Content-Disposition", 'attachment; filename="all.bin"')]
TAG = '"v1"'
# 5 ms: no test waits for long.
PAUSE_S = 0.005
# What tests ask for on their own account.
SERVICES = ("open", "pid")


class Boom(Exception):
    """What these handlers raise."""


class Asked(NamedTuple):
    """One request."""

    method: str
    what: str
    name: str
    known_tag: str
    body: bytes


class Said(NamedTuple):
    """An answer; what comes *after* it is done when it has been sent."""

    status: int
    headers: Headers
    parts: bytes | Iterable[bytes]
    after: Callable[[], None] | None = None


def note(asked: Asked, event: str) -> None:
    if asked.what in SERVICES:
        return
    # One small append is one write: whole lines, also from several processes.
    with (DIRECTORY / "events").open("a") as events:
        events.write(f"{asked.name} {event}\n")


def gate_of(name: str) -> Path:
    return DIRECTORY / f"open-{name}"


def wait_for_gate(asked: Asked) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not gate_of(asked.name).exists():
        assert time.monotonic() < deadline, "no test opened this"
        time.sleep(PAUSE_S)


# --- what can be asked for ------------------------------------------------------------------


def in_parts(asked: Asked) -> Said:
    return Said(201, [*PLAIN, *COOKIES], (TEXT[at : at + 100] for at in range(0, len(TEXT), 100)))


def binary(asked: Asked) -> Said:
    return Said(201, [*BYTES, ("X-Sha256", sha256(asked.body).hexdigest())], BINARY)


def large(asked: Asked) -> Said:
    return Said(201, BYTES, (PART for _ in range(KEPT_PARTS)))


def too_large(asked: Asked) -> Said:
    return Said(201, BYTES, gated(asked, [PART] * STREAMED_PARTS, [PART]))


def events(asked: Asked) -> Said:
    return Said(200, EVENTS, gated(asked, [b"data: 1\n\n"], [b"data: 2\n\n"]))


def download(asked: Asked) -> Said:
    length = ("Content-Length", str(3 * len(PART)))
    return Said(200, [*SAVED, length], gated(asked, [PART], [PART, PART]))


def gated(asked: Asked, before: list[bytes], behind: list[bytes]) -> Iterator[bytes]:
    """What is *behind* the gate is made when that was opened, and not before."""
    yield from before
    wait_for_gate(asked)
    note(asked, "last")
    yield from behind


def endless(asked: Asked) -> Said:
    """Events until the client has left, or should have left long ago."""
    deadline = time.monotonic() + WAIT_S_MAX

    def on_and_on() -> Iterator[bytes]:
        try:
            while time.monotonic() < deadline:
                yield b"data: 1\n\n"
                time.sleep(PAUSE_S)
        except GeneratorExit:
            note(asked, "left")
            raise

    return Said(200, EVENTS, on_and_on())


def task(asked: Asked) -> Said:
    """An answer that is there while something is still done for it."""

    def after() -> None:
        wait_for_gate(asked)
        note(asked, "done")

    return Said(201, PLAIN, TEXT, after)


def page(asked: Asked) -> Said:
    tag = ("ETag", TAG)
    if asked.known_tag == TAG:
        return Said(304, [tag], b"")
    headers = [*PLAIN, tag, ("Content-Length", str(len(TEXT)))]
    return Said(200, headers, b"" if asked.method == "HEAD" else TEXT)


def unchanged(asked: Asked) -> Said:
    return Said(304, [("ETag", TAG)], b"")


def breaks(asked: Asked) -> Said:
    """Fails where its first bytes have left: more than is kept, and less than was announced."""
    length = ("Content-Length", str((STREAMED_PARTS + 1) * len(PART)))
    return Said(201, [*BYTES, length], failing([PART] * STREAMED_PARTS))


def breaks_early(asked: Asked) -> Said:
    """Fails in the middle of an answer of which nothing has left yet; not the second time."""
    if gate_of(asked.name).exists():
        return Said(201, PLAIN, b"whole")
    return Said(201, PLAIN, failing([b"half"]))


def breaks_late(asked: Asked) -> Said:
    """Fails after the whole response."""

    def after() -> None:
        raise Boom("too late")

    return Said(201, PLAIN, TEXT, after)


def failing(parts: list[bytes]) -> Iterator[bytes]:
    yield from parts
    raise Boom("in the middle")


def open_gate(asked: Asked) -> Said:
    gate_of(asked.name).touch()
    return Said(200, PLAIN, b"open")


ANSWERS: dict[str, Callable[[Asked], Said]] = {
    "text": lambda _asked: Said(201, PLAIN, TEXT),
    "in-parts": in_parts,
    "binary": binary,
    "large": large,
    "too-large": too_large,
    "events": events,
    "download": download,
    "endless": endless,
    "task": task,
    "page": page,
    "unchanged": unchanged,
    "breaks": breaks,
    "breaks-early": breaks_early,
    "breaks-late": breaks_late,
    "open": open_gate,
    "pid": lambda _asked: Said(200, PLAIN, str(os.getpid()).encode()),
}


def answer(asked: Asked) -> Said:
    note(asked, "ran")
    return ANSWERS[asked.what](asked)


# --- ASGI -----------------------------------------------------------------------------------


async def asgi(asgi_scope: Any, receive: Any, send: Any) -> None:
    """The application, as Starlette answers."""
    request = Request(asgi_scope, receive)
    asked = Asked(
        request.method,
        what_of(asgi_scope["path"]),
        request.query_params.get("name", "-"),
        request.headers.get("if-none-match", ""),
        await request.body(),
    )
    said = await run_in_threadpool(answer, asked)
    background = None if said.after is None else BackgroundTask(said.after)
    if isinstance(said.parts, bytes):
        response = Response(said.parts, said.status, background=background)
    else:
        response = StreamingResponse(to_its_end(said.parts), said.status, background=background)
    given = [(name.lower().encode(), value.encode()) for name, value in said.headers]
    if any(name == b"content-length" for name, _ in given):  # else it is Starlette's own
        response.raw_headers = []
    response.raw_headers = [*given, *response.raw_headers]
    await response(asgi_scope, receive, send)


async def to_its_end(parts: Any) -> AsyncIterator[bytes]:
    """Close the generator when the client has left, which Starlette leaves to the collector."""
    try:
        async for part in iterate_in_threadpool(parts):
            yield part
    finally:
        parts.close()


async def passes_on(request: Any, call_next: Any) -> Any:
    response = await call_next(request)
    response.headers["X-Seen"] = "1"
    return response


def asgi_stacks() -> dict[str, Any]:
    engine = AsyncEngine(STORE, POLICY)

    def ours(app: Any) -> AsgiMiddleware:
        return AsgiMiddleware(app, engine=engine)

    return {
        "bare": asgi,
        "guarded": ours(asgi),
        "base": ours(BaseHTTPMiddleware(asgi, passes_on)),
        "based": BaseHTTPMiddleware(ours(asgi), passes_on),
        "zipped": ours(GZipMiddleware(asgi)),
        "zipping": GZipMiddleware(ours(asgi)),
        "lifespan": ours(Starlette()),
        "shop": AsgiMiddleware(shop.asgi, store=SHOP_STORE),
    }


def asgi_mounted() -> Any:
    stacks = asgi_stacks()

    async def mounted(asgi_scope: Any, receive: Any, send: Any) -> None:
        name = stack_of(asgi_scope["path"]) if asgi_scope["type"] == "http" else "lifespan"
        await stacks.get(name, stacks["shop"])(asgi_scope, receive, send)

    return mounted


# --- WSGI -----------------------------------------------------------------------------------


class Parts:
    """What the application returns; it notes when the server is done with it."""

    def __init__(self, asked: Asked, said: Said) -> None:
        self._asked = asked
        self._said = said
        self._parts = iter([said.parts] if isinstance(said.parts, bytes) else said.parts)

    def __iter__(self) -> Iterator[bytes]:
        return self._parts

    def close(self) -> None:
        note(self._asked, "closed")
        getattr(self._parts, "close", lambda: None)()
        if self._said.after is not None:
            self._said.after()


def wsgi(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """The application, as PEP 3333 says."""
    asked = Asked(
        environ["REQUEST_METHOD"],
        what_of(environ["PATH_INFO"]),
        parse_qs(environ["QUERY_STRING"]).get("name", ["-"])[0],
        environ.get("HTTP_IF_NONE_MATCH", ""),
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)),
    )
    said = answer(asked)
    start_response(f"{said.status} {HTTPStatus(said.status).phrase}", list(said.headers))
    return Parts(asked, said)


class Zip:
    """Compresses responses for clients that accept it, as Starlette's middleware does."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if "gzip" not in environ.get("HTTP_ACCEPT_ENCODING", ""):
            return self._app(environ, start_response)
        started: list[Any] = []
        said = self._app(environ, lambda *start: started.append(start))
        try:
            body = gzip.compress(b"".join(said))
        finally:
            getattr(said, "close", lambda: None)()
        ((status, headers),) = started
        kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
        coding = [("Content-Encoding", "gzip"), ("Vary", "Accept-Encoding")]
        start_response(status, [*kept, *coding, ("Content-Length", str(len(body)))])
        return [body]


def wsgi_mounted() -> Any:
    engine = Engine(STORE, POLICY)
    guarded = WsgiMiddleware(wsgi, engine=engine)
    stacks = {
        "bare": wsgi,
        "guarded": guarded,
        "zipped": WsgiMiddleware(Zip(wsgi), engine=engine),
        "zipping": Zip(guarded),
        "shop": WsgiMiddleware(shop.wsgi, store=SHOP_STORE),
    }

    def mounted(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        stack = stacks.get(stack_of(environ["PATH_INFO"]), stacks["shop"])
        return stack(environ, start_response)

    return mounted


# --- where they are -------------------------------------------------------------------------


def stack_of(path: str) -> str:
    return "bare" if path == "/pid" else path.split("/")[1]


def what_of(path: str) -> str:
    return path.rpartition("/")[2]


# Made when the server loads the application: under gunicorn --preload, before it forks.
FLAVOUR = os.environ.get("SHOP_FLAVOUR")
if FLAVOUR == "asgi":
    asgi_app = asgi_mounted()
elif FLAVOUR == "wsgi":
    wsgi_app = wsgi_mounted()
