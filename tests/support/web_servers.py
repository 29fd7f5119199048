"""Real HTTP servers, and clients that speak to them in bytes.

Each server runs in processes of its own, on a listening socket of the tests' own. What a server
cannot do is in its `Kind`, and the tests then say what happens instead.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from tests.support.http import Response
from tests.support.times import WAIT_S_MAX

ROOT = Path(__file__).resolve().parents[2]
UVICORN = [sys.executable, "-m", "uvicorn", "{app}:asgi_app", "--no-access-log"]
GUNICORN = [sys.executable, "-m", "gunicorn", "{app}:wsgi_app", "--preload", "--workers=2"]
# 5 s: its workers wait so long for connections that clients keep alive; by default 30 s.
GUNICORN += ["--graceful-timeout=5"]
OWN = [sys.executable, "-m", "tests.support.servers.wsgi"]


class Kind(NamedTuple):
    """A server, and what it can do."""

    name: str
    command: list[str]
    flavour: str = "wsgi"
    keeps_alive: bool = True
    takes_chunks: bool = True
    processes: int = 1


UVICORN_ALONE = Kind("uvicorn", [*UVICORN, "--fd={fd}"], "asgi")
HYPERCORN = Kind(
    "hypercorn",
    [sys.executable, "-m", "hypercorn", "{app}:asgi_app", "--bind=fd://{fd}"],
    "asgi",
)
WAITRESS = Kind("waitress", [*OWN, "waitress", "{fd}", "{app}:wsgi_app"])
KINDS = (
    Kind("uvicorn", [*UVICORN, "--workers=2", "--fd={fd}"], "asgi", processes=2),
    Kind("gunicorn-sync", [*GUNICORN, "--bind=fd://{fd}"], keeps_alive=False, processes=2),
    Kind(
        "gunicorn-threads",
        [*GUNICORN, "--bind=fd://{fd}", "--worker-class=gthread", "--threads=8"],
        processes=2,
    ),
    WAITRESS,
    Kind(
        "wsgiref",
        [*OWN, "wsgiref", "{fd}", "{app}:wsgi_app"],
        keeps_alive=False,
        takes_chunks=False,
    ),
)


class Server:
    """A server that runs the application of the module *app*; it can be killed and begun again."""

    def __init__(self, kind: Kind, directory: Path, app: str, **environ: str) -> None:
        self.kind = kind
        self.directory = directory
        self._app = app
        self._environ = environ
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listening.getsockname()[1]
        self.begin()

    def begin(self) -> None:
        """Start it, and wait until it answers."""
        fd = self._listening.fileno()
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "SHOP_DIRECTORY": str(self.directory),
            "SHOP_FLAVOUR": self.kind.flavour,
            **self._environ,
        }
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [word.format(fd=fd, app=self._app) for word in self.kind.command],
                env=environ,
                pass_fds=[fd],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            assert self.exchange("GET", "/pid").status == 200
        except BaseException:
            self.kill()
            self.close()
            sys.stderr.write(self.log())
            raise

    def kill(self) -> None:
        """kill -9, all of its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT_S_MAX)

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def lines_of(self, name: str) -> list[str]:
        """What the application has written into its file *name*."""
        file = self.directory / name
        return file.read_text().splitlines() if file.exists() else []

    def close(self) -> None:
        """Ask it to end, as an operator does; it must obey soon."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(WAIT_S_MAX)
        finally:
            self._listening.close()

    def connect(self) -> "Connection":
        return Connection(self.port)

    def exchange(self, method: str, path: str, headers: str = "", body: bytes = b"") -> Response:
        with closing(self.connect()) as connection:
            connection.send(request_of(method, path, headers, body))
            return connection.read()

    def post(self, key: str, path: str, body: bytes = b"{}", headers: str = "") -> Response:
        return self.exchange("POST", path, f"Idempotency-Key: {key}\r\n{headers}", body)


def request_of(method: str, path: str, headers: str = "", body: bytes = b"") -> bytes:
    """A whole request; without a length where there is no body."""
    length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: shop.example\r\n{length}{headers}\r\n"
    return head.encode("latin-1") + body


class BrokenOff(ConnectionError):
    """The connection has ended, and the response had not."""


class Connection:
    """A raw connection, read as HTTP/1.1 says."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), WAIT_S_MAX)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def read(self, *, has_body: bool = True) -> Response:
        """The next response, whole; one to HEAD has no body, whatever its headers say."""
        response = self.read_head()
        return response._replace(body=b"".join(self.parts_of(response)) if has_body else b"")

    def read_head(self) -> Response:
        status_line = self._file.readline()
        if not status_line:
            raise ConnectionResetError("the server has closed the connection")
        assert status_line.startswith(b"HTTP/1."), status_line
        status = int(status_line.split()[1])
        headers: list[tuple[str, str]] = []
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers.append((name.lower(), value.strip()))
        return Response(status, headers, b"")

    def parts_of(self, response: Response) -> Iterator[bytes]:
        """The body of *response*, as it comes."""
        if response.status in (100, 204, 304):
            return
        if response.header("transfer-encoding") == "chunked":
            while size := int(self._line(), 16):
                yield from self._bytes(size)
                self._line()
            self._line()
            return
        length = response.header("content-length")
        if length is not None:
            yield from self._bytes(int(length))
            return
        while part := self._file.read1():
            yield part

    def _line(self) -> bytes:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise BrokenOff
        return line

    def _bytes(self, left: int) -> Iterator[bytes]:
        while left:
            part = self._file.read1(left)
            if not part:
                raise BrokenOff
            left -= len(part)
            yield part

    def is_ended(self) -> bool:
        """The server has closed it; nothing more was said."""
        return self._file.read(1) == b""

    def hang_up(self) -> None:
        """Go at once, without a farewell: the server gets a reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def in_two_processes(server: Server) -> tuple[Connection, Connection]:
    """Two connections that are kept by two different workers."""
    found: dict[bytes, Connection] = {}
    deadline = time.monotonic() + WAIT_S_MAX
    while len(found) < 2:
        assert time.monotonic() < deadline, "one worker took every connection"
        connection = server.connect()
        connection.send(request_of("GET", "/pid"))
        pid = connection.read().body
        if pid in found:
            connection.close()
        found.setdefault(pid, connection)
    one, other = found.values()
    return one, other
