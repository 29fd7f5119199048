"""The record: what may follow what."""

import pytest

from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    GONE,
    IN_DOUBT,
    MOVES,
    OPERATOR_MOVES,
    RUNNING,
    STATE_NAMES,
    Record,
    When,
    can_erase,
    completed,
    failed,
    in_doubt,
    is_lease_over,
    is_retention_over,
    is_same_attempt,
    is_same_write,
    is_same_write_cut,
    is_window_over,
    legal_moves,
    next_version,
    renewed,
)

CLAIM = Record(
    *(b"i" * 16, 1_000, RUNNING, 1, b"f" * 16, 1_000, 2_000, 5_000, 6_000, 7),
    *("POST /orders", "caller", "key", None, None),
)


def names(before, after, now_ms=1_500):
    return [move.name for move in legal_moves(before, after, now_ms)]


def taken_over(record, now_ms):
    return record._replace(
        version=next_version(record, now_ms), state=RUNNING, attempt=record.attempt + 1, nonce=8
    )


def test_a_claim_is_made_of_nothing():
    assert names(None, CLAIM) == ["claim"]
    assert names(None, completed(CLAIM, b"")) == []


@pytest.mark.parametrize(
    ("after", "name"),
    [
        (renewed(CLAIM, 9_000), "renew"),
        (completed(CLAIM, b"r"), "complete"),
        (failed(CLAIM), "release"),
        (in_doubt(CLAIM), "mark in doubt"),
    ],
)
def test_an_attempt_may_renew_complete_release_or_doubt_its_claim(after, name):
    assert names(CLAIM, after) == [name]


def test_a_claim_is_taken_over_only_after_its_lease():
    """L5."""
    assert names(CLAIM, taken_over(CLAIM, 1_999), 1_999) == []
    assert names(CLAIM, taken_over(CLAIM, 2_000), 2_000) == ["take over"]


def test_a_version_that_does_not_grow_is_illegal():
    assert names(CLAIM, completed(CLAIM, b"")._replace(version=CLAIM.version)) == []


@pytest.mark.parametrize("ended", [completed(CLAIM, b"r"), failed(CLAIM), in_doubt(CLAIM)])
def test_a_key_is_free_when_its_window_is_over_and_swept_when_its_retention_is(ended):
    """T1, T2, T3."""
    assert "new generation" not in names(ended, taken_over(ended, 4_999), 4_999)
    assert "new generation" in names(ended, taken_over(ended, 5_000), 5_000)
    assert names(ended, None, 5_999) == []
    assert names(ended, None, 6_000) == ["sweep"]


def test_a_completed_record_stays_so_until_its_window_is_over():
    """T1."""
    done = completed(CLAIM, b"r")
    assert names(done, taken_over(done, 4_999), 4_999) == []
    assert names(done, in_doubt(CLAIM)._replace(version=9_999)) == []


def test_a_claim_with_a_live_lease_is_neither_free_nor_swept():
    long = renewed(CLAIM, 10_000)
    assert not is_window_over(long, 9_999)
    assert not is_retention_over(long, 9_999)
    assert is_window_over(long, 10_000)
    assert is_retention_over(long, 10_000)


def test_a_record_in_doubt_keeps_the_end_of_its_lease():
    """L6: an operator must know when it may have happened."""
    doubt = in_doubt(CLAIM)
    assert doubt.lease_until_ms == CLAIM.lease_until_ms > 0
    assert is_lease_over(doubt, 0)
    assert in_doubt(doubt).lease_until_ms == CLAIM.lease_until_ms
    assert completed(doubt, b"").lease_until_ms == failed(doubt).lease_until_ms == 0


def test_a_new_attempt_exceeds_every_version_that_was():
    """L5: after a sweep it starts from the clock, which has passed all versions before."""
    assert next_version(GONE, 1_700_000_000_000) == 1_700_000_000_000
    assert next_version(CLAIM._replace(version=2_000), 1_000) == 2_001


def test_an_attempt_knows_itself_by_its_nonce_while_it_runs():
    assert is_same_attempt(renewed(CLAIM, 9_000), CLAIM)
    assert not is_same_attempt(taken_over(CLAIM, 3_000), CLAIM)
    assert not is_same_attempt(completed(CLAIM, b""), CLAIM)


