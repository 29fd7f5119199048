"""Steps, deferred work and operators, over every interleaving (L6, L7, L10)."""

import pytest

from .kinds import kind
from .middle import Budget, Party, PartyScenario, explored
from .parties import (
    client,
    handing_over,
    operator,
    plain,
    reconciler,
    stepping,
    stepping_plainly,
    worker,
)

# Long enough for a busy machine.
pytestmark = pytest.mark.timeout(300)

# A duplicate gets a 409 at once.
RETRY = kind(in_flight="409")
MANUAL = kind(in_flight="409", recovery="manual")
RECONCILE = kind(in_flight="409", recovery="reconcile", reconcile=print)
RECOVERIES = pytest.mark.parametrize(
    "kind", [RETRY, MANUAL, RECONCILE], ids=["retry", "manual", "reconcile"]
)


def of(kind, *flows):
    """The parties with these *flows*."""
    is_operator, is_work = ("operator.", "worker.")
    return tuple(
        Party(
            flow,
            kind,
            is_operator=flow.__qualname__.startswith(is_operator),
            is_work=flow.__qualname__.startswith(is_work),
        )
        for flow in flows
    )


STEPPING = client(stepping)
STEPPING_PLAINLY = client(stepping_plainly)
PLAIN = client(plain)
HANDING = client(handing_over)
WORKER = worker(plain)
RESOLVER = operator()
RERUNNER = operator(plain)
STEP_RERUNNER = operator(stepping)


@pytest.fixture
def counted(request, record_property):
    """Explore, and print and record the number of states."""

    def count(kind, flows, budget):
        states = explored(PartyScenario(of(kind, *flows), budget))
        print(f"\n{request.node.name}: {states:,} states")
        record_property("explored", [states, 0, 0])
        return states

    return count


@RECOVERIES
def test_a_step_that_is_done_runs_only_once(kind, counted):
    """L7: a crash, a failure, a renewal or a lost answer in the middle of any step."""
    counted(kind, (STEPPING,) * 2, Budget(crashes=1, failures=1, expiries=1))
    counted(kind, (STEPPING,) * 2, Budget(expiries=1, renewals=1))
    counted(kind, (STEPPING,) * 2, Budget(expiries=1, unacknowledged=1))


@RECOVERIES
def test_a_step_in_doubt_may_run_again_when_an_operator_says_so(kind, counted):
    """L6, L7: it is in doubt until then, under every policy."""
    counted(kind, (STEPPING, STEPPING, RESOLVER), Budget(failures=1))
    counted(kind, (STEPPING, STEPPING, STEP_RERUNNER), Budget(failures=1))
    counted(kind, (STEPPING, RESOLVER), Budget(crashes=1, failures=1, expiries=1))


@RECOVERIES
def test_another_release_does_not_forget_a_step_that_was_begun(kind, counted):
    """L6, L7: neither one that declares it as plain, nor one without steps."""
    counted(kind, (STEPPING, STEPPING_PLAINLY), Budget(crashes=1, failures=1, expiries=1))
    counted(kind, (STEPPING, PLAIN), Budget(crashes=1, failures=1, expiries=1))
    counted(kind, (STEPPING, PLAIN, RESOLVER), Budget(failures=1))


@RECOVERIES
def test_a_step_does_not_run_again_because_its_result_cannot_be_stored(kind, counted):
    """L7: without a crash, after which a plain step may run again."""
    counted(kind, (STEPPING,) * 3, Budget(unkept=1))
    counted(kind, (STEPPING,) * 2, Budget(unkept=2, failures=1, renewals=1))
    counted(kind, (STEPPING, STEPPING, RESOLVER), Budget(unkept=1))


@RECOVERIES
def test_deferred_work_starts_only_once(kind, counted):
    """L10: however often it is delivered, and whichever party crashes."""
    counted(kind, (HANDING, WORKER, WORKER), Budget(crashes=1, failures=1, expiries=1))
    counted(kind, (HANDING, HANDING, WORKER), Budget(crashes=1, expiries=1))


@pytest.mark.parametrize("kind", [MANUAL, RECONCILE], ids=["manual", "reconcile"])
def test_the_decision_of_an_operator_is_final(kind, counted):
    """L6: against a late attempt, a retry, the background recovery and another operator."""
    counted(kind, (PLAIN, RESOLVER, reconciler), Budget(crashes=1, failures=1, expiries=1))
    counted(kind, (PLAIN, RESOLVER, RESOLVER, reconciler), Budget(expiries=1))
    counted(kind, (PLAIN, PLAIN, RERUNNER), Budget(failures=1, expiries=1))
