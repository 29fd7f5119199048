"""Every interleaving of two and three clients, on the production flow; see `world` and `rules`.

Within its budget each scenario is exhaustive: any client may move next, and the adversary may act
between any two steps. A paused client needs no budget: it is not chosen while others take over, and
chosen again later. A failing scenario prints its shortest schedule.
"""

import pytest

from coatcheck.core.keep import Outcome, OutcomeKind

from .kinds import MANUAL, RECONCILE, RETRY, kind
from .places import HandlerError, Raised
from .world import FAILURES, Budget, Scenario

# Long enough for a busy machine.
pytestmark = pytest.mark.timeout(300)

RECOVERIES = pytest.mark.parametrize(
    "client", [RETRY, MANUAL, RECONCILE], ids=["retry", "manual", "reconcile"]
)
RAISES = (Raised(HandlerError),)


@pytest.mark.parametrize(
    ("client", "renewals"),
    [(RETRY, 1), (MANUAL, 1), (RECONCILE, 0)],
    ids=["retry", "manual", "reconcile"],
)
def test_three_clients_with_a_crash_a_lost_acknowledgement_and_an_expired_lease(
    client, renewals, explored
):
    """L1, L5: one executes; a crash leaves a lease; a client that lost its claim writes nothing."""
    budget = Budget(crashes=1, unacknowledged=1, expiries=1, renewals=renewals)
    explored(Scenario((client,) * 3, budget))


@RECOVERIES
def test_three_clients_whose_executions_end_in_every_way(client, explored):
    """L4, L5: a failure, an answer that is not kept and one too large to keep, and an expiry."""
    failures = FAILURES if client.policy.reruns else (*FAILURES, Outcome(OutcomeKind.IN_DOUBT))
    explored(Scenario((client,) * 3, Budget(expiries=1, failures=1), failures))


@pytest.mark.parametrize(
    ("client", "losses"),
    [(RETRY, 2), (MANUAL, 2), (RECONCILE, 1)],
    ids=["retry", "manual", "reconcile"],
)
def test_two_clients_whose_messages_come_late_or_never(client, losses, explored):
    """L5: a lost swap may still take effect later."""
    explored(Scenario((client,) * 2, Budget(losses=losses, renewals=1, expiries=1)))


def test_two_clients_with_everything_that_can_go_wrong_at_once(explored):
    """L1, L4, L5: a crash, a late message, a lost acknowledgement, an expiry and a failure."""
    budget = Budget(crashes=1, losses=1, unacknowledged=1, expiries=1, failures=1)
    explored(Scenario((RETRY,) * 2, budget, RAISES))


@RECOVERIES
def test_two_clients_over_several_leases_with_renewals(client, explored):
    """L5: a renewal may be on its way when the handler ends."""
    explored(Scenario((client,) * 2, Budget(renewals=2, expiries=2)))
    explored(Scenario((client,) * 2, Budget(unacknowledged=1, renewals=1, expiries=2)))


@pytest.mark.parametrize(
    "client",
    [RETRY, MANUAL, RECONCILE, kind(on_expired="refuse")],
    ids=["retry", "manual", "reconcile", "refuse"],
)
def test_two_clients_over_several_generations_and_a_sweep(client, explored):
    """T1, T2, T3: a new generation after the window, a sweep, and old clients that continue."""
    budget = Budget(unacknowledged=1, expiries=1, windows=1, retentions=1)
    explored(Scenario((client,) * 2, budget))


def test_three_clients_and_the_end_of_the_window(explored):
    """T2: one of many late retries begins the new generation."""
    explored(Scenario((RETRY,) * 3, Budget(windows=1, retentions=1)))


@pytest.mark.parametrize("recovery", ["retry", "manual"])
def test_a_client_with_another_request_among_two_equal_ones(recovery, explored):
    """F1: a client that waits or takes over compares the request again."""
    same = kind(recovery=recovery)
    other = kind(b"G" * 16, recovery=recovery)
    failures = (Raised(HandlerError), Outcome(OutcomeKind.REJECT))
    budget = Budget(unacknowledged=1, expiries=1, failures=1)
    explored(Scenario((same, same, other), budget, failures))


def test_clients_that_do_not_wait(explored):
    """L3: a duplicate that gets 409 at once has changed nothing."""
    explored(
        Scenario(
            (kind(in_flight="409"),) * 3, Budget(unacknowledged=1, expiries=1, failures=1), RAISES
        )
    )


def test_waiters_that_give_up_or_are_one_too_many(explored):
    """L3, X2: they have changed nothing."""
    budget = Budget(expiries=1, ticks=1, crowds=1, failures=1)
    explored(Scenario((RETRY,) * 3, budget, RAISES))


def test_clients_with_too_many_keys_use_only_known_ones(explored):
    """X2: a caller over its limit may still retry, and take over."""
    full = kind(may_claim=False)
    budget = Budget(unacknowledged=1, expiries=1, failures=1)
    explored(Scenario((RETRY, full, full), budget, RAISES))
