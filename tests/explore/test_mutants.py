"""The explorer can fail: flows that are broken on purpose are caught, each for what it breaks.

Every mutant is explored beside its control: the same scenario with the flow as it is.
"""

import dataclasses

import pytest

from coatcheck.core import lifecycle as production
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import (
    ClaimRequest,
    Executed,
    Refuse,
    Replay,
    Snapshot,
    WaitForChange,
    lifecycle,
)
from coatcheck.core.problem import problem
from coatcheck.core.record import COMPLETED, FAILED, GONE, RUNNING, Record, Swap, failed

from . import rules
from .kinds import MANUAL, RECONCILE, RETRY, kind
from .places import HandlerError, Raised
from .rules import Violation
from .search import explore, shortest
from .world import Budget, Scenario, steps

OTHER = kind(b"G" * 16)
EXPIRY = Budget(expiries=1)
GENERATIONS = Budget(expiries=1, windows=1, retentions=1)


def promise_broken_by(scenario):
    """What the shortest schedule breaks; empty where there is none."""
    schedule = shortest(scenario)
    return schedule[-1][-1] if schedule else ""


def promises_broken_by(scenario):
    """Everything that some schedule breaks, where a broken promise does not end the search."""
    broken = set()
    queue = [scenario.start()]
    seen = set(queue)
    while queue:
        try:
            following = steps(scenario, queue.pop())
        except Violation as violation:
            broken.add(str(violation))
            continue
        fresh = {after for _, after in following} - seen
        seen |= fresh
        queue += fresh
    return broken


def twisted(twist):
    """The production flow, but *twist* changes the results that it is sent."""

    def broken(request, policy, *, may_claim=True):
        flow = lifecycle(request, policy, may_claim=may_claim)
        effect = next(flow)
        while True:
            try:
                result = yield effect
            except Exception as error:  # noqa: BLE001 - passed on
                effect = _next(flow.throw, error)
            else:
                effect = _next(flow.send, twist(effect, result, request))
            if isinstance(effect, StopIteration):
                return effect.value

    return broken


def _next(move, value):
    """The flow's next effect; its end as a value, because a generator may not raise it."""
    try:
        return move(value)
    except StopIteration as done:
        return done


def with_policy(**changes):
    """The production flow under another policy than the rules believe."""

    def broken(request, policy, *, may_claim=True):
        return lifecycle(request, dataclasses.replace(policy, **changes), may_claim=may_claim)

    return broken


def believes_to_have_claimed(effect, result, _ticket):
    is_claim = isinstance(effect, Swap) and effect.record.state == RUNNING
    return None if is_claim else result


def believes_to_have_completed(effect, result, _ticket):
    is_end = isinstance(effect, Swap) and effect.record.state == COMPLETED
    return None if is_end else result


def trusts_what_it_waited_for(effect, result, request):
    if isinstance(effect, WaitForChange) and result is not None and result.record.version:
        return Snapshot(result.record._replace(fingerprint=request.fingerprint), result.now_ms)
    return result


def compares_no_requests(effect, result, request):
    if isinstance(effect, Swap) and result is not None and result.version:
        return result._replace(fingerprint=request.fingerprint)
    return trusts_what_it_waited_for(effect, result, request)


def compares_no_requests_after_a_failure(effect, result, request):
    is_free = isinstance(effect, Swap) and result is not None and result.state == FAILED
    return result._replace(fingerprint=request.fingerprint) if is_free else result


def takes_its_own_renewal_for_another_attempt(effect, result, request):
    is_end = isinstance(effect, Swap) and effect.record.state != RUNNING
    is_own = is_end and isinstance(result, Record) and result.nonce == request.nonce
    return result._replace(nonce=0) if is_own else result


def frees_the_key_when_it_gives_up(request, policy, *, may_claim=True):
    """A waiter whose time is up ends the attempt it waited for."""
    seen = []

    def remember(_effect, result, _ticket):
        seen.append(result)
        return result

    answer = yield from twisted(remember)(request, policy, may_claim=may_claim)
    if isinstance(answer, Refuse) and answer.problem.code == "in-progress":
        current = seen[-1].record if isinstance(seen[-1], Snapshot) else seen[-1]
        freed = current._replace(version=current.version + 1, state=FAILED, lease_until_ms=0)
        yield from Swap(request.id, current.version, freed)
    return answer


