"""Real servers and real sockets: what only shows when bytes travel.

What other middleware, streams and errors do there is in `test_traps.py`.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.http import Response
from tests.support.times import WAIT_S_MAX, eventually
from tests.support.web_servers import KINDS, WAITRESS, Kind, Server, in_two_processes, request_of


class Shop:
    """A server with the shop of the HTTP laws; its effects are in a file."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def post(self, key: str, path: str = "/orders", body: bytes = b"{}") -> Response:
        return self._server.post(key, path, body)

    def post_until_final(self, key: str, path: str = "/orders") -> Response:
        """Retry with the same key as long as the first request still runs."""
        deadline = time.monotonic() + WAIT_S_MAX
        while (response := self.post(key, path)).status == 409:
            assert response.code == "in-progress"
            assert time.monotonic() < deadline
        return response

    def effects(self, key: str) -> int:
        return sum(line.split()[1] == key for line in self._server.lines_of("effects"))

    def wait_for_effect(self, key: str) -> None:
        eventually(lambda: self.effects(key))

    def release(self, key: str) -> None:
        (self._server.directory / f"release-{key}").touch()


@pytest.fixture
def server(web_server: Server) -> Shop:
    return Shop(web_server)


NUMBERS = count()


@pytest.fixture
def key() -> str:
    return f"key-{next(NUMBERS)}"


# --- answers --------------------------------------------------------------------------------


def test_a_retry_gets_the_first_answer(server: Shop, key: str):
    """L1, L2: with fresh headers of its own message."""
    first, again = server.post(key), server.post(key)
    assert (first.status, again.status) == (201, 201)
    assert first.body == again.body
    assert again.is_replay
    assert len(first.all("set-cookie")) == 2
    assert again.all("set-cookie") == []
    assert len(again.all("date")) == 1
    assert again.header("content-length") == str(len(again.body))
    assert server.effects(key) == 1


def test_simultaneous_requests_have_one_effect(server: Shop, key: str):
    """L1: all but the last byte of each is there already when it is let go."""
    rounds = 3
    for number in range(rounds):
        name = f"{key}-{number}"
        answers = together(server, name, 20)
        assert {answer.status for answer in answers} <= {201, 409}
        assert len({answer.body for answer in answers if answer.status == 201}) == 1
        assert server.effects(name) == 1


def together(server: Shop, key: str, clients: int, path: str = "/orders") -> list[Response]:
    start = threading.Barrier(clients)
    whole = request_of("POST", path, f"Idempotency-Key: {key}\r\n", b"{}")

    def client(_number: int) -> Response:
        with closing(server.connect()) as connection:
            connection.send(whole[:-1])
            start.wait(WAIT_S_MAX)
            connection.send(whole[-1:])
            return connection.read()

    with ThreadPoolExecutor(clients) as threads:
        return list(threads.map(client, range(clients)))


def test_a_duplicate_waits_for_the_first_in_whatever_process(server: Shop, key: str):
    """L1, L3: with several processes, in another one."""
    if not server.kind.keeps_alive or server.kind.processes == 1:
        first_connection, second_connection = server.connect(), server.connect()
    else:
        first_connection, second_connection = in_two_processes(server)
    with (
        closing(first_connection),
        closing(second_connection),
        ThreadPoolExecutor(1) as threads,
    ):
        request = request_of("POST", "/slow", f"Idempotency-Key: {key}\r\n", b"{}")
        first_connection.send(request)
        server.wait_for_effect(key)
        second_connection.send(request)
        second = threads.submit(second_connection.read)
        server.release(key)
        first = first_connection.read()
        assert first.status == 201
        assert (second.result(WAIT_S_MAX).body, second.result().is_replay) == (first.body, True)
    assert server.effects(key) == 1


