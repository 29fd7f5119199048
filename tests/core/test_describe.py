"""Descriptions for operators: everything of a record, except for responses and results."""

import json

import pytest

from coatcheck.core.describe import advice_of, age_of, facts_of, lines_of, state_of, story_of
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import ClaimRequest, first_attempt, next_attempt
from coatcheck.core.policy import Policy
from coatcheck.core.progress import (
    NOTHING,
    Note,
    Report,
    Resolution,
    Step,
    encoded,
    with_failure,
)
from coatcheck.core.record import GONE, completed, failed, in_doubt, renewed
from coatcheck.core.response import SEALED, Response, encode_response, encode_value

NOW = 1_800_000_000_000
REQUEST = ClaimRequest(b"i" * 16, b"f" * 16, NOW, 7, "POST /orders", "caller", "the key")
CLAIM = first_attempt(REQUEST, Policy(), GONE, NOW)
SECRET = "of the customer"
PROGRESS = (
    NOTHING.with_step(Step("charge", 1, encode_value(SECRET)))
    .with_step(Step("ship", 2))
    .with_note(Note(NOW, 1, "about to charge"))
    .with_note(Note(NOW + 1_000, 2, {"parcel": 7}))
    .with_resolution(Resolution(NOW + 2_000, "run again", "ada", "the bank was away"))
    ._replace(report=Report(0.5, "half"))
)
WITH_PROGRESS = CLAIM._replace(progress=encoded(PROGRESS))


def test_a_running_operation_is_described_with_its_lease():
    """O1."""
    facts = facts_of(CLAIM, NOW)
    assert facts["reference"] == reference_of(CLAIM.id)
    assert bytes.fromhex(facts["id"]) == CLAIM.id
    assert (facts["state"], facts["attempt"], facts["label"]) == ("running", 1, "POST /orders")
    assert facts["created"] == "2027-01-15T08:00:00Z"
    assert (facts["lease_until"], facts["is_lease_over"]) == ("2027-01-15T08:00:20Z", False)
    assert facts_of(CLAIM, NOW + 20_000)["is_lease_over"] is True
    assert facts["response"] is None
    assert (facts["steps"], facts["notes"], facts["resolutions"]) == ([], [], [])
    assert facts["progress"] is None
    assert list(story_of(CLAIM)) == []


def test_progress_is_described_without_the_results_of_steps():
    """O1, L6: all that an operator needs to decide."""
    facts = facts_of(in_doubt(WITH_PROGRESS), NOW)
    assert facts["steps"] == [
        {"name": "charge", "attempt": 1, "is_done": True},
        {"name": "ship", "attempt": 2, "is_done": False},
    ]
    assert facts["notes"] == [
        {"at": "2027-01-15T08:00:00Z", "attempt": 1, "what": "about to charge"},
        {"at": "2027-01-15T08:00:01Z", "attempt": 2, "what": {"parcel": 7}},
    ]
    assert facts["progress"] == {"fraction": 0.5, "words": "half"}
    assert facts["resolutions"] == [
        {
            "at": "2027-01-15T08:00:02Z",
            "outcome": "run again",
            "by": "ada",
            "why": "the bank was away",
        }
    ]
    assert SECRET not in json.dumps(facts)
    assert list(story_of(WITH_PROGRESS)) == [
        ("step", "charge: done by attempt 1"),
        ("step", "ship: begun by attempt 2"),
        ("note", "2027-01-15T08:00:00Z attempt 1: about to charge"),
        ("note", '2027-01-15T08:00:01Z attempt 2: {"parcel": 7}'),
        ("resolution", "2027-01-15T08:00:02Z run again, by ada: the bank was away"),
    ]


