"""DynamoDB: moto's server stands in for it, because the real one cannot be installed."""

from __future__ import annotations

import socket
import sys
from functools import cache
from itertools import count
from pathlib import Path

from tests.support.servers import Server

PROGRAM = Path(__file__).with_name("dynamodb_stand_in.py")


class Dynamodb(Server):
    """One server; every store has a table of its own."""

    def __init__(self) -> None:
        super().__init__("dynamodb")
        self._numbers = count()
        self.start()

    @property
    def place(self) -> str:
        """Where it is, as it stands in a URL."""
        return f"region=eu-west-1&endpoint=http://127.0.0.1:{self.port}"

    def fresh_url(self) -> str:
        """A fresh store; patient, because many calls wait for the stand-in."""
        return f"dynamodb://laws_{next(self._numbers)}?{self.place}&timeout=30s"

    def start(self) -> None:
        """Start it, again where it has ended; it remembers nothing."""
        # -P: its neighbours here are called as packages are that it may want to import.
        self.launch([sys.executable, "-P", PROGRAM, str(self.port)], self._is_ready)

    def _is_ready(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


@cache
def dynamodb() -> Dynamodb:
    """The one of this process."""
    return Dynamodb()
