"""The retry policy, the presets and the budget of clients: wrong settings stop at once."""

import pytest

from coatcheck.core.client.retry_policy import Preset, RetryBudget, RetryPolicy
from coatcheck.errors import Misconfigured


def test_the_defaults_are_bounded_and_inside_the_usual_window():
    policy = RetryPolicy()
    assert (policy.attempts_max, policy.deadline_s, policy.timeout_s) == (6, 60.0, None)
    assert policy.horizon_s == 60.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attempts_max": 0}, "attempts_max is 0"),
        ({"attempts_max": True}, "attempts_max is True"),
        ({"attempts_max": 1.5}, "attempts_max is 1.5"),
        ({"deadline": "soon"}, "deadline: 'soon' is not a duration"),
        ({"deadline": 0}, "deadline must be longer than zero"),
        ({"deadline": -1}, "deadline is -1"),
        ({"deadline": float("inf")}, "deadline: cannot convert"),
        ({"timeout": 0}, "timeout must be longer than zero"),
        ({"backoff_base": "20s"}, "is longer than backoff_max"),
        ({"deadline": "25h"}, "is longer than server_window"),
        ({"renew_expired": "yes"}, "renew_expired is 'yes'"),
        ({"follow_accepted": 1}, "follow_accepted is 1"),
        ({"methods_without_key": "GET"}, "not a collection of methods"),
        ({"methods_without_key": {1}}, "not a collection of methods"),
    ],
)
def test_a_wrong_retry_policy_is_refused_with_the_reason(settings, words):
    with pytest.raises(Misconfigured, match=words):
        RetryPolicy(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"key_header": None}, "needs key_header or key_member"),
        ({"key_member": "id"}, "needs key_header or key_member"),
        ({"key_header": "two words"}, "cannot be the name of a header"),
        ({"key_chars_max": 256}, "key_chars_max is 256"),
        ({"window": "long"}, "window: 'long'"),
    ],
)
def test_a_wrong_preset_is_refused_with_the_reason(settings, words):
    with pytest.raises(Misconfigured, match=words):
        Preset(name="wrong", **settings)


def test_a_preset_without_a_published_window_is_fine():
    assert Preset(name="own", window=None, methods={"post"}).methods == {"POST"}


def test_the_pause_doubles_up_to_its_limit():
    policy = RetryPolicy(backoff_base="1s", backoff_max="5s")
    assert [policy.backoff_s(n) for n in (1, 2, 3, 4, 10_000)] == [1, 2, 4, 5, 5]


@pytest.mark.parametrize(
    ("settings", "horizon_s"),
    [
        ({"attempts_max": 1}, 0.0),
        ({"attempts_max": 1, "timeout": "5s"}, 0.0),
        ({"attempts_max": 2}, 60.0),
        ({"attempts_max": 2, "timeout": "5s", "retry_after_max": 0, "deadline": "30s"}, 30.0),
    ],
)
def test_the_horizon_is_the_longest_time_to_the_last_attempt(settings, horizon_s):
    """T4: also if each answer comes byte by byte, which no timeout of httpx or requests ends."""
    assert RetryPolicy(**settings).horizon_s == pytest.approx(horizon_s)


def test_a_budget_ends_and_is_refilled_by_answers():
    budget = RetryBudget(2, 0.5)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    budget.give()
    assert not budget.take()
    for _ in range(9):
        budget.give()
    assert budget.tokens == 2


@pytest.mark.parametrize("wrong", [(-1, 0.1), (1, 2), (1, -0.1)])
def test_a_wrong_budget_is_refused_at_once(wrong):
    with pytest.raises(Misconfigured):
        RetryBudget(*wrong)
