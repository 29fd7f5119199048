"""D2: while the store cannot be reached nothing executes, and no unrecorded success is reported."""

import logging
import sqlite3
from contextlib import closing

import pytest

from coatcheck.core.record import COMPLETED, RUNNING, Swap
from coatcheck.errors import StoreUnavailable
from tests.support.failing_stores import Faulty, LosesOne, unavailable
from tests.support.times import eventually

from .api import Api, AsgiApi, OpenApi
from .shop import Call, Said, in_turn, raises, says


@pytest.fixture
def store(new_store) -> Faulty:
    return Faulty(new_store())


@pytest.fixture
def api(open_api: OpenApi, store: Faulty) -> Api:
    return open_api(store=store, patience=0)


def is_claim(swap: Swap) -> bool:
    return swap.record is not None and swap.record.state == RUNNING


def is_completion(swap: Swap) -> bool:
    return swap.record is not None and swap.record.state == COMPLETED


@pytest.mark.persists
def test_without_the_store_nothing_executes(api: Api, store: Faulty):
    """D2: 503 with Retry-After, and the same key works when the store is back."""
    store.is_down = True
    refused = api.post()
    assert (refused.status, refused.code) == (503, "store-unavailable")
    assert refused.header("retry-after") == "1"
    assert refused.problem["retry"] == "same-key"
    assert "not run" in refused.problem["detail"]
    assert api.shop.effects == []
    store.is_down = False
    assert api.post().status == 201
    assert api.effects() == 1


def test_a_store_that_is_down_from_the_start_is_refused_the_same_way(open_api, store: Faulty):
    """D2: also where its clock is asked for the first time."""
    store.is_down = True
    api = open_api(store=store, settings={"clock": None})
    refused = api.post()
    assert (refused.status, refused.code) == (503, "store-unavailable")
    store.is_down = False
    assert api.post().status == 201


def test_without_a_key_the_store_does_not_matter(api: Api, store: Faulty):
    """D2, S3: what is not guarded works on."""
    store.is_down = True
    assert api.post(None).status == 201
    assert api.send("GET", "/orders").status == 201


def test_a_store_that_fails_at_the_completion_is_not_a_success(api: Api, store: Faulty):
    """D2: a success that a retry would repeat must not be reported."""
    store.before = lambda swaps: is_completion(swaps[0]) and unavailable(swaps)
    refused = api.post()
    assert (refused.status, refused.code) == (503, "store-unavailable")
    assert refused.header("retry-after") == "1"
    assert "not be recorded" in refused.problem["detail"]
    assert refused.problem["reference"] == refused.reference
    assert b"order" not in refused.body
    assert api.effects() == 1


@pytest.mark.persists
def test_after_a_lost_completion_nothing_runs_twice(api: Api, store: Faulty, clock):
    """D2, L5: the heartbeat writes it when the store is back, also after the lease."""
    store.before = lambda swaps: is_completion(swaps[0]) and unavailable(swaps)
    assert api.post().status == 503
    clock.advance(61)
    store.before = len
    eventually(lambda: api.records()[0].state == COMPLETED)
    assert (api.post().status, api.post().is_replay) == (201, True)
    assert [call.operation.attempt for call in api.shop.effects] == [1]


def test_a_client_may_get_its_response_although_it_is_not_recorded_yet(open_api, store: Faulty):
    """D2: by choice; the completion is written later."""
    api = open_api(store=store, patience=0, unrecorded="answer")
    store.before = lambda swaps: is_completion(swaps[0]) and unavailable(swaps)
    first = api.post()
    assert (first.status, first.is_replay) == (201, False)
    store.before = len
    eventually(lambda: api.records()[0].state == COMPLETED)
    again = api.post()
    assert again.is_replay
    assert (again.body, api.effects()) == (first.body, 1)


def test_a_handlers_error_matters_more_than_the_stores(api: Api, store: Faulty):
    """D2: what the server reports is the bug, not the store."""
    api.shop.answers["/orders"] = raises(ValueError("a bug"))
    store.before = lambda swaps: is_claim(swaps[0]) or unavailable(swaps)
    assert isinstance(api.post().error, ValueError)


