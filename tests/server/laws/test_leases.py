"""L5: a crash leaves a lease, not a lock; and a late zombie overwrites nothing."""

import threading

import pytest

from coatcheck import Happened
from coatcheck.core.record import COMPLETED, RUNNING
from coatcheck.errors import ClaimLost
from tests.support.failing_stores import Faulty
from tests.support.times import WAIT_S_MAX, eventually

from .api import Api, OpenApi
from .shop import Gate, Handler, says


@pytest.mark.persists
def test_after_a_crash_the_key_is_free_when_the_lease_has_expired(open_api: OpenApi, clock):
    """L5: the retry is the second attempt."""
    api = open_api(in_flight="409")
    dead = api.claim("k-1", "/orders")
    clock.advance(19.999)
    assert api.post("k-1").code == "in-progress"
    clock.advance(0.001)
    assert api.post("k-1").status == 201
    (call,) = api.shop.effects
    assert call.operation.attempt == 2
    assert call.operation.fence > dead.version
    assert api.post("k-1").is_replay


@pytest.mark.persists
def test_of_many_retries_after_a_crash_one_executes(api: Api, clock):
    """L1, L5."""
    api.claim("k-1", "/orders")
    clock.advance(61)
    running = [api.start_post("k-1") for _ in range(20)]
    assert len({future.result(20).body for future in running}) == 1
    assert api.effects() == 1


def test_a_duplicate_that_waits_takes_over_when_the_lease_expires(open_api: OpenApi, clock):
    """L3, L5: its client need not retry for that."""
    api = open_api(wait="2h", lease="1h")
    api.claim("k-1", "/orders")
    waiting = api.start_post("k-1")
    eventually(lambda: api.waiters() == 1)
    assert not waiting.done()
    clock.advance(3_600)
    assert waiting.result(20).status == 201
    assert api.effects() == 1


# --- renewals and completions that cross ----------------------------------------------------


@pytest.mark.persists
def test_a_renewal_during_the_work_does_not_make_the_completion_lose(api: Api, clock):
    """L5: our own renewal has made the version larger."""
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    first = api.start_post()
    gate.wait_until_entered()
    before = api.records()[0].version
    clock.advance(10)
    api.engine.attempts.heartbeat.tick()
    assert api.records()[0].version > before
    gate.open()
    assert first.result(20).body == b"done"
    assert not first.result(20).is_replay
    assert api.post().body == b"done"
    assert api.effects() == 1


@pytest.mark.persists
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_renewal_on_its_way_when_the_handler_finishes_is_harmless(
    open_api: OpenApi, new_store, clock, moment: str
):
    """L5: whether it is written first and acknowledged late, or comes too late to be written."""
    store = Faulty(new_store())
    api = open_api(store=store)
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    arrived, may_go_on = threading.Event(), threading.Event()

    def hold_up(swaps) -> None:
        if any(swap.expected > 0 and swap.record.state == RUNNING for swap in swaps):
            arrived.set()
            assert may_go_on.wait(WAIT_S_MAX)

    first = api.start_post()
    gate.wait_until_entered()
    setattr(store, moment, hold_up)
    clock.advance(10)
    beat = api.workers.submit(api.engine.attempts.heartbeat.tick)
    assert arrived.wait(WAIT_S_MAX)
    gate.open()
    answer = first.result(20)
    may_go_on.set()
    beat.result(20)
    assert (answer.status, answer.body, answer.is_replay) == (201, b"done", False)
    assert api.record(answer.reference).state == COMPLETED
    assert open_api(shop=api.shop).post().body == b"done"
    assert api.effects() == 1


# --- zombies --------------------------------------------------------------------------------


def paused(api: Api) -> None:
    """The process of *api* is stopped, and renews nothing."""
    api.engine.attempts.heartbeat.stop()


def taking_a_late_step(call):
    """Take a step in a thread, which both adapters allow."""
    lost = []

    def step():
        try:
            call.operation.step("late", lambda: pytest.fail("the step has run"))
        except ClaimLost as error:
            lost.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join(WAIT_S_MAX)
    raise lost[0]


LATE = {"responds": says(201, b"of the zombie"), "takes a step": taking_a_late_step}


@pytest.mark.persists
@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_a_zombie_gets_the_current_response_and_overwrites_nothing(
    open_api: OpenApi, clock, late: Handler
):
    """L5, L7: its lease is over, and another attempt has completed."""
    slow, quick = open_api(), open_api()
    gate = slow.shop.answers["/orders"] = Gate(late)
    quick.shop.answers["/orders"] = says(201, b"of the second")
    zombie = slow.start_post()
    gate.wait_until_entered()
    paused(slow)
    clock.advance(61)
    assert quick.post().body == b"of the second"
    (current,) = quick.records()
    gate.open()
    answer = zombie.result(20)
    assert (answer.status, answer.body, answer.is_replay) == (201, b"of the second", True)
    assert quick.records() == [current]
    assert slow.post().body == b"of the second"


@pytest.mark.parametrize("status", [201, 500, 429])
def test_a_zombie_whose_successor_still_runs_gets_409(open_api: OpenApi, clock, status: int):
    """L5: its own response may differ from the final one; its failure releases nothing."""
    slow, quick = open_api(), open_api()
    gate = slow.shop.answers["/orders"] = Gate(says(status, b"of the zombie"))
    second_gate = quick.shop.answers["/orders"] = Gate(says(201, b"of the second"))
    zombie = slow.start_post()
    gate.wait_until_entered()
    paused(slow)
    clock.advance(61)
    second = quick.start_post()
    second_gate.wait_until_entered()
    gate.open()
    refused = zombie.result(20)
    assert (refused.status, refused.code) == (409, "in-progress")
    assert refused.header("retry-after") == "1"
    second_gate.open()
    assert second.result(20).body == b"of the second"
    assert slow.post().body == b"of the second"


def test_a_zombie_that_fails_does_not_free_the_key_of_its_successor(open_api: OpenApi, clock):
    """L5."""

    def broken(call):
        raise RuntimeError("too late")

    slow, quick = open_api(), open_api()
    gate = slow.shop.answers["/orders"] = Gate(broken)
    zombie = slow.start_post()
    gate.wait_until_entered()
    paused(slow)
    clock.advance(61)
    quick.post()
    gate.open()
    assert isinstance(zombie.result(20).error, RuntimeError)
    assert quick.post().is_replay
    assert quick.effects() == 1


# --- recovery -------------------------------------------------------------------------------


def test_after_a_crash_the_client_gets_what_the_reconcile_function_found(open_api: OpenApi, clock):
    """L5: recovery="reconcile"; what the function returns is kept."""
    asked: list[int] = []

    def ask(operation) -> Happened:
        asked.append(operation.attempt)
        return Happened(201, [("Location", "/charges/7"), ("Content-Type", "text/plain")], b"paid")

    api = open_api(recovery="reconcile", reconcile=ask)
    api.claim("k-1", "/orders")
    clock.advance(61)
    first, again = api.post(), api.post()
    assert (first.status, first.body, first.header("location")) == (201, b"paid", "/charges/7")
    assert again.body == b"paid"
    assert (api.effects(), len(asked)) == (0, 1)
