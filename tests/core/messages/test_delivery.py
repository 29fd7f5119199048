"""What a consumer does with a message (E1)."""

from __future__ import annotations

import pytest

from coatcheck.core.messages.delivery import (
    Acknowledge,
    DeadLetter,
    Redeliver,
    action_of_failure,
    action_of_refusal,
)
from coatcheck.core.problem import KINDS, problem


def failed(attempt: int, attempts_max: int | None = 3, *, backoff_s_max: float = 60):
    return action_of_failure(
        ValueError("secret text"),
        attempt=attempt,
        attempts_max=attempts_max,
        backoff_s=2,
        backoff_s_max=backoff_s_max,
    )


@pytest.mark.parametrize("code", KINDS)
def test_a_refused_message_is_kept_by_the_broker_or_as_a_dead_letter_unless_it_was_handled(code):
    action = action_of_refusal(problem(code, key="event-1", id=bytes(16)))
    if code == "result-unavailable":
        assert action == Acknowledge(is_duplicate=True)
    elif KINDS[code].retry == "same-key":
        assert isinstance(action, Redeliver)
        assert action.after_s >= 1
    else:
        assert isinstance(action, DeadLetter)
        assert action.reason


def test_a_dead_letter_names_the_reference_of_its_operation_where_there_is_one():
    with_reference = action_of_refusal(problem("outcome-unknown", id=bytes(16)))
    assert "reference 0000-0000-0000" in str(with_reference)
    assert "reference" not in str(action_of_refusal(problem("key-invalid", reason="it is empty")))


def test_another_payload_under_the_same_id_is_named_as_the_reason():
    action = action_of_refusal(problem("key-reused", key="k", reason="the arguments differ"))
    assert action == DeadLetter(
        "another message with this event id, and another payload, came before"
    )


def test_a_failed_message_comes_again_after_a_pause_that_doubles_up_to_a_limit():
    assert [failed(n, None, backoff_s_max=10).after_s for n in (1, 2, 3, 4)] == [2, 4, 8, 10]
    assert failed(10_000, None).after_s == 60


def test_the_last_allowed_attempt_makes_a_dead_letter_without_the_text_of_the_error():
    assert isinstance(failed(2), Redeliver)
    last = failed(3)
    assert isinstance(last, DeadLetter)
    assert "ValueError in attempt 3" in last.reason
    assert "secret text" not in last.reason
