"""The seam: begin, complete and fail, as every door uses them, and what is built on it.

Each decision is reported once, whatever the store does; blocks of code can be guarded; and a
function with a stored input is run again by another node.
"""

import asyncio
import contextvars
import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from coatcheck import (
    Happened,
    KeyBusy,
    KeyReused,
    KeyRing,
    Misconfigured,
    OutcomeUnknown,
    Policy,
    StoreUnavailable,
    current_operation,
)
from coatcheck.core.identity import operation_id
from coatcheck.core.keep import COMPLETE, Outcome
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT, RUNNING
from coatcheck.errors import StepInDoubt, Uncertain
from coatcheck.server import asgi, wsgi
from coatcheck.stores.memory import MemoryStore
from coatcheck.telemetry import Recovered
from tests.support.engines import (
    BY_ADA,
    LEASE_S,
    NOW_MS,
    ROUND_S,
    Handler,
    Killed,
    held_up,
    only_record,
    recovery_round,
)
from tests.support.http import AsgiExchange, environ_of, exchange_wsgi, with_key
from tests.support.times import WAIT_S_MAX, eventually, wait_for


@pytest.fixture
def decisions():
    """What the engine has reported, in order."""
    return []


@pytest.fixture
def engine(guards, store, clock, decisions):
    return guards.engine(store, clock=clock, observers=[decisions.append])


def outcomes(decisions):
    return [(decision.outcome, decision.code) for decision in decisions]


# --- one decision, also if the store is down at the end -----------------------------------------


@pytest.mark.parametrize("unrecorded", ["answer", "503"])
@pytest.mark.parametrize("entry", ["run", "run_deferred", "rerun", "attempt"])
def test_a_result_that_is_recorded_later_is_one_decision(
    guards, store, clock, decisions, entry, *, unrecorded
):
    """D2, O2: each entry point obeys `unrecorded`, and a retry gets the same result."""
    policy = Policy(unrecorded=unrecorded, patience=0)
    engine = guards.engine(store, policy, clock=clock, observers=[decisions.append])
    call = ENTRIES[entry](guards, engine)
    decisions.clear()

    def unplug():
        store.is_down = True
        return "done"

    if unrecorded == "answer":
        assert call(unplug) == "done"
        assert outcomes(decisions) == [("executed", "")]
    else:
        with pytest.raises(StoreUnavailable):
            call(unplug)
        assert outcomes(decisions) == [("refused", "store-unavailable")]
    store.is_down = False
    engine.attempts.heartbeat.tick()
    assert store.record.state == COMPLETED
    assert len(decisions) == 1
    assert call(Handler("again")) == "done"


def test_a_completion_that_fails_for_another_reason_is_one_decision(guards, clock, decisions):
    """O3: a store may have a bug, or a disk."""

    class Broken(MemoryStore):
        def swap(self, swaps):
            if swaps[0].record.state == COMPLETED:
                raise OSError("no space left")
            return super().swap(swaps)

    engine = guards.engine(Broken(), clock=clock, observers=[decisions.append])
    with pytest.raises(OSError, match="no space"):
        guards.run(engine, "k", Handler())
    assert outcomes(decisions) == [("failed", "")]
    assert engine.attempts.heartbeat.leases == {}


def calls_of_run(guards, engine):
    return lambda work: guards.run(engine, "k", work, scope="s")


def calls_of_run_deferred(guards, engine):
    token = deferred(guards, engine)
    flavoured = guards.flavoured
    return lambda work: json.loads(guards.done(engine.run_deferred(token, flavoured(work))).body)


def calls_of_rerun(guards, engine):
    with pytest.raises(Uncertain):
        guards.run(engine, "k", Handler(Uncertain()), scope="s")
    id = only_record(engine).id

    def call(work):
        if only_record(engine).state == COMPLETED:
            return guards.run(engine, "k", work, scope="s")
        return guards.done(engine.rerun(id, guards.flavoured(work), **BY_ADA))

    return call


def calls_of_attempt(guards, engine):
    return lambda work: (
        attempted(guards, engine, lambda a: None if a.is_replay else a.complete(work())).result
    )