FLOWS = {
    "believes to have claimed": (
        *(believes_to_have_claimed, (RETRY,) * 2, EXPIRY),
        "an attempt executes at most once",
    ),
    "believes to have completed": (
        *(believes_to_have_completed, (RETRY,) * 2, EXPIRY),
        "an answer leaves after its record is safe",
    ),
    "trusts what it waited for": (
        *(trusts_what_it_waited_for, (RETRY, RETRY, OTHER), Budget(failures=1)),
        "no client gets the answer to another request",
    ),
    "compares no requests": (
        *(compares_no_requests, (RETRY, OTHER), Budget()),
        "no client gets the answer to another request",
    ),
    "compares no requests after a failure": (
        *(compares_no_requests_after_a_failure, (RETRY, OTHER), Budget(failures=1)),
        "another request never continues a generation",
    ),
    "takes its own renewal for another attempt": (
        *(takes_its_own_renewal_for_another_attempt, (RETRY,) * 2, Budget(renewals=1)),
        "a client that is refused holds no claim",
    ),
}


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_that_misreads_its_results_is_caught(name):
    twist, kinds, budget, promise = FLOWS[name]
    failures = (Raised(HandlerError), Outcome(OutcomeKind.REJECT))
    explore(Scenario(kinds, budget, failures))
    broken = Scenario(kinds, budget, failures, lifecycle=twisted(twist))
    assert promise_broken_by(broken) == promise


def ignores_the_lease(monkeypatch):
    monkeypatch.setattr(production, "is_lease_over", lambda _record, _now_ms: True)


def never_takes_over(monkeypatch):
    monkeypatch.setattr(production, "is_lease_over", lambda _record, _now_ms: False)


def forgets_versions_with_the_record(monkeypatch):
    monkeypatch.setattr(production, "next_version", lambda current, _now_ms: current.version + 1)


def begins_a_new_generation_within_the_window(monkeypatch):
    monkeypatch.setattr(production, "is_window_over", production.is_lease_over)


def refuses_late_retries_for_good(monkeypatch):
    monkeypatch.setattr(production, "is_retention_over", lambda _record, _now_ms: False)


def counts_no_attempts(monkeypatch):
    change(monkeypatch, "next_attempt", lambda record: record._replace(attempt=1))


def prolongs_the_window(monkeypatch):
    def longer(record):
        return record._replace(window_until_ms=record.window_until_ms + 1)

    change(monkeypatch, "next_attempt", longer)


def claims_for_no_request(monkeypatch):
    change(monkeypatch, "first_attempt", lambda record: record._replace(fingerprint=b""))


def insists_on_its_own_answer(monkeypatch):
    def own(current, request, _policy):
        return Replay(current, b"by %d" % (request.nonce % 1_000))

    monkeypatch.setattr(production, "superseded", own)


def change(monkeypatch, name, twist):
    """Have the function *name* of the flow write a record that went through *twist*."""
    made = getattr(production, name)
    monkeypatch.setattr(production, name, lambda *args: twist(made(*args)))


DECISIONS = {
    ignores_the_lease: (RETRY, EXPIRY, "every accepted swap is a legal move"),
    never_takes_over: (RETRY, EXPIRY, "a key is never stuck: a lone client waits"),
    forgets_versions_with_the_record: (
        RETRY,
        GENERATIONS,
        "versions only grow, also across generations",
    ),
    begins_a_new_generation_within_the_window: (
        RETRY,
        GENERATIONS,
        "every accepted swap is a legal move",
    ),
    refuses_late_retries_for_good: (kind(on_expired="refuse"), GENERATIONS, "a key expires once"),
    counts_no_attempts: (RETRY, EXPIRY, "attempts are counted one by one"),
    prolongs_the_window: (RETRY, EXPIRY, "the times of a generation are set once"),
    claims_for_no_request: (RETRY, EXPIRY, "a claim is for the request of its client"),
    insists_on_its_own_answer: (RETRY, EXPIRY, "only final answers are replayed"),
}


@pytest.mark.parametrize("breaks", DECISIONS, ids=lambda breaks: breaks.__name__)
def test_a_flow_that_decides_wrongly_is_caught(breaks, monkeypatch):
    client, budget, promise = DECISIONS[breaks]
    explore(Scenario((client,) * 2, budget))
    breaks(monkeypatch)
    assert promise_broken_by(Scenario((client,) * 2, budget)) == promise


@pytest.mark.parametrize(
    ("budget", "promise"),
    [
        (Budget(), "executions overlap only after a lease ran out"),
        (
            *(Budget(crashes=1),),
            "another execution follows only an end that is known or a lease that ran out",
        ),
    ],
    ids=["overlap", "crash"],
)
def test_a_second_execution_is_seen_without_the_table_of_moves(budget, promise, monkeypatch):
    """L5: the rules of execution do not rely on those of the record."""
    ignores_the_lease(monkeypatch)
    monkeypatch.setattr(rules, "legal_moves", lambda *_: True)
    assert promise in promises_broken_by(Scenario((RETRY,) * 2, budget))


