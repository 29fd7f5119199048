"""RabbitMQ, in a directory of the tests' own; each test has queues of its own."""

from __future__ import annotations

import os
import signal
import socket
from functools import cache
from itertools import count

from tests.support.servers import Server, children_of, find_program, free_port

PLACES = ("/usr/lib/rabbitmq/bin", "/usr/sbin")


class Names(Server):
    """The service by which nodes of Erlang find each other."""

    def __init__(self) -> None:
        self._program = find_program("epmd", package="erlang-base")
        super().__init__("epmd")
        self.start()

    def start(self) -> None:
        """Start it, again where it has ended."""
        command = [self._program, "-address", "127.0.0.1", "-port", str(self.port)]
        self.launch(command, lambda: is_open(self.port))


def is_open(port: int) -> bool:
    """A server accepts connections on *port* of the loopback."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


class RabbitMQ(Server):
    """One node, which no other node and no command line tool talks to."""

    def __init__(self) -> None:
        self._program = find_program("rabbitmq-server", *PLACES, package="rabbitmq-server")
        super().__init__("rabbitmq", user="rabbitmq")
        self._numbers = count()
        self._distribution_port = free_port()
        self._names = Names()  # or RabbitMQ would start one that outlives the tests
        self.start()

    @property
    def url(self) -> str:
        """For aio-pika."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def fresh_name(self) -> str:
        """The name of a queue that does not exist yet."""
        return f"orders-{os.getpid()}-{next(self._numbers)}"

    def start(self) -> None:
        """Start it, again where it has ended."""
        (self.directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            "loopback_users = none\nvm_memory_high_watermark.absolute = 1GB\n"
            "disk_free_limit.absolute = 50MB\n"
        )
        settings = {
            "HOME": self.directory,
            "ERL_EPMD_PORT": self._names.port,
            "RABBITMQ_NODENAME": f"coatcheck{self.port}@localhost",
            "RABBITMQ_DIST_PORT": self._distribution_port,
            "RABBITMQ_MNESIA_BASE": self.directory / "data",
            "RABBITMQ_LOG_BASE": self.directory / "logs",
            "RABBITMQ_CONFIG_FILE": self.directory / "rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.directory / "enabled_plugins",
            "RABBITMQ_PID_FILE": self.directory / "pid",
        }
        words = [f"{name}={value}" for name, value in settings.items()]
        # 50 s: Erlang computes for some seconds before it answers, and the machine may be busy.
        self.launch(["env", *words, self._program], self._is_ready, within_s=50)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to Erlang, which a shell waits for, and wait until both have ended."""
        assert self.process is not None
        for pid in children_of(self.process.pid):
            os.kill(pid, number)
        self.process.wait()

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return bool(connection.recv(1))
        except OSError:
            return False


@cache
def rabbitmq() -> RabbitMQ:
    """The server of this process."""
    return RabbitMQ()
