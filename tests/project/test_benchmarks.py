"""What the benchmarks measure with; what they measure is theirs to say."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BURN = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_the_processor_time_of_another_process_is_known_to_less_than_a_tick(benchmarks):
    processor_s = benchmarks("machine").processor_s
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()
        used_s = processor_s(process.pid)
        process.communicate(b"\n")
    assert 0.2 <= used_s < 1
    assert round(used_s, 2) != used_s


class Made:
    def __init__(self):
        self.is_there = True

    def remove(self):
        self.is_there = False


def test_quick_questions_share_a_server_and_others_have_their_own(benchmarks):
    server_for = benchmarks("servers").server_for
    with server_for(Made, quick=True) as first, server_for(Made, quick=False) as own:
        pass
    with server_for(Made, quick=True) as second:
        assert second is first
    assert (first.is_there, own.is_there) == (True, False)
