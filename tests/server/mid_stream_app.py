"""Large answers for real servers, in both flavours; what each execution does is on disk.

`POST /kept` answers with as much as is kept of a response at most, `POST /streamed` with more than
that; `POST /committed` is the first in transaction mode. All of them answer in parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

import coatcheck
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.starlette import idempotent
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware

PART = b"0123456789abcdef" * 4096
# 8 MiB: what a policy keeps; no socket holds so much of it that all has left the process.
KEPT_PARTS = 8 * 1024 * 1024 // len(PART)
PARTS = {"/kept": KEPT_PARTS, "/committed": KEPT_PARTS, "/streamed": 4 * KEPT_PARTS}


def began() -> None:
    """Have the effect."""
    operation = coatcheck.current_operation()
    with (DIRECTORY / "effects").open("a") as effects:
        effects.write(f"{operation.key} {operation.attempt}\n")


def parts_of(path: str) -> Iterator[bytes]:
    """The answer; each part with its number, so that none can be taken for another."""
    for number in range(PARTS[path]):
        yield b"%08d" % number + PART[8:]


async def answer(request: Request) -> StreamingResponse:
    """Have the effect, and answer at length."""
    began()
    return StreamingResponse(parts_of(request.url.path), 201, media_type="text/plain")


def made_for_asgi() -> Any:
    """For uvicorn."""

    async def pid(_request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(os.getpid()))

    committed = idempotent(mode="transaction")(answer)
    app = Starlette(
        routes=[
            Route("/pid", pid),
            Route("/kept", answer, methods=["POST"]),
            Route("/streamed", answer, methods=["POST"]),
            Route("/committed", committed, methods=["POST"]),
        ]
    )
    app.add_middleware(IdempotencyMiddleware, store=STORE)
    return app


def made_for_wsgi() -> Any:
    """For waitress."""

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/pid":
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [str(os.getpid()).encode()]
        began()
        start_response("201 Created", [("Content-Type", "text/plain")])
        return parts_of(path)

    recorded = WsgiMiddleware(app, store=STORE)
    committed = WsgiMiddleware(app, store=STORE, policy=coatcheck.Policy(mode="transaction"))

    def mounted(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        guarded = committed if environ["PATH_INFO"] == "/committed" else recorded
        return guarded(environ, start_response)

    return mounted


FLAVOUR = os.environ.get("SHOP_FLAVOUR")
if FLAVOUR is not None:
    DIRECTORY = Path(os.environ["SHOP_DIRECTORY"])
    STORE = f"sqlite:///{DIRECTORY}/records.db"
if FLAVOUR == "asgi":
    asgi_app = made_for_asgi()
elif FLAVOUR == "wsgi":
    wsgi_app = made_for_wsgi()
