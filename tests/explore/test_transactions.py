"""Transaction mode over every interleaving: record and effect both exist, or neither (L9)."""

import pytest

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.policy import Policy
from coatcheck.core.record import Swap
from coatcheck.core.transaction import Begin, Commit, Rollback, transactional

from .places import HandlerError, Kind
from .transactions import Budget, TransactionScenario, explored

SAME = Kind(Policy(mode="transaction"))
OTHER = Kind(Policy(mode="transaction"), fingerprint=b"G" * 16)
TROUBLE = Budget(crashes=1, unsure=1, failures=1, refusals=1, ticks=2, windows=1)


@pytest.mark.parametrize(
    ("kinds", "budget"),
    [
        ((SAME, SAME), TROUBLE._replace(crashes=2, unsure=2, failures=2, refusals=2)),
        ((SAME, OTHER), TROUBLE),
        ((SAME, SAME, SAME), TROUBLE),
        ((SAME, SAME, SAME), Budget(crashes=2, unsure=2)),
        ((SAME, SAME, SAME), Budget(crashes=1, unsure=1, refusals=3)),
    ],
)
def test_nothing_is_ever_half_done_in_any_interleaving(kinds, budget, record_property):
    states = explored(TransactionScenario(kinds, budget, transactional))
    print(f"\n{states:,} states")
    record_property("explored", [states, 0, 0])
    assert states > 100


def test_a_database_that_does_not_lock_is_noticed():
    with pytest.raises(AssertionError, match="ran again"):
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

    with pytest.raises(AssertionError, match="a record without its effect"):
        explored(TransactionScenario((SAME, SAME), Budget(failures=1), careless))


def changed(change):
    """The flow with another effect in the place of each that *change* knows."""

    def flow_of(request, policy, *, may_claim):
        flow = transactional(request, policy, may_claim=may_claim)
        effect, expected = next(flow), 0
        try:
            while True:
                if isinstance(effect, Begin):
                    expected = effect.swap.expected
                effect = flow.send((yield from change(effect, expected)))
        except StopIteration as done:
            return done.value

    return flow_of


def rolled_back_then_stored(effect, expected):
    """Frees the row before the refusal is stored."""
    if not isinstance(effect, Commit) or not effect.undo:
        return (yield effect)
    yield Rollback()
    return (yield Swap(effect.swap.id, expected, effect.swap.record))


def committed_as_a_success(effect, _expected):
    """Keeps the writes of a handler that has refused."""
    return (yield Commit(effect.swap) if isinstance(effect, Commit) else effect)


@pytest.mark.parametrize(
    ("change", "noticed"),
    [(rolled_back_then_stored, "ran again"), (committed_as_a_success, "an effect of a refusal")],
)
def test_a_refusal_that_frees_its_row_or_keeps_its_effect_is_noticed(change, noticed):
    """L1, L9: a duplicate that waits for the row would run the handler."""
    with pytest.raises(AssertionError, match=noticed):
        explored(TransactionScenario((SAME, SAME), Budget(refusals=1), changed(change)))
