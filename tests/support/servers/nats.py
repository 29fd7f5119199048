"""NATS with JetStream, in a directory of the tests' own; each test has streams of its own."""

from __future__ import annotations

import os
import socket
from functools import cache
from itertools import count

from tests.support.servers import Server, find_program


class Nats(Server):
    """One server."""

    def __init__(self) -> None:
        self._program = find_program("nats-server", "/usr/sbin", package="nats-server")
        super().__init__("nats")
        self._numbers = count()
        self.start()

    @property
    def url(self) -> str:
        """For nats-py."""
        return f"nats://127.0.0.1:{self.port}"

    def fresh_name(self) -> str:
        """The name of a stream that does not exist yet."""
        return f"orders-{os.getpid()}-{next(self._numbers)}"

    def start(self) -> None:
        """Start it, again where it has ended."""
        where = ["--addr", "127.0.0.1", "--port", str(self.port)]
        command = [self._program, *where, "--jetstream", "--store_dir", self.directory]
        self.launch(command, self._is_ready)

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False


@cache
def nats_server() -> Nats:
    """The server of this process."""
    return Nats()
