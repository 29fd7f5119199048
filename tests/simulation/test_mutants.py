"""The simulation can fail: what is broken on purpose is noticed, each for what it breaks.

The control is `test_simulation`: the same seeds with nothing broken.
"""

import dataclasses
from contextlib import nullcontext

import pytest

from coatcheck.core import deferred as defer_work
from coatcheck.core import lifecycle as production
from coatcheck.core import recovery as resolving
from coatcheck.core import steps
from coatcheck.core.keep import OutcomeKind
from coatcheck.core.lifecycle import Refuse, Replay, TakeOver
from coatcheck.core.progress import NOTHING, encoded, progress_of
from coatcheck.core.record import IN_DOUBT, RUNNING, Swap, completed, failed
from coatcheck.core.saga.actions import UNDOING
from coatcheck.engine import attempts, lease_writes, leases
from coatcheck.engine import deferred as resuming
from coatcheck.engine import steps as step_writer
from coatcheck.engine.attempts import Attempts
from coatcheck.engine.leases import Heartbeat
from coatcheck.saga import action as saga_action
from coatcheck.saga import run as saga_run
from coatcheck.saga.run import Saga

from . import served
from .faults import SOUND
from .runs import explained, run
from .schedule import simulate
from .test_simulation import SCHEDULES
from .world import Violation

