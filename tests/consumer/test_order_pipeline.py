"""The order pipeline of the examples is killed in a loop, and its ledger adds up (E1, E5)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.consumer.law import IS_LONG
from tests.support.servers import free_port
from tests.support.servers.rabbitmq import rabbitmq

ROOT = Path(__file__).parents[2]
# 50 s more than the pipeline: until RabbitMQ has started.
START_S_MAX = 50
# How many orders and kills: in `make test-faults`, and in `make test`; and how long they may take.
ORDERS, KILLS, WITHIN_S = (100, 20, 280) if IS_LONG else (8, 2, 90)


def run_to_its_end(command, settings):
    """Its exit status and what it printed; none of its processes outlives it."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=WITHIN_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, printed


@pytest.mark.timeout(WITHIN_S + START_S_MAX)
def test_each_order_is_placed_charged_and_shipped_once_whatever_is_killed(tmp_path):
    server = rabbitmq()
    settings = {
        "RABBITMQ": server.url,
        "QUEUE": server.fresh_name(),
        "PIPELINE": str(tmp_path),
        "PORT": str(free_port()),
    }
    words = ["--orders", str(ORDERS), "--kills", str(KILLS)]
    status, printed = run_to_its_end(
        [sys.executable, "-m", "examples.order_pipeline", *words], settings
    )
    assert status == 0, printed
    lines = [line.split() for line in printed.splitlines()]
    assert [len(line) for line in lines if line[:1] == ["killed:"]] == [1 + KILLS]
    refused = ORDERS // 5
    for name, count in {
        "orders placed": ORDERS,
        "events handled": ORDERS,
        "charged": ORDERS,
        "refunded": refused,
        "shipped": ORDERS - refused,
        "dead letters": 0,
    }.items():
        assert [*name.split(), str(count)] in lines
    assert lines[-1] == ["the", "ledger", "adds", "up"]
