"""A relay before a server: what a load balancer or an address that moves is to clients."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial


class Relay:
    """A port of the loopback behind which another one is, and after `point_at` yet another."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._last_word = b""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def point_at(self, port: int) -> None:
        """Forward new connections to *port*; existing ones stay."""
        self._target = port

    def fall_silent_after(self, word: bytes) -> None:
        """Drop the answers of connections that send *word* from now on."""
        self._last_word = word

    def _is_heard(self, is_savepoint_gone: threading.Event, said: bytes) -> bool:
        if self._last_word and self._last_word in said:
            is_savepoint_gone.set()
        return True

    def close(self) -> None:
        """Accept no more connections."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:  # it is closed
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the server is gone
                client.close()
                continue
            is_savepoint_gone = threading.Event()
            ways = (
                (client, server, partial(self._is_heard, is_savepoint_gone)),
                (
                    server,
                    client,
                    lambda _, is_savepoint_gone=is_savepoint_gone: not is_savepoint_gone.is_set(),
                ),
            )
            for way in ways:
                threading.Thread(target=_pass_on, args=way, daemon=True).start()


def _pass_on(come: socket.socket, go: socket.socket, passes: Callable[[bytes], bool]) -> None:
    """Until one of them ends, and then both do."""
    with come:
        with suppress(OSError):
            while data := come.recv(1 << 16):
                if passes(data):
                    go.sendall(data)
        with suppress(OSError):
            go.shutdown(socket.SHUT_RDWR)
