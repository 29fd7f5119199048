"""Errors go by what is known of the effect: given back, asked about, or parked (L4, L6).

What the core decides is in `tests/core`; this is what a client sees of it, over both adapters.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coatcheck import DidNotHappen, Happened, Policy, Resumable, Unknown, open_store
from coatcheck.core.record import FAILED, IN_DOUBT
from tests.server.laws.api import ADAPTERS, Api, Workers
from tests.server.laws.shop import Call, Said, Shop, in_turn, raises, says
from tests.support.times import Clock


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture(params=ADAPTERS)
def open_api(request: pytest.FixtureRequest, workers: Workers) -> Iterator[Callable[..., Api]]:
    """Opens a guarded shop, over ASGI and over WSGI, in memory."""
    opened: list[Api] = []

    def open_one(**fields: Any) -> Api:
        settings = {"policy": Policy(**fields), "sweep_every_s": None}
        kind = ADAPTERS[request.param]
        api = kind(
            open_store("memory://"), Shop(), Clock(), workers, settings=settings, middleware={}
        )
        opened.append(api)
        return api

    yield open_one
    for api in opened:
        api.close()


def declares(then: Callable[[Call], Said]) -> Callable[[Call], Said]:
    """A handler that knows that it may simply run again."""

    def handler(call: Call) -> Said:
        assert call.operation is not None
        call.operation.resumable()
        return then(call)

    return handler


ERRORS = {
    "answers 502": says(502, b"?"),
    "raises": raises(RuntimeError("a bug")),
}
KNOWN = {
    "declares and answers 503": declares(says(503, b"not now")),
    "declares and raises": declares(raises(RuntimeError("a bug"))),
    "raises Resumable": raises(Resumable("nothing was sent")),
}


@pytest.mark.parametrize("recovery", ["retry", "reconcile", "manual"])
@pytest.mark.parametrize("ends", KNOWN.values(), ids=list(KNOWN))
def test_a_handler_that_knows_is_run_again_under_every_policy(
    open_api: Callable[..., Api], ends: Callable[[Call], Said], recovery: str
):
    """L4, L6: nobody is asked, and nothing is parked."""
    asked: list[object] = []
    asks = {"reconcile": asked.append} if recovery == "reconcile" else {}
    api = open_api(recovery=recovery, **asks)
    api.shop.answers["/orders"] = in_turn(ends, says(201, b"done"))
    api.post()
    assert [record.state for record in api.records()] == [FAILED]
    second = api.post()
    assert (second.status, second.body, second.is_replay) == (201, b"done", False)
    assert api.post().is_replay
    assert asked == []


@pytest.mark.parametrize("ends", ERRORS.values(), ids=list(ERRORS))
@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (Happened(201, [("content-type", "text/plain")], b"it was there"), 201, b"it was there"),
        (DidNotHappen(), 201, b"done"),
        (Unknown(), 409, None),
    ],
    ids=["happened", "did not happen", "unknown"],
)
def test_an_error_of_which_nothing_is_known_is_asked_about(
    open_api: Callable[..., Api],
    ends: Callable[[Call], Said],
    answer: Any,
    status: int,
    body: bytes | None,
):
    """L4, L6: and what is told decides whether the handler runs again."""
    api = open_api(recovery="reconcile", reconcile=lambda _operation: answer)
    api.shop.answers["/orders"] = in_turn(ends, says(201, b"done"))
    api.post()
    assert [record.state for record in api.records()] == [IN_DOUBT]
    second = api.post()
    assert second.status == status
    assert second.body == body if body is not None else second.code == "outcome-unknown"
    assert api.effects() == (2 if isinstance(answer, DidNotHappen) else 1)


@pytest.mark.parametrize("ends", ERRORS.values(), ids=list(ERRORS))
def test_an_error_of_which_nothing_is_known_is_parked_where_only_people_know(
    open_api: Callable[..., Api], ends: Callable[[Call], Said]
):
    """L4, L6: the control of both."""
    api = open_api(recovery="manual")
    api.shop.answers["/orders"] = in_turn(ends, says(201, b"done"))
    api.post()
    assert api.post().code == "outcome-unknown"
    assert api.effects() == 1
