"""Descriptions for operators: everything of a record, except for responses and results."""

import json

import pytest

from coatcheck.core.describe import facts_of, story_of, times_of
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import ClaimRequest, first_attempt, next_attempt
from coatcheck.core.policy import Policy
from coatcheck.core.progress import NOTHING, Note, Report, Resolution, Step, encoded
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
    assert times_of(doubt) == (
        "attempt 2 began 2027-01-15T08:01:30Z, lease until 2027-01-15T08:03:10Z, "
        "window until 2027-01-16T08:00:00Z"
    )


def test_a_record_without_a_lease_is_described_without():
    """O1: it has ended."""
    done = completed(CLAIM, None)
    assert facts_of(done, NOW)["lease_until"] is None
    assert facts_of(done, NOW)["last_attempt"] == "2027-01-15T08:00:00Z"
    assert times_of(done) == (
        "attempt 1 began 2027-01-15T08:00:00Z, window until 2027-01-16T08:00:00Z"
    )


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