@pytest.mark.parametrize(
    ("client", "budget", "promise"),
    [
        (MANUAL, EXPIRY, "manual: nothing runs again after an unclear end"),
        (MANUAL, Budget(failures=1), "an attempt with an unclear end is not released"),
        (
            *(RECONCILE, EXPIRY),
            "reconcile: nothing runs again before the reconcile function was called",
        ),
    ],
    ids=["manual after a crash", "manual after an error", "reconcile"],
)
def test_a_flow_that_runs_again_where_it_may_not_is_caught(client, budget, promise):
    """L6."""
    explore(Scenario((client,) * 2, budget))
    careless = with_policy(recovery="retry", reconcile=None)
    assert promise_broken_by(Scenario((client,) * 2, budget, lifecycle=careless)) == promise


def hides_what_it_did(request, policy, *, may_claim=True):
    """It executes, and then tells the client to try again."""
    answer = yield from lifecycle(request, policy, may_claim=may_claim)
    return BUSY if isinstance(answer, Executed) else answer


def gives_up_what_it_won(request, policy, *, may_claim=True):
    """It claims, thinks better of it, and refuses."""
    claim = production.first_attempt(request, policy, GONE, request.now_ms)
    lost = yield from Swap(request.id, 0, claim)
    if lost is None:
        yield from Swap(request.id, claim.version, failed(claim))
    return BUSY


BUSY = Refuse(problem("in-progress"))

WHOLE_FLOWS = {
    # The classic mistake: a timeout that deletes the lock of another client.
    frees_the_key_when_it_gives_up: "only its holder ends an attempt",
    hides_what_it_did: "a client that is refused ran nothing, unless it lost its claim",
    gives_up_what_it_won: "a waiter that gives up has changed nothing",
}


@pytest.mark.parametrize("broken", WHOLE_FLOWS, ids=lambda broken: broken.__name__)
def test_a_flow_that_misleads_its_client_is_caught(broken):
    """L3: a client that is refused ran nothing and changed nothing."""
    explore(Scenario((RETRY,) * 2, Budget(ticks=1)))
    scenario = Scenario((RETRY,) * 2, Budget(ticks=1), lifecycle=broken)
    assert promise_broken_by(scenario) == WHOLE_FLOWS[broken]


def test_two_final_answers_of_one_generation_are_caught(monkeypatch):
    """L2: an attempt that lost its claim insists on what it did itself."""
    insists_on_its_own_answer(monkeypatch)
    broken = promises_broken_by(Scenario((RETRY,) * 2, EXPIRY))
    assert "one generation has one final answer" in broken


def test_a_late_write_after_its_client_has_continued_is_caught():
    """L5: no store that compares versions can do this, so the rule is asked directly."""
    scenario = Scenario((RETRY,), Budget())
    world = scenario.start()
    for _ in range(3):  # arrives, claims, executes
        (_, world), *_ = steps(scenario, world)
    late = production.first_attempt(ClaimRequest(b"I" * 16, b"", 0, 1), RETRY.policy, GONE, 0)
    with pytest.raises(Violation, match="does not change the record"):
        rules.check_late(world, 0, late)


def test_an_engine_that_does_not_recognise_its_own_write_is_caught():
    """L5: it would wait for itself."""
    explore(Scenario((RETRY,) * 2, Budget(unacknowledged=1)))
    broken = Scenario((RETRY,) * 2, Budget(unacknowledged=1), recognises_own=False)
    assert promise_broken_by(broken) == "a client that is refused holds no claim"


def test_a_store_that_ends_attempts_without_comparing_versions_is_caught():
    """L5: a late client would overwrite the result of a newer attempt."""
    explore(Scenario((RETRY,) * 2, EXPIRY))
    broken = Scenario((RETRY,) * 2, EXPIRY, compares_versions=False)
    assert promise_broken_by(broken) == "every accepted swap is a legal move"


def test_a_violation_tells_the_shortest_schedule(monkeypatch):
    ignores_the_lease(monkeypatch)
    with pytest.raises(Violation) as caught:
        explore(Scenario((RETRY,) * 2, EXPIRY))
    assert str(caught.value).splitlines() == [
        "every accepted swap is a legal move; the shortest schedule:",
        "0  0  arrives",
        "0  0  writes  running v0 attempt 1 of 1000",
        "0  1  arrives",
        "0  1  loses  running v0 attempt 1 of 1001",
        "!  every accepted swap is a legal move",
    ]
