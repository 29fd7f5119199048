"""Servers and other processes end with the test process that has started them, even by SIGKILL."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import MEMORY, until
from tests.support.servers.watcher import marked_with

ROOT = Path(__file__).parents[2]
START = """
import sys
from tests.support import servers
print(servers.mark(), flush=True)
{start}
print("started", flush=True)
sys.stdin.read()
"""
STARTS = {
    "postgres": "from tests.support.servers.postgres import postgres; postgres()",
    "redis": "from tests.support.servers.redis import redis_server; redis_server()",
    "rabbitmq": "from tests.support.servers.rabbitmq import rabbitmq; rabbitmq()",
    "any program": "import subprocess; process = subprocess.Popen(['sleep', '600'])",
}


# 180 s: Erlang alone may take 50 s to start on a busy machine.
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", STARTS)
def test_what_a_test_process_has_started_ends_when_that_is_killed(name):
    command = [sys.executable, "-c", START.format(start=STARTS[name])]
    owner = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        mark = owner.stdout.readline().strip()
        assert owner.stdout.readline() == "started\n"
        assert len(marked_with(mark)) > 1  # the watcher, and what was started
        assert bool(directories_of(mark)) == (name != "any program")
        owner.kill()
    until(lambda: marked_with(mark) == [] and directories_of(mark) == [])


def directories_of(mark):
    return [path.name for path in Path(MEMORY).iterdir() if mark in path.name]
