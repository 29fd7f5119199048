"""L1, L3, L11: of any number of requests with one key, one executes; what the others see."""

import pytest

from tests.support.times import eventually

from .api import Api, OpenApi
from .shop import Gate, says

pytestmark = pytest.mark.served

CLIENTS = 20


@pytest.mark.persists
def test_of_twenty_simultaneous_requests_one_executes(api: Api):
    """L1, L3: all are sent while the first runs, and all get its answer."""
    gate = api.shop.answers["/orders"] = Gate(says(201, b"the one"))
    running = [api.start_post("k-1") for _ in range(CLIENTS)]
    gate.wait_until_entered()
    eventually(lambda: api.waiters() == CLIENTS - 1)
    gate.open()
    answers = [future.result(20) for future in running]
    assert {(answer.status, answer.body) for answer in answers} == {(201, b"the one")}
    assert sum(not answer.is_replay for answer in answers) == 1
    assert api.effects() == 1


@pytest.mark.persists
def test_twenty_requests_of_any_order_execute_once(api: Api):
    """L1: whatever order they come in."""
    for key in ("k-1", "k-2", "k-3"):
        running = [api.start_post(key) for _ in range(CLIENTS)]
        answers = [future.result(20) for future in running]
        assert {answer.status for answer in answers} == {201}
        assert len({answer.body for answer in answers}) == 1
    assert api.effects() == 3


@pytest.mark.persists
def test_requests_to_several_nodes_execute_once(open_api: OpenApi):
    """L1: two engines on one store know nothing of each other but its records."""
    nodes = [open_api(), open_api()]
    gate = Gate(says(201, b"the one"))
    for node in nodes:
        node.shop.answers["/orders"] = gate
    running = [nodes[n % 2].start_post("k-1") for n in range(CLIENTS)]
    gate.wait_until_entered()
    eventually(lambda: sum(node.waiters() for node in nodes) == CLIENTS - 1)
    gate.open()
    assert {future.result(20).body for future in running} == {b"the one"}
    assert sum(node.effects() for node in nodes) == 1


@pytest.mark.persists
def test_many_keys_with_many_duplicates_lose_nothing(api: Api):
    """L1: each key has one effect and one answer."""
    running = [(n % 40, api.start_post(f"k-{n % 40}")) for n in range(200)]
    bodies: dict[int, set[bytes]] = {}
    for key, future in running:
        bodies.setdefault(key, set()).add(future.result(20).body)
    assert all(len(answers) == 1 for answers in bodies.values())
    assert api.effects() == 40


def test_a_duplicate_waits_and_then_gets_409(open_api: OpenApi, clock):
    """L3: 409 with Retry-After, which is not stored: the next retry gets the result."""
    api = open_api(wait="50ms")
    gate = api.shop.answers["/orders"] = Gate()
    first = api.start_post()
    gate.wait_until_entered()
    second = api.start_post()
    eventually(lambda: api.waiters() == 1)
    clock.advance(0.05)
    refused = second.result(20)
    assert (refused.status, refused.code) == (409, "in-progress")
    assert refused.header("retry-after") == "1"
    assert api.waiters() == 0
    gate.open()
    assert api.post().body == first.result(20).body
    assert api.effects() == 1


@pytest.mark.parametrize("policy", [{"in_flight": "409"}, {"wait": 0}])
def test_a_duplicate_can_be_refused_at_once(open_api: OpenApi, policy):
    """L3: chosen by the policy; the clock never moves."""
    api = open_api(**policy)
    gate = api.shop.answers["/orders"] = Gate()
    first = api.start_post()
    gate.wait_until_entered()
    refused = api.post()
    assert (refused.status, refused.code) == (409, "in-progress")
    assert refused.header("retry-after") == "1"
    gate.open()
    assert first.result(20).status == 201
    assert api.post().is_replay


def test_a_duplicate_is_asked_to_come_back_later_the_longer_the_first_runs(
    open_api: OpenApi, clock
):
    """L3: half of the time so far, until the end of the lease."""
    api = open_api(in_flight="409")
    api.claim("k-1", "/orders")
    refused = []
    for _ in range(6):
        clock.advance(3)
        refused.append(api.post("k-1"))
    assert [answer.header("retry-after") for answer in refused] == ["2", "3", "5", "6", "5", "2"]
    assert "was started 18.0 s ago and has not answered yet" in refused[-1].problem["detail"]


@pytest.mark.persists
def test_a_duplicate_on_another_node_gets_the_result_too(open_api: OpenApi):
    """L3: it polls the store."""
    one, other = open_api(), open_api(wait="1h", lease="2h")
    gate = one.shop.answers["/orders"] = Gate()
    first = one.start_post()
    gate.wait_until_entered()
    second = other.start_post()
    eventually(lambda: other.waiters() == 1)
    gate.open()
    assert second.result(20).body == first.result(20).body
    assert other.effects() == 0


def test_different_keys_do_not_wait_for_each_other(api: Api):
    """L1."""
    gate = api.shop.answers["/slow"] = Gate()
    slow = api.start_post("k-0", "/slow")
    gate.wait_until_entered()
    assert {api.post(f"k-{n}").status for n in range(1, 11)} == {201}
    assert not slow.done()
    gate.open()
    assert slow.result(20).status == 201


def test_a_client_that_hangs_up_does_not_stop_the_work(api: Api):
    """L11: the result is stored, and the retry gets it."""
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done all the same"))
    api.abandon("POST", "/orders", [("Idempotency-Key", "k-1")])
    gate.open()
    retry = api.send("POST", "/orders", [("Idempotency-Key", "k-1")])
    assert retry.is_replay
    assert retry.body == b"done all the same"
    assert api.effects() == 1


def test_a_retry_waits_for_the_work_of_a_client_that_hung_up(open_api: OpenApi):
    """L3, L11."""
    api = open_api(wait="1h", lease="2h")
    gate = api.shop.answers["/orders"] = Gate(says(201, b"the one"))
    api.abandon("POST", "/orders", [("Idempotency-Key", "k-1")])
    retry = api.start("POST", "/orders", [("Idempotency-Key", "k-1")])
    eventually(lambda: api.waiters() == 1)
    gate.open()
    assert retry.result(20).body == b"the one"
    assert api.effects() == 1
