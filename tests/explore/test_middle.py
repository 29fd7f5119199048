"""What happens in the middle, over every interleaving: steps, hand-over, and people (L6, L7, L10)."""

import pytest

from .errands import (
    client,
    handing_over,
    person,
    plain,
    reconciler,
    stepping,
    stepping_plainly,
    worker,
)
from .kinds import kind
from .middle import Budget, Errand, Party, explored

# Exploring is computing: on a machine that does much else it may take its time.
pytestmark = pytest.mark.timeout(300)

# Nobody waits: a duplicate is told so at once.
RETRY = kind(in_flight="409")
MANUAL = kind(in_flight="409", recovery="manual")
RECONCILE = kind(in_flight="409", recovery="reconcile", reconcile=print)
RECOVERIES = pytest.mark.parametrize(
    "kind", [RETRY, MANUAL, RECONCILE], ids=["retry", "manual", "reconcile"]
)


def of(kind, *flows):
    """Those who do these *flows*, by what they are called."""
    is_person, is_work = ("person.", "worker.")
    return tuple(
        Party(
            flow,
            kind,
            is_person=flow.__qualname__.startswith(is_person),
            is_work=flow.__qualname__.startswith(is_work),
        )
        for flow in flows
    )


STEPPING = client(stepping)
STEPPING_PLAINLY = client(stepping_plainly)
PLAIN = client(plain)
HANDING = client(handing_over)
WORKER = worker(plain)
RESOLVER = person()
RERUNNER = person(plain)
STEP_RERUNNER = person(stepping)


@pytest.fixture
def counted(request, record_property):
    """Explore, say how much that was, and have it counted."""

    def count(kind, flows, budget):
        states = explored(Errand(of(kind, *flows), budget))
        print(f"\n{request.node.name}: {states:,} states")
        record_property("explored", [states, 0, 0])
        return states

    return count


@RECOVERIES
def test_what_is_taken_in_steps_is_taken_once(kind, counted):
    """L7: a crash, a failure, a renewal or a lost answer in the middle of any step."""
    counted(kind, (STEPPING,) * 2, Budget(crashes=1, failures=1, expiries=1))
    counted(kind, (STEPPING,) * 2, Budget(expiries=1, renewals=1))
    counted(kind, (STEPPING,) * 2, Budget(expiries=1, deaf=1))


@RECOVERIES
def test_a_step_in_doubt_is_free_when_a_person_says_so(kind, counted):
    """L6, L7: and it is in doubt until then, whatever the route's policy is."""
    counted(kind, (STEPPING, STEPPING, RESOLVER), Budget(failures=1))
    counted(kind, (STEPPING, STEPPING, STEP_RERUNNER), Budget(failures=1))
    counted(kind, (STEPPING, RESOLVER), Budget(crashes=1, failures=1, expiries=1))


@RECOVERIES
def test_what_was_begun_is_not_forgotten_by_another_release(kind, counted):
    """L6, L7: one that calls the step plain, and one that takes no steps at all."""
    counted(kind, (STEPPING, STEPPING_PLAINLY), Budget(crashes=1, failures=1, expiries=1))
    counted(kind, (STEPPING, PLAIN), Budget(crashes=1, failures=1, expiries=1))
    counted(kind, (STEPPING, PLAIN, RESOLVER), Budget(failures=1))


@RECOVERIES
def test_an_effect_is_not_repeated_because_its_result_cannot_be_kept(kind, counted):
    """L7: nobody dies here; who dies before it is written that a plain step is done repeats it."""
    counted(kind, (STEPPING,) * 3, Budget(unkept=1))
    counted(kind, (STEPPING,) * 2, Budget(unkept=2, failures=1, renewals=1))
    counted(kind, (STEPPING, STEPPING, RESOLVER), Budget(unkept=1))


@RECOVERIES
def test_work_that_is_handed_over_starts_once(kind, counted):
    """L10: however often it is delivered, and whoever dies."""
    counted(kind, (HANDING, WORKER, WORKER), Budget(crashes=1, failures=1, expiries=1))
    counted(kind, (HANDING, HANDING, WORKER), Budget(crashes=1, expiries=1))


@pytest.mark.parametrize("kind", [MANUAL, RECONCILE], ids=["manual", "reconcile"])
def test_what_a_person_decides_stands(kind, counted):
    """L6: against a zombie, a retry, the background reconciler and another person."""
    counted(kind, (PLAIN, RESOLVER, reconciler), Budget(crashes=1, failures=1, expiries=1))
    counted(kind, (PLAIN, RESOLVER, RESOLVER, reconciler), Budget(expiries=1))
    counted(kind, (PLAIN, PLAIN, RERUNNER), Budget(failures=1, expiries=1))