def test_an_operation_in_doubt_is_described_with_the_time_in_which_it_may_have_happened():
    """O1, L6: from the beginning of its last attempt to the end of that attempt's lease."""
    later = REQUEST._replace(now_ms=NOW + 90_000)
    again = next_attempt(failed(CLAIM), later, Policy(), NOW + 90_000)
    doubt = in_doubt(renewed(renewed(again, NOW + 170_000), NOW + 190_000))
    facts = facts_of(doubt, NOW + 7_200_000)
    assert (facts["attempt"], facts["created"]) == (2, "2027-01-15T08:00:00Z")
    assert facts["last_attempt"] == "2027-01-15T08:01:30Z"
    assert (facts["lease_until"], facts["is_lease_over"]) == ("2027-01-15T08:03:10Z", None)
    assert facts["window_until"] == "2027-01-16T08:00:00Z"
    assert facts["expires"] >= facts["window_until"]


def test_a_record_without_a_lease_is_described_without():
    """O1: it has ended."""
    done = completed(CLAIM, None)
    assert facts_of(done, NOW)["lease_until"] is None
    assert facts_of(done, NOW)["last_attempt"] == "2027-01-15T08:00:00Z"
    assert "lease until" not in dict(lines_of(done, NOW))


def test_only_status_and_size_of_a_response_are_described():
    """O3: no bodies."""
    response = encode_response(Response(201, [], SECRET.encode()))
    facts = facts_of(completed(CLAIM, response), NOW)
    assert facts["response"] == {"status": 201, "bytes": len(SECRET)}
    assert SECRET not in json.dumps(facts)


@pytest.mark.parametrize(
    ("progress", "reason"),
    [(bytes([SEALED]) + b"whatever", "encrypted"), (b'{"steps":[["charge"', "damaged")],
)
def test_a_record_whose_progress_cannot_be_read_is_described_without(progress, reason):
    """O3, X1: it must not spoil a listing."""
    record = WITH_PROGRESS._replace(progress=progress)
    facts = facts_of(record, NOW)
    assert facts["reference"] == reference_of(record.id)
    assert (facts["steps"], facts["notes"], facts["resolutions"]) == (None, None, None)
    assert list(story_of(record)) == [("notes", reason)]


def test_a_record_is_described_in_lines():
    """O1: with its ages, and without what it does not have."""
    doubt = in_doubt(CLAIM._replace(progress=encoded(NOTHING.with_note(Note(NOW, 1, "charging")))))
    lines = dict(lines_of(doubt, NOW + 180_000))
    assert lines["reference"] == reference_of(CLAIM.id)
    assert (lines["state"], lines["label"], lines["attempt"]) == ("in doubt", "POST /orders", "1")
    assert (lines["caller"], lines["key"]) == ("caller", "the key")
    assert lines["created"] == "2027-01-15T08:00:00Z (3 m ago)"
    assert lines["lease until"] == "2027-01-15T08:00:20Z (2 m ago)"
    assert lines["window until"] == "2027-01-16T08:00:00Z (in 23 h)"
    assert lines["note"] == "2027-01-15T08:00:00Z attempt 1: charging"
    assert "response" not in lines
    compact = dict(lines_of(CLAIM._replace(scope="", key=""), NOW))
    assert {"caller", "key"} & set(compact) == set()


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (None, "not kept"),
        (encode_response(Response(201, [], b"12345")), "status 201, 5 bytes"),
        (encode_value(7), "a value, 1 bytes"),
    ],
)
def test_a_completed_operation_is_described_with_the_kind_of_its_response(response, words):
    """O1."""
    assert dict(lines_of(completed(CLAIM, response), NOW))["response"] == words


def test_a_running_operation_whose_lease_is_over_is_called_that():
    """O1, L5."""
    assert state_of(CLAIM, NOW) == "running"
    assert state_of(CLAIM, NOW + 60_000) == "lease expired"
    assert state_of(failed(CLAIM), NOW) == "failed"


@pytest.mark.parametrize(
    ("apart_ms", "words"),
    [
        (999, "now"),
        (-999, "now"),
        (59_999, "59 s ago"),
        (180_000, "3 m ago"),
        (7_200_000, "2 h ago"),
        (86_400_000 * 40, "40 d ago"),
        (-61_000, "in 1 m"),
    ],
)
def test_an_age_is_told_in_its_largest_unit(apart_ms, words):
    """O1."""
    assert age_of(NOW - apart_ms, NOW) == words