# One record in each state, and the moment at which nothing, its lease, window and retention are over.
RECORDS = {
    None: None,
    RUNNING: CLAIM,
    COMPLETED: completed(CLAIM, b"r"),
    FAILED: failed(CLAIM),
    IN_DOUBT: in_doubt(CLAIM),
}
MOMENTS = {1_500: {When.ALWAYS}, 2_000: {When.LEASE_OVER}, 5_000: {When.WINDOW_OVER}}
MOMENTS[6_000] = {When.RETENTION_OVER}


def over_at(now_ms, state):
    """Every condition that holds at *now_ms*; a record that does not run holds no lease."""
    held = set().union(*(found for moment, found in MOMENTS.items() if moment <= now_ms))
    return held if state == RUNNING else held | {When.LEASE_OVER}


def following(before, target, *, is_own):
    """A record in the state *target* after *before*, by the same attempt or by another."""
    if target is None:
        return None
    grown = (before or CLAIM)._replace(version=9_000, state=target)
    return grown if is_own else grown._replace(nonce=8, attempt=grown.attempt + 1)


@pytest.mark.parametrize("now_ms", MOMENTS)
@pytest.mark.parametrize("target", RECORDS)
@pytest.mark.parametrize("source", RECORDS)
def test_the_legal_moves_are_those_of_the_table(source, target, now_ms):
    """L5, T2, T3: everything else is illegal, for the attempt itself and for others."""
    before = RECORDS[source]
    for is_own in (True, False):
        expected = [
            move
            for move in MOVES
            if (move.source, move.target) == (source, target)
            and (source is None or move.when in over_at(now_ms, source))
        ]
        if target == RUNNING and source is not None:
            expected = [move for move in expected if (move.name == "renew") == is_own]
            expected = [move for move in expected if move.name != "defer"]
        after = following(before, target, is_own=is_own)
        assert list(legal_moves(before, after, now_ms)) == expected


def test_the_same_attempt_with_another_nonce_or_number_is_no_renewal():
    """L10: with another nonce, a worker has taken deferred work; that needs a running claim."""
    grown = renewed(CLAIM, 9_000)
    assert names(CLAIM, grown._replace(nonce=8)) == ["defer"]
    assert names(CLAIM, grown._replace(attempt=2)) == []
    assert names(CLAIM, grown._replace(nonce=8, created_ms=1_500)) == []
    assert names(failed(CLAIM), grown._replace(nonce=8, version=9_000)) == []


def test_the_table_is_the_published_one():
    """L5, T2, T3: the laws, the explorer and the docs are made from it."""
    assert [(m.name, m.source, m.target, m.when) for m in MOVES] == [
        ("claim", None, RUNNING, When.ALWAYS),
        ("renew", RUNNING, RUNNING, When.ALWAYS),
        ("defer", RUNNING, RUNNING, When.ALWAYS),
        ("complete", RUNNING, COMPLETED, When.ALWAYS),
        ("release", RUNNING, FAILED, When.ALWAYS),
        ("mark in doubt", RUNNING, IN_DOUBT, When.ALWAYS),
        ("take over", RUNNING, RUNNING, When.LEASE_OVER),
        ("retry", FAILED, RUNNING, When.ALWAYS),
        ("resolve as happened", IN_DOUBT, COMPLETED, When.ALWAYS),
        ("resolve as not happened", IN_DOUBT, FAILED, When.ALWAYS),
        ("resolve by running again", IN_DOUBT, RUNNING, When.ALWAYS),
        *(("new generation", state, RUNNING, When.WINDOW_OVER) for state in range(4)),
        *(("sweep", state, None, When.RETENTION_OVER) for state in range(4)),
    ]
    assert [(m.name, m.source, m.target, m.when) for m in OPERATOR_MOVES] == [
        ("correct", COMPLETED, COMPLETED, When.DECIDED),
        ("correct", COMPLETED, FAILED, When.DECIDED),
        ("correct", FAILED, COMPLETED, When.DECIDED),
        ("correct", FAILED, FAILED, When.DECIDED),
        *(("erase", state, None, When.VERSION_PASSED) for state in (COMPLETED, FAILED, IN_DOUBT)),
    ]


