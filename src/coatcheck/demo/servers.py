"""The two servers of the demo: the shop and the payment provider, each in its own process.

    python -m coatcheck.demo.servers provider DIRECTORY GUARD
    python -m coatcheck.demo.servers shop DIRECTORY GUARD PROVIDER_PORT

A server listens on a free loopback port and prints it. It ends when its standard input is closed,
so it never outlives its parent. It logs to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import quote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication

import coatcheck
from coatcheck import Policy
from coatcheck.demo.client import NETWORK_ERRORS, Response, connect, post
from coatcheck.server.wsgi import IdempotencyMiddleware

SHOP_DATABASE = "shop.db"
PROVIDER_DATABASE = "provider.db"

# 60 ms to write the confirmation: the money is taken and the customer does not know it yet. This is
# the moment in which a crash hurts.
CONFIRM_S = 0.06
# 20 ms: a fast card network.
CHARGE_S = 0.02
# 1.5 s until another attempt takes over the orders of a killed shop. Short, because a person is
# watching; a living shop renews it three times within that.
SHOP_LEASE = "1.5s"
# The next attempt runs the whole order again. It may, because it charges with the same derived key.
RECOVERY: Final = "retry"
# 30 s: the provider is never killed, so no other attempt takes over.
PROVIDER_LEASE = "30s"
# 10 s: as long as the client waits for a response.
_BUSY_TIMEOUT_S = 10.0
# How soon a server notices that its standard input was closed.
_POLL_S = 0.05

# "forgetful" is a guard that does not work: its store lasts for one request. A test uses it to
# prove that the demo can fail.
Guard: TypeAlias = Literal["coatcheck", "none", "forgetful"]
Handler: TypeAlias = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


def run_shop(directory: Path, guard: str, provider_port: int) -> None:
    """Serve POST /orders: charge through the provider, then confirm with an order number."""

    def order(document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            charged = _charge(provider_port, document)
        except NETWORK_ERRORS:
            return 502, {"detail": "the payment provider could not be reached"}
        if charged.status != 201:
            return 502, {"detail": f"the payment provider answered {charged.status}"}
        time.sleep(CONFIRM_S)
        # Random: an order that was executed twice has two numbers.
        number = f"N-{secrets.token_hex(4).upper()}"
        return 201, {"number": number, "order": document["order"], **charged.document}

    _serve(_guarded(_endpoint("/orders", order), guard, directory / SHOP_DATABASE, SHOP_LEASE))


def _charge(provider_port: int, document: dict[str, Any]) -> Response:
    """
    Charge one order.

    The derived key is the same for every attempt at one order. If the shop dies between charge and
    confirmation, the next attempt gets the charge that was made, and not a second one.
    """
    operation = coatcheck.current_operation()
    key = None if operation is None else operation.derive("charge")
    with closing(connect(provider_port)) as connection:
        return post(connection, "/charges", document, key)


def run_provider(directory: Path, guard: str) -> None:
    """Serve POST /charges: each executed charge becomes one row."""
    database = directory / PROVIDER_DATABASE
    mutex = threading.Lock()
    connection = sqlite3.connect(
        database, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = full")
    connection.execute(
        "create table if not exists charges"
        " (id integer primary key, order_name text not null, cents integer not null)"
    )

    def charge(document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        time.sleep(CHARGE_S)
        statement = "insert into charges (order_name, cents) values (?, ?)"
        with mutex:
            cursor = connection.execute(statement, (document["order"], document["cents"]))
            return 201, {"charge": cursor.lastrowid}

    _serve(_guarded(_endpoint("/charges", charge), guard, database, PROVIDER_LEASE))
    connection.close()


def charges_in(directory: Path) -> list[tuple[str, int]]:
    """Return all charges of the provider in *directory* as (order, cents), oldest first."""
    address = f"{(directory / PROVIDER_DATABASE).resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True, timeout=_BUSY_TIMEOUT_S)) as connection:
        return connection.execute("select order_name, cents from charges order by id").fetchall()


def store_url(database: Path) -> str:
    """Return the URL of the SQLite store in *database*."""
    return f"sqlite:///{quote(database.resolve().as_posix())}"


def _endpoint(path: str, handle: Handler) -> WSGIApplication:
    """Return an application that takes and returns a JSON document at POST *path*."""

    def application(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if (environ["REQUEST_METHOD"], environ["PATH_INFO"]) == ("POST", path):
            status, document = handle(json.loads(body))
        else:
            status, document = 404, {"detail": f"there is only POST {path}"}
        content = json.dumps(document).encode()
        start_response(
            f"{status} {HTTPStatus(status).phrase}",
            [("Content-Type", "application/json"), ("Content-Length", str(len(content)))],
        )
        return [content]

    return application


def _guarded(app: WSGIApplication, guard: str, database: Path, lease: str) -> WSGIApplication:
    policy = Policy(required=True, lease=lease, recovery=RECOVERY)
    match guard:
        case "none":
            return app
        case "coatcheck":
            return IdempotencyMiddleware(app, store=store_url(database), policy=policy)
        case "forgetful":
            return _forgetful(app, policy)
    raise ValueError(guard)


def _forgetful(app: WSGIApplication, policy: Policy) -> WSGIApplication:
    def application(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        guard = IdempotencyMiddleware(app, store="memory://", policy=policy)
        return guard(environ, start_response)

    return application


def _serve(app: WSGIApplication) -> None:
    """Serve until the parent closes our standard input or ends."""
    # Ctrl-C reaches all processes of a terminal, and the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with _Server(("127.0.0.1", 0), _RequestHandler) as server:
        server.set_app(app)
        threading.Thread(target=_shut_down_with_parent, args=(server,), daemon=True).start()
        print(server.server_port, flush=True)  # noqa: T201 - the parent reads it
        server.serve_forever(_POLL_S)
    if isinstance(app, IdempotencyMiddleware):
        app.engine.close()


def _shut_down_with_parent(server: WSGIServer) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    server.shutdown()


class _Server(ThreadingMixIn, WSGIServer):
    # 128: connections that arrive while a thread is started.
    request_queue_size = 128

    def server_bind(self) -> None:
        """Bind without a lookup of this machine's name, which the original makes."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]
        self.setup_environ()


class _RequestHandler(WSGIRequestHandler):
    # Headers and body are written separately, and the body must not wait for an acknowledgement.
    disable_nagle_algorithm = True

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing: the log of coatcheck's decisions is more useful."""


if __name__ == "__main__":
    name, directory, guard, *ports = sys.argv[1:]
    if name == "shop":
        run_shop(Path(directory), guard, int(ports[0]))
    else:
        run_provider(Path(directory), guard)
