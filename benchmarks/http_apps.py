"""The servers: `python -m benchmarks.http_apps CONTENDER STORE_URL …` serves each contender.

Each is one uvicorn worker with uvloop and httptools, in a process of its own, on a free loopback
port. The parent imports everything once, forks, and prints port and process id, one line for each.
The servers end when their standard input is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

import uvicorn
from idemkit import HttpConfig, InMemoryBackend
from idemkit import IdempotencyMiddleware as IdemkitMiddleware
from idemkit.backends.base import IdempotencyBackend
from idemkit.backends.postgres import PostgresBackend, init_pg
from idemkit.backends.redis import RedisBackend
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from benchmarks.exporters import EXPORTERS
from benchmarks.http_floor import App, FloorMiddleware
from benchmarks.machine import pinned
from coatcheck import AsyncEngine
from coatcheck.server.asgi import IdempotencyMiddleware


async def _create(request: Request) -> Response:
    order = await request.json()
    return JSONResponse({"id": 1, "amount": order["amount"], "state": "placed"}, status_code=201)


async def _forget(request: Request) -> Response:
    request.app.state.forget()
    return PlainTextResponse("forgotten")


def _shop(forget: Callable[[], object] = int) -> Starlette:
    routes = [
        Route("/orders", _create, methods=["POST"]),
        Route("/forget", _forget, methods=["GET"]),
    ]
    shop = Starlette(routes=routes)
    shop.state.forget = forget
    return shop


def _product(url: str) -> App:
    shop = _shop()
    shop.add_middleware(IdempotencyMiddleware, store=url)
    return shop


def _measured(instrument: Callable[[AsyncEngine], object], url: str) -> App:
    shop, engine = _shop(), AsyncEngine(url)
    instrument(engine)
    shop.add_middleware(IdempotencyMiddleware, engine=engine)
    return shop


def _idemkit(url: str) -> App:
    backend = _idemkit_backend(url)
    # Its memory backend reads every record at each claim, so it is fastest when empty.
    forget = backend._records.clear if isinstance(backend, InMemoryBackend) else int  # noqa: SLF001 - there is no public way
    shop = _shop(forget)
    shop.add_middleware(
        IdemkitMiddleware, backend=backend, config=HttpConfig(scope_mode="single_tenant")
    )
    return shop


def _idemkit_backend(url: str) -> IdempotencyBackend:
    match urlsplit(url).scheme:
        case "postgresql":
            asyncio.run(init_pg(url))
            return PostgresBackend.from_url(url)
        case "redis":
            # With the driver's default limit, idemkit would answer 503.
            return RedisBackend.from_url(url, max_connections=1_000)
        case _:
            return InMemoryBackend()


CONTENDERS: dict[str, Callable[[str], App]] = {
    "bare": lambda _: _shop(),
    "product": _product,
    "idemkit": _idemkit,
    **{name: partial(_measured, instrument) for name, instrument in EXPORTERS.items()},
    "floor": lambda _: FloorMiddleware(_shop()),
}


def main() -> None:
    """Serve until standard input ends."""
    for contender, url in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
            pid = os.fork()
            if pid == 0:
                with pinned("first"):
                    _serve(CONTENDERS[contender](url), listening)
                return
            print(listening.getsockname()[1], pid, flush=True)
    sys.stdin.read()


def _serve(app: App, listening: socket.socket) -> None:
    logging.getLogger("idemkit").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )
    threading.Thread(target=_end_with_parent, daemon=True).start()
    uvicorn.Server(config).run(sockets=[listening])


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