def test_a_person_may_erase_what_has_ended_and_is_older_than_the_clock():
    """R3, T3: what runs is left alone; no version is used twice."""
    done = completed(CLAIM, b"r")._replace(version=7_000)
    assert [can_erase(done, now_ms) for now_ms in (7_000, 7_001)] == [False, True]
    assert can_erase(in_doubt(CLAIM), 9_999)
    assert not can_erase(CLAIM, 99_999)


def test_a_record_that_is_gone_is_empty_free_and_older_than_all_others():
    """T3."""
    assert GONE.version == GONE.nonce == GONE.attempt == 0
    assert (GONE.id, GONE.fingerprint, GONE.response, GONE.progress) == (b"", b"", None, None)
    assert (GONE.label, GONE.scope, GONE.key) == ("", "", "")
    assert (GONE.created_ms, GONE.lease_until_ms) == (0, 0)
    assert (GONE.window_until_ms, GONE.expires_ms) == (0, 0)
    assert is_lease_over(GONE, 0)
    assert is_window_over(GONE, 0)
    assert is_retention_over(GONE, 1)


def test_a_record_that_has_ended_has_no_lease():
    """L5: whatever its field says."""
    assert completed(CLAIM, b"").lease_until_ms == 0
    assert is_lease_over(failed(CLAIM)._replace(lease_until_ms=9_999), 1_500)


def test_a_record_is_not_swept_before_the_clock_has_passed_its_version():
    """T3: the next generation starts from the clock, and must not get the same version."""
    done = completed(CLAIM, b"r")._replace(version=7_000)
    assert not is_retention_over(done, 7_000)
    assert is_retention_over(done, 7_001)
    assert names(done, None, 7_000) == []
    assert names(done, None, 7_001) == ["sweep"]


def test_a_write_is_recognised_in_a_store_that_drops_the_texts_for_operators():
    """L1, L5."""
    assert is_same_write(CLAIM, CLAIM)
    assert is_same_write(CLAIM._replace(label="", scope="", key=""), CLAIM)
    assert not is_same_write(completed(CLAIM, b"one"), completed(CLAIM, b"two"))


def test_a_write_is_recognised_if_the_store_had_no_room_for_its_response():
    """L12: by its version and its nonce; its progress may be encrypted, differently each time."""
    answer = completed(CLAIM, b"large")._replace(progress=b"sealed")
    kept = answer._replace(label="", scope="", key="", progress=b"sealed before", response=None)
    assert is_same_write_cut(kept, answer)
    assert not is_same_write_cut(answer, answer)
    assert not is_same_write_cut(kept._replace(nonce=8), answer)
    assert not is_same_write_cut(CLAIM, answer)


@pytest.mark.parametrize("name", sorted(set(Record._fields) - {"label", "scope", "key"}))
def test_a_write_that_differs_in_another_field_is_not_ours(name):
    """L5."""
    other = CLAIM._replace(**{name: b"other" if name in {"progress", "response"} else 77})
    assert not is_same_write(other, CLAIM)


def test_the_numbers_and_names_of_states_never_change():
    """They are in databases."""
    assert [STATE_NAMES[state] for state in (RUNNING, COMPLETED, FAILED, IN_DOUBT)] == [
        *("running", "completed", "failed", "in_doubt"),
    ]
    assert [RUNNING, COMPLETED, FAILED, IN_DOUBT] == [0, 1, 2, 3]


@pytest.mark.parametrize("ended", [completed(CLAIM, b"r"), failed(CLAIM), in_doubt(CLAIM)])
def test_the_end_of_an_attempt_changes_its_state_and_nothing_of_its_generation(ended):
    changed = {name for name in Record._fields if getattr(ended, name) != getattr(CLAIM, name)}
    assert changed <= {"version", "state", "lease_until_ms", "response"}
    assert ended.version == CLAIM.version + 1


def test_a_renewal_changes_the_lease_and_nothing_else():
    assert renewed(CLAIM, 9_000) == CLAIM._replace(version=1_001, lease_until_ms=9_000)


@pytest.mark.parametrize("end", [failed, in_doubt, lambda claim: completed(claim, b"other")])
def test_a_completed_record_cannot_be_ended_again(end):
    with pytest.raises(AssertionError):
        end(completed(CLAIM, b"r"))
