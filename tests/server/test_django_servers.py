"""Django on real servers: gunicorn, uvicorn and runserver, hang-ups, `kill -9` and a wrong start."""

import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from tests.support.times import WAIT_S_MAX, eventually
from tests.support.web_servers import KINDS, ROOT, UVICORN_ALONE, Kind, Server, request_of

SLOW = ("/slow", "/slow-async", "/transaction")
APP = "tests.server.django_app"
UVICORN, GUNICORN = KINDS[0], KINDS[2]
RUNSERVER = Kind("runserver", [sys.executable, "-m", APP, "{fd}"])


@pytest.fixture(scope="module", params=[GUNICORN, UVICORN, RUNSERVER], ids=lambda kind: kind.name)
def server(request, tmp_path_factory):
    server = Server(request.param, tmp_path_factory.mktemp("django"), APP)
    yield server
    server.close()
    log = server.log()
    assert "Traceback" not in log, log


def post_until_final(server, key, path):
    """What a client gets that retries while the work goes on."""
    while (answer := server.post(key, path)).status == 409:
        assert answer.code == "in-progress"
    return answer


def rows(server) -> list[str]:
    with closing(sqlite3.connect(server.directory / "orders.db")) as connection:
        return [name for (name,) in connection.execute("select name from orders")]


def effects(server, key) -> int:
    return sum(line.endswith(f" {key}") for line in server.lines_of("effects"))


def test_a_server_with_several_processes_executes_once(server):
    """L1, K3: in record mode and in transaction mode."""
    (server.directory / "release-k-2").touch()
    for key, path in (("k-1", "/orders"), ("k-2", "/transaction")):
        responses = [server.post(key, path) for _ in range(5)]
        assert {(one.status, one.body) for one in responses} == {(201, b"placed")}, server.log()
        assert [one.is_replay for one in responses] == [False, *[True] * 4]
        assert effects(server, key) == 1
    assert "k-2" in rows(server)
    assert server.exchange("POST", "/orders").code == "key-missing"
    assert server.post("k-1", "/orders", b'{"other": 1}').code == "key-reused"


def test_a_client_that_hangs_up_does_not_stop_the_work(server):
    """L11: Django cancels the request under ASGI, but not the work."""
    for path in SLOW:  # one after the other: SQLite has one writer at a time
        key = f"left{path.replace('/', '-')}"
        connection = server.connect()
        connection.send(request_of("POST", path, f"Idempotency-Key: {key}\r\n", b"{}"))
        eventually(lambda key=key: effects(server, key))
        connection.hang_up()
        (server.directory / f"release-{key}").touch()
        answer = post_until_final(server, key, path)
        assert (answer.status, answer.body, answer.is_replay) == (201, b"placed", True)
        assert effects(server, key) == 1


@pytest.mark.parametrize("kind", [GUNICORN, UVICORN_ALONE], ids=lambda kind: kind.name)
def test_kill_9_in_a_transaction_leaves_nothing_and_the_retry_runs(tmp_path, kind):
    """L9, L5: there is no lease to wait for."""
    server = Server(kind, tmp_path, APP)
    connection = server.connect()
    connection.send(request_of("POST", "/transaction", "Idempotency-Key: k-1\r\n", b"{}"))
    eventually(lambda: effects(server, "k-1"))
    server.kill()
    connection.close()
    assert rows(server) == []
    (tmp_path / "release-k-1").touch()
    server.begin()
    answer = server.post("k-1", "/transaction")
    assert (answer.status, answer.is_replay) == (201, False)
    assert (rows(server), effects(server, "k-1")) == (["k-1"], 2)
    server.close()


@pytest.mark.parametrize("kind", [GUNICORN, UVICORN_ALONE], ids=lambda kind: kind.name)
def test_a_mistake_in_the_settings_stops_the_server(tmp_path, kind):
    """D2: before it listens."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "SHOP_DIRECTORY": str(tmp_path),
        "SHOP_FLAVOUR": kind.flavour,
        "SHOP_STORE": "defualt",
    }
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        fd = listening.fileno()
        ended = subprocess.run(
            [word.format(fd=fd, app=APP) for word in kind.command],
            env=environ,
            pass_fds=[fd],
            capture_output=True,
            text=True,
            timeout=WAIT_S_MAX,
            check=False,
        )
    assert ended.returncode != 0
    assert "did you mean default?" in ended.stderr
