"""Real servers for the laws, each on a socket of its own and in threads of this process.

So a law scripts the shop, moves the clock and reads the store while its requests travel as bytes.
What several processes, restarts and `kill -9` do is in `test_real_servers.py`,
`test_django_servers.py` and `test_served_frameworks.py`.

One server of each kind serves all laws. A header that only the tests know says which application a
request is for, and is taken away before the application gets the request.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import closing
from itertools import count
from typing import Any

from tests.support.http import Headers, Response
from tests.support.times import eventually
from tests.support.web_servers import Connection

from .api import THREADS, Api, AsgiApi, Workers, WsgiApi

WHICH = "X-Law"


class Host(ABC):
    """A server on loopback; `apps` are the applications that it serves now."""

    def __init__(self, workers: Workers) -> None:
        self.apps: dict[str, Any] = {}
        self.workers = workers
        self._numbers = count()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Start it."""

    @abstractmethod
    def end(self) -> None:
        """Stop it."""

    def add(self, app: Any) -> str:
        """Serve *app* to requests that name what this returns."""
        which = str(next(self._numbers))
        self.apps[which] = app
        return which


# --- ASGI -----------------------------------------------------------------------------------


class AsgiHost(Host):
    """On the event loop on which the engines of the laws run."""

    async def app(self, asgi_scope: dict[str, Any], receive: Any, send: Any) -> None:
        if asgi_scope["type"] == "lifespan":
            for moment in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{moment}.complete"})
            return
        name = WHICH.lower().encode()
        headers = list(asgi_scope["headers"])
        which = next(value for found, value in headers if found == name).decode()
        asgi_scope["headers"] = [line for line in headers if line[0] != name]
        await self.apps[which](asgi_scope, receive, send)


class Uvicorn(AsgiHost):
    def begin(self) -> None:
        import uvicorn

        config = uvicorn.Config(self.app, interface="asgi3", log_config=None, access_log=False)
        self._server = uvicorn.Server(config)
        self._running = self.workers.start(self._server.serve(sockets=[self._socket]))
        eventually(lambda: self._server.started)

    def end(self) -> None:
        self._server.should_exit = True
        self._running.result(20)


class Hypercorn(AsgiHost):
    def begin(self) -> None:
        import hypercorn.asyncio
        import hypercorn.config

        config = hypercorn.config.Config()
        config.bind = [f"fd://{self._socket.fileno()}"]
        config.graceful_timeout = 0.1
        self._is_over = asyncio.Event()
        serving = hypercorn.asyncio.serve(
            self.app, config, shutdown_trigger=self._is_over.wait, mode="asgi"
        )
        self._running = self.workers.start(serving)

    def end(self) -> None:
        self.workers.loop.call_soon_threadsafe(self._is_over.set)
        self._running.result(20)


# --- WSGI -----------------------------------------------------------------------------------


class WsgiHost(Host):
    """In a thread, with as many threads for requests as a law needs."""

    def app(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        which = environ.pop(f"HTTP_{WHICH.upper().replace('-', '_')}")
        served: Iterable[bytes] = self.apps[which](environ, start_response)
        return served

    def begin(self) -> None:
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()

    @abstractmethod
    def run(self) -> None:
        """Serve, until `end` is called."""


class Gunicorn(WsgiHost):
    """The worker of gunicorn that has threads; gunicorn itself would run it in a process."""

    def begin(self) -> None:
        from gunicorn.app.base import BaseApplication
        from gunicorn.glogging import Logger
        from gunicorn.workers.gthread import ThreadWorker

        host = self

        class Application(BaseApplication):
            def load_config(self) -> None:
                self.cfg.set("threads", THREADS)

            def load(self) -> Any:
                return host.app

        class Worker(ThreadWorker):
            def init_signals(self) -> None:
                """They are the test run's."""

        application = Application()
        application.cfg.set("worker_class", "gthread")
        self._worker = Worker(
            *(0, os.getppid(), [self._socket], application, 30, application.cfg),
            Logger(application.cfg),
        )
        super().begin()

    def run(self) -> None:
        self._worker.init_process()

    def end(self) -> None:
        self._worker.handle_exit(None, None)
        self._thread.join(20)
        self._worker.tmp.close()


class Waitress(WsgiHost):
    def begin(self) -> None:
        import waitress

        self._server = waitress.create_server(self.app, sockets=[self._socket], threads=THREADS)
        super().begin()

    def run(self) -> None:
        self._server.run()

    def end(self) -> None:
        """The thread is the process's to end: waitress offers no other way but a signal."""


class Runserver(WsgiHost):
    """What `manage.py runserver` starts."""

    def begin(self) -> None:
        from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler

        class Quiet(WSGIRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

        self._socket.setblocking(True)
        self._server = ThreadedWSGIServer(
            self._socket.getsockname(), Quiet, bind_and_activate=False
        )
        self._server.socket.close()
        self._server.socket = self._socket
        self._server.server_name, self._server.server_port = self._socket.getsockname()
        self._server.setup_environ()
        self._server.set_app(self.app)
        super().begin()

    def run(self) -> None:
        self._server.serve_forever(0.01)

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()


HOSTS: dict[str, type[Host]] = {
    "uvicorn": Uvicorn,
    "hypercorn": Hypercorn,
    "gunicorn": Gunicorn,
    "waitress": Waitress,
    "runserver": Runserver,
}


# --- the adapters behind them ---------------------------------------------------------------


class Served(Api):
    """An adapter whose requests reach it through a server; mixed into its class."""

    host: Host

    def _open(self, settings: dict[str, Any], middleware: dict[str, Any]) -> None:
        super()._open(settings, middleware)
        self._which = self.host.add(self.app)

    def _connect(self) -> None:
        """No test client."""

    def start(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Future[Response]:
        return self.workers.submit(self._over_socket, method, target, headers, body)

    def _over_socket(self, method: str, target: str, headers: Headers, body: bytes) -> Response:
        with closing(Connection(self.host.port)) as connection:
            connection.send(self._bytes_of(method, target, headers, body))
            return self.with_error(connection.read(has_body=method != "HEAD"))

    def abandon(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> None:
        entered = len(self.shop.effects)
        connection = Connection(self.host.port)
        connection.send(self._bytes_of(method, target, headers, body))
        eventually(lambda: len(self.shop.effects) > entered)
        connection.hang_up()

    def _bytes_of(self, method: str, target: str, headers: Headers, body: bytes) -> bytes:
        own = [("Host", "shop.example"), (WHICH, self._which), ("Connection", "close")]
        length = [("Content-Length", str(len(body)))] if body or method != "GET" else []
        lines = [f"{name}: {value}\r\n" for name, value in (*own, *length, *headers)]
        head = f"{method} {target} HTTP/1.1\r\n{''.join(lines)}\r\n"
        return head.encode("latin-1") + body

    def close(self) -> None:
        self.host.apps.pop(self._which)
        if isinstance(self, AsgiApi):
            AsgiApi.close(self)
        else:
            WsgiApi.close(self)


def served(adapter: type[Api], host: Host) -> type[Api]:
    """*adapter* behind *host*."""
    return type(f"{adapter.__name__}On{type(host).__name__}", (Served, adapter), {"host": host})
