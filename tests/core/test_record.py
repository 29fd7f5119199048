"""The record: what may follow what."""

import pytest

from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    GONE,
    IN_DOUBT,
    MOVES,
    RUNNING,
    STATE_NAMES,
    Record,
    When,
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
def test_a_holder_may_renew_complete_release_and_park(after, name):
    assert names(CLAIM, after) == [name]


def test_nobody_takes_over_a_living_claim():
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


def test_what_is_completed_stays_so_until_its_window_is_over():
    done = completed(CLAIM, b"r")
    assert names(done, taken_over(done, 4_999), 4_999) == []
    assert names(done, in_doubt(CLAIM)._replace(version=9_999)) == []


def test_a_claim_with_a_live_lease_is_neither_free_nor_swept():
    long = renewed(CLAIM, 10_000)
    assert not is_window_over(long, 9_999)
    assert not is_retention_over(long, 9_999)
    assert is_window_over(long, 10_000)
    assert is_retention_over(long, 10_000)


def test_what_is_in_doubt_remembers_how_long_its_claim_held():
    """L6: whoever finds out what happened has to know when it may have."""
    parked = in_doubt(CLAIM)
    assert parked.lease_until_ms == CLAIM.lease_until_ms > 0
    assert is_lease_over(parked, 0)
    assert in_doubt(parked).lease_until_ms == CLAIM.lease_until_ms
    assert completed(parked, b"").lease_until_ms == failed(parked).lease_until_ms == 0


def test_an_ended_record_holds_no_lease():
    assert completed(CLAIM, b"").lease_until_ms == 0
    assert is_lease_over(failed(CLAIM), 0)


def test_a_new_attempt_exceeds_every_version_that_was():
    """A swept key starts from the clock, which has passed all versions of the life before."""
    assert next_version(GONE, 1_700_000_000_000) == 1_700_000_000_000
    assert next_version(CLAIM._replace(version=2_000), 1_000) == 2_001


def test_an_attempt_knows_itself_by_its_nonce_while_it_runs():
    assert is_same_attempt(renewed(CLAIM, 9_000), CLAIM)
    assert not is_same_attempt(taken_over(CLAIM, 3_000), CLAIM)
    assert not is_same_attempt(completed(CLAIM, b""), CLAIM)


