"""DynamoDB: moto's server stands in for it, because the real one cannot be installed."""

from __future__ import annotations

import socket
import sys
from functools import cache
from itertools import count

from servers import Server

# Moto looks at a condition and then writes, and another thread may come between; DynamoDB does both
# in one step. So one request at a time, from a server that keeps connections open as AWS does.
# And it looks for each of the ten types in every value, under half a dozen names: that took most of
# the time of a read, and a value has but one type, under its own name.
SCRIPT = """
import sys
from moto.core.serialize import ResponseSerializer
from moto.moto_server.werkzeug_app import create_backend_app
from waitress import serve

TYPES = {"S", "N", "B", "SS", "NS", "BS", "M", "L", "NULL", "BOOL"}
looked_for = ResponseSerializer.get_value

def get_value(self, value, key, shape):
    is_plain = type(value) is dict and value.keys() <= TYPES
    return value.get(key) if is_plain else looked_for(self, value, key, shape)

ResponseSerializer.get_value = get_value
serve(create_backend_app("dynamodb"), host="127.0.0.1", port=int(sys.argv[1]), threads=1,
      connection_limit=1000, channel_timeout=600)
"""


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
        """A store that nobody has used; patient, because crowds stand in line for the stand-in."""
        return f"dynamodb://laws_{next(self._numbers)}?{self.place}&timeout=30s"

    def start(self) -> None:
        """Start it, again where it has ended; it remembers nothing."""
        self.launch([sys.executable, "-c", SCRIPT, str(self.port)], self._is_ready)

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