RESOLVED = Resolution(NOW, "happened", "ada", "asked")


@pytest.mark.parametrize(
    ("record", "words", "options"),
    [
        (CLAIM, "attempt 1 is running", []),
        (in_doubt(CLAIM), "retries are refused", ["--completed --status", "--failed"]),
        (in_doubt(CLAIM)._replace(scope=""), "are refused", ["--completed --value", "--failed"]),
        (
            CLAIM._replace(lease_until_ms=0),
            "follows the recovery policy",
            ["--abandoned --c", "--abandoned --f"],
        ),
        (completed(CLAIM, b""), "retries get the stored response", []),
        (completed(WITH_PROGRESS, b""), "retries get the stored response", []),
        (failed(CLAIM), "the next retry executes it", []),
        (failed(CLAIM)._replace(progress=bytes([SEALED])), "the next retry executes it", []),
        (
            completed(CLAIM, b"")._replace(progress=encoded(NOTHING.with_resolution(RESOLVED))),
            "as a person decided",
            ["--correct --completed", "--correct --failed"],
        ),
        (
            failed(CLAIM)._replace(
                progress=encoded(
                    NOTHING.with_resolution(RESOLVED._replace(outcome="did not happen"))
                )
            ),
            "executes it, as a person decided",
            ["--correct --completed"],
        ),
    ],
)
def test_a_person_gets_the_command_to_type_next(record, words, options):
    """O1, L6."""
    advice = advice_of(record, NOW)
    assert words in advice.words
    begin = f"coatcheck resolve {reference_of(record.id)}"
    assert len(advice.commands) == len(options)
    pairs = zip(advice.commands, options, strict=True)
    assert all(command.startswith(f"{begin} {option}") for command, option in pairs)
    assert facts_of(record, NOW)["next"] == advice._asdict()


def test_the_failure_of_the_last_attempt_is_described():
    """O1, O3: by the class of the error, because its text may have what a client has sent."""
    failed_once = with_failure(failed(CLAIM), "raised TimeoutError")
    assert list(story_of(failed_once)) == [("failure", "attempt 1 raised TimeoutError")]
    assert facts_of(failed_once, NOW)["failure"] == "attempt 1 raised TimeoutError"
    assert facts_of(CLAIM, NOW)["failure"] is None


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Policy(), "window 24 h, kept for 1 h longer"),
        (Policy(window="72h", margin="90s"), "window 3 d, kept for 90 s longer"),
        (Policy(window="36h", margin="7d"), "window 36 h, kept for 7 d longer"),
        (Policy(window="20.5s", margin=0), "window 20.5 s, kept for 0 s longer"),
    ],
)
def test_the_times_of_its_policy_are_shown(policy, words):
    """O1, T1: as the record has them."""
    record = first_attempt(REQUEST, policy, GONE, NOW)
    assert dict(lines_of(record, NOW))["policy"] == words
    assert facts_of(record, NOW)["policy"] is None


def test_the_policy_of_an_attempt_without_an_answer_is_shown():
    """O1, L6: it decides what a retry gets."""
    policy = Policy(recovery="manual", lease="90s")
    record = with_failure(in_doubt(CLAIM), "raised TimeoutError", policy.words)
    shown = dict(lines_of(record, NOW))
    assert shown["policy"].startswith("record mode, recovery manual, lease 90 s, window ")
    assert shown["failure"] == "attempt 1 raised TimeoutError"
    assert facts_of(record, NOW)["policy"] == policy.words


def test_an_operation_that_is_a_saga_is_decided_by_its_steps():
    """O1, E3: a decision about the whole would leave its undos out."""
    advice = advice_of(in_doubt(CLAIM._replace(label="saga checkout")), NOW)
    assert advice.commands == (f"coatcheck sagas show {reference_of(CLAIM.id)}",)
