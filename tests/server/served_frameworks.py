"""The same guarded routes in every framework, for real servers; SHOP_FRAMEWORK chooses one.

`POST /orders` needs a key and an item that is text. `/slow` waits for the file `release-<key>`.
Each execution is a line in the file `effects`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.times import WAIT_S_MAX

DIRECTORY = Path(os.environ.get("SHOP_DIRECTORY", ""))
STORE = f"sqlite:///{DIRECTORY}/orders.db"


def note(key: str) -> None:
    # One small append is one write: whole lines, also from several processes.
    with (DIRECTORY / "effects").open("a") as effects:
        effects.write(f"{key} {os.getpid()}\n")


def wait_for_release(key: str) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not (DIRECTORY / f"release-{key}").exists():
        assert time.monotonic() < deadline, "no test released this"
        time.sleep(0.005)


def fastapi_app() -> Any:
    from fastapi import FastAPI
    from pydantic import BaseModel, create_model

    from coatcheck.server.fastapi import CurrentSyncOperation, IdempotencyMiddleware, idempotent

    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, store=STORE)
    model: type[BaseModel] = create_model("Order", item=(str, ...))

    @app.get("/pid")
    def pid() -> int:
        return os.getpid()

    def place(order, operation) -> str:
        note(operation.key)
        return order.item

    def slow(order, operation) -> str:
        note(operation.key)
        wait_for_release(operation.key)
        return order.item

    for path, endpoint in (("/orders", place), ("/slow", slow)):
        endpoint.__annotations__ = {"order": model, "operation": CurrentSyncOperation}
        app.post(path, status_code=201)(idempotent(required=True)(endpoint))
    return app


def litestar_app() -> Any:
    from litestar import Litestar, get, post
    from litestar.params import JSONBody

    from coatcheck.server.litestar import CurrentSyncOperation, IdempotencyPlugin, idempotent

    def pid() -> str:
        return str(os.getpid())

    def place(data, operation) -> str:
        note(operation.key)
        return data["item"]

    def slow(data, operation) -> str:
        note(operation.key)
        wait_for_release(operation.key)
        return data["item"]

    pid.__annotations__ = {"return": str}
    handlers = [get("/pid", sync_to_thread=False)(pid)]
    for path, handler in (("/orders", place), ("/slow", slow)):
        handler.__annotations__ = {
            "data": JSONBody[dict[str, str]],
            "operation": CurrentSyncOperation,
            "return": str,
        }
        handlers.append(post(path, sync_to_thread=True)(idempotent(required=True)(handler)))
    return Litestar(handlers, plugins=[IdempotencyPlugin(store=STORE)])


def flask_app() -> Any:
    import flask

    from coatcheck.server.flask import Coatcheck, current_operation, idempotent

    app = flask.Flask(__name__)
    app.config["COATCHECK_STORE"] = STORE
    Coatcheck(app)

    @app.before_request
    def validate() -> None:
        order = flask.request.get_json(silent=True)
        if flask.request.method == "POST" and not isinstance(order["item"], str):
            flask.abort(400)

    @app.get("/pid")
    def pid() -> str:
        return str(os.getpid())

    @app.post("/orders")
    @idempotent(required=True)
    def place() -> tuple[str, int]:
        note(current_operation.key)
        return flask.request.json["item"], 201

    @app.post("/slow")
    @idempotent(required=True)
    def slow() -> tuple[str, int]:
        note(current_operation.key)
        wait_for_release(current_operation.key)
        return flask.request.json["item"], 201

    return app


# Every framework, with one entry.
FRAMEWORKS: dict[str, tuple[str, Callable[[], Any]]] = {
    "fastapi": ("asgi_app", fastapi_app),
    "litestar": ("asgi_app", litestar_app),
    "flask": ("wsgi_app", flask_app),
}

if "SHOP_FRAMEWORK" in os.environ:
    name, make = FRAMEWORKS[os.environ["SHOP_FRAMEWORK"]]
    globals()[name] = make()
