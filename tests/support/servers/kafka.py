"""Kafka: librdkafka's mock cluster, or a real broker; each test has topics of its own.

`make test-kafka` sets COATCHECK_KAFKA to a directory with the jars of Apache Kafka.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import uuid
from base64 import urlsafe_b64encode
from functools import cache
from itertools import count
from pathlib import Path

from tests.support.servers import Server, find_program, free_port

STAND_IN = Path(__file__).with_name("kafka_stand_in.py")


JARS = os.environ.get("COATCHECK_KAFKA")


class KafkaStandIn(Server):
    """A process with a mock cluster; it forgets all when it ends."""

    # 1 s: how soon it notices that a consumer has died.
    session_ms = 1_000

    def __init__(self) -> None:
        super().__init__("kafka")
        self._numbers = count()
        self.start()

    @property
    def address(self) -> str:
        """For `bootstrap.servers`."""
        return (self.directory / "address").read_text()

    def fresh_name(self) -> str:
        """The name of a topic that does not exist yet."""
        return f"orders-{os.getpid()}-{next(self._numbers)}"

    def start(self) -> None:
        """Start it, again where it has ended."""
        address = self.directory / "address"
        address.unlink(missing_ok=True)
        # -P: its neighbours here are called as packages are that it wants to import.
        self.launch([sys.executable, "-P", STAND_IN, address], self._is_ready)

    def _is_ready(self) -> bool:
        path = self.directory / "address"
        return path.exists() and ":" in path.read_text()


class Kafka(KafkaStandIn):
    """Apache Kafka, one node that is broker and controller."""

    def __init__(self, jars: str) -> None:
        self._java = find_program("java", package="default-jre-headless")
        self._jars = jars
        self._controller_port = free_port()
        super().__init__()

    @property
    def address(self) -> str:
        """For `bootstrap.servers`."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, again where it has ended."""
        properties = self.directory / "properties"
        data = self.directory / "data"
        shutil.rmtree(data, ignore_errors=True)
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "listeners": (
                f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self._controller_port}"
            ),
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": data,
            "num.partitions": 4,
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 4,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "group.initial.rebalance.delay.ms": 100,
            "group.min.session.timeout.ms": self.session_ms,
        }
        properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        java = [self._java, "-Xmx512m", "-cp", f"{self._jars}/*"]
        self.run([*java, "kafka.tools.StorageTool", "format", "-t", id, "-c", properties])
        self.launch([*java, "kafka.Kafka", properties], self._is_ready)

    def _is_ready(self) -> bool:
        if "Kafka Server started" not in self.log():
            return False
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@cache
def kafka() -> KafkaStandIn:
    """The broker of this process."""
    return Kafka(JARS) if JARS else KafkaStandIn()
