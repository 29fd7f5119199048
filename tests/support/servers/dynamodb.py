"""DynamoDB: moto's server stands in for it, or DynamoDB Local, which is AWS's own.

`make test-dynamodb` sets COATCHECK_DYNAMODB to a directory with the jars of DynamoDB Local.
"""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from itertools import count
from pathlib import Path

from tests.support.servers import Server, find_program

PROGRAM = Path(__file__).with_name("dynamodb_stand_in.py")
JARS = os.environ.get("COATCHECK_DYNAMODB")


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


class DynamodbLocal(Dynamodb):
    """DynamoDB Local, which keeps its tables in a file; it listens on all addresses."""

    def __init__(self, jars: str) -> None:
        self._java = find_program("java", package="default-jre-headless")
        self._jars = jars
        super().__init__()

    def start(self) -> None:
        """Start it, again where it has ended; its tables are still there."""
        java = [self._java, "-Xmx512m", f"-Djava.library.path={self._jars}", "-cp"]
        main = "com.amazonaws.services.dynamodbv2.local.main.ServerRunner"
        options = ["-disableTelemetry", "-sharedDb", "-dbPath", self.directory]
        where = ["-port", str(self.port)]
        self.launch([*java, f"{self._jars}/*", main, *options, *where], self._is_ready)


@cache
def dynamodb() -> Dynamodb:
    """The one of this process."""
    return DynamodbLocal(JARS) if JARS else Dynamodb()