ENTRIES = {
    "run": calls_of_run,
    "run_deferred": calls_of_run_deferred,
    "rerun": calls_of_rerun,
    "attempt": calls_of_attempt,
}


def new_request(engine):
    """What an HTTP door asks the engine for."""
    id = operation_id(caller="c" * 32, route="POST /orders", key="k", secret=b"")
    options = {"key": "k", "caller": "c" * 32, "label": "POST /orders"}
    return engine.attempts.new_request(id, b"f" * 16, **options)


def begun(guards, engine):
    """An operation that was begun at the seam, as an HTTP door does it."""
    return guards.done(engine.begin(new_request(engine), engine.policy))


def deferred(guards, engine):
    """The token of an operation whose work a handler has left to a worker."""
    operation = begun(guards, engine)
    return guards.done(engine.defer(operation, 1_000 * LEASE_S))


def test_a_rerun_that_fails_is_one_decision(guards, engine, store, decisions):
    """L6, O2: and the operation is in doubt again."""
    with pytest.raises(Uncertain):
        guards.run(engine, "k", Handler(Uncertain()), scope="s")
    decisions.clear()
    work = guards.flavoured(Handler(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        guards.done(engine.rerun(store.record.id, work, **BY_ADA))
    assert (outcomes(decisions), store.record.state) == ([("failed", "")], IN_DOUBT)


def test_an_operation_that_fails_twice_fails_once(guards, engine, store, decisions):
    """L4: a door may fail what it could not complete."""
    operation = begun(guards, engine)
    assert guards.done(engine.fail(operation, ZeroDivisionError())) is None
    assert guards.done(engine.fail(operation, ZeroDivisionError())) is None
    assert (outcomes(decisions), store.record.state) == ([("failed", "")], FAILED)
    assert engine.attempts.heartbeat.leases == {}


# --- defer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["down", "deaf"])
def test_leaving_work_to_a_worker_survives_one_failed_write(guards, engine, store, trouble):
    """D2: as a note does."""
    operation = begun(guards, engine)
    store.troubles = [trouble]
    token = guards.done(engine.defer(operation, 5_000 * LEASE_S))
    assert store.troubles == []
    assert store.record.lease_until_ms == engine.attempts.now_ms() + 5_000 * LEASE_S
    assert engine.attempts.heartbeat.leases == {}  # the worker renews it from now on
    answer = guards.done(engine.run_deferred(token, guards.flavoured(Handler("shipped"))))
    assert answer.body == b'"shipped"'
    assert store.record.state == COMPLETED


@pytest.mark.parametrize("trouble", ["down", "deaf"])
def test_a_handler_that_defers_during_a_failed_write_is_answered_with_202(
    guards, engine, store, trouble
):
    """D2, L7: over both doors."""
    tokens = []
    respond = post_asgi if guards.is_async else post_wsgi

    def began(operation):
        store.troubles = [trouble]
        return operation.defer()

    assert respond(engine, began, tokens).status == 202
    assert (store.troubles, store.record.state) == ([], RUNNING)
    work = guards.flavoured(Handler(Happened(201, [], b"made")))
    assert guards.done(engine.run_deferred(tokens[0], work)).status == 201
    assert store.record.state == COMPLETED


def post_wsgi(engine, defer, tokens):
    """A POST whose handler defers its work."""

    def app(_environ, start_response):
        tokens.append(defer(current_operation()))
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"deferred"]

    environ = environ_of("POST", "/orders", with_key("k"), b"")
    return exchange_wsgi(wsgi.IdempotencyMiddleware(app, engine=engine), environ)


def post_asgi(engine, defer, tokens):
    """The same over ASGI."""

    async def app(_scope, _receive, send):
        tokens.append(await defer(current_operation()))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"deferred"})

    exchange = AsgiExchange("POST", "/orders", with_key("k"), b"")
    return asyncio.run(exchange.run(asgi.IdempotencyMiddleware(app, engine=engine)))


# --- attempts -----------------------------------------------------------------------------------


