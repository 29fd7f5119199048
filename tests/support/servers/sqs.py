"""SQS: moto's server, or ElasticMQ; each test has queues of its own.

`make test-sqs` sets COATCHECK_ELASTICMQ to a directory with the jars of ElasticMQ.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from functools import cache
from itertools import count
from typing import Any

import boto3

from tests.support.servers import Server, find_program

KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "eu-west-1"}

JARS = os.environ.get("COATCHECK_ELASTICMQ")
# 60 s: a Java program with a hundred jars, on a busy machine.
START_S_OF_JAVA = 60


class Moto(Server):
    """The server of moto; it forgets all when it ends."""

    def __init__(self) -> None:
        super().__init__("sqs")
        self._numbers = count()
        self.start()

    @property
    def url(self) -> str:
        """For `endpoint_url`."""
        return f"http://127.0.0.1:{self.port}"

    def resource(self) -> Any:
        """A resource of boto3."""
        return boto3.resource("sqs", endpoint_url=self.url, **KEYS)

    def fresh_queues(self, *, is_fifo: bool = False, **attributes: str) -> tuple[Any, Any]:
        """A queue, and that for its dead letters."""
        end = ".fifo" if is_fifo else ""
        name = f"orders-{os.getpid()}-{next(self._numbers)}"
        fifo = {"FifoQueue": "true"} if is_fifo else {}
        resource = self.resource()
        letters = resource.create_queue(QueueName=f"{name}-dead-letters{end}", Attributes=fifo)
        arn = letters.attributes["QueueArn"]
        policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "1000"})
        queue = resource.create_queue(
            QueueName=f"{name}{end}", Attributes={"RedrivePolicy": policy, **fifo, **attributes}
        )
        return queue, letters

    def start(self) -> None:
        """Start it, again where it has ended."""
        where = ["-H", "127.0.0.1", "-p", str(self.port)]
        self.launch([sys.executable, "-m", "moto.server", *where], self._is_ready)

    def _is_ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class ElasticMq(Moto):
    """ElasticMQ, with its queues in memory and the limits of SQS."""

    def __init__(self, jars: str) -> None:
        self._java = find_program("java", package="default-jre-headless")
        self._jars = jars
        super().__init__()

    def start(self) -> None:
        """Start it, again where it has ended."""
        settings = {
            "rest-sqs.bind-hostname": "127.0.0.1",
            "rest-sqs.bind-port": self.port,
            "rest-sqs.sqs-limits": "strict",
            "node-address.host": "127.0.0.1",  # in the URLs of queues
            "node-address.port": self.port,
        }
        given = [f"-D{name}={value}" for name, value in settings.items()]
        command = [self._java, "-Xmx512m", *given, "-cp", f"{self._jars}/*"]
        self.launch(
            [*command, "org.elasticmq.server.Main"], self._is_ready, within_s=START_S_OF_JAVA
        )


@cache
def sqs() -> Moto:
    """The server of this process."""
    return ElasticMq(JARS) if JARS else Moto()
