"""A trip whose process dies at any boundary of its steps: everything adds up (E3).

`make test` kills at some boundaries, `make test-faults` at every one of them.
"""

import signal

import pytest

from coatcheck import SagaUndone
from tests.faults.cells import IS_ALL
from tests.faults.test_matrix import place_of
from tests.faults.trip_processes import HAD, STEPS, Agency, Boundaries, Node, die
from tests.faults.victims import PROCESSES, WAIT_S_MAX
from tests.support.times import eventually

# The claim; each step begins, acts and ends; one fails; undoing begins; each undo acts and ends;
# the answer. Two boundaries each. A test below counts them. Two branches that write at the same time
# may have to write again, so there can be more in async code.
BOUNDARIES = {"sync": 42, "async": 42}
# In the action of the second step, between a step and the next, when undoing begins, in an undo,
# after one, before the answer.
SAMPLE = [("SQLite", "sync", n) for n in (10, 31, 41)]
SAMPLE += [("PostgreSQL", "sync", 35), ("PostgreSQL", "async", 12), ("SQLite", "async", 38)]
EVERY = [
    (store, code, n)
    for store in ("SQLite", "PostgreSQL")
    for code, last in BOUNDARIES.items()
    for n in range(1, last + 1)
]


def node_at(place, code, *, fails="charge", boundaries=None):
    boundaries = boundaries or Boundaries()
    return Node(place, is_async=code == "async", fails=fails, boundaries=boundaries)


@pytest.mark.parametrize(("store", "code", "number"), EVERY if IS_ALL else SAMPLE)
def test_wherever_a_process_dies_money_seats_and_rooms_add_up(store, code, number, tmp_path):
    """E3: kill -9 at a boundary; each undo takes effect once, in reverse order."""
    place = place_of(store, tmp_path)
    Agency(place.ledger).prepare()
    process = PROCESSES.Process(target=die, args=(place, code == "async", "charge", number))
    process.start()
    process.join(WAIT_S_MAX)
    assert process.exitcode == -signal.SIGKILL

    node = node_at(place, code)
    try:
        is_claimed = bool(node.sagas.list())
        if is_claimed and number % 2:  # no caller comes again: the background continues it
            node.sagas.start()
            eventually(lambda: node.sagas.show("42").state == "undone")
        undone = node.call()
    finally:
        node.close()
    assert isinstance(undone, SagaUndone)
    assert (undone.step, undone.error) == ("charge", "ValueError")
    assert node.agency.left() == HAD
    keys = node.agency.keys()
    assert sorted(keys) == sorted([f"trip:42:{s}{end}" for s in STEPS[:3] for end in ("", ":undo")])
    undos = [key for key in keys if key.endswith("undo")]
    in_reverse = [f"trip:42:{s}:undo" for s in ("car", "hotel", "flight")]
    assert undos == in_reverse
    calls = node.agency.keys("calls")
    assert max(calls.count(key) for key in calls) <= 2


@pytest.mark.parametrize("number", range(2, 32, 6) if IS_ALL else [20])
def test_wherever_a_process_dies_a_trip_that_can_succeed_does(number, tmp_path):
    """E3: nothing is undone, and each step has happened once."""
    place = place_of("SQLite", tmp_path)
    Agency(place.ledger).prepare()
    process = PROCESSES.Process(target=die, args=(place, False, "", number))
    process.start()
    process.join(WAIT_S_MAX)
    node = node_at(place, "sync", fails="")
    try:
        assert node.call() == ["flight by -1", "hotel by -1", "car by -1", "charge by -30"]
    finally:
        node.close()
    assert node.agency.left() == {"flight": 9, "hotel": 9, "car": 9, "charge": 70}


@pytest.mark.parametrize("code", BOUNDARIES)
def test_every_boundary_is_in_the_list(code, tmp_path):
    """E3: a new write is a new place to die at."""
    place = place_of("SQLite", tmp_path)
    Agency(place.ledger).prepare()
    boundaries = Boundaries()
    node = node_at(place, code, boundaries=boundaries)
    try:
        assert isinstance(node.call(), SagaUndone)
    finally:
        node.close()
    assert boundaries.count >= BOUNDARIES[code]
    assert code == "async" or boundaries.count == BOUNDARIES[code]
