"""L5: a crash leaves a lease, not a lock; and a late zombie overwrites nothing."""

import threading

import pytest

from coatcheck import DidNotHappen, Happened, Unknown
from coatcheck.core.record import COMPLETED, IN_DOUBT, RUNNING, Swap
from coatcheck.errors import ClaimLost

from .api import Api, until
from .conftest import OpenApi
from .doubles import Faulty, LosesOne
from .shop import WAIT_S_MAX, Gate, says


def test_after_a_crash_the_key_is_free_when_the_lease_has_run_out(open_api: OpenApi, clock):
    """L5: the retry is the second attempt."""
    api = open_api(in_flight="409")
    dead = api.claim("k-1", "/orders")
    clock.advance(59.999)
    assert api.post("k-1").code == "in-progress"
    clock.advance(0.001)
    assert api.post("k-1").status == 201
    (call,) = api.shop.effects
    assert call.operation.attempt == 2
    assert call.operation.fence > dead.version
    assert api.post("k-1").is_replay


def test_of_many_retries_after_a_crash_one_executes(api: Api, clock):
    """L1, L5."""
    api.claim("k-1", "/orders")
    clock.advance(61)
    running = [api.start_post("k-1") for _ in range(20)]
    assert len({future.result(20).body for future in running}) == 1
    assert api.effects() == 1


def test_a_duplicate_that_waits_takes_over_when_the_lease_runs_out(open_api: OpenApi, clock):
    """L3, L5: it need not be told to come back for that."""
    api = open_api(wait="2h", lease="1h")
    api.claim("k-1", "/orders")
    waiting = api.start_post("k-1")
    until(lambda: api.waiters() == 1)
    assert not waiting.done()
    clock.advance(3_600)
    assert waiting.result(20).status == 201
    assert api.effects() == 1


def test_a_living_executor_renews_its_lease(open_api: OpenApi, clock):
    """L5: however long its handler takes."""
    api = open_api(in_flight="409")
    gate = api.shop.answers["/orders"] = Gate()
    first = api.start_post()
    gate.wait_until_entered()
    for _ in range(10):
        clock.advance(25)
        api.engine.attempts.heartbeat.tick()
        assert api.post().code == "in-progress"
    gate.open()
    assert first.result(20).status == 201
    assert api.post().is_replay
    assert api.effects() == 1


def test_a_lease_is_renewed_while_nobody_looks(open_api: OpenApi, clock):
    """L5: by a thread, because a handler may block everything else."""
    api = open_api(lease="300ms", wait=0)
    gate = api.shop.answers["/orders"] = Gate()
    first = api.start_post()
    gate.wait_until_entered()
    (claim,) = api.records()
    clock.advance(0.2)
    until(lambda: api.records()[0].lease_until_ms > claim.lease_until_ms)
    gate.open()
    assert first.result(20).status == 201


# --- renewals and completions that cross ----------------------------------------------------


def is_renewal(swap: Swap) -> bool:
    return swap.expected > 0 and swap.record is not None and swap.record.state == RUNNING


def test_a_renewal_during_the_work_does_not_make_the_completion_lose(api: Api, clock):
    """L5: the version has grown meanwhile, by our own hand."""
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    first = api.start_post()
    gate.wait_until_entered()
    before = api.records()[0].version
    clock.advance(30)
    api.engine.attempts.heartbeat.tick()
    assert api.records()[0].version > before
    gate.open()
    assert first.result(20).body == b"done"
    assert not first.result(20).is_replay
    assert api.post().body == b"done"
    assert api.effects() == 1


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
        if any(is_renewal(swap) for swap in swaps):
            arrived.set()
            assert may_go_on.wait(WAIT_S_MAX)

    first = api.start_post()
    gate.wait_until_entered()
    setattr(store, moment, hold_up)
    clock.advance(30)
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


def test_a_renewal_whose_acknowledgement_was_lost_is_recognised(
    open_api: OpenApi, new_store, clock
):
    """L5: by the next renewal, and by the completion."""
    store = Faulty(new_store())
    api = open_api(store=store)
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    first = api.start_post()
    gate.wait_until_entered()
    store.after = LosesOne(is_renewal)
    clock.advance(30)
    with pytest.raises(Exception, match="connection reset"):
        api.engine.attempts.heartbeat.tick()
    for _ in range(3):
        clock.advance(25)
        api.engine.attempts.heartbeat.tick()
    assert api.records()[0].lease_until_ms > clock.now_ms
    gate.open()
    assert (first.result(20).body, first.result(20).is_replay) == (b"done", False)
    assert api.effects() == 1


# --- zombies --------------------------------------------------------------------------------


def paused(api: Api) -> None:
    """What a process looks like to others that the system has stopped: it renews nothing."""
    api.engine.attempts.heartbeat.stop()


def test_a_zombie_gets_the_answer_that_stands_and_overwrites_nothing(open_api: OpenApi, clock):
    """L5: its lease is over, and another attempt has completed."""
    slow, quick = open_api(), open_api()
    gate = slow.shop.answers["/orders"] = Gate(says(201, b"of the zombie"))
    quick.shop.answers["/orders"] = says(201, b"of the second")
    zombie = slow.start_post()
    gate.wait_until_entered()
    paused(slow)
    clock.advance(61)
    second = quick.post()
    assert second.body == b"of the second"
    (standing,) = quick.records()
    gate.open()
    answer = zombie.result(20)
    assert (answer.status, answer.body, answer.is_replay) == (201, b"of the second", True)
    assert quick.records() == [standing]
    assert slow.post().body == b"of the second"