# One record in each state, and the moment at which nothing, its lease, window and retention are over.
STANDING = {
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
    """A record in the state *target* that follows *before*, by its own holder or another."""
    if target is None:
        return None
    grown = (before or CLAIM)._replace(version=9_000, state=target)
    return grown if is_own else grown._replace(nonce=8, attempt=grown.attempt + 1)


@pytest.mark.parametrize("now_ms", MOMENTS)
@pytest.mark.parametrize("target", STANDING)
@pytest.mark.parametrize("source", STANDING)
def test_the_legal_moves_are_those_of_the_table(source, target, now_ms):
    """L5, T2, T3: whatever is not in the table is illegal, for the holder and for everybody."""
    before = STANDING[source]
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
    """L10: with another nonce it was handed over, and that is for claims that are held."""
    grown = renewed(CLAIM, 9_000)
    assert names(CLAIM, grown._replace(nonce=8)) == ["defer"]
    assert names(CLAIM, grown._replace(attempt=2)) == []
    assert names(CLAIM, grown._replace(nonce=8, created_ms=1_500)) == []
    assert names(failed(CLAIM), grown._replace(nonce=8, version=9_000)) == []


def test_the_table_is_the_one_that_is_published():
    """L5, T2, T3: the laws, the explorer and the docs are made from it, so nothing slips in."""
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


def test_the_table_says_every_move_once():
    assert len(set(MOVES)) == len(MOVES)
    named = {(move.source, move.target, move.name) for move in MOVES}
    assert len(named) == len(MOVES)


def test_nothing_stands_where_a_record_is_gone():
    """It is older than everything, free, swept, and belongs to nobody."""
    assert GONE.version == GONE.nonce == GONE.attempt == 0
    assert (GONE.id, GONE.fingerprint, GONE.response, GONE.progress) == (b"", b"", None, None)
    assert (GONE.label, GONE.scope, GONE.key) == ("", "", "")
    assert (GONE.created_ms, GONE.lease_until_ms) == (0, 0)
    assert (GONE.window_until_ms, GONE.expires_ms) == (0, 0)
    assert is_lease_over(GONE, 0)
    assert is_window_over(GONE, 0)
    assert is_retention_over(GONE, 1)


def test_an_ended_record_is_held_by_nobody_whatever_its_lease_says():
    """L5."""
    assert is_lease_over(failed(CLAIM)._replace(lease_until_ms=9_999), 1_500)


def test_a_record_is_not_swept_before_the_clock_has_passed_its_version():
    """T3: or the next life, which starts from the clock, could be handed the same version."""
    done = completed(CLAIM, b"r")._replace(version=7_000)
    assert not is_retention_over(done, 7_000)
    assert is_retention_over(done, 7_001)
    assert names(done, None, 7_000) == []
    assert names(done, None, 7_001) == ["sweep"]


def test_a_write_is_recognised_also_in_a_store_that_drops_what_is_for_people():
    """L5."""
    assert is_same_write(CLAIM, CLAIM)
    assert is_same_write(CLAIM._replace(label="", scope="", key=""), CLAIM)


def test_a_write_is_recognised_also_where_there_was_no_room_for_its_response():
    """L12: by its version and its nonce; what it has noted may be sealed, each time anew."""
    answer = completed(CLAIM, b"large")._replace(progress=b"sealed")
    kept = answer._replace(label="", scope="", key="", progress=b"sealed before", response=None)
    assert is_same_write_cut(kept, answer)
    assert not is_same_write_cut(answer, answer)
    assert not is_same_write_cut(kept._replace(nonce=8), answer)
    assert not is_same_write_cut(CLAIM, answer)


@pytest.mark.parametrize("name", sorted(set(Record._fields) - {"label", "scope", "key"}))
def test_a_write_that_differs_in_anything_else_is_not_ours(name):
    """L5."""
    other = CLAIM._replace(**{name: b"other" if name in {"progress", "response"} else 77})
    assert not is_same_write(other, CLAIM)


def test_every_state_has_a_name():
    assert STATE_NAMES == {
        RUNNING: "running",
        COMPLETED: "completed",
        FAILED: "failed",
        IN_DOUBT: "in_doubt",
    }


def test_the_numbers_of_states_never_change():
    """They are in databases."""
    assert [RUNNING, COMPLETED, FAILED, IN_DOUBT] == [0, 1, 2, 3]


@pytest.mark.parametrize("ended", [completed(CLAIM, b"r"), failed(CLAIM), in_doubt(CLAIM)])
def test_ending_an_attempt_changes_its_state_and_nothing_of_its_life(ended):
    changed = {name for name in Record._fields if getattr(ended, name) != getattr(CLAIM, name)}
    assert changed <= {"version", "state", "lease_until_ms", "response"}
    assert ended.version == CLAIM.version + 1


def test_renewing_changes_the_lease_and_nothing_else():
    assert renewed(CLAIM, 9_000) == CLAIM._replace(version=1_001, lease_until_ms=9_000)


@pytest.mark.parametrize("end", [failed, in_doubt, lambda claim: completed(claim, b"other")])
def test_what_is_completed_cannot_be_ended_again(end):
    with pytest.raises(AssertionError):
        end(completed(CLAIM, b"r"))


def test_every_state_can_be_left():
    left = {move.source for move in MOVES}
    assert {RUNNING, COMPLETED, FAILED, IN_DOUBT, None} == left


def test_a_write_is_recognised_even_by_a_store_that_keeps_no_labels():
    """L1: who meets exactly what it wanted to write has written it."""
    assert is_same_write(CLAIM._replace(label="", scope="", key=""), CLAIM)
    assert not is_same_write(CLAIM._replace(nonce=8), CLAIM)
    assert not is_same_write(completed(CLAIM, b"one"), completed(CLAIM, b"two"))
