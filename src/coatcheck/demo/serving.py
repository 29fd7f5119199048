"""Serving: one WSGI application as a process of its own, on a loopback port of its own.

The process says its port on standard output and ends when its standard input does, so that it
never outlives whoever started it, however that ended. It logs to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import quote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from coatcheck import Policy
from coatcheck.server.wsgi import IdempotencyMiddleware
from coatcheck.server.wsgi_visit import App, StartResponse

# How soon the end of the parent is noticed.
_POLL_S = 0.05

Handler = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


def endpoint(path: str, handle: Handler) -> App:
    """A WSGI application with one endpoint: POST a JSON document to *path*, get one back."""

    def application(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if (environ["REQUEST_METHOD"], environ["PATH_INFO"]) == ("POST", path):
            status, document = handle(json.loads(body))
        else:
            status, document = 404, {"detail": f"there is only POST {path}"}
        said = json.dumps(document).encode()
        start_response(
            f"{status} {HTTPStatus(status).phrase}",
            [("Content-Type", "application/json"), ("Content-Length", str(len(said)))],
        )
        return [said]

    return application


def guarded(app: App, guard: str, database: Path, *, lease: str) -> App:
    """
    *app* behind *guard*: "none", "coatcheck", or "forgetful".

    The last is a guard that is there and does not work: its memory lasts for one request. The
    demo must find it out, or it would prove nothing.
    """
    policy = Policy(required=True, lease=lease)
    match guard:
        case "none":
            return app
        case "coatcheck":
            return IdempotencyMiddleware(app, store=store_url(database), policy=policy)
        case "forgetful":
            return _forgetful(app, policy)
    raise ValueError(guard)


def _forgetful(app: App, policy: Policy) -> App:
    def application(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        guard = IdempotencyMiddleware(app, store="memory://", policy=policy)
        return guard(environ, start_response)

    return application


def store_url(database: Path) -> str:
    """The URL of the SQLite store in *database*."""
    return f"sqlite:///{quote(database.resolve().as_posix())}"


def serve(app: App) -> None:
    """Serve until the parent is gone or closes our standard input."""
    # Ctrl-C reaches the whole terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with _Server(("127.0.0.1", 0), _RequestHandler) as server:
        server.set_app(app)
        threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
        print(server.server_port, flush=True)  # noqa: T201 - what the parent waits for
        server.serve_forever(_POLL_S)
    if isinstance(app, IdempotencyMiddleware):
        app.engine.close()


def _end_with_parent(server: WSGIServer) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    server.shutdown()


class _Server(ThreadingMixIn, WSGIServer):
    # 128: everybody who comes while a thread is being started.
    request_queue_size = 128

    def server_bind(self) -> None:
        """As the original, without asking the name service what this machine is called."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]
        self.setup_environ()


class _RequestHandler(WSGIRequestHandler):
    # Headers and body are written one after the other; neither should wait for an acknowledgement.
    disable_nagle_algorithm = True

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing: the decisions are logged, and they say more."""
