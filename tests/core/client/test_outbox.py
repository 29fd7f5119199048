"""What an answer means for an action that is on disk."""

import pytest

from coatcheck.core.client.outbox import (
    CLOCK_SET_BACK,
    TOO_LATE,
    Entry,
    Verdict,
    latest_ms,
    limited,
    pause_ms,
    too_late,
    verdict_of,
)
from coatcheck.core.client.send import Result

NEW = Entry(1, "k", "k", "lane", "POST", "/charges", (), b"", "pending", 500, None, 1)
SENT = NEW._replace(first_sent_ms=1_000, calls=2)


def result(outcome, gave_up="", *, code=None, was_replayed=False):
    return Result(outcome, 1, was_replayed, "k", gave_up, code)


@pytest.mark.parametrize(
    ("entry", "got", "status", "state"),
    [
        (NEW, result("done"), 201, "done"),
        (SENT, result("done"), 201, "done"),
        (NEW, result("refused"), 422, "refused"),
        (SENT, result("refused"), 422, "refused"),
        (NEW, result("refused"), 401, "refused"),
        (SENT, result("refused"), 401, "unknown"),
        (SENT, result("refused", was_replayed=True), 401, "refused"),
        (NEW, result("unknown", "attempts"), 503, "pending"),
        (NEW, result("refused", "attempts"), None, "pending"),
        (NEW, result("unknown", code="outcome-unknown"), 409, "unknown"),
        (NEW, result("unknown"), 500, "unknown"),
    ],
)
def test_only_a_definite_answer_ends_an_action(entry, got, status, state):
    """C3: until then it is sent again, with the same key."""
    assert verdict_of(entry, got, status).state == state


@pytest.mark.parametrize(("code", "reason"), [("sold-out", "sold-out"), (None, "status 422")])
def test_a_refusal_has_a_reason(code, reason):
    """C3: the list of dead letters shows it."""
    assert verdict_of(NEW, result("refused", code=code), 422) == Verdict("refused", reason)
    assert verdict_of(NEW, result("done"), 201) == Verdict("done")


def test_an_action_that_no_server_can_have_got_stays_new():
    assert not verdict_of(NEW, result("refused", "attempts"), None).was_sent
    assert verdict_of(SENT, result("refused", "attempts"), None).was_sent
    assert verdict_of(NEW, result("unknown", "attempts"), None).was_sent


@pytest.mark.parametrize(
    ("now_ms", "verdict"),
    [
        *((1_000, None), (4_000, None), (4_001, TOO_LATE)),
        *((-59_000, None), (-59_001, CLOCK_SET_BACK)),
    ],
)
def test_an_action_is_too_late_when_its_last_attempt_may_be_after_the_window(now_ms, verdict):
    """C-17: a key is never used after the server may have forgotten it."""
    assert too_late(SENT, now_ms, 10_000, 7_000) is verdict
    assert too_late(NEW, now_ms + 10**9, 10_000, 7_000) is None


def test_no_pause_and_no_lease_is_longer_than_the_latest_time():
    """C3: what ends later was stored before the clock was set back."""
    assert latest_ms(1_000, 90_000) == 1_000 + pause_ms(99, 1.0) + 60_000
    assert latest_ms(1_000, 400_000) == 1_000 + 400_000 + 60_000


def test_the_pause_between_two_calls_grows_to_five_minutes():
    assert [pause_ms(n, 1.0) for n in (1, 2, 3, 99)] == [1_000, 2_000, 4_000, 300_000]
    assert pause_ms(1, 0.0) == 500


@pytest.mark.parametrize(
    ("entry", "renews", "state", "needs_new_key"),
    [
        (SENT, True, "pending", True),
        (SENT, False, "unknown", False),
        (SENT._replace(sent_key="renewed"), True, "unknown", False),
    ],
)
def test_an_expired_key_is_renewed_once_and_only_on_request(entry, renews, state, needs_new_key):
    """C5: a new key may do the work twice."""
    verdict = verdict_of(entry, result("unknown", code="key-expired"), 409, renews=renews)
    assert (verdict.state, verdict.needs_new_key) == (state, needs_new_key)


@pytest.mark.parametrize(
    ("verdict", "now_ms", "state"),
    [
        (Verdict("pending", "no route", was_sent=False), 10_499, "pending"),
        (Verdict("pending", "no route", was_sent=False), 10_500, "refused"),
        (Verdict("pending", "no route", was_sent=False), -9_500, "refused"),  # a clock set back
        (Verdict("pending", "attempts"), 10_500, "pending"),
        (Verdict("pending", was_sent=False, needs_new_key=True), 10_500, "pending"),
        (Verdict("done"), 10_500, "done"),
    ],
)
def test_an_action_that_cannot_be_sent_is_refused_after_a_limited_time(verdict, now_ms, state):
    """C3: otherwise it would block its lane for ever."""
    got = limited(verdict, NEW, now_ms, 10_000)
    assert got.state == state
    if state == "refused":
        assert got.reason == "it could not be sent: no route"
