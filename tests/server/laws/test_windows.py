"""T: how long a key is remembered, and what a late retry meets."""

import pytest

from tests.support.times import eventually

from .api import Api, OpenApi
from .shop import Gate

HOUR_S = 3_600


def open_sweeping(open_api: OpenApi, *, settings=(), **fields) -> Api:
    """An api that sweeps about once a minute; its first tick sets the time of the first sweep."""
    api = open_api(settings={"sweep_every_s": 60, **dict(settings)}, **fields)
    api.engine.attempts.heartbeat.tick()
    return api


def swept(api: Api) -> None:
    """Let its heartbeat tick; if a sweep was due, wait until it has ended."""
    api.engine.attempts.heartbeat.tick()
    eventually(lambda: not api.engine.sweeper.is_sweeping())


@pytest.mark.persists
@pytest.mark.parametrize(
    ("window", "hours"), [({}, 24), ({"window": "1h"}, 1), ({"window": "7d"}, 168)]
)
def test_every_retry_within_the_window_is_deduplicated(
    open_api: OpenApi, clock, window, hours: int
):
    """T1: to the last millisecond; 24 hours is the default."""
    api = open_api(**window)
    first = api.post()
    clock.advance(hours * HOUR_S - 0.001)
    again = api.post()
    assert (again.is_replay, again.body) == (True, first.body)
    assert open_api(shop=api.shop).post().is_replay
    clock.advance(0.001)
    assert not api.post().is_replay
    assert api.effects() == 2


def test_the_window_begins_with_the_first_request(open_api: OpenApi, clock):
    """T1: neither a retry nor a slow handler moves its end."""
    api = open_api(window="1h")
    api.post()
    clock.advance(0.9 * HOUR_S)
    assert api.post().is_replay
    clock.advance(0.1 * HOUR_S)
    assert not api.post().is_replay


@pytest.mark.persists
def test_after_the_window_the_key_is_free_again(api: Api, clock, caplog):
    """T2: a new generation with its own attempt 1 and other derived keys; the log mentions it."""
    first = api.post(body=b'{"item": 1}')
    clock.advance(24 * HOUR_S)
    second = api.post(body=b'{"item": 2}')
    assert second.status == 201
    assert second.body != first.body
    assert not second.is_replay
    assert api.post(body=b'{"item": 2}').is_replay
    one, other = (call.operation for call in api.shop.effects)
    assert (one.attempt, other.attempt) == (1, 1)
    assert one.derive("charge") != other.derive("charge")
    assert any("late retry" in record.getMessage() for record in caplog.records)


@pytest.mark.persists
def test_after_the_window_of_twenty_late_retries_one_executes(api: Api, clock):
    """L1, T2."""
    api.post()
    clock.advance(25 * HOUR_S)
    running = [api.start_post() for _ in range(20)]
    assert len({future.result(20).body for future in running}) == 1
    assert api.effects() == 2


@pytest.mark.parametrize("status", [409, 410, 412, 429])
def test_a_late_retry_can_be_refused_instead(open_api: OpenApi, clock, caplog, status: int):
    """T2: during the margin; nothing runs, and it is logged."""
    api = open_api(window="1h", margin="10h", on_expired="refuse", expired_status=status)
    first = api.post()
    clock.advance(HOUR_S)
    caplog.set_level("INFO", "coatcheck")
    late = api.post()
    assert (late.status, late.code) == (status, "key-expired")
    assert late.problem["retry"] == "never"
    assert late.reference == first.reference
    assert any(getattr(r, "code", "") == "key-expired" for r in caplog.records)
    assert open_api(shop=api.shop, policy=api.engine.policy).post().code == "key-expired"
    clock.advance(9 * HOUR_S)
    assert api.post(body=b"{}").code == "key-expired"
    assert api.effects() == 1


@pytest.mark.persists
def test_after_the_margin_a_refused_key_is_free(open_api: OpenApi, clock):
    """T2, T3: once the sweep has taken it."""
    api = open_sweeping(open_api, window="1h", margin="1h", on_expired="refuse")
    api.post()
    clock.advance(2 * HOUR_S)
    swept(api)
    assert api.records() == []
    fresh = open_api(shop=api.shop, policy=api.engine.policy)
    assert fresh.post().status == 201
    assert api.effects() == 2


def test_expiry_does_not_wait_for_the_sweep(open_api: OpenApi, clock):
    """T1, T2: the times of the record count, however late the sweep is."""
    api = open_api(window="1h")
    api.post()
    clock.advance(1_000 * HOUR_S)
    assert len(api.records()) == 1
    assert not api.post().is_replay


@pytest.mark.persists
def test_a_sweep_deletes_nothing_before_window_and_margin_are_over(open_api: OpenApi, clock):
    """T1, T3: so that no retry races the cleanup."""
    api = open_sweeping(open_api, window="1h", margin="1h")
    api.post()
    for _ in range(2):
        clock.advance(HOUR_S - 1)
        swept(api)
        assert len(api.records()) == 1
    clock.advance(200)
    swept(api)
    assert api.records() == []


def test_a_sweep_deletes_no_key_that_is_in_use(open_api: OpenApi, clock):
    """T3, L5: an operation that outlives its own retention still completes."""
    api = open_sweeping(open_api, window="1h", margin="1h")
    gate = api.shop.answers["/orders"] = Gate()
    first = api.start_post()
    gate.wait_until_entered()
    for _ in range(4):
        clock.advance(HOUR_S)
        swept(api)  # renews first, and sweeps then
    gate.open()
    assert first.result(20).status == 201


@pytest.mark.persists
def test_claims_go_on_while_a_long_backlog_is_swept(open_api: OpenApi, clock):
    """T3: in small batches, on every node at once."""
    nodes = [open_sweeping(open_api) for _ in range(2)]
    for number in range(50):
        nodes[0].post(f"old-{number}")
    clock.advance(26 * HOUR_S)
    sweeps = [node.workers.submit(swept, node) for node in nodes]
    running = [nodes[n % 2].start_post(f"new-{n}") for n in range(20)]
    assert {future.result(20).status for future in running} == {201}
    for sweep in sweeps:
        sweep.result(20)
    assert sorted(record.key[:3] for record in nodes[0].records()) == ["new"] * 20
