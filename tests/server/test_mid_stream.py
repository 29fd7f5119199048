"""An answer that breaks off on its way: its record was safe before the first byte left (L2, L11).

Real servers and real sockets. The client reads the head and a little of the body, and no more; so
most of it is still in the server when the client hangs up, or the server is killed.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.mid_stream_app import PARTS, parts_of

HERE = Path(__file__).resolve().parent
COMMANDS = {
    "asgi": [
        sys.executable,
        "-m",
        "uvicorn",
        "--factory",
        "tests.server.mid_stream_app:asgi_app",
        "--fd={fd}",
    ],
    "wsgi": [sys.executable, str(HERE / "mid_stream_app.py"), "{fd}"],
}
# 20 s: a hundred times what any of these waits takes; past it something hangs, and says so.
WAIT_S_MAX = 20.0
HEAD_BYTES = 1024


class Server:
    """A server in a process of its own, which can be killed and begun again."""

    def __init__(self, flavour: str, directory: Path) -> None:
        self.flavour = flavour
        self.directory = directory
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listening.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start it, again where it was killed."""
        fd = self._listening.fileno()
        path = os.pathsep.join([str(HERE), *sys.path])
        environ = {**os.environ, "PYTHONPATH": path, "STREAM_DIRECTORY": str(self.directory)}
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [word.format(fd=fd) for word in COMMANDS[self.flavour]],
                env=environ,
                pass_fds=[fd],
                stdout=log,
                stderr=log,
            )
        with httpx.Client(base_url=self.address, timeout=WAIT_S_MAX) as client:
            assert client.get("/pid").text == str(self._process.pid), self.log()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        """What it has said."""
        return (self.directory / "log").read_text()

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send it the signal, and wait for its end."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(WAIT_S_MAX)

    def close(self) -> None:
        """End it, if it is not."""
        if self._process is not None and self._process.poll() is None:
            self.end(signal.SIGKILL)
        self._listening.close()

    def post(self, path: str) -> httpx.Response:
        """Ask for it, whole."""
        with httpx.Client(base_url=self.address, timeout=WAIT_S_MAX) as client:
            return client.post(path, headers={"Idempotency-Key": "k"})

    def effects(self) -> list[str]:
        """What has been executed."""
        return (self.directory / "effects").read_text().splitlines()


class Listener:
    """A client that has read the beginning of its answer, and reads no more."""

    def __init__(self, server: Server, path: str) -> None:
        self._socket = socket.socket()
        self._socket.settimeout(WAIT_S_MAX)
        # Small, and before it connects: what it does not read stays with the server.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HEAD_BYTES)
        self._socket.connect(("127.0.0.1", server.port))
        self._socket.sendall(
            f"POST {path} HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: k\r\n"
            "Content-Length: 0\r\n\r\n".encode()
        )
        self.said = self._socket.recv(HEAD_BYTES)

    def hang_up(self) -> None:
        """Go at once: the server gets a reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def read_to_its_end(self) -> int:
        """How many bytes there were, until the connection broke off."""
        count = len(self.said)
        try:
            while chunk := self._socket.recv(65_536):
                count += len(chunk)
        except ConnectionResetError:
            pass
        self._socket.close()
        return count


@pytest.fixture(params=COMMANDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    server = Server(request.param, tmp_path)
    server.begin()
    yield server
    server.close()


def begin_to_read(server: Server, path: str) -> Listener:
    listener = Listener(server, path)
    assert listener.said.startswith(b"HTTP/1.1 201"), server.log()
    return listener


def assert_answered_without_running(server: Server, path: str) -> None:
    """What is kept is there whole; what is not kept is said to be done, and nothing runs."""
    retried = server.post(path)
    if path == "/streamed":
        assert (retried.status_code, retried.json()["code"]) == (409, "result-unavailable")
        assert retried.json()["retry"] == "never"
    else:
        assert retried.status_code == 201
        assert retried.headers["Idempotent-Replayed"] == "true"
        assert retried.content == b"".join(parts_of(path))
    assert server.effects() == ["k 1"]


@pytest.mark.parametrize("path", PARTS)
def test_a_process_that_is_killed_while_its_answer_leaves_has_done_it(server: Server, path: str):
    """L2, L5, L12: kill -9 in the middle of the body; the retry waits for no lease."""
    listener = begin_to_read(server, path)
    server.end(signal.SIGKILL)
    assert listener.read_to_its_end() < PARTS[path] * len(next(parts_of(path)))
    server.begin()
    assert_answered_without_running(server, path)


@pytest.mark.parametrize("path", PARTS)
def test_a_client_that_leaves_while_its_answer_comes_finds_it_later(server: Server, path: str):
    """L2, L11, L12: in the process that still has it in memory, and in the next one."""
    begin_to_read(server, path).hang_up()
    assert_answered_without_running(server, path)
    server.end(signal.SIGKILL)
    server.begin()
    assert_answered_without_running(server, path)
