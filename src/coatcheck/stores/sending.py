"""Sending over a socket that an event loop watches, and that never blocks.

Beneath the wires that write to their sockets by themselves. What is asked leaves in the order in
which it was asked, as soon as the socket takes it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

# It would block: neither an answer nor an end.
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Sending:
    """
    What goes out over one socket.

    Args:
        loop: tells when the socket takes more.
        sock: does not block.
        moves: told before each try to send the rest: who makes room is not silent.
        lost: told why nothing can be sent any more.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        *,
        moves: Callable[[], None],
        lost: Callable[[OSError], None],
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._moves = moves
        self._lost = lost
        self._unsent = b""

    def send(self, data: bytes) -> None:
        """Send *data*, behind what has not left yet."""
        if self._unsent:
            self._unsent += data
        else:
            self._send(data)

    def _send(self, data: bytes) -> None:
        """Send what the socket takes; the rest when it takes more."""
        try:
            data = data[self._socket.send(data) :]
        except NOT_NOW:
            pass
        except OSError as error:
            self._unsent = b""
            self._lost(error)
            return
        if data and not self._unsent:
            self._loop.add_writer(self._socket, self._send_more)
        elif self._unsent and not data:
            self._loop.remove_writer(self._socket)
        self._unsent = data

    def _send_more(self) -> None:
        self._moves()
        self._send(self._unsent)
