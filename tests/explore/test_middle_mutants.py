"""The explorer of the middle can fail: what is broken on purpose is caught, for what it breaks.

Each mutant is explored beside its control: the same parties with the flows as they are.
"""

import pytest

from coatcheck.core import deferred as hand_over
from coatcheck.core import lifecycle as production
from coatcheck.core import recovery as recovering
from coatcheck.core import recovery as resolving
from coatcheck.core import steps
from coatcheck.core.keep import OutcomeKind
from coatcheck.core.progress import progress_of
from coatcheck.core.record import IN_DOUBT, RUNNING, Swap, completed, failed

from . import parties
from .middle import Budget, PartyScenario, explored
from .parties import reconciler
from .rules import Violation
from .test_middle import (
    HANDING,
    MANUAL,
    PLAIN,
    RESOLVER,
    RETRY,
    STEPPING,
    STEPPING_PLAINLY,
    WORKER,
    of,
)


def runs_again_what_was_begun(monkeypatch):
    def careless(_plan, _known):
        return None
        yield

    monkeypatch.setattr(steps, "_known_result", careless)


def goes_by_what_is_declared_now(monkeypatch):
    known_result = steps._known_result

    def forgetful(plan, known):
        return (
            (yield from known_result(plan, known)) if plan.at_most_once or plan.has_probe else None
        )

    monkeypatch.setattr(steps, "_known_result", forgetful)


def forgets_steps_that_were_not_asked_for(monkeypatch):
    monkeypatch.setattr(steps, "_left", lambda _progress, _asked: [])


def forgets_what_could_not_be_kept(monkeypatch):
    finish = steps._finish

    def forgetful(claim, done, result):
        return (yield from finish(claim, done, steps._storable(done.name, result)))

    monkeypatch.setattr(steps, "_finish", forgetful)


def runs_again_what_is_done(monkeypatch):
    def forgetful(claim, plan):
        known = progress_of(claim).step(plan.name)
        if known is not None and known.value is not None:
            yield from steps.Run(plan.name)
        return (yield from steps.take(claim, plan))

    monkeypatch.setattr(parties, "take", forgetful)


def takes_over_without_what_was_written(monkeypatch):
    made = production.next_attempt
    monkeypatch.setattr(
        production, "next_attempt", lambda *args: made(*args)._replace(progress=None)
    )


def takes_what_was_taken_before(monkeypatch):
    def greedy(handed, request, policy, current):
        return hand_over.run_deferred(
            handed._replace(nonce=current.nonce), request, policy, current
        )

    monkeypatch.setattr(parties, "run_deferred", greedy)


def decides_without_a_reason(monkeypatch):
    monkeypatch.setattr(resolving, "_with_resolution", lambda current, *_args, **_may_run: current)


def frees_nothing_for_a_person(monkeypatch):
    decide = resolving._with_resolution

    def stubborn(current, resolution, **_may_run):
        return decide(current, resolution, may_run=False)

    monkeypatch.setattr(resolving, "_with_resolution", stubborn)


def decides_about_what_is_alive(monkeypatch):
    monkeypatch.setattr(
        *(resolving, "can_resolve"),
        lambda seen, **_abandoned: seen.record.state in (RUNNING, IN_DOUBT),
    )


def writes_over_what_a_person_decided(monkeypatch):
    """A late attempt writes its own end over the decision."""
    write_outcome = production.write_outcome

    def stubborn(claim, outcome, **options):
        lost = yield from write_outcome(claim, outcome, **options)
        if lost is not None and lost.nonce == claim.nonce and outcome.kind is OutcomeKind.COMPLETE:
            end = completed(claim, outcome.response)._replace(version=lost.version + 1)
            lost = yield from Swap(claim.id, lost.version, end)
        return lost

    monkeypatch.setattr(production, "write_outcome", stubborn)


def frees_in_the_background_what_is_in_doubt(monkeypatch):
    def careless(seen, request, policy):
        if seen.record.state == IN_DOUBT:
            yield from Swap(seen.record.id, seen.record.version, failed(seen.record))
        return (yield from recovering.recover(seen, request, policy))

    monkeypatch.setattr(parties, "recover", careless)


FAILURE = Budget(failures=1)
EXPIRY = Budget(expiries=1)

MUTANTS = {
    runs_again_what_was_begun: (
        *(RETRY, (STEPPING,) * 2, FAILURE),
        "what may happen at most once happens once",
    ),
    goes_by_what_is_declared_now: (
        *(RETRY, (STEPPING, STEPPING_PLAINLY), FAILURE),
        "what may happen at most once happens once",
    ),
    forgets_steps_that_were_not_asked_for: (
        *(RETRY, (STEPPING, PLAIN), FAILURE),
        "no doubt vanishes with an answer",
    ),
    forgets_what_could_not_be_kept: (
        *(RETRY, (STEPPING,) * 2, Budget(unkept=1)),
        "no effect is repeated because its result cannot be kept",
    ),
    runs_again_what_is_done: (
        *(RETRY, (STEPPING,) * 2, FAILURE),
        "a step that is done does not run again",
    ),
    takes_over_without_what_was_written: (
        *(RETRY, (STEPPING,) * 2, FAILURE),
        "the result of a step stays",
    ),
    takes_what_was_taken_before: (
        *(RETRY, (HANDING, WORKER, WORKER), EXPIRY),
        "an attempt executes at most once",
    ),
    decides_without_a_reason: (
        *(MANUAL, (PLAIN, RESOLVER), FAILURE),
        "every decision is stored with its author and its reason",
    ),
    frees_nothing_for_a_person: (
        *(RETRY, (STEPPING, STEPPING, RESOLVER), FAILURE),
        "a step that did not happen may run again",
    ),
    decides_about_what_is_alive: (
        *(MANUAL, (PLAIN, RESOLVER), EXPIRY),
        "an operator does not decide about an attempt that lives",
    ),
    writes_over_what_a_person_decided: (
        *(MANUAL, (PLAIN, RESOLVER), EXPIRY),
        "every accepted swap is a legal move",
    ),
    frees_in_the_background_what_is_in_doubt: (
        *(MANUAL, (PLAIN, reconciler), FAILURE),
        "only its own client or an operator ends an attempt",
    ),
}


@pytest.mark.parametrize("breaks", MUTANTS, ids=lambda breaks: breaks.__name__)
def test_a_mistake_in_the_middle_is_caught(breaks, monkeypatch):
    """L5, L6, L7, L10: in every interleaving, so in the shortest as well."""
    kind, flows, budget, promise = MUTANTS[breaks]
    explored(PartyScenario(of(kind, *flows), budget))
    breaks(monkeypatch)
    with pytest.raises(Violation, match=promise):
        explored(PartyScenario(of(kind, *flows), budget))