# A schedule ends at a broken promise, and crashed processes have tasks that never end. The garbage
# collector closes these generators in any order: one may be closed while it closes another.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator object:pytest.PytestUnraisableExceptionWarning"
)


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
    "probes_tell_the_truth": ("steps", "steps: at most once, of what a probe could ask for"),
    "engine_asks_the_store_for_the_time": ("retry", "no claim holds longer than its lease"),
    # Why no process freezes while it reads the clock: it would take a future time for the present.
    "freezes_while_it_asks_the_time": ("retry", "no claim holds longer than its lease"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_broken_is_noticed(part):
    """L1, L5, L6, L8, L9: each part of the world is needed."""
    kind, promise = PARTS[part]
    broken = SOUND._replace(**{part: not getattr(SOUND, part)})
    assert promise in promises_broken(kind, broken)


# --- the engine ---------------------------------------------------------------------------------


def nothing(*_args):
    return
    yield


def never_renews(monkeypatch):
    monkeypatch.setattr(Heartbeat, "renew", nothing)


def does_not_recognise_its_own_write(monkeypatch):
    monkeypatch.setattr(attempts, "is_same_write", lambda _current, _record: False)


def believes_in_its_claims(monkeypatch):
    after_write = Attempts.after_write

    def careless(self, swap, conflict, **more):
        return after_write(self, swap, None if swap.record.state == RUNNING else conflict, **more)

    monkeypatch.setattr(Attempts, "after_write", careless)


def does_not_know_what_it_executes_itself(monkeypatch):
    monkeypatch.setattr(Attempts, "current", lambda _self, record: record)


def renews_whatever_is_stored(monkeypatch):
    """A heartbeat that takes the claim of another attempt for its own."""
    monkeypatch.setattr(leases, "is_same_attempt", lambda _current, _claim: True)


def completes_whatever_is_stored(monkeypatch):
    """A pending completion that is written over the record of another attempt."""

    def stubborn(_self, swap, conflict):
        if conflict is None or conflict == swap.record:
            return None
        record = swap.record._replace(version=conflict.version + 1)
        return Swap(swap.id, conflict.version, record)

    monkeypatch.setattr(lease_writes.PendingCompletions, "_next", stubborn)


def drops_pending_completions_and_says_that_they_are_written(monkeypatch):
    def forgetful(self, effect, _failure):
        if isinstance(effect, Swap) and effect.record.state != RUNNING:
            self.replay_cache.put(effect.record)
            self.waiters.wake(effect.record)

    monkeypatch.setattr(Attempts, "_schedule", forgetful)


def remembers_what_was_not_written(monkeypatch):
    after_write = Attempts.after_write

    def hasty(self, swap, conflict, **more):
        if swap.record.state != RUNNING:
            self.replay_cache.put(swap.record)
            self.waiters.wake(swap.record)
        return after_write(self, swap, conflict, **more)

    monkeypatch.setattr(Attempts, "after_write", hasty)


def recalls_without_comparing_requests(monkeypatch):
    def late(self, request, _policy):
        record = self.replay_cache.get(request.id)
        return None if record is None else Replay(record, record.response)

    monkeypatch.setattr(Attempts, "find_replay", late)


def recalls_past_the_window(monkeypatch):
    def late(self, request, _policy):
        record = self.replay_cache.get(request.id)
        if record is None or record.fingerprint != request.fingerprint:
            return None
        return Replay(record, record.response)

    monkeypatch.setattr(Attempts, "find_replay", late)


def waits_for_ever(monkeypatch):
    monkeypatch.setattr(attempts, "has_changed", lambda _read, _wait: False)


def answers_though_nothing_was_recorded(monkeypatch):
    def hasty(_self, operation, _error, _transaction):
        return production.Executed(operation.claim)

    monkeypatch.setattr(Attempts, "_not_recorded", hasty)


ENGINE = [
    (does_not_recognise_its_own_write, "retry", "a request that is answered holds no claim"),
    (believes_in_its_claims, "manual", "an attempt executes at most once"),
    (
        *(does_not_know_what_it_executes_itself, "retry"),
        "no request takes over from an attempt that its own process executes",
    ),
    (renews_whatever_is_stored, "retry", "every change is a legal move"),
    (completes_whatever_is_stored, "steps", "a heartbeat writes only what its own process holds"),
    (
        drops_pending_completions_and_says_that_they_are_written,
        "retry",
        "an answer leaves after its record is safe",
    ),
    (remembers_what_was_not_written, "retry", "an answer leaves after its record is safe"),
    (recalls_without_comparing_requests, "retry", "no request gets the answer to another one"),
    (
        *(recalls_past_the_window, "retry"),
        "no request gets an answer whose window is over",
    ),
    (waits_for_ever, "retry", "every flow comes to its end"),
    (answers_though_nothing_was_recorded, "retry", "a request that is answered holds no claim"),
]


@pytest.mark.parametrize(
    ("breaks", "kind", "promise"), ENGINE, ids=[f"{e[0].__name__}-{e[1]}" for e in ENGINE]
)
def test_a_mistake_of_the_engine_is_noticed(breaks, kind, promise, monkeypatch):
    """L1, L2, L3, L5, L8: the engine's own code runs here, and its mistakes show."""
    breaks(monkeypatch)
    assert promise in promises_broken(kind)


@pytest.mark.parametrize("kind", ["derived", "fenced", "manual"])
def test_a_heartbeat_that_never_renews_breaks_no_promise_about_effects(kind, monkeypatch):
    """L5, L6: a lease that runs out costs work, which is noticed if nothing else goes wrong; never more."""
    never_renews(monkeypatch)
    broken = set(promises_broken(kind))
    assert broken == {"a living executor keeps its claim"}


def ignores_the_lease(monkeypatch):
    monkeypatch.setattr(production, "is_lease_over", lambda _record, _now_ms: True)


def never_takes_over(monkeypatch):
    monkeypatch.setattr(production, "is_lease_over", lambda _record, _now_ms: False)


def begins_a_new_generation_within_the_window(monkeypatch):
    monkeypatch.setattr(production, "is_window_over", production.is_lease_over)


def counts_no_attempts(monkeypatch):
    made = production.next_attempt
    monkeypatch.setattr(production, "next_attempt", lambda *args: made(*args)._replace(attempt=1))


def answers_before_its_record_is_safe(monkeypatch):
    def unsettled(_claim, _ending, **_options):
        return None
        yield

    monkeypatch.setattr(production, "write_outcome", unsettled)


def insists_on_its_own_answer(monkeypatch):
    def own(current, request, _policy):
        return Replay(current, b"by %d for %s" % (request.nonce, request.fingerprint))

    monkeypatch.setattr(production, "superseded", own)


def compares_no_requests(monkeypatch):
    decide = production.verdict

    def careless(current, request, policy, now_ms):
        return decide(current._replace(fingerprint=b""), request, policy, now_ms)

    monkeypatch.setattr(production, "verdict", careless)


def runs_again_whatever_the_policy_says(monkeypatch):
    def careless(request, policy, *, may_claim=True):
        policy = dataclasses.replace(policy, recovery="retry", reconcile=None)
        return production.lifecycle(request, policy, may_claim=may_claim)

    monkeypatch.setattr(attempts, "lifecycle", careless)


DECISIONS = [
    (ignores_the_lease, "retry", "every change is a legal move"),
    (never_takes_over, "retry", "no key is stuck: in-progress"),
    (
        *(begins_a_new_generation_within_the_window, "retry"),
        "a new generation begins when the window is over, and not before",
    ),
    (counts_no_attempts, "derived", "only deferred work is taken up elsewhere"),
    (answers_before_its_record_is_safe, "manual", "a request that is answered holds no claim"),
    (insists_on_its_own_answer, "retry", "an answer leaves after its record is safe"),
    (compares_no_requests, "retry", "no request gets the answer to another one"),
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


# --- between claim and completion ----------------------------------------------------------------


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


def runs_again_what_is_done(monkeypatch):
    def forgetful(claim, plan):
        known = progress_of(claim).step(plan.name)
        if known is not None and known.value is not None:
            yield from steps.Run(plan.name)
        return (yield from steps.take(claim, plan))

    monkeypatch.setattr(step_writer, "take", forgetful)


def writes_over_what_was_written(monkeypatch):
    monkeypatch.setattr(steps, "progress_of", lambda _claim: NOTHING)


def does_not_ask_when_its_lease_is_over(monkeypatch):
    monkeypatch.setattr(steps, "is_lease_over", lambda _record, _now_ms: False)


def forgets_what_it_began_when_that_fails(monkeypatch):
    written = step_writer.written

    def careless(operation, effect):
        claim = operation.claim
        conflict = yield from written(operation, effect)
        operation.claim = claim
        return conflict

    monkeypatch.setattr(step_writer, "written", careless)


def begins_anew_when_it_takes_over(monkeypatch):
    made = production.next_attempt
    monkeypatch.setattr(
        production, "next_attempt", lambda *args: made(*args)._replace(progress=None)
    )


def frees_what_was_begun(monkeypatch):
    made = production.next_attempt

    def freed(*args):
        record = made(*args)
        progress = progress_of(record)
        done = tuple(step for step in progress.steps if step.value is not None)
        return record._replace(progress=encoded(progress._replace(steps=done)))

    monkeypatch.setattr(production, "next_attempt", freed)


def frees_nothing_for_an_operator(monkeypatch):
    decide = resolving._with_resolution

    def stubborn(standing, resolution, **_may_run):
        return decide(standing, resolution, may_run=False)

    monkeypatch.setattr(resolving, "_with_resolution", stubborn)


def frees_too_much_for_an_operator(monkeypatch):
    def anew(standing, resolution, **_may_run):
        return standing._replace(progress=encoded(NOTHING.with_resolution(resolution)))

    monkeypatch.setattr(resolving, "_with_resolution", anew)


def takes_what_was_taken_before(monkeypatch):
    def greedy(deferred, request, policy, current):
        deferred = deferred._replace(nonce=current.nonce)
        return defer_work.run_deferred(deferred, request, policy, current)

    monkeypatch.setattr(resuming, "run_deferred", greedy)


def works_without_taking_it(monkeypatch):
    def hasty(_handed, _ticket, _policy, current):
        yield from production.Execute(current)
        return production.Executed(current)

    monkeypatch.setattr(resuming, "run_deferred", hasty)


def defers_for_ever(monkeypatch):
    offer = resuming.offer
    monkeypatch.setattr(resuming, "offer", lambda claim, until_ms: offer(claim, until_ms * 2))


def decides_without_a_reason(monkeypatch):
    monkeypatch.setattr(
        resolving, "_with_resolution", lambda standing, *_args, **_may_run: standing
    )


def decides_about_what_is_alive(monkeypatch):
    monkeypatch.setattr(
        *(resolving, "can_resolve"),
        lambda seen, **_abandoned: seen.record.state in (RUNNING, IN_DOUBT),
    )


def believes_a_late_executor(monkeypatch):
    """A zombie writes its own end over what an operator has decided."""

    def stubborn(claim, outcome, **options):
        lost = yield from write_outcome(claim, outcome, **options)
        if lost is not None and lost.nonce == claim.nonce and outcome.kind is OutcomeKind.COMPLETE:
            end = completed(claim, outcome.response)._replace(version=lost.version + 1)
            lost = yield from Swap(claim.id, lost.version, end)
        return lost

    write_outcome = production.write_outcome
    monkeypatch.setattr(production, "write_outcome", stubborn)


def frees_in_the_background_what_is_in_doubt(monkeypatch):
    def careless(seen, _ticket, _policy):
        if seen.record.state == IN_DOUBT:
            yield from Swap(seen.record.id, seen.record.version, failed(seen.record))

    monkeypatch.setattr(served, "recover", careless)


def runs_again_what_is_in_doubt(monkeypatch):
    decide = production.verdict

    def careless(current, request, policy, now_ms):
        decided = decide(current, request, policy, now_ms)
        if current.state != IN_DOUBT or not isinstance(decided, Refuse):
            return decided
        return TakeOver(production.next_attempt(current, request, policy, now_ms), asks=False)

    monkeypatch.setattr(production, "verdict", careless)


PROGRESS = [
    (runs_again_what_was_begun, "steps", "a step at most once does not run again"),
    (goes_by_what_is_declared_now, "steps", "a step at most once does not run again"),
    (runs_again_what_is_done, "steps", "a step that is done does not run again"),
    (writes_over_what_was_written, "steps", "what was noted stays"),
    (
        *(does_not_ask_when_its_lease_is_over, "steps"),
        "an attempt that has lost its claim takes no further step",
    ),
    (
        *(forgets_what_it_began_when_that_fails, "steps"),
        "a step at most once does not run again",
    ),
    (begins_anew_when_it_takes_over, "steps", "what was noted stays"),
    (frees_what_was_begun, "steps", "what was begun stays until an operator decides"),
    (
        *(frees_nothing_for_an_operator, "steps"),
        "a step that did not happen, says an operator, may be taken again",
    ),
    (frees_too_much_for_an_operator, "steps", "what was noted stays"),
    (takes_what_was_taken_before, "deferred", "only deferred work is taken up elsewhere"),
    (works_without_taking_it, "deferred", "an attempt executes at most once"),
    (defers_for_ever, "deferred", "no claim holds longer than its lease"),
    (
        *(decides_without_a_reason, "resolved"),
        "no decision is without its author and its reason",
    ),
    (
        *(decides_about_what_is_alive, "resolved"),
        "only its holder ends an attempt, unless its lease has run out",
    ),
    (believes_a_late_executor, "resolved", "every change is a legal move"),
    (
        *(frees_in_the_background_what_is_in_doubt, "manual"),
        "only its executor or an operator ends a doubt",
    ),
    (
        *(runs_again_what_is_in_doubt, "resolved"),
        "nothing in doubt runs again before the application is asked",
    ),
]


@pytest.mark.parametrize(
    ("breaks", "kind", "promise"), PROGRESS, ids=[f"{m[0].__name__}-{m[1]}" for m in PROGRESS]
)
def test_a_mistake_in_the_middle_is_noticed(breaks, kind, promise, monkeypatch):
    """L5, L6, L7, L10: steps, deferred work and what operators decide."""
    breaks(monkeypatch)
    assert promise in promises_broken(kind)


# --- sagas --------------------------------------------------------------------------------------


def forgets_that_it_undoes(monkeypatch):
    """An attempt that goes forward again after an earlier one has begun to undo."""
    begin = Saga.__init__

    def forgetful(self, setting, operation):
        begin(self, setting, operation)
        self._cause = None

    monkeypatch.setattr(Saga, "__init__", forgetful)


def undoes_in_the_order_of_the_steps(monkeypatch):
    monkeypatch.setattr(saga_run, "reversed", list, raising=False)


def takes_no_answer_for_a_refusal(monkeypatch):
    """A time-out that counts as "it did not happen"."""
    act = saga_run.act
    monkeypatch.setattr(saga_run, "act", lambda plan: act(plan._replace(unknown_errors=())))


def does_not_write_that_it_undoes(monkeypatch):
    """Undos run before the saga has written that it undoes."""
    record = Saga._record

    def careless(self, call):
        if call.name == UNDOING:
            return None
        return (yield from record(self, call))

    monkeypatch.setattr(Saga, "_record", careless)


def registers_no_undo(monkeypatch):
    """A step without a probe is only written when it is done."""
    monkeypatch.setattr(saga_action, "_remembered_ms", lambda *_args, **_kwargs: 0)


def repeats_what_it_should_ask_for(monkeypatch):
    act = saga_run.act
    always = {"again_until_ms": steps.ALWAYS_MS}
    monkeypatch.setattr(saga_run, "act", lambda plan: act(plan._replace(**always)))


def undoes_twice(monkeypatch):
    act = saga_run.act

    def twice(plan):
        if plan.name.endswith(":undo"):
            yield from act(plan)
        return (yield from act(plan))

    monkeypatch.setattr(saga_run, "act", twice)


def calls_again_without_its_claim(monkeypatch):
    monkeypatch.setattr(step_writer.StepWriter, "confirm", lambda *_: None)


def forgets_its_pivot(monkeypatch):
    monkeypatch.setattr(Saga, "pivot", lambda *_: None)


def takes_branches_for_a_sequence(monkeypatch):
    """The next attempt blocks a saga whose branches come in another order."""
    monkeypatch.setattr(Saga, "_branching", nullcontext)


NOTHING_LEFT = "saga: of a saga that was undone, nothing is left"
SAGAS = [
    # The recorded steps show that its function goes another way: it is blocked.
    (forgets_that_it_undoes, "no key is stuck: outcome-unknown"),
    (undoes_in_the_order_of_the_steps, "saga: undos run in reverse order, each once"),
    (takes_no_answer_for_a_refusal, NOTHING_LEFT),
    (does_not_write_that_it_undoes, "no key is stuck: outcome-unknown"),
    (registers_no_undo, NOTHING_LEFT),
    (repeats_what_it_should_ask_for, "saga: a probe is asked before its step is repeated"),
    (undoes_twice, "saga: without faults, each function is called once"),
    (takes_branches_for_a_sequence, "no key is stuck: outcome-unknown"),
    (forgets_its_pivot, "saga: nothing is undone after the pivot"),
    (calls_again_without_its_claim, "saga: a call is repeated after its claim was confirmed"),
]


@pytest.mark.parametrize(("breaks", "promise"), SAGAS, ids=[m[0].__name__ for m in SAGAS])
def test_a_mistake_of_a_saga_is_noticed(breaks, promise, monkeypatch):
    """E3."""
    breaks(monkeypatch)
    assert promise in promises_broken("saga")


def test_a_broken_promise_tells_its_seed_and_all_that_happened(monkeypatch):
    ignores_the_lease(monkeypatch)
    with pytest.raises(Violation, match=r"--seed \d+ --kind retry") as caught:
        run(range(SCHEDULES), "retry")
    text, is_kept = explained(caught.value.seed, caught.value.kind)
    assert not is_kept
    assert "!                 every change is a legal move" in text
