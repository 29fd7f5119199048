"""The shop as a small application for real servers, in both flavours; its effects are on disk.

    SHOP_DIRECTORY=… uvicorn laws.http.app:asgi_app
    SHOP_DIRECTORY=… gunicorn laws.http.app:wsgi_app
    SHOP_DIRECTORY=… python -m laws.http.app waitress 5     # on the listening socket of descriptor 5

Everything that a test wants to see from outside is a file in the directory: `orders.db` is the
store, `effects` has a line for each execution, and `/slow` waits for `release-<key>` to appear.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from hashlib import sha256
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from coatcheck.server.asgi import IdempotencyMiddleware as AsgiMiddleware
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware

from .shop import JSON, WAIT_S_MAX, Call, Said, Shop, says

DIRECTORY = Path(os.environ["SHOP_DIRECTORY"])
STORE = f"sqlite:///{DIRECTORY}/orders.db"
SAFE = ("GET", "HEAD")


class ShopOnDisk(Shop):
    """Writes each effect down before anything else happens."""

    def handle(self, call: Call) -> Said:
        if call.method not in SAFE:
            key = call.operation.key if call.operation else "-"
            # One small append is one write: whole lines, also from several processes.
            with (DIRECTORY / "effects").open("a") as effects:
                effects.write(f"{call.path} {key} {os.getpid()}\n")
        return super().handle(call)


def order(call: Call) -> Said:
    answer = {"pid": os.getpid(), "at_ns": time.time_ns(), "sha256": sha256(call.body).hexdigest()}
    return Said(
        201, (JSON, ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")), [json.dumps(answer).encode()]
    )


def slow(call: Call) -> Said:
    """Waits until the test says so: across processes, by a file."""
    assert call.operation is not None
    deadline = time.monotonic() + WAIT_S_MAX
    while not (DIRECTORY / f"release-{call.operation.key}").exists():
        assert time.monotonic() < deadline, "nobody released this"
        time.sleep(0.005)
    return order(call)


shop = ShopOnDisk()
shop.answers |= {
    "/orders": order,
    "/slow": slow,
    "/nothing": says(204),
    "/pid": lambda _call: Said(200, (JSON,), [str(os.getpid()).encode()]),
}


class Wsgiref(ThreadingMixIn, WSGIServer):
    """The standard library's server, one thread for each connection."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that left is no error
            super().handle_error(*_)


class Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    listening = socket.socket(fileno=int(sys.argv[2]))
    if sys.argv[1] == "waitress":
        from waitress import serve

        serve(WsgiMiddleware(shop.wsgi, store=STORE), sockets=[listening], threads=8)
    else:
        server = Wsgiref(listening.getsockname(), Quiet, bind_and_activate=False)
        server.socket.close()
        server.socket = listening
        server.server_name, server.server_port = listening.getsockname()
        server.setup_environ()
        server.set_app(WsgiMiddleware(shop.wsgi, store=STORE))
        server.serve_forever()
# Made when the server loads the application: under gunicorn --preload, before it forks.
elif os.environ["SHOP_FLAVOUR"] == "asgi":
    asgi_app = AsgiMiddleware(shop.asgi, store=STORE)
else:
    wsgi_app = WsgiMiddleware(shop.wsgi, store=STORE)