@pytest.mark.persists
@pytest.mark.parametrize("lost", [is_claim, is_completion])
def test_a_write_whose_acknowledgement_was_lost_is_recognised(api: Api, store: Faulty, lost):
    """D2: the engine meets its own record; the request succeeds and is executed once."""
    store.after = ack = LosesOne(lost)
    first = api.post()
    assert ack.is_lost
    assert (first.status, first.is_replay) == (201, False)
    assert api.post().is_replay
    assert api.effects() == 1


@pytest.mark.persists
def test_a_release_whose_acknowledgement_was_lost_is_recognised(api: Api, store: Faulty):
    """D2, L4."""
    api.shop.answers["/orders"] = in_turn(says(503), says(201, b"done"))
    store.after = ack = LosesOne(lambda swap: not is_claim(swap))
    assert api.post().status == 503
    assert ack.is_lost
    assert api.post().body == b"done"


def test_a_duplicate_that_waits_when_the_store_goes_down_is_refused(api: Api, store: Faulty):
    """D2: it cannot know the outcome of the first."""
    api.claim("k-1", "/orders")
    store.before = lambda swaps: setattr(store, "is_down", True)
    refused = api.post("k-1")
    assert (refused.status, refused.code) == (503, "store-unavailable")
    assert api.shop.effects == []


@pytest.mark.parametrize("new_store", ["sqlite"], indirect=True)
def test_a_file_that_another_process_has_locked_is_an_outage(open_api: OpenApi, new_store):
    """D2: a real store that really cannot write."""
    api = open_api(store=new_store("?busy_timeout=50ms"))
    api.post("k-0")
    with closing(sqlite3.connect(new_store.path, isolation_level=None)) as other:
        other.execute("begin immediate")
        refused = api.post("k-1")
        other.execute("rollback")
    assert (refused.status, refused.code) == (503, "store-unavailable")
    assert api.effects() == 1
    assert api.post("k-1").status == 201


def test_a_claim_whose_completion_failed_is_renewed_no_longer(api: Api, store: Faulty):
    """L5, D2: waiting does not cure a defect, and it must not block the key for ever."""

    def fail_to_complete(swaps):
        if any(swap.expected for swap in swaps):
            raise ValueError("a defect")

    store.before = fail_to_complete
    assert api.post().status == 500
    assert api.effects() == 1
    assert not api.engine.attempts.heartbeat.leases


# --- routes with low stakes -------------------------------------------------------------------


@pytest.fixture
def lax(open_api: OpenApi, store: Faulty) -> Api:
    """Executes unguarded while the store is down."""
    return open_api(store=store, patience=0, on_outage="execute")


@pytest.mark.persists
def test_by_choice_a_request_runs_unguarded_while_the_store_is_down(
    lax: Api, store: Faulty, caplog
):
    """D2: without a reference, because no record has it; and loudly, but not for each request."""
    store.is_down = True
    unguarded = [lax.post(), lax.post()]
    assert [(r.status, r.all("idempotency-reference")) for r in unguarded] == [(201, [])] * 2
    assert lax.effects() == 2
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == ["coatcheck: requests run unguarded: the store is unavailable"]
    decisions = [(r.outcome, r.code) for r in caplog.records if hasattr(r, "outcome")]
    assert decisions == [("unguarded", "store-unavailable")] * 2
    store.is_down = False
    assert lax.records() == []
    first, again = lax.post(), lax.post()
    assert (first.is_replay, again.is_replay) == (False, True)


def test_a_store_that_was_never_there_is_no_obstacle_either(open_api, store: Faulty):
    """D2: also where its clock is asked for the first time."""
    store.is_down = True
    api = open_api(store=store, on_outage="execute", settings={"clock": None})
    assert api.post().status == 201
    store.is_down = False
    assert not api.post().is_replay
    assert api.post().is_replay