def attempted(guards, engine, block, key="k", **options):
    """Run *block* in an attempt; it may be a generator that yields what is to be awaited."""
    if not guards.is_async:
        with engine.attempt(key, scope="orders", **options) as attempt:
            guards.flavoured(block)(attempt)
        return attempt

    async def use():
        async with engine.attempt(key, scope="orders", **options) as attempt:
            await guards.flavoured(block)(attempt)
        return attempt

    return asyncio.run(use())


def completing(result):
    """A block that completes with *result*, unless it has been done."""
    return lambda attempt: None if attempt.is_replay else attempt.complete(result)


def test_a_block_is_done_once_and_retries_get_its_result(guards, engine, store, decisions):
    """L1, L2: the first caller gets what a retry gets."""
    attempts = [attempted(guards, engine, completing(("order", n))) for n in (1, 2)]
    assert [attempt.is_replay for attempt in attempts] == [False, True]
    assert [attempt.result for attempt in attempts] == [["order", 1]] * 2
    assert outcomes(decisions) == [("executed", ""), ("replayed", "")]
    assert (store.record.state, store.record.label) == (COMPLETED, "orders")
    assert engine.attempts.heartbeat.leases == {}


def test_within_a_block_its_operation_is_the_current_one(guards, engine):
    """L7."""
    seen = []

    def block(attempt):
        seen.append((current_operation() is attempt.operation, attempt.operation.key))
        return attempt.complete(None)

    attempt = attempted(guards, engine, block)
    assert (seen, attempt.result, current_operation()) == ([(True, "k")], None, None)


def test_a_block_that_raises_releases_its_claim(guards, engine, store, decisions):
    """L4: the next attempt runs."""

    def fail(_attempt):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        attempted(guards, engine, fail)
    assert (store.record.state, engine.attempts.heartbeat.leases) == (FAILED, {})
    assert current_operation() is None
    attempt = attempted(guards, engine, completing("done"))
    assert (attempt.is_replay, attempt.result, store.record.attempt) == (False, "done", 2)
    assert outcomes(decisions) == [("failed", ""), ("executed", "")]


def test_a_block_may_end_in_another_context_than_it_began(guards, engine, store, decisions):
    """L5: frameworks close generators in a thread or a task of their own."""
    attempt, error = engine.attempt("k", scope="orders"), ZeroDivisionError()
    if guards.is_async:

        async def use():
            await asyncio.create_task(attempt.__aenter__())
            await asyncio.create_task(attempt.__aexit__(type(error), error, None))

        asyncio.run(use())
    else:
        contextvars.copy_context().run(attempt.__enter__)
        attempt.__exit__(type(error), error, None)
    assert (store.record.state, engine.attempts.heartbeat.leases) == (FAILED, {})
    assert outcomes(decisions) == [("failed", "")]


@pytest.mark.parametrize("recovery", ["retry", "manual"])
def test_a_block_that_ends_without_a_result_has_failed(guards, engine, store, decisions, recovery):
    """L4, L6: nothing that could be replayed was stored."""
    policy = Policy(recovery=recovery)
    with pytest.raises(Misconfigured, match=r"without attempt\.complete"):
        attempted(guards, engine, lambda _: None, policy=policy)
    assert store.record.state == (FAILED if recovery == "retry" else IN_DOUBT)
    assert engine.attempts.heartbeat.leases == {}
    assert outcomes(decisions) == [("failed", "")]
    if recovery == "manual":
        with pytest.raises(OutcomeUnknown):
            attempted(guards, engine, completing("done"), policy=policy)
    else:
        assert attempted(guards, engine, completing("done"), policy=policy).result == "done"


def test_a_block_that_raises_after_its_result_is_done(guards, engine, store, decisions):
    """L2: what is stored stays."""

    def block(attempt):
        yield attempt.complete("done")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        attempted(guards, engine, block)
    assert (outcomes(decisions), store.record.state) == ([("executed", "")], COMPLETED)
    assert attempted(guards, engine, completing("again")).result == "done"


def test_a_block_has_one_result(guards, engine, store):
    """L2."""

    def twice(attempt):
        yield attempt.complete("one")
        yield attempt.complete("two")

    with pytest.raises(Misconfigured, match="complete already"):
        attempted(guards, engine, twice)
    assert attempted(guards, engine, completing("three")).result == "one"


