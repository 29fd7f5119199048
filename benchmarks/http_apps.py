"""The servers: `python -m benchmarks.http_apps NAME DIRECTORY` serves one contender.

One uvicorn worker with uvloop and httptools on a free port of the loopback, which is printed once
it listens. The server ends when its standard input does, so that none outlives its benchmark.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn
from idemkit import HttpConfig, InMemoryBackend
from idemkit import IdempotencyMiddleware as IdemkitMiddleware
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from benchmarks.http_handmade import App, HandMade
from benchmarks.machine import pinned
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


def _idemkit(_: Path) -> App:
    backend = InMemoryBackend()
    # It looks at every record it holds at each claim: an empty store is the best it can have.
    shop = _shop(backend._records.clear)  # noqa: SLF001 - there is no public way
    shop.add_middleware(
        IdemkitMiddleware, backend=backend, config=HttpConfig(scope_mode="single_tenant")
    )
    return shop


def _product(store: str) -> App:
    shop = _shop()
    shop.add_middleware(IdempotencyMiddleware, store=store)
    return shop


CONTENDERS: dict[str, Callable[[Path], App]] = {
    "bare": lambda _: _shop(),
    "product-memory": lambda _: _product("memory://"),
    "product-sqlite": lambda directory: _product(f"sqlite:///{directory}/product.db"),
    "idemkit": _idemkit,
    "handmade-memory": lambda _: HandMade(_shop()),
    "handmade-sqlite": lambda directory: HandMade(_shop(), directory / "handmade.db"),
}


def main() -> None:
    """Serve until standard input ends."""
    name, directory = sys.argv[1:]
    with pinned("first"):
        _serve(CONTENDERS[name](Path(directory)))


def _serve(app: App) -> None:
    logging.getLogger("idemkit").setLevel(logging.ERROR)
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )
    print(listening.getsockname()[1], flush=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    uvicorn.Server(config).run(sockets=[listening])


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
