"""Plans: the window of the server and the retries of the client, and what a rate stores."""

import re
from pathlib import Path

import pytest

import coatcheck
from coatcheck.core.client.plan import BYTES_PER_KEY, duration, plan_text
from coatcheck.core.client.retry_policy import RetryPolicy
from coatcheck.errors import Misconfigured

STORES = Path(__file__).parents[3] / "docs" / "stores.md"


def test_the_defaults_of_server_and_client_fit():
    """T4: 24 hours are enough for a minute of retries."""
    made = coatcheck.plan()
    assert (made.horizon_s, made.window_s, made.warnings, made.is_safe) == (60, 86_400, (), True)


@pytest.mark.parametrize(
    ("window", "horizon", "is_safe"),
    [("24h", "23h", True), ("24h", "23.1h", False), ("1h", "1h", False), ("72h", 3600, True)],
)
def test_a_window_that_is_shorter_than_horizon_and_margin_is_warned_about(window, horizon, is_safe):
    """T4: a planner tells when window < horizon."""
    made = coatcheck.plan(coatcheck.Policy(window=window, margin="1h"), horizon)
    assert made.is_safe is is_safe
    assert all("a late retry would be executed again" in text for text in made.warnings)


def test_a_client_that_believes_in_a_longer_window_is_warned_about():
    made = coatcheck.plan(coatcheck.Policy(window="2h", margin=60), RetryPolicy())
    assert len(made.warnings) == 1
    assert "set server_window='2h'" in made.warnings[0]
    assert coatcheck.plan(coatcheck.Policy(window="2h"), RetryPolicy(server_window="2h")).is_safe


def test_storage_is_keys_times_their_size():
    """T4: how much storage a rate needs."""
    policy = coatcheck.Policy(window="24h", margin="1h")
    made = coatcheck.plan(policy, rate=100, store="postgresql://h/d", response_bytes=84)
    assert made.keys == 100 * 25 * 3_600
    assert made.bytes == made.keys * (268 + 84)
    compact = coatcheck.plan(policy, rate=100, store="postgres", compact=True)
    assert compact.bytes == compact.keys * 212


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"store": "oracle"}, "no sizes are known for the store 'oracle'"),
        ({"rate": -1}, "rate is -1"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"response_bytes": float("inf")}, "response_bytes is inf"),
        ({"retry": "soon"}, "retry: 'soon' is not a duration"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_reason(settings, words):
    with pytest.raises(Misconfigured, match=words):
        coatcheck.plan(**settings)


def test_the_sizes_are_those_of_the_documentation():
    table = STORES.read_text().partition("<!-- size -->")[2].partition("<!-- /size -->")[0]
    rows = [tuple(map(int, pair)) for pair in re.findall(r"\| (\d+) \| (\d+) \|", table)]
    assert rows == [tuple(size) for size in BYTES_PER_KEY.values()]


def test_the_report_is_for_people():
    text = plan_text(coatcheck.plan(rate=1_000, store="redis", response_bytes=679))
    assert "keys stored           90,000,000" in text
    assert "storage               90 GB in redis" in text
    assert text.endswith("every retry is inside the window")
    text = plan_text(coatcheck.plan(coatcheck.Policy(window="1h"), "2d", rate=1e9))
    assert "warning: the window (60 min) is shorter than the time for which clients retry" in text
    assert "TB" in text


def test_durations_are_short_and_readable():
    units = [duration(s) for s in (0, 1.5, 60, 180, 7_200, 86_400, 7 * 86_400)]
    assert units == ["0 s", "1.5 s", "60 s", "3 min", "2 h", "24 h", "7 d"]
