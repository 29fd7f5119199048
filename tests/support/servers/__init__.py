"""Real servers for the tests: started by them, on private ports and in private directories.

A server is started when a test first asks for it, once for each process of the test run, and ends
with that process, also where that is killed: `watcher.py`. Where a program is missing, CI fails; on a laptop the tests of that one store
are left out, with one clear line, and a benchmark ends with it.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# 30 s: many times what any of them needs to start on a busy machine.
START_S_MAX = 30
MEMORY = "/dev/shm"
# 1 GiB: several times what all of them take together.
ROOM_BYTES = 1 << 30
MARK = "COATCHECK_TESTS"
WATCHER = Path(__file__).with_name("watcher.py")


def mark() -> str:
    """What marks the processes and directories of this process; they end when it has ended."""
    return _mark_of(os.getpid())


@cache
def _mark_of(pid: int) -> str:
    mark = f"{pid}-{secrets.token_hex(4)}"
    # -I, -S: it needs only the standard library, and starts in a third of the time.
    command = [sys.executable, "-I", "-S", str(WATCHER), str(pid), mark]
    os.posix_spawn(
        sys.executable,
        [*command, MEMORY, tempfile.gettempdir()],
        {name: value for name, value in os.environ.items() if name != MARK},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
        ],
        setsid=True,  # what ends all processes of a terminal does not end it
    )
    os.environ[MARK] = mark
    return mark


def find_program(name: str, *places: str, package: str) -> str:
    """The path of a server's program, which Debian may keep in one of *places*."""
    found = shutil.which(name, path=os.pathsep.join([*places, os.environ.get("PATH", "")]))
    if found is None:
        missing(f"{name} is not installed: apt-get install {package}")
    return found


def missing(message: str) -> None:
    """A server cannot be had."""
    pytest = sys.modules.get("pytest")
    if pytest is None:  # a benchmark
        raise SystemExit(message)
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def _has_room(directory: str) -> bool:
    return os.access(directory, os.W_OK) and shutil.disk_usage(directory).free > ROOM_BYTES


def free_port() -> int:
    """A port of the loopback that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def until(look: Callable[[], T]) -> T:
    """Look again and again, for as long as a server may take to start; what was found."""
    deadline = time.monotonic() + START_S_MAX
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not become so"
        time.sleep(0.01)
    return found


def reserve_port() -> tuple[socket.socket, int]:
    """A socket, and the port that is reserved for a server of ours while the socket is open.

    The system gives the port to nobody else, also while the server starts and after it was killed.
    The server can listen on it, because this socket does not, and both have SO_REUSEADDR.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port: int = reserved.getsockname()[1]
    if sys.platform != "linux":  # elsewhere only one socket can be bound to a port
        reserved.close()
    return reserved, port


class Server:
    """A process of a server, its directory and its port; it may be killed and started again."""

    def __init__(self, name: str, user: str = "", *, on_disk: bool = False) -> None:
        self.name = name
        # As root, some servers need another user.
        self.user = user if user and os.getuid() == 0 else ""
        # In memory where that can be: the laws commit thousands of times, and are not about disks.
        parent = None if on_disk or not _has_room(MEMORY) else MEMORY
        self.directory = Path(tempfile.mkdtemp(prefix=f"coatcheck-{name}-{mark()}-", dir=parent))
        if self.user:
            shutil.chown(self.directory, self.user)
        self._reserved, self.port = reserve_port()
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.remove)

    def run(self, command: Sequence[str | Path]) -> None:
        """Run a program to its end, as the server's user; it must succeed."""
        done = subprocess.run(
            self._as_user(command), cwd=self.directory, capture_output=True, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr).decode()

    def launch(
        self,
        command: Sequence[str | Path],
        is_ready: Callable[[], bool],
        *,
        within_s: float = START_S_MAX,
    ) -> None:
        """Start the server, and wait until it answers."""
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._as_user(command), cwd=self.directory, stdout=log, stderr=log
            )
        deadline = time.monotonic() + within_s
        while not is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.stderr.write(self.log())
                raise AssertionError(f"{self.name} did not start")
            time.sleep(0.02)

    def start(self) -> None:
        """Start it, again where it has ended."""
        raise NotImplementedError

    def restart(self) -> None:
        """Start it again, as soon as what is left of the old one knows that it is dead."""
        deadline = time.monotonic() + START_S_MAX
        while True:
            try:
                self.start()
            except AssertionError:
                assert time.monotonic() < deadline, f"{self.name} does not come back"
                time.sleep(0.02)
            else:
                return

    def _as_user(self, command: Sequence[str | Path]) -> list[str]:
        words = [str(word) for word in command]
        if not self.user:
            return words
        return ["setpriv", "--reuid", self.user, "--regid", self.user, "--clear-groups", *words]

    def log(self) -> str:
        """What it has said so far."""
        return (self.directory / "log").read_text(errors="replace")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop it, and its children, which may be its sessions, until the end of the `with`."""
        assert self.process is not None
        pids = [self.process.pid, *children_of(self.process.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """
        Send a signal to it, and wait until it has stopped, or has ended.

        Its children, which a server may have one of for each session, notice that a moment later,
        and would still answer; except for those that were stopped.
        """
        assert self.process is not None
        children = children_of(self.process.pid)
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            until(lambda: _state_of(self.process.pid) in _STOPPED)
        elif number != signal.SIGCONT:
            self.process.wait()
            until(lambda: all(_state_of(pid) in _STOPPED for pid in children))

    def remove(self) -> None:
        """End it, and leave nothing behind."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        self._reserved.close()
        shutil.rmtree(self.directory, ignore_errors=True)


# Of a process, as the system shows it: stopped, ended and not yet taken note of, or gone.
_STOPPED = ("T", "t", "Z", "X", "")


def _state_of(pid: int) -> str:
    return _status_of(pid).partition(" ")[0]


def children_of(pid: int) -> list[int]:
    """The processes that *pid* has started, and that still run."""
    others = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [other for other in others if _status_of(other).split(" ")[1:2] == [str(pid)]]


def _status_of(pid: int) -> str:
    """Its state, its parent and so on; nothing where it is gone, or where the system has no such."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except OSError:
        return ""
