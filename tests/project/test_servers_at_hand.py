"""Tests and benchmarks get the servers they need, or one clear line."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_SUCH = 'from tests.support import servers; servers.find_program("no-such-server", package="no-such-package")'


def test_a_benchmark_reports_what_is_not_installed_without_pytest():
    hidden = f"import sys; sys.modules['pytest'] = None; {NO_SUCH}"
    done = subprocess.run(
        [sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "no-such-server is not installed: apt-get install no-such-package\n"


def test_every_target_that_starts_servers_installs_them_first():
    makefile = (ROOT / "Makefile").read_text()
    needs = dict(re.findall(r"^(test|test-faults|bench): (.*?) ##", makefile, re.MULTILINE))
    assert sorted(needs) == ["bench", "test", "test-faults"]
    assert [name for name, needed in needs.items() if "$(VENV)/.servers" not in needed] == []


# Of `make test-kafka` and `make test-dynamodb`, which say so; and what comes with RabbitMQ.
NOT_LISTED = {"default-jre-headless", "erlang-base"}


def test_every_server_that_tests_start_is_installed():
    makefile = (ROOT / "Makefile").read_text()
    (listed,) = re.findall(r"^SERVERS := (.*)$", makefile, re.MULTILINE)
    texts = [path.read_text() for path in (ROOT / "tests" / "support" / "servers").glob("*.py")]
    named = {name for text in texts for name in re.findall(r'package="([\w-]+)"', text)}
    assert {"postgresql", "nats-server"} <= named
    assert named - set(listed.split()) == NOT_LISTED
