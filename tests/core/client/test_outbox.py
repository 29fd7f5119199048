"""What an answer means for an action that is on disk."""

import pytest

from coatcheck.core.client.outbox import Entry, is_too_late, pause_ms, verdict_of
from coatcheck.core.client.send import Result

NEW = Entry(1, "k", "lane", "POST", "/charges", (), b"", None, 1)
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


def test_an_action_that_no_server_can_have_got_stays_new():
    assert not verdict_of(NEW, result("refused", "attempts"), None).was_sent
    assert verdict_of(SENT, result("refused", "attempts"), None).was_sent
    assert verdict_of(NEW, result("unknown", "attempts"), None).was_sent


@pytest.mark.parametrize(("now_ms", "is_late"), [(1_000, False), (4_000, False), (4_001, True)])
def test_an_action_is_too_late_when_its_last_attempt_may_be_after_the_window(now_ms, is_late):
    """C-17: a key is never used after the server may have forgotten it."""
    assert is_too_late(SENT, now_ms, 10_000, 7_000) is is_late
    assert not is_too_late(NEW, now_ms + 10**9, 10_000, 7_000)


def test_the_pause_between_two_calls_grows_to_five_minutes():
    assert [pause_ms(n, 1.0) for n in (1, 2, 3, 99)] == [1_000, 2_000, 4_000, 300_000]
    assert pause_ms(1, 0.0) == 500
