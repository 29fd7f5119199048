"""After an error, what is known of its effect decides: released, reconciled, or in doubt (L4, L6).

What the core decides is in `tests/core`; this is what a client sees of it, over both adapters.
"""

from collections.abc import Callable
from typing import Any

import pytest

from coatcheck import DidNotHappen, Happened, Resumable, Unknown
from coatcheck.core.record import FAILED, IN_DOUBT

from .api import OpenApi
from .shop import Call, Said, in_turn, raises, says


def declares(then: Callable[[Call], Said]) -> Callable[[Call], Said]:
    """A handler that knows that it may simply run again."""

    def handler(call: Call) -> Said:
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
def test_a_resumable_handler_is_run_again_under_every_policy(
    open_api: OpenApi, ends: Callable[[Call], Said], recovery: str
):
    """L4, L6: no reconcile function is called, and nothing is in doubt."""
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
def test_after_an_error_of_unknown_effect_the_reconcile_function_decides(
    open_api: OpenApi,
    ends: Callable[[Call], Said],
    answer: Any,
    status: int,
    body: bytes | None,
):
    """L4, L6: also whether the handler runs again."""
    api = open_api(recovery="reconcile", reconcile=lambda _operation: answer)
    api.shop.answers["/orders"] = in_turn(ends, says(201, b"done"))
    api.post()
    assert [record.state for record in api.records()] == [IN_DOUBT]
    second = api.post()
    assert second.status == status
    assert second.body == body if body is not None else second.code == "outcome-unknown"
    assert api.effects() == (2 if isinstance(answer, DidNotHappen) else 1)


@pytest.mark.parametrize("ends", ERRORS.values(), ids=list(ERRORS))
def test_after_an_error_of_unknown_effect_manual_recovery_leaves_it_in_doubt(
    open_api: OpenApi, ends: Callable[[Call], Said]
):
    """L4, L6: the control of both."""
    api = open_api(recovery="manual")
    api.shop.answers["/orders"] = in_turn(ends, says(201, b"done"))
    api.post()
    assert api.post().code == "outcome-unknown"
    assert api.effects() == 1