def test_an_answer_without_content_leaves_the_connection_in_order(server: Shop, key: str):
    """L2: 204 the first time and again."""
    request = request_of("POST", "/nothing", f"Idempotency-Key: {key}\r\n", b"{}")
    if not server.kind.keeps_alive:
        assert [server.post(key, "/nothing").status for _ in range(2)] == [204, 204]
        return
    with closing(server.connect()) as connection:
        for is_replay in (False, True):
            connection.send(request)
            response = connection.read()
            assert (response.status, response.is_replay) == (204, is_replay)
            assert response.all("content-length") in ([], ["0"])
            if response.header("connection") == "close":  # waitress keeps none that has no length
                assert connection.is_ended()
                return
        connection.send(request_of("GET", "/pid"))
        assert connection.read().status == 200


def test_a_large_body_reaches_the_handler_whole(server: Shop, key: str):
    """F1: three megabytes, spooled to disk on the way."""
    from hashlib import sha256

    body = os.urandom(3_000_000) + b"."
    first = server.post(key, body=body)
    assert json.loads(first.body)["sha256"] == sha256(body).hexdigest()
    assert server.post(key, body=body).is_replay
    assert server.post(key, body=body[:-1] + b"!").code == "key-reused"


# --- connections ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 60_000, 300_000])
def test_a_refused_request_does_not_spoil_its_connection(server: Shop, key: str, size: int):
    """K3: its body is unread; what follows is the next request, or the end of the connection."""
    body = b'{"filling": "%b"}' % (b"GET /evil HTTP/1.1\r\n\r\n" * (size // 22))
    with closing(server.connect()) as connection:
        connection.send(request_of("POST", "/orders", "Idempotency-Key: a,b\r\n", body))
        refused = connection.read()
        assert (refused.status, refused.code) == (400, "key-invalid")
        if server.kind.keeps_alive:
            try:
                connection.send(request_of("POST", "/orders", f"Idempotency-Key: {key}\r\n", b"{}"))
                assert connection.read().status == 201
            except ConnectionError:
                assert size > 65_536, "a small body is read away, and its connection kept"
    assert server.post(key).status == 201
    assert server.effects(key) == 1


def test_a_replayed_request_does_not_spoil_its_connection(server: Shop, key: str):
    """L2: ten of them on one connection."""
    if not server.kind.keeps_alive:
        assert len({server.post(key).body for _ in range(10)}) == 1
        return
    with closing(server.connect()) as connection:
        bodies = set()
        for _ in range(10):
            connection.send(request_of("POST", "/orders", f"Idempotency-Key: {key}\r\n", b"{}"))
            bodies.add(connection.read().body)
    assert len(bodies) == 1
    assert server.effects(key) == 1


@pytest.mark.parametrize("name", ["right", "wrong,"])
def test_a_client_that_waits_for_100_continue_is_served(server: Shop, key: str, name: str):
    """K3, L1: it gets 100 or its response at once; neither side waits for ever."""
    sent = key if name == "right" else name
    headers = f"Idempotency-Key: {sent}\r\nExpect: 100-continue\r\n"
    body = b'{"item": 1}'
    whole = request_of("POST", "/orders", headers, body)
    with closing(server.connect()) as connection:
        connection.send(whole[: -len(body)])
        if name == "right" and not sends_100(server):
            connection.send(body)
        response = connection.read()
        if response.status == 100:
            connection.send(body)
            response = connection.read()
    assert response.status == (201 if name == "right" else 400)
    assert server.effects(key) == (1 if name == "right" else 0)


def sends_100(server: Shop) -> bool:
    """All but wsgiref, whose HTTP/1.0 has no such thing: a client then sends without."""
    return server.kind.name != "wsgiref"


def chunked(key: str, *chunks: bytes, path: str = "/orders") -> bytes:
    head = request_of(
        "POST",
        path,
        f"Idempotency-Key: {key}\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n",
    )
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + body + b"0\r\n\r\n"


def test_a_chunked_request_is_the_same_however_it_is_cut(server: Shop, key: str):
    """F1: and the handler gets all of it."""
    if not server.kind.takes_chunks:
        return
    ways = [(b'{"item": 1}',), (b'{"it', b'em": ', b"1}"), (b"{", b'"item": 1}')]
    answers = []
    for way in ways:
        with closing(server.connect()) as connection:
            connection.send(chunked(key, *way))
            answers.append(connection.read())
    assert [answer.status for answer in answers] == [201] * 3
    assert [answer.is_replay for answer in answers] == [False, True, True]
    assert server.post(key, body=b'{"item": 1}').is_replay
    assert server.post(key, body=b'{"item": 2}').code == "key-reused"
    assert server.effects(key) == 1


# --- clients that leave ---------------------------------------------------------------------


def test_a_request_that_is_half_sent_does_not_hold_its_key(server: Shop, key: str):
    """L11: while it is open and after it is gone."""
    whole = request_of("POST", "/orders", f"Idempotency-Key: {key}\r\n", b'{"item": 1}')
    with closing(server.connect()) as half:
        half.send(whole[:-5])
        assert server.post(key, body=b'{"item": 1}').status == 201
        half.hang_up()
    again = server.post(key, body=b'{"item": 1}')
    assert again.is_replay
    assert server.effects(key) == 1


def test_a_request_that_breaks_off_runs_nothing(server: Shop, key: str):
    """L11: whatever was sent of it."""
    whole = request_of("POST", "/orders", f"Idempotency-Key: {key}\r\n", b'{"item": 1}')
    for sent in (len(whole) - 1, len(whole) - 10, len(whole) - 30, 10):
        connection = server.connect()
        connection.send(whole[:sent])
        connection.hang_up()
    assert server.post(key, body=b'{"item": 1}').status == 201
    assert server.effects(key) == 1


def test_a_client_that_leaves_during_the_work_finds_its_result_later(server: Shop, key: str):
    """L11."""
    connection = server.connect()
    connection.send(request_of("POST", "/slow", f"Idempotency-Key: {key}\r\n", b"{}"))
    server.wait_for_effect(key)
    connection.hang_up()
    server.release(key)
    answer = server.post_until_final(key, "/slow")
    assert (answer.status, answer.is_replay) == (201, True)
    assert server.effects(key) == 1


def test_a_client_that_leaves_at_any_moment_has_one_effect(server: Shop, key: str):
    """L11: from before the request is read to after the answer was sent."""
    pause = threading.Event()
    for number, moment_s in enumerate((0.0, 0.0, 0.001, 0.002, 0.005, 0.01)):
        name = f"{key}-{number}"
        connection = server.connect()
        connection.send(request_of("POST", "/orders", f"Idempotency-Key: {name}\r\n", b"{}"))
        pause.wait(moment_s)
        connection.hang_up()
        assert server.post_until_final(name).status == 201
        assert server.effects(name) == 1


# --- restarts -------------------------------------------------------------------------------


@contextmanager
def running(kind: Kind, directory: Path) -> Iterator[Shop]:
    server = Server(kind, directory, "tests.server.web_app")
    try:
        yield Shop(server)
    finally:
        server.close()


def test_what_was_completed_survives_a_restart(tmp_path: Path, key: str):
    """L1, L2: also of another kind of server, in both processes of an engine made before the fork."""
    threaded = next(kind for kind in KINDS if kind.name == "gunicorn-threads")
    with running(WAITRESS, tmp_path) as server:
        first = server.post(key)
    with running(threaded, tmp_path) as server:
        again = server.post(key)
        assert (again.body, again.is_replay) == (first.body, True)
        one, other = in_two_processes(server)
        with closing(one), closing(other):
            answers: list[Response] = []
            for number in range(20):
                for connection in (one, other):
                    headers = f"Idempotency-Key: both-{number}\r\n"
                    connection.send(request_of("POST", "/orders", headers, b"{}"))
                    answers.append(connection.read())
        assert {answer.status for answer in answers} == {201}
        assert sum(answer.is_replay for answer in answers) == 20
        assert server.effects(key) == 1
        assert all(server.effects(f"both-{number}") == 1 for number in range(20))
