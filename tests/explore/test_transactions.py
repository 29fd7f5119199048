"""Transaction mode over every interleaving: record and effect both exist, or neither (L9)."""

import pytest

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.policy import Policy
from coatcheck.core.transaction import transactional

from .places import HandlerError, Kind
from .transactions import Budget, TransactionScenario, explored

SAME = Kind(Policy(mode="transaction"))
OTHER = Kind(Policy(mode="transaction"), fingerprint=b"G" * 16)
TROUBLE = Budget(crashes=1, unsure=1, failures=1, ticks=2, windows=1)


@pytest.mark.parametrize(
    ("kinds", "budget"),
    [
        ((SAME, SAME), TROUBLE._replace(crashes=2, unsure=2, failures=2)),
        ((SAME, OTHER), TROUBLE),
        ((SAME, SAME, SAME), TROUBLE),
        ((SAME, SAME, SAME), Budget(crashes=2, unsure=2)),
    ],
)
def test_nothing_is_ever_half_done_in_any_interleaving(kinds, budget, record_property):
    states = explored(TransactionScenario(kinds, budget, transactional))
    print(f"\n{states:,} states")
    record_property("explored", [states, 0, 0])
    assert states > 100


def test_a_database_that_does_not_lock_is_noticed():
    with pytest.raises(AssertionError, match="happened twice"):
        explored(TransactionScenario((SAME, SAME), Budget(), transactional, locks=False))


def test_a_flow_that_commits_a_failure_is_noticed():
    """A failure must leave no record."""

    def careless(request, policy, *, may_claim):
        flow = transactional(request, policy, may_claim=may_claim)
        sent = None
        try:
            while True:
                try:
                    sent = yield flow.send(sent)
                except HandlerError:
                    sent = Outcome(OutcomeKind.COMPLETE, b"made up")
        except StopIteration as done:
            return done.value

    with pytest.raises(AssertionError, match="a made-up answer"):
        explored(TransactionScenario((SAME, SAME), Budget(failures=1), careless))
