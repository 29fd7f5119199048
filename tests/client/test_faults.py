"""Every client against an API that loses answers: every action has exactly one effect."""

from contextlib import ExitStack

import pytest

from coatcheck.client import RetryPolicy
from tests.client.drivers import DRIVERS, FakeTime
from tests.support.faulty_server import IN_PROGRESS, FaultyServer, later
from tests.support.servers import reserve_port

# 600 ms: a busy machine answers within that time, and a test waits for it once at most.
QUICK = RetryPolicy(timeout="600ms", attempts_max=4)

pytestmark = pytest.mark.parametrize("driver", DRIVERS, ids=repr)


@pytest.mark.parametrize(
    ("script", "was_replayed"),
    [
        (["lose"], True),
        (["lose-by-reset", "lose"], True),
        (["half", "half"], True),
        (["hang"], True),
        (["500"], True),
        (["reset", "reset"], False),
        ([IN_PROGRESS, IN_PROGRESS], False),
        ([later(409, 2)], False),
        ([later(429, 2), later(503, 2, as_date=True)], False),
        (["lose", IN_PROGRESS, later(503, 2)], True),
    ],
    ids=str,
)
def test_every_action_has_exactly_one_effect(driver, script, was_replayed):
    """C1, K2, C-02, C-04, C-07, C-10, C-19: lost, broken-off and late answers; refusals for now."""
    with FaultyServer(*script) as server:
        got = driver.post(f"{server.url}/charges", json={"amount": 5}, retry=QUICK)
    assert got.error is None
    assert (got.status, got.body) == (201, b'{"charge": 1}')
    assert len(server.effects) == 1
    attempts = len(script) + 1
    assert (got.result.outcome, got.result.attempts) == ("done", attempts)
    assert got.result.was_replayed is was_replayed
    first = server.seen[0]
    same = {(seen.method, seen.path, seen.key, seen.body) for seen in server.seen}
    assert same == {("POST", "/charges", got.result.key, first.body)}
    assert len(server.seen) == attempts
    assert {seen.headers["Content-Type"] for seen in server.seen} == {"application/json"}


@pytest.mark.parametrize("as_date", [False, True])
@pytest.mark.parametrize("status", [409, 429, 503])
def test_the_client_waits_as_long_as_the_server_asks(driver, status, as_date):
    """C-11: both forms of Retry-After; the pauses are noted, not waited for."""
    with FaultyServer(later(status, 7, as_date=as_date)) as server:
        got = driver.post(f"{server.url}/charges", json={})
    assert got.status == 201
    assert len(got.slept) == 1
    assert 7 <= got.slept[0] <= 7.2


def test_an_endless_loss_ends_unknown_with_the_error_of_the_library(driver):
    """C-13, C-18: the caller learns that the outcome is unknown, and keeps the key."""
    with FaultyServer(*["lose"] * 9) as server:
        got = driver.post(f"{server.url}/charges", json={}, retry=RetryPolicy(attempts_max=3))
    assert len(server.seen) == 3
    assert isinstance(got.error, driver.errors)
    assert (got.result.outcome, got.result.gave_up) == ("unknown", "attempts")
    assert got.result.key == server.keys[0]
    assert any("The outcome is unknown" in note for note in got.error.__notes__)


def test_an_endless_refusal_ends_with_the_last_response(driver):
    """C-13: 503 for ever is three attempts, and the response is the caller's to read."""
    with FaultyServer(*[(503, {}, {"words": "down"})] * 9) as server:
        got = driver.post(f"{server.url}/charges", json={}, retry=RetryPolicy(attempts_max=3))
    assert (got.status, got.body) == (503, b'{"words": "down"}')
    assert (got.result.outcome, got.result.attempts) == ("unknown", 3)


def test_a_server_that_is_not_there_is_refused_and_not_unknown(driver):
    """C-25: no connection, no effect."""
    reserved, port = reserve_port()
    with reserved:
        url = f"http://127.0.0.1:{port}/"
        got = driver.post(url, json={}, retry=RetryPolicy(attempts_max=2))
    assert isinstance(got.error, driver.errors)
    assert (got.result.outcome, got.result.attempts) == ("refused", 2)