def test_an_unguarded_request_gets_its_response_and_not_the_address_of_none(
    open_api: OpenApi, store: Faulty
):
    """D2, L10: no record would ever have it, so the client waits for the handler."""
    api = open_api(store=store, patience=0, on_outage="execute", in_flight="202")
    store.is_down = True
    assert api.post(headers=[("Prefer", "respond-async")]).status == 201
    if isinstance(api, AsgiApi):
        api.shop.answers["/orders"] = lambda call: call.operation.accept() or Said()
        assert api.post().status == 201


def test_an_unguarded_handler_may_use_its_operation(lax: Api, store: Faulty):
    """D2, K5: steps run and are not recorded; what it raises is raised."""

    def handler(call: Call) -> Said:
        assert call.operation.step("charge", lambda: 7) == 7
        call.operation.note("done")
        return Said()

    lax.shop.answers["/orders"] = in_turn(handler, raises(ValueError("a bug")))
    store.is_down = True
    assert lax.post().status == 201
    assert isinstance(lax.post().error, ValueError)


@pytest.mark.parametrize("is_caught", [False, True])
def test_work_that_cannot_be_deferred_is_refused(lax: Api, store: Faulty, caplog, is_caught):
    """D2, L10: no worker would find it; so 503 at once, also if a framework catches the error."""

    def handler(call: Call) -> Said:
        try:
            call.operation.defer()
        except StoreUnavailable:
            if not is_caught:
                raise
            return Said(500, chunks=[b"Internal Server Error"])
        return Said()

    lax.shop.answers["/orders"] = handler
    store.is_down = True
    refused = lax.post()
    assert (refused.status, refused.code) == (503, "store-unavailable")
    assert refused.problem["retry"] == "same-key"
    assert "no worker" in refused.problem["detail"]
    assert not [r for r in caplog.records if r.exc_info]


def test_a_handler_may_do_the_work_itself_that_it_cannot_defer(lax: Api, store: Faulty):
    """D2, L10."""

    def handler(call: Call) -> Said:
        with pytest.raises(StoreUnavailable, match="no worker"):
            call.operation.defer()
        return Said(201, chunks=[b"done here"])

    lax.shop.answers["/orders"] = handler
    store.is_down = True
    assert (lax.post().status, lax.post().body) == (201, b"done here")


def test_a_store_that_fails_when_work_is_deferred_is_refused(api: Api, store: Faulty, monkeypatch):
    """D2, L10: the same where the claim was written."""
    monkeypatch.setattr("coatcheck.engine.steps.RETRY_S", 0)

    def handler(call: Call) -> Said:
        store.is_down = True
        call.operation.defer()
        return Said()

    api.shop.answers["/orders"] = handler
    refused = api.post()
    assert (refused.status, refused.code) == (503, "store-unavailable")


def test_what_this_process_has_executed_does_not_run_unguarded(lax: Api, store: Faulty):
    """D2, L1: its completion is still to be written, so the retry is known to be one."""
    store.before = lambda swaps: is_completion(swaps[0]) and unavailable(swaps)
    assert lax.post().status == 503
    store.is_down = True
    assert (lax.post().code, lax.effects()) == ("store-unavailable", 1)
    store.is_down, store.before = False, len
    eventually(lambda: lax.records()[0].state == COMPLETED)
    assert lax.post().is_replay


def test_a_claim_that_was_applied_unnoticed_stays_until_its_lease_ends(
    lax: Api, store: Faulty, clock
):
    """D2, L5: then the recovery policy decides about a retry."""

    def lose_everything(_swaps):
        store.is_down = True
        raise StoreUnavailable("connection reset", is_ambiguous=True)

    store.after = lose_everything
    assert lax.post().status == 201
    store.is_down, store.after = False, len
    assert [record.state for record in lax.records()] == [RUNNING]
    clock.advance(61)
    assert (lax.post().status, lax.effects()) == (201, 2)


def test_a_function_runs_unguarded_by_the_same_choice(lax: Api, store: Faulty):
    """D2."""
    store.is_down = True
    calls: list[int] = []
    for _ in range(2):
        lax.run("k", calls.append, 1, scope="s")
    store.is_down = False
    for _ in range(2):
        lax.run("k", calls.append, 1, scope="s")
    assert calls == [1, 1, 1]
