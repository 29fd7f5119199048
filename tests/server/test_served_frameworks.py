"""Every framework in a server process of its own, with a store on disk, which is killed.

What servers do to requests is in the laws that are marked `served`, and what they do to the
middlewares themselves in `test_real_servers.py`.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.http import Response
from tests.support.times import WAIT_S_MAX, eventually
from tests.support.web_servers import HYPERCORN, KINDS, UVICORN_ALONE, WAITRESS, Kind, Server

(GUNICORN,) = (kind for kind in KINDS if kind.name == "gunicorn-threads")
SERVED: list[tuple[str, Kind]] = [
    ("fastapi", UVICORN_ALONE),
    ("fastapi", HYPERCORN),
    ("litestar", UVICORN_ALONE),
    ("litestar", HYPERCORN),
    ("flask", GUNICORN),
    ("flask", WAITRESS),
]
COAT, HAT, WRONG = b'{"item": "coat"}', b'{"item": "hat"}', b'{"item": 17}'


@pytest.fixture(params=SERVED, ids=lambda one: f"{one[0]}-{one[1].name}")
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    framework, kind = request.param
    server = Server(kind, tmp_path, "tests.server.served_frameworks", SHOP_FRAMEWORK=framework)
    yield server
    server.close()
    assert "Traceback" not in server.log()


def test_a_framework_keeps_the_laws_behind_its_server(server: Server):
    """L1, L2, L3, L4, K3, R2: one server for all of them, because it takes a while to start."""
    executes_once_and_replays(server)
    refuses_other_requests(server)
    a_refusal_before_the_handler_does_not_use_up_the_key(server)
    duplicates_wait_for_the_first(server)
    what_was_completed_survives_a_kill(server)


def effects(server: Server, key: str) -> int:
    return sum(line.split()[0] == key for line in server.lines_of("effects"))


def executes_once_and_replays(server: Server) -> None:
    answers = [server.post("once", "/orders", COAT) for _ in range(4)]
    assert {answer.status for answer in answers} == {201}
    assert len({answer.body for answer in answers}) == 1
    assert [answer.is_replay for answer in answers] == [False, True, True, True]
    assert len({answer.reference for answer in answers}) == 1
    assert effects(server, "once") == 1


def refuses_other_requests(server: Server) -> None:
    assert server.exchange("POST", "/orders", body=COAT).code == "key-missing"
    assert server.post("a,b", "/orders", COAT).code == "key-invalid"
    assert server.post("once", "/orders", HAT).code == "key-reused"


def a_refusal_before_the_handler_does_not_use_up_the_key(server: Server) -> None:
    assert server.post("corrected", "/orders", WRONG).status in (400, 422)
    assert server.post("corrected", "/orders", COAT).status == 201
    assert effects(server, "corrected") == 1


def duplicates_wait_for_the_first(server: Server) -> None:
    def post(_number: int) -> Response:
        return server.post("slow", "/slow", COAT)

    with ThreadPoolExecutor(5) as clients:
        running = [clients.submit(post, number) for number in range(5)]
        eventually(lambda: effects(server, "slow"))
        (server.directory / "release-slow").touch()
        answers = [one.result(WAIT_S_MAX) for one in running]
    assert {answer.status for answer in answers} == {201}
    assert sum(answer.is_replay for answer in answers) == 4
    assert effects(server, "slow") == 1


def what_was_completed_survives_a_kill(server: Server) -> None:
    server.kill()
    server.begin()
    assert server.post("once", "/orders", COAT).is_replay
    assert effects(server, "once") == 1