def test_a_server_that_starts_while_the_client_waits_gets_the_request(driver):
    """C-25: the port was closed, and is open at the second attempt."""
    reserved, port = reserve_port()
    time, servers = FakeTime(), []
    with reserved, ExitStack() as stack:

        def sleep(seconds, pause=time.sleep):
            pause(seconds)
            servers.append(stack.enter_context(FaultyServer(port=port)))

        time.sleep = sleep
        got = driver.post(f"http://127.0.0.1:{port}/charges", json={}, time=time)
    assert (got.status, got.result.attempts, got.result.was_replayed) == (201, 2, False)
    assert servers[0].keys == [got.result.key]


@pytest.mark.parametrize("status", [400, 402, 403, 404, 409, 422])
def test_a_definite_refusal_is_sent_once(driver, status):
    """C1, C-08, C-09: 400 and 422 are never retried."""
    with FaultyServer((status, {}, {"code": "key-reused"})) as server:
        got = driver.post(f"{server.url}/charges", json={})
    assert (got.status, len(server.seen)) == (status, 1)
    assert (got.result.outcome, got.result.code) == ("refused", "key-reused")


def test_the_outcome_that_the_server_does_not_know_is_unknown(driver):
    with FaultyServer((409, {}, {"code": "outcome-unknown", "retry": "never"})) as server:
        got = driver.post(f"{server.url}/charges", json={})
    assert (got.result.outcome, len(server.seen)) == ("unknown", 1)


def test_a_get_has_no_key_and_is_sent_again(driver):
    """C-01: a key is for what changes something."""
    with FaultyServer("lose", later(503, 1)) as server:
        got = driver.call("GET", f"{server.url}/charges")
    assert (got.status, server.keys) == (201, [None] * 3)


def test_an_expired_key_is_renewed_only_on_request(driver):
    """C5: a new key may do the work twice, so the caller has to say so."""
    expired = (409, {}, {"code": "key-expired", "retry": "never"})
    with FaultyServer(expired) as server:
        assert driver.post(f"{server.url}/charges", json={}).status == 409
    with FaultyServer(expired) as server:
        got = driver.post(f"{server.url}/charges", json={}, retry=RetryPolicy(renew_expired=True))
    assert got.status == 201
    assert len(set(server.keys)) == 2
    assert got.result.key == server.keys[1]


def test_an_accepted_operation_is_followed_to_its_result(driver):
    done = (201, {"Idempotent-Replayed": "true"}, {"report": 1})
    running = (202, {"Retry-After": "3"}, {"status": "running"})
    with FaultyServer("accept", running, "reset", done) as server:
        got = driver.post(
            f"{server.url}/reports",
            json={},
            headers={"Authorization": "Bearer t"},
            retry=RetryPolicy(follow_accepted=True),
        )
    assert (got.status, got.body) == (201, b'{"report": 1}')
    assert [seen.path for seen in server.seen] == ["/reports", *["/operations/1"] * 3]
    assert [seen.key is None for seen in server.seen] == [False, True, True, True]
    assert {seen.headers["Authorization"] for seen in server.seen} == {"Bearer t"}


def test_an_interrupted_operation_is_sent_again_with_its_key(driver):
    interrupted = (200, {}, {"status": "interrupted", "retry": "same-key"})
    with FaultyServer("accept", interrupted) as server:
        got = driver.post(f"{server.url}/reports", json={}, retry=RetryPolicy(follow_accepted=True))
    assert (got.status, got.result.was_replayed, len(server.effects)) == (201, True, 1)
    assert server.keys == [got.result.key, None, got.result.key]


def test_the_retries_of_the_library_itself_do_not_multiply_ours(driver):
    """C-15: aiohttp repeats a GET by itself; only its bare middleware cannot prevent that."""
    with FaultyServer(*["lose"] * 20) as server:
        got = driver.call("GET", server.url, retry=RetryPolicy(attempts_max=3))
    assert isinstance(got.error, driver.errors)
    assert len(server.seen) == (6 if driver.name == "aiohttp-middleware" else 3)
