"""The application of `test_boot.py`: FastAPI with a lifespan, and a WSGI application beside it."""

import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware

URL = os.environ["SHOP_STORE"]
POLICY = os.environ.get("SHOP_POLICY")
PLACE = Path(os.environ["SHOP_DIRECTORY"])


def note(name: str) -> None:
    with (PLACE / name).open("a") as file:
        file.write("x\n")


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    note("started")
    yield
    note("stopped")


asgi_app = FastAPI(lifespan=lifespan)


@asgi_app.get("/pid")
@asgi_app.post("/unguarded")
async def pid() -> int:
    return os.getpid()


@asgi_app.post("/orders", status_code=201)
async def order() -> str:
    note("orders")
    return "ordered"


def plain(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    if environ["REQUEST_METHOD"] == "POST":
        note("orders")
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"ordered"]


if os.environ["SHOP_FLAVOUR"] == "asgi":
    asgi_app.add_middleware(IdempotencyMiddleware, store=URL, policy=POLICY)
else:
    wsgi_app = WsgiMiddleware(plain, store=URL, policy=POLICY)
