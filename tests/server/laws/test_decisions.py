"""O3: observers get one decision for every request that is to be guarded, whatever its outcome."""

import pytest

from coatcheck import Decision
from coatcheck.core.record import RUNNING, Swap
from tests.support.failing_stores import Faulty, unavailable

from .api import Api, OpenApi
from .shop import Call, Said, in_turn, says


class Observer(list[Decision]):
    """An observer that remembers."""

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        return [(decision.outcome, decision.code) for decision in self]


@pytest.fixture
def observer() -> Observer:
    return Observer()


@pytest.fixture
def store(new_store) -> Faulty:
    return Faulty(new_store())


@pytest.fixture
def api(open_api: OpenApi, store: Faulty, observer: Observer) -> Api:
    return open_api(
        store=store,
        required=True,
        patience=0,
        settings={"observers": [observer.append], "clock": None},
    )


def is_end(swap: Swap) -> bool:
    return swap.record is not None and swap.record.state != RUNNING


def test_a_request_without_a_usable_key_is_reported(api: Api, observer: Observer):
    """O3: by its route, for it has no operation yet."""
    assert api.post(None).status == 400
    assert api.post("a, b", path="/refunds").status == 400
    assert observer.outcomes == [("refused", "key-missing"), ("refused", "key-invalid")]
    assert [decision.label for decision in observer] == ["POST /orders", "POST /refunds"]
    assert {decision.reference for decision in observer} == {""}


def test_a_body_over_the_limit_is_reported(open_api: OpenApi, observer: Observer):
    """O3."""
    api = open_api(body_bytes_max=3, settings={"observers": [observer.append]})
    assert api.post(body=b"long").status == 413
    assert observer.outcomes == [("refused", "body-too-large")]


def test_a_natural_key_that_is_not_there_is_reported(open_api: OpenApi, observer: Observer):
    """O3, K4."""
    api = open_api(
        key=lambda request: request.json()["id"], settings={"observers": [observer.append]}
    )
    assert api.post(None, body=b"{}").status == 400
    assert observer.outcomes == [("refused", "key-invalid")]


def test_an_outage_at_the_first_request_is_reported(api: Api, store: Faulty, observer: Observer):
    """O3, D2."""
    store.is_down = True
    assert api.post().status == 503
    assert observer.outcomes == [("refused", "store-unavailable")]


def test_an_outage_at_the_claim_is_reported_with_its_operation(
    api: Api, store: Faulty, observer: Observer
):
    """O3, K5, D2: the id is known, although nothing could be claimed."""
    api.post("k-0")
    observer.clear()
    store.is_down = True
    refused = api.post("k-1")
    assert (refused.status, refused.problem["reference"]) == (503, refused.reference)
    assert observer.outcomes == [("refused", "store-unavailable")]
    assert observer[0].reference == refused.reference
    store.is_down = False
    assert api.post("k-1").reference == refused.reference


def test_what_ran_and_is_not_recorded_is_reported(api: Api, store: Faulty, observer: Observer):
    """O3, D2."""
    store.before = lambda swaps: is_end(swaps[0]) and unavailable(swaps)
    assert api.post().status == 503
    assert observer.outcomes == [("refused", "store-unavailable")]


def test_what_was_answered_without_a_record_was_executed(
    open_api: OpenApi, store, observer: Observer
):
    """O3, D2."""
    settings = {"observers": [observer.append]}
    api = open_api(store=store, patience=0, unrecorded="answer", settings=settings)
    store.before = lambda swaps: is_end(swaps[0]) and unavailable(swaps)
    assert api.post().status == 201
    assert observer.outcomes == [("executed", "")]


def test_what_is_in_doubt_is_reported(api: Api, observer: Observer):
    """O3: although the handler knows nothing of it."""

    def takes_a_step(call: Call) -> Said:
        call.operation.step("charge", lambda: 1)
        return says(503)(call)

    api.shop.answers["/orders"] = in_turn(takes_a_step, says(201))
    assert api.post().status == 503
    assert api.post().code == "outcome-unknown"
    assert observer.outcomes == [("executed", ""), ("refused", "outcome-unknown")]
