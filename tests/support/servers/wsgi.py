"""WSGI servers on a listening socket of the tests' own, for `python -m`:

python -m tests.support.servers.wsgi waitress 5 module:app      # on the socket of descriptor 5
python -m tests.support.servers.wsgi wsgiref 5 module:app
"""

from __future__ import annotations

import socket
import sys
from importlib import import_module
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

THREADS = 8


class Wsgiref(ThreadingMixIn, WSGIServer):
    """The standard library's server, one thread for each connection."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that left is no error
            super().handle_error(*_)


class Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def serve(name: str, listening: socket.socket, app: Any) -> None:
    if name == "waitress":
        import waitress

        waitress.serve(app, sockets=[listening], threads=THREADS)
        return
    server = Wsgiref(listening.getsockname(), Quiet, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.server_name, server.server_port = listening.getsockname()
    server.setup_environ()
    server.set_app(app)
    server.serve_forever()


if __name__ == "__main__":
    module, _, attribute = sys.argv[3].partition(":")
    app = getattr(import_module(module), attribute)
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), app)
