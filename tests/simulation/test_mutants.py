"""The simulation can fail: what is broken on purpose is noticed, each for what it breaks.

The control is `test_simulation`: the same seeds with nothing broken.
"""

import dataclasses

import pytest

from coatcheck.core import serve as production
from coatcheck.core.serve import Replay

from . import driver
from .runs import explained, run
from .schedule import simulate
from .test_simulation import SCHEDULES
from .weather import SOUND, Broken
from .world import Violation


def promises_broken(kind, broken=SOUND):
    """The promises that schedules of *kind* break, in the order of their seeds."""
    for seed in range(SCHEDULES):
        try:
            simulate(seed, kind=kind, broken=broken)
        except Violation as violation:
            yield violation.promise


PARTS = {
    "store_compares_versions": ("retry", "every change is a legal move"),
    "store_keeps_what_it_acknowledged": ("manual", "what was acknowledged is kept"),
    "rows_are_locked": ("transaction", "every change is a legal move"),
    "downstream_fences": (
        *("fenced", "fenced: one effect, because downstream refuses old fences"),
    ),
    "keys_are_derived": ("derived", "derived: one effect, because downstream knows the key"),
    "reconciler_tells_the_truth": (
        *("reconcile", "reconcile: one effect, of those that could be asked for"),
    ),
    "engine_recognises_its_own_write": ("retry", "who has an answer holds no claim any more"),
    "engine_believes_in_its_claims": ("manual", "an attempt executes at most once"),
    "engine_asks_the_store_for_the_time": ("retry", "no claim holds longer than its lease"),
    # Why nobody freezes while it asks for the time: it would believe in a time that is yet to come.
    "freezes_while_it_asks_the_time": ("retry", "no claim holds longer than its lease"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_broken_is_noticed(part):
    """L1, L5, L6, L8, L9: each part of the world is needed."""
    kind, promise = PARTS[part]
    broken = SOUND._replace(**{part: not getattr(SOUND, part)})
    assert promise in promises_broken(kind, broken)


@pytest.mark.parametrize("kind", ["derived", "fenced", "manual"])
def test_a_heart_that_never_renews_breaks_no_promise_about_effects(kind):
    """L5, L6: a lease that runs out costs work, and in calm weather that is noticed; never more."""
    broken = set(promises_broken(kind, Broken(heart_renews=False)))
    assert broken == {"a living executor keeps its claim"}


def ignores_the_lease(monkeypatch):
    monkeypatch.setattr(production, "is_lease_over", lambda _record, _now_ms: True)


def never_takes_over(monkeypatch):
    monkeypatch.setattr(production, "is_lease_over", lambda _record, _now_ms: False)


def begins_a_new_life_within_the_window(monkeypatch):
    monkeypatch.setattr(production, "is_window_over", production.is_lease_over)


def counts_no_attempts(monkeypatch):
    made = production.next_attempt
    monkeypatch.setattr(production, "next_attempt", lambda *args: made(*args)._replace(attempt=1))


def answers_before_its_record_is_safe(monkeypatch):
    def unsettled(_claim, _ending):
        return None
        yield

    monkeypatch.setattr(production, "settle", unsettled)


def insists_on_its_own_answer(monkeypatch):
    def own(standing, ticket, _policy):
        return Replay(standing, b"by %d for %s" % (ticket.nonce, ticket.fingerprint))

    monkeypatch.setattr(production, "superseded", own)


def compares_no_requests(monkeypatch):
    decide = production.verdict

    def careless(standing, ticket, policy, now_ms):
        return decide(standing._replace(fingerprint=b""), ticket, policy, now_ms)

    monkeypatch.setattr(production, "verdict", careless)


def runs_again_whatever_the_policy_says(monkeypatch):
    def careless(ticket, policy, *, may_claim=True):
        policy = dataclasses.replace(policy, recovery="retry", reconcile=None)
        return production.serve(ticket, policy, may_claim=may_claim)

    monkeypatch.setattr(driver, "serve", careless)


DECISIONS = [
    (ignores_the_lease, "retry", "every change is a legal move"),
    (never_takes_over, "retry", "no key is stuck: in-progress"),
    (
        *(begins_a_new_life_within_the_window, "retry"),
        "a new life begins when the window is over, and not before",
    ),
    (counts_no_attempts, "derived", "attempts are counted one by one"),
    (answers_before_its_record_is_safe, "manual", "who has an answer holds no claim any more"),
    (insists_on_its_own_answer, "retry", "an answer leaves after its record is safe"),
    (compares_no_requests, "retry", "nobody sees the answer to another request"),
    (runs_again_whatever_the_policy_says, "manual", "manual: one effect"),
    (
        *(runs_again_whatever_the_policy_says, "reconcile"),
        "reconcile: one effect, of those that could be asked for",
    ),
    (
        *(runs_again_whatever_the_policy_says, "fenced"),
        "fenced: one effect, because downstream refuses old fences",
    ),
]


@pytest.mark.parametrize(
    ("breaks", "kind", "promise"), DECISIONS, ids=[f"{d[0].__name__}-{d[1]}" for d in DECISIONS]
)
def test_a_flow_that_decides_wrongly_is_noticed(breaks, kind, promise, monkeypatch):
    """L2, L5, L6, F1: what the flow decides is what keeps the promises."""
    breaks(monkeypatch)
    assert promise in promises_broken(kind)


def test_a_broken_promise_tells_its_seed_and_all_that_happened(monkeypatch):
    ignores_the_lease(monkeypatch)
    with pytest.raises(Violation, match=r"--seed \d+ --kind retry") as caught:
        run(range(SCHEDULES), "retry")
    text, is_kept = explained(caught.value.seed, caught.value.kind)
    assert not is_kept
    assert "!                 every change is a legal move" in text
