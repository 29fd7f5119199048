"""The example of each broker runs against the real one, and prints what its page shows (E1)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.servers.kafka import kafka
from tests.support.servers.nats import nats_server
from tests.support.servers.rabbitmq import rabbitmq
from tests.support.servers.redis import redis_server
from tests.support.servers.sqs import sqs

ROOT = Path(__file__).parents[2]
# The environment of each example: where its broker is, and a queue of its own.
SETTINGS: dict[str, Callable[[], dict[str, str]]] = {
    "nats": lambda: {"NATS": nats_server().url, "QUEUE": nats_server().fresh_name()},
    "redis_streams": lambda: {"REDIS": redis_server().url, "QUEUE": "example"},
    "kafka": lambda: {"KAFKA": kafka().address, "QUEUE": kafka().fresh_name()},
    "kafka_offsets": lambda: {"KAFKA": kafka().address, "QUEUE": kafka().fresh_name()},
    "aiokafka": lambda: {"KAFKA": kafka().address, "QUEUE": kafka().fresh_name()},
    "sqs": lambda: {
        "AWS_ENDPOINT_URL": sqs().url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "eu-west-1",
    },
    "faststream": lambda: {"NATS": nats_server().url, "QUEUE": nats_server().fresh_name()},
    "rabbitmq": lambda: {"RABBITMQ": rabbitmq().url, "QUEUE": rabbitmq().fresh_name()},
}


@pytest.mark.parametrize("broker", SETTINGS)
def test_the_example_of_a_broker_prints_what_its_page_shows(broker, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"consumer_{broker}.py")],
        cwd=tmp_path,
        env={**os.environ, **SETTINGS[broker]()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    name = {"aiokafka": "kafka", "kafka_offsets": "kafka"}.get(broker, broker).replace("_", "-")
    page = (ROOT / "docs" / "howto" / f"{name}.md").read_text()
    assert f"\n```\n{done.stdout}```\n" in page
