"""X2: limits; over each a clear 4xx, never an unbounded queue and never an execution."""

import pytest

from tests.support.times import eventually

from .api import Api, OpenApi
from .shop import Gate, in_turn, says


@pytest.mark.served
def test_a_body_over_the_limit_is_refused_before_anything_runs(open_api: OpenApi):
    """X2: the limit itself is still taken."""
    api = open_api(body_bytes_max=1_000)
    refused = api.post(body=b"x" * 1_001)
    assert (refused.status, refused.code) == (413, "body-too-large")
    assert "1000" in refused.problem["detail"]
    assert api.shop.effects == []
    assert api.records() == []
    assert api.post(body=b"x" * 1_000).status == 201


@pytest.mark.served
def test_a_body_over_the_limit_does_not_use_up_its_key(open_api: OpenApi):
    """X2."""
    api = open_api(body_bytes_max=10)
    api.post("k-1", body=b"x" * 11)
    assert api.post("k-1", body=b"x").status == 201


def test_an_unguarded_body_has_no_limit_of_ours(open_api: OpenApi):
    """S3, X2."""
    api = open_api(body_bytes_max=10)
    assert api.post(None, body=b"x" * 100_000).status == 201
    assert len(api.shop.effects[0].body) == 100_000


def test_the_limit_of_waiters_is_for_each_key(open_api: OpenApi):
    """X2: one key with many duplicates does not affect others."""
    api = open_api(waiters_max=1, wait="1h", lease="2h")
    gate = api.shop.answers["/orders"] = Gate()
    running = [api.start_post("k-1"), api.start_post("k-2")]
    gate.wait_until_entered()
    gate.wait_until_entered()
    running += [api.start_post("k-1"), api.start_post("k-2")]
    eventually(lambda: api.waiters() == 2)
    gate.open()
    assert {future.result(20).status for future in running} == {201}


def test_a_caller_may_have_only_so_many_keys(open_api: OpenApi, clock):
    """X2: known keys still replay, other callers are not concerned, and time frees them."""
    api = open_api(live_keys_max=3, window="1h")
    alice, bob = [("Authorization", "alice")], [("Authorization", "bob")]
    for number in range(3):
        assert api.post(f"k-{number}", headers=alice).status == 201
    refused = api.post("k-3", headers=alice)
    assert (refused.status, refused.code) == (429, "too-many-keys")
    assert refused.header("retry-after") == "60"  # only time frees a place
    assert api.post("k-0", headers=alice).is_replay
    assert api.post("k-3", headers=bob).status == 201
    assert api.effects() == 4
    clock.advance(3_600)
    assert api.post("k-3", headers=alice).status == 201


@pytest.mark.parametrize("in_flight", ["wait", "202"])
def test_keys_of_running_requests_are_in_use(open_api: OpenApi, in_flight: str):
    """X2: they count before they have completed."""
    api = open_api(live_keys_max=2, in_flight=in_flight)
    gate = api.shop.answers["/orders"] = Gate()
    running = [api.start_post(f"k-{number}") for number in range(2)]
    gate.wait_until_entered()
    gate.wait_until_entered()
    one_more = api.start_post("k-2")
    eventually(lambda: one_more.done() or api.effects() == 3)
    gate.open()
    assert {future.result(20).status for future in running} == {201}
    assert api.effects() == 2
    assert one_more.result(20).code == "too-many-keys"


@pytest.mark.persists
def test_a_known_key_replays_over_the_limit_also_from_the_store(open_api: OpenApi):
    """X2: on a node that does not have it in memory."""
    one, other = open_api(live_keys_max=1), open_api(live_keys_max=1)
    one.post("k-1")
    other.post("k-2")
    assert other.post("k-1").is_replay
    assert other.post("k-3").code == "too-many-keys"


def test_failed_attempts_of_one_key_count_once(open_api: OpenApi):
    """X2, L4: a key that is retried is one key."""
    api = open_api(live_keys_max=2)
    api.shop.answers["/orders"] = in_turn(*[says(503)] * 5, says(201, b"done"))
    assert [api.post("k-1").status for _ in range(5)] == [503] * 5
    assert api.post("k-2").body == b"done"


def test_a_key_that_was_free_again_may_be_used_over_the_limit(open_api: OpenApi):
    """X2, L4: a retry after a failure is not a new key."""
    api = open_api(live_keys_max=1)
    api.shop.answers["/orders"] = in_turn(says(503), says(201))
    api.post("k-1")
    assert api.post("k-1").status == 201


@pytest.mark.parametrize("limit", [10, 64])
def test_the_longest_key_can_be_chosen(open_api: OpenApi, limit: int):
    """X2, K3."""
    api = open_api(key_chars_max=limit)
    assert api.post("k" * limit).status == 201
    assert api.post("k" * (limit + 1)).code == "key-invalid"


def test_a_refused_key_is_not_stored(api: Api):
    """X2: what is refused costs no room in the store."""
    for number in range(10):
        api.post("k" * (256 + number))
    assert api.records() == []