def test_a_replay_has_nothing_to_complete(guards, engine):
    """L2: a block that does not look gets an error."""
    attempted(guards, engine, completing("done"))
    with pytest.raises(Misconfigured, match="complete already"):
        attempted(guards, engine, lambda attempt: attempt.complete("again"))
    with pytest.raises(Misconfigured, match="nothing runs in this attempt"):
        attempted(guards, engine, lambda attempt: attempt.operation)
    assert attempted(guards, engine, completing("again")).result == "done"


def test_there_is_no_result_before_it_is_complete(guards, engine):
    with pytest.raises(Misconfigured, match="no result yet"):
        attempted(guards, engine, lambda attempt: attempt.result)
    assert attempted(guards, engine, completing("done")).result == "done"


def test_a_block_that_runs_elsewhere_is_refused(guards, store, clock, decisions):
    """L3."""
    options = {"policy": Policy(wait=0), "observers": [decisions.append], "clock": clock}
    engine, other = (guards.engine(store, **options) for _ in range(2))

    def block(attempt):
        with pytest.raises(KeyBusy), ThreadPoolExecutor(1) as threads:
            threads.submit(attempted, guards, other, completing("theirs")).result(WAIT_S_MAX)
        return attempt.complete("ours")

    assert attempted(guards, engine, block).result == "ours"
    assert outcomes(decisions) == [("refused", "in-progress"), ("executed", "")]


def test_a_block_has_no_transaction(guards, engine):
    with pytest.raises(Misconfigured, match=r"use engine\.transaction"):
        attempted(guards, engine, completing(1), policy=Policy(mode="transaction"))


# --- fingerprints that are given -----------------------------------------------------------------


@pytest.mark.parametrize("fingerprint", [{"amount": 1}, "text", b"d" * 16, b"short", None])
def test_a_key_belongs_to_the_fingerprint_that_it_was_given_with(
    guards, engine, store, fingerprint
):
    """K2: 422 for another one."""
    for _ in range(2):
        attempt = attempted(guards, engine, completing("done"), fingerprint=fingerprint)
        assert attempt.result == "done"
    for other in ({"amount": 2}, b"e" * 16):
        with pytest.raises(KeyReused) as refused:
            attempted(guards, engine, completing("other"), fingerprint=other)
        assert (refused.value.problem.code, refused.value.problem.status) == ("key-reused", 422)
    assert (store.record.fingerprint == fingerprint) == (fingerprint == b"d" * 16)


# --- renewals ------------------------------------------------------------------------------------


def test_a_callback_is_called_at_each_renewal_although_another_fails(guards, engine, clock, caplog):
    """L5: in a thread; one that fails does not affect the others."""
    calls, threads = [], []

    def called():
        threads.append(threading.current_thread())
        calls.append(1)

    def renew_twice():
        operation = current_operation()
        operation.on_renewed(lambda: 1 / 0)
        operation.on_renewed(called)
        for count in (1, 2):
            clock.advance(LEASE_S / 2)
            engine.attempts.heartbeat.tick()
            eventually(lambda count=count: len(calls) == count)
        return "done"

    assert guards.run(engine, "k", renew_twice, scope="s") == "done"
    assert threading.current_thread() not in threads
    assert "an on_renewed callback raised" in caplog.text
    clock.advance(LEASE_S)
    engine.attempts.heartbeat.tick()
    assert len(calls) == 2  # it has ended


# --- how many attempts ---------------------------------------------------------------------------


def test_after_so_many_failures_there_is_no_further_attempt(
    guards, store, clock, decisions, caplog
):
    """L4."""
    policy = Policy(attempts_max=2)
    engine = guards.engine(store, policy, clock=clock, observers=[decisions.append])
    handler = Handler(ZeroDivisionError())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            guards.run(engine, "k", handler, scope="s")
    for _ in range(2):
        with pytest.raises(OutcomeUnknown) as refused:
            guards.run(engine, "k", handler, scope="s")
        assert refused.value.problem.code == "too-many-attempts"
        assert "all 2 attempts have failed" in refused.value.problem.detail
    assert (handler.calls, store.record.state, store.record.attempt) == (2, FAILED, 2)
    failed, refused = ("failed", ""), ("refused", "too-many-attempts")
    assert outcomes(decisions) == [failed, failed, refused, refused]