def taking_a_late_step(call):
    """As a handler in a thread does, whatever the adapter is."""
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


def test_a_zombie_that_learns_it_at_a_step_gets_the_answer_that_stands(open_api: OpenApi, clock):
    """L5, L7: what it was told is no error of the handler's."""
    slow, quick = open_api(), open_api()
    gate = slow.shop.answers["/orders"] = Gate(taking_a_late_step)
    quick.shop.answers["/orders"] = says(201, b"of the second")
    zombie = slow.start_post()
    gate.wait_until_entered()
    paused(slow)
    clock.advance(61)
    assert quick.post().body == b"of the second"
    gate.open()
    answer = zombie.result(20)
    assert (answer.status, answer.body, answer.is_replay) == (201, b"of the second", True)


@pytest.mark.parametrize("status", [201, 500, 429])
def test_a_zombie_whose_successor_still_runs_is_told_to_ask_again(
    open_api: OpenApi, clock, status: int
):
    """L5: its own answer may differ from the one that will stand; a failure gives nothing back."""
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


def test_an_executor_whose_lease_ran_out_unnoticed_still_completes(open_api: OpenApi, clock):
    """L5: where nobody took over, nothing was lost."""
    api = open_api()
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    first = api.start_post()
    gate.wait_until_entered()
    paused(api)
    clock.advance(600)
    gate.open()
    assert first.result(20).body == b"done"
    assert api.post().is_replay


# --- recovery -------------------------------------------------------------------------------


def test_a_crash_where_only_a_person_can_tell_is_parked(open_api: OpenApi, clock):
    """L5: recovery="manual" never runs again by itself."""
    api = open_api(recovery="manual", in_flight="409")
    api.claim("k-1", "/orders")
    assert api.post().code == "in-progress"
    clock.advance(61)
    parked = api.post()
    assert (parked.status, parked.code) == (409, "outcome-unknown")
    assert parked.problem["reference"] == parked.reference
    assert parked.all("retry-after") == []
    assert api.post().code == "outcome-unknown"
    assert api.effects() == 0


def test_an_executor_that_was_given_up_too_early_ends_the_doubt_itself(open_api: OpenApi, clock):
    """L5: it was only slow, and it knows what happened."""
    slow, other = open_api(recovery="manual"), open_api(recovery="manual")
    gate = slow.shop.answers["/orders"] = Gate(says(201, b"done"))
    first = slow.start_post()
    gate.wait_until_entered()
    paused(slow)
    clock.advance(61)
    assert other.post().code == "outcome-unknown"
    gate.open()
    assert first.result(20).body == b"done"
    assert (other.post().body, other.effects()) == (b"done", 0)


def test_a_crash_that_can_be_looked_up_is_answered_with_what_happened(open_api: OpenApi, clock):
    """L5: recovery="reconcile"; what the reconciler tells is kept."""
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


def test_an_answer_that_cannot_be_sent_leaves_a_doubt_and_no_error(open_api: OpenApi, clock):
    """L5, L6: a header with what no header can hold; else its lease would have to run out again."""

    def ask(_operation) -> Happened:
        return Happened(201, [("Location", "/charges/\u2603")], b"paid")

    api = open_api(recovery="reconcile", reconcile=ask)
    api.claim("k-1", "/orders")
    clock.advance(61)
    assert api.post().code == "outcome-unknown"
    assert [record.state for record in api.records()] == [IN_DOUBT]
    assert api.effects() == 0


def test_a_crash_that_had_no_effect_is_run_again(open_api: OpenApi, clock):
    """L5."""
    api = open_api(recovery="reconcile", reconcile=lambda operation: DidNotHappen())
    api.claim("k-1", "/orders")
    clock.advance(61)
    assert api.post().status == 201
    assert api.effects() == 1


def test_a_question_that_hangs_does_not_hang_the_request(open_api: OpenApi, clock):
    """L5, L6: nobody knows in time; the key is in doubt, and not stuck."""
    hangs = threading.Event()
    api = open_api(
        recovery="reconcile",
        reconcile=lambda operation: hangs.wait(WAIT_S_MAX),
        reconcile_timeout="20ms",
    )
    api.claim("k-1", "/orders")
    clock.advance(61)
    try:
        assert api.start_post().result(WAIT_S_MAX / 2).code == "outcome-unknown"
    finally:
        hangs.set()
    assert [record.state for record in api.records()] == [IN_DOUBT]
    assert api.effects() == 0


@pytest.mark.parametrize("failure", [None, RuntimeError("the gateway is down")])
def test_a_crash_of_which_nobody_knows_is_asked_about_again(open_api: OpenApi, clock, failure):
    """L5: the key is not stuck; the next retry asks again."""
    answers = [Unknown(), Happened(200, [("Content-Type", "text/plain")], b"found")]

    def ask(operation):
        answer = answers.pop(0)
        if failure is not None and answers:
            raise failure
        return answer

    api = open_api(recovery="reconcile", reconcile=ask)
    api.claim("k-1", "/orders")
    clock.advance(61)
    assert api.post().code == "outcome-unknown"
    assert api.post().body == b"found"
    assert api.effects() == 0
