"""A response that breaks off on its way: its record was safe before the first byte left (L2, L11).

Real servers and real sockets. The client reads the head and a little of the body, and no more; so
most of it is still in the server when the client hangs up, or the server is killed.
"""

import socket
import struct
from pathlib import Path

import pytest

from tests.server.mid_stream_app import PARTS, parts_of
from tests.support.times import WAIT_S_MAX
from tests.support.web_servers import UVICORN_ALONE, WAITRESS, Kind, Server, request_of

HEAD_BYTES = 1024


class Listener:
    """A client that has read the beginning of its response, and reads no more."""

    def __init__(self, server: Server, key: str, path: str) -> None:
        self._socket = socket.socket()
        self._socket.settimeout(WAIT_S_MAX)
        # Small, and before it connects: what it does not read stays with the server.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HEAD_BYTES)
        self._socket.connect(("127.0.0.1", server.port))
        self._socket.sendall(request_of("POST", path, f"Idempotency-Key: {key}\r\n"))
        self._read = self._socket.recv(HEAD_BYTES)
        assert self._read.startswith(b"HTTP/1.1 201"), server.log()

    def hang_up(self) -> None:
        """Go at once: the server gets a reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def read_to_its_end(self) -> int:
        """How many bytes there were, until the connection broke off."""
        count = len(self._read)
        try:
            while chunk := self._socket.recv(65_536):
                count += len(chunk)
        except ConnectionResetError:
            pass
        self._socket.close()
        return count


def assert_answered_without_running(server: Server, key: str, path: str) -> None:
    """What is kept is there whole; for what is not kept there is a clear problem, and nothing runs."""
    retried = server.exchange("POST", path, f"Idempotency-Key: {key}\r\n")
    if path == "/streamed":
        assert (retried.status, retried.code) == (409, "result-unavailable")
        assert retried.problem["retry"] == "never"
    else:
        assert (retried.status, retried.is_replay) == (201, True)
        assert retried.body == b"".join(parts_of(path))
    assert server.lines_of("effects").count(f"{key} 1") == 1
    assert f"{key} 2" not in server.lines_of("effects")


@pytest.mark.parametrize("kind", [UVICORN_ALONE, WAITRESS], ids=lambda kind: kind.name)
def test_a_response_that_breaks_off_is_found_later_and_nothing_runs_again(
    kind: Kind, tmp_path: Path
):
    """L2, L5, L11, L12: the client hangs up, or kill -9 comes, in the middle of the body."""
    server = Server(kind, tmp_path, "tests.server.mid_stream_app")
    for path in PARTS:
        Listener(server, f"left{path}", path).hang_up()
        assert_answered_without_running(server, f"left{path}", path)
    listeners = {path: Listener(server, f"killed{path}", path) for path in PARTS}
    server.kill()
    for path, listener in listeners.items():
        assert listener.read_to_its_end() < PARTS[path] * len(next(parts_of(path)))
    server.begin()
    for path in PARTS:
        for key in (f"left{path}", f"killed{path}"):
            assert_answered_without_running(server, key, path)
    server.close()