def test_after_so_many_crashes_the_operation_is_in_doubt(guards, store, clock):
    """L6: what kills its process does not kill one after the other."""
    engine = guards.engine(store, Policy(attempts_max=2), clock=clock)
    handler = Handler(Killed())
    for _ in range(2):
        with pytest.raises(Killed):
            guards.run(engine, "k", handler, scope="s")
        clock.advance(LEASE_S)
    with pytest.raises(OutcomeUnknown) as refused:
        guards.run(engine, "k", handler, scope="s")
    assert refused.value.problem.code == "outcome-unknown"
    assert (handler.calls, store.record.state, store.record.attempt) == (2, IN_DOUBT, 2)


def test_the_last_attempt_may_still_succeed(guards, store, clock):
    """L4: and its result is replayed like any other."""
    engine = guards.engine(store, Policy(attempts_max=2), clock=clock)
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "k", Handler(ZeroDivisionError()), scope="s")
    for _ in range(2):
        assert guards.run(engine, "k", Handler("done"), scope="s") == "done"


@pytest.mark.parametrize("attempts_max", [0, -1, 1.5])
def test_a_number_of_attempts_is_a_number_of_attempts(attempts_max):
    with pytest.raises(Misconfigured, match="attempts_max"):
        Policy(attempts_max=attempts_max)


# --- handlers that do not know ---------------------------------------------------------------------


def test_a_handler_that_raises_uncertain_leaves_it_in_doubt(guards, engine, store, decisions):
    """L6: also where a failure would simply be retried."""
    handler = Handler(Uncertain("the provider did not answer"))
    with pytest.raises(Uncertain):
        guards.run(engine, "k", handler, scope="s")
    assert (store.record.state, engine.attempts.heartbeat.leases) == (IN_DOUBT, {})
    with pytest.raises(OutcomeUnknown):
        guards.run(engine, "k", handler, scope="s")
    assert handler.calls == 1
    assert outcomes(decisions) == [("failed", ""), ("refused", "outcome-unknown")]
    guards.done(engine.resolve(store.record.id, Happened(value="charged"), **BY_ADA))
    assert guards.run(engine, "k", handler, scope="s") == "charged"


def test_a_reconcile_function_is_called_after_uncertain(guards, store, clock):
    """L6."""
    policy = Policy(recovery="reconcile", reconcile=lambda _: Happened(value="charged"))
    engine = guards.engine(store, policy, clock=clock)
    with pytest.raises(Uncertain):
        guards.run(engine, "k", Handler(Uncertain()), scope="s")
    assert guards.run(engine, "k", Handler(), scope="s") == "charged"


# --- registered functions --------------------------------------------------------------------------


class Work:
    """A function that is registered, and can die."""

    def __init__(self, dies=False, result=None):
        self.dies = dies
        self.result = result
        self.inputs = []

    def __call__(self, given):
        self.inputs.append(given)
        if self.dies:
            raise Killed
        return self.result or given


def registered(guards, engine, work, name="ship", **options):
    return engine.register(name, guards.flavoured(work), **options)


def dead(guards, store, clock, given, name="ship", **options):
    """The input of a call of a registered function whose process has died."""
    policy = options.pop("policy", None)
    engine = guards.engine(store, clock=clock, **options)
    call = registered(guards, engine, Work(dies=True), name, policy=policy)
    with pytest.raises(Killed):
        guards.done(call.run("k", given))


def another_node(guards, store, clock, work, *, name="ship", policy=None, **options):
    """The engine of another process, in which the same name is registered."""
    engine = guards.engine(store, clock=clock, recover_every_s=60, **options)
    call = registered(guards, engine, work, name, policy=policy)
    engine.attempts.heartbeat.tick()
    return engine, call


