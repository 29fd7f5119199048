"""Long work for real servers, in both flavours; what it does is on disk.

`/jobs` accepts, and then waits for `release-<key>` to appear; `/jobs/sync` does so in a thread of
FastAPI's. `/broken` accepts and fails. Over WSGI they defer, and a worker does the same. Each
execution is a line of `effects`.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from flask import Flask

import coatcheck
from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from tests.support.times import WAIT_S_MAX

DIRECTORY = Path(os.environ["SHOP_DIRECTORY"])
STORE = f"sqlite:///{DIRECTORY}/jobs.db"
RECOVERY = os.environ.get("WORK_RECOVERY", "retry")
LEASE = os.environ.get("WORK_LEASE", "60s")


def began(operation: coatcheck.Operation) -> None:
    with (DIRECTORY / "effects").open("a") as effects:
        effects.write(f"{operation.key} {operation.attempt}\n")


def is_released(key: str) -> bool:
    return (DIRECTORY / f"release-{key}").exists()


def wait_for_release(key: str) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not is_released(key):
        assert time.monotonic() < deadline, "no test released this"
        time.sleep(0.005)


def ask(operation: coatcheck.Operation) -> coatcheck.Happened:
    """It has happened: another process has finished it."""
    body = json.dumps({"asked about": operation.key}).encode()
    return coatcheck.Happened(201, [("content-type", "application/json")], body)


def policy(**fields: Any) -> coatcheck.Policy:
    if RECOVERY == "reconcile":
        fields["reconcile"] = ask
    return coatcheck.Policy(recovery=RECOVERY, lease=LEASE, **fields)  # type: ignore[arg-type]


asgi_app = FastAPI()
asgi_app.add_middleware(IdempotencyMiddleware, store=STORE, policy=policy())


@asgi_app.get("/pid")
async def pid() -> int:
    return os.getpid()


@asgi_app.post("/jobs", status_code=201)
@idempotent(in_flight="202", required=True)
async def work(operation: CurrentOperation) -> dict[str, str]:
    began(operation)
    await operation.accept()
    await operation.progress(0.5, "half of it")
    deadline = time.monotonic() + WAIT_S_MAX
    while not is_released(operation.key):
        assert time.monotonic() < deadline, "no test released this"
        await asyncio.sleep(0.005)
    return {"done": operation.key}


@asgi_app.post("/jobs/sync", status_code=201)
@idempotent(required=True)
def work_sync(operation: CurrentOperation) -> dict[str, str]:
    began(operation)
    operation.accept()
    operation.progress(0.5, "half of it")
    wait_for_release(operation.key)
    return {"done": operation.key}


@asgi_app.post("/broken")
@idempotent(in_flight="202", required=True)
async def broken(operation: CurrentOperation) -> None:
    began(operation)
    await operation.accept()
    raise RuntimeError("after the client has been answered")


def flask_app() -> Flask:
    """The same over WSGI: handlers defer, and threads of this process are the workers."""
    app = Flask(__name__)
    middleware = WsgiMiddleware(app.wsgi_app, store=STORE, policy=policy(in_flight="202"))
    app.wsgi_app = middleware  # type: ignore[method-assign]

    def defer(function: Callable[[coatcheck.Operation], coatcheck.Happened]) -> str:
        token = current().defer()
        args = (token, lambda: function(current()))
        threading.Thread(target=middleware.engine.run_deferred, args=args, daemon=True).start()
        return "deferred"

    @app.get("/pid")
    def pid() -> str:
        return str(os.getpid())

    @app.post("/jobs")
    @app.post("/jobs/sync")
    def work() -> str:
        return defer(work_deferred)

    @app.post("/broken")
    def broken() -> str:
        return defer(break_deferred)

    return app


def current() -> coatcheck.Operation:
    return coatcheck.current_operation()


def work_deferred(operation: coatcheck.Operation) -> coatcheck.Happened:
    began(operation)
    operation.progress(0.5, "half of it")
    wait_for_release(operation.key)
    body = json.dumps({"done": operation.key}).encode()
    return coatcheck.Happened(201, [("content-type", "application/json")], body)


def break_deferred(operation: coatcheck.Operation) -> coatcheck.Happened:
    began(operation)
    raise RuntimeError("after the client has been answered")


if os.environ["SHOP_FLAVOUR"] == "wsgi":
    wsgi_app = flask_app()