@pytest.mark.parametrize("given", [{"order": [1, None, "ä"]}, b"\0\xff", "text", None])
def test_a_call_that_died_is_run_again_by_another_node_with_its_input(guards, store, clock, given):
    """L6: though no client comes back."""
    dead(guards, store, clock, given)
    work, events = Work(), []
    engine, call = another_node(guards, store, clock, work, listeners=[events.append])
    recovery_round(engine, clock)
    assert work.inputs == [given]
    assert (store.record.state, store.record.attempt, store.record.key) == (COMPLETED, 2, "k")
    assert [e.outcome for e in events if isinstance(e, Recovered)] == ["run again"]
    assert engine.attempts.heartbeat.leases == {}
    assert (guards.done(call.run("k", given)), len(work.inputs)) == (given, 1)
    recovery_round(engine, clock)
    assert len(work.inputs) == 1


@pytest.mark.parametrize("options", [{"keyring": KeyRing({"1": b"k" * 32})}, {"compress": True}])
def test_an_encrypted_input_is_run_again_where_it_can_be_read(guards, store, clock, options):
    """L6, X1."""
    given = "secret" * 1_000
    dead(guards, store, clock, given, **options)
    assert b"secret" not in store.record.progress
    if "keyring" in options:
        blind = Work()
        engine, _ = another_node(guards, store, clock, blind)
        recovery_round(engine, clock)
        assert (blind.inputs, store.record.attempt) == ([], 1)
    work = Work(result="done")
    engine, _ = another_node(guards, store, clock, work, **options)
    recovery_round(engine, clock)
    assert (work.inputs, store.record.state) == ([given], COMPLETED)


def test_a_function_that_is_not_registered_here_is_not_run(guards, store, clock):
    """L6."""
    dead(guards, store, clock, 7)
    work, before = Work(), store.record
    engine, _ = another_node(guards, store, clock, work, name="bill")
    recovery_round(engine, clock)
    assert (work.inputs, store.record) == ([], before)


def test_a_call_that_still_runs_is_not_run_again(guards, store, clock):
    """L5: neither here nor by another node."""
    slow, work = held_up("done"), Work()
    engine, call = another_node(guards, store, clock, slow)
    other, _ = another_node(guards, store, clock, work)
    thread = threading.Thread(target=lambda: guards.done(call.run("k", 7)))
    thread.start()
    wait_for(slow.is_running)
    engine.attempts.heartbeat.tick()
    while clock.now_ms < NOW_MS + 1_000 * (ROUND_S - LEASE_S / 2):
        clock.advance(LEASE_S / 2)
        engine.attempts.heartbeat.tick()
    thread_before = other.recovery._thread
    clock.advance(LEASE_S / 2)
    engine.attempts.heartbeat.tick()
    other.attempts.heartbeat.tick()
    assert other.recovery._thread is not thread_before
    other.recovery._thread.join(WAIT_S_MAX)
    slow.may_end.set()
    thread.join(WAIT_S_MAX)
    assert (slow.calls, work.inputs, store.record.state) == (1, [], COMPLETED)


def test_a_call_that_fails_again_does_not_prevent_the_others(guards, store, clock, caplog):
    """L6."""
    for key in "abc":
        engine = guards.engine(store, clock=clock)
        with pytest.raises(Killed):
            guards.done(registered(guards, engine, Work(dies=True)).run(key, key))

    class FailsOnce(Work):
        def __call__(self, given):
            super().__call__(given)
            if len(self.inputs) == 1:
                raise ZeroDivisionError
            return "done"

    work = FailsOnce()
    engine, _ = another_node(guards, store, clock, work)
    recovery_round(engine, clock)
    assert sorted(work.inputs) == ["a", "b", "c"]
    assert sorted(record.state for record in store.records) == sorted([FAILED, *[COMPLETED] * 2])
    assert "was run again and failed" in caplog.text


def test_steps_that_are_done_are_not_done_again(guards, store, clock):
    """L7: the input stays beside them."""
    charges = []

    def work(given):
        operation = current_operation()
        yield operation.step("charge", charges.append, given)
        if operation.attempt == 1:
            raise Killed
        return "shipped"

    engine = guards.engine(store, clock=clock)
    with pytest.raises(Killed):
        guards.done(registered(guards, engine, work).run("k", 7))
    node, _ = another_node(guards, store, clock, work)
    recovery_round(node, clock)
    assert (charges, store.record.state) == ([7], COMPLETED)


@pytest.mark.parametrize("recovery", ["manual", "reconcile"])
def test_a_registered_function_that_may_not_run_again_is_recovered_as_its_policy_says(
    guards, store, clock, recovery
):
    """L6: it is marked in doubt where people look, or asked about."""
    asked = []

    def ask(operation):
        asked.append(operation.key)
        return Happened(value="shipped")

    reconcile = ask if recovery == "reconcile" else None
    policy = Policy(recovery=recovery, reconcile=reconcile)
    dead(guards, store, clock, 7, policy=policy)
    work = Work()
    engine, call = another_node(guards, store, clock, work, policy=policy)
    recovery_round(engine, clock)
    assert work.inputs == []
    assert asked == ([] if recovery == "manual" else ["k"])
    assert store.record.state == (IN_DOUBT if recovery == "manual" else COMPLETED)
    if recovery == "reconcile":
        assert guards.done(call.run("k", 7)) == "shipped"


def test_a_call_that_kills_every_process_is_run_again_only_so_often(guards, store, clock):
    """L6: then it is in doubt."""
    policy = Policy(attempts_max=2)
    dead(guards, store, clock, 7, policy=policy)
    work = Work()
    engine = guards.engine(store, clock=clock)
    call = registered(guards, engine, Work(dies=True), policy=policy)
    clock.advance(LEASE_S)
    with pytest.raises(Killed):
        guards.done(call.run("k", 7))
    engine, _ = another_node(guards, store, clock, work, policy=policy)
    recovery_round(engine, clock)
    assert (work.inputs, store.record.state, store.record.attempt) == ([], IN_DOUBT, 2)


def test_a_registered_function_runs_again_when_the_database_asks_for_it(guards, tmp_path):
    """L9: as `engine.transaction` does; the caller does not see that it had to."""
    policy, runs = Policy(mode="transaction", transaction_retries=1), []

    def collide_once(given):
        runs.append(given)
        if len(runs) == 1:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY_SNAPSHOT
            raise error
        return "done"

    engine = guards.engine(f"sqlite:///{tmp_path}/records.db")
    call = registered(guards, engine, collide_once, policy=policy)
    assert guards.done(call.run("k", 1)) == "done"
    assert runs == [1, 1]


def test_a_key_of_a_registered_function_belongs_to_its_input(guards, engine):
    """K2."""
    work = Work()
    call = registered(guards, engine, work)
    for _ in range(2):
        assert guards.done(call.run("k", {"a": 1})) == {"a": 1}
    with pytest.raises(KeyReused):
        guards.done(call.run("k", {"a": 2}))
    assert len(work.inputs) == 1


@pytest.mark.parametrize(
    ("given", "sentence"), [(object(), "neither JSON nor bytes"), ("x" * 300_000, "can be stored")]
)
def test_an_input_that_cannot_be_stored_is_refused_before_anything_runs(
    guards, engine, store, given, sentence
):
    """X2."""
    work = Work()
    with pytest.raises(Misconfigured, match=sentence):
        guards.done(registered(guards, engine, work).run("k", given))
    assert (work.inputs, store.records) == ([], [])


# --- in doubt while the store is down -------------------------------------------------------------


def test_a_doubt_that_could_not_be_written_is_an_outage_that_may_be_retried(
    guards, store, clock, decisions
):
    """D2, L7: "outcome-unknown" says never to retry, and would be wrong before it is stored."""
    engine = guards.engine(store, Policy(patience=0), clock=clock, observers=[decisions.append])

    def doubted():
        operation = yield engine.begin(new_request(engine), engine.policy)
        operation.step_problem = StepInDoubt("charge")
        operation.has_notes = True
        store.is_down = True
        return (yield engine.complete(operation, Outcome(COMPLETE, b"")))

    answer = guards.done(guards.flavoured(doubted)())
    assert answer.problem.code == "store-unavailable"
    assert outcomes(decisions) == [("refused", "store-unavailable")]
    store.is_down = False
    engine.attempts.heartbeat.tick()
    assert store.record.state == IN_DOUBT
