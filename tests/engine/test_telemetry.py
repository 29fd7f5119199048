"""Telemetry: decisions, log lines and events, each once, and no secrets in them."""

import logging
from contextlib import suppress
from typing import get_args

import pytest

from coatcheck import (
    CoatcheckError,
    Decision,
    DidNotHappen,
    Happened,
    KeyBusy,
    Misconfigured,
    OutcomeUnknown,
    Policy,
    StoreUnavailable,
    Uncertain,
    Unknown,
)
from coatcheck.core.key import reference_of
from coatcheck.core.record import IN_DOUBT
from coatcheck.engine import recovery
from coatcheck.telemetry import (
    Claimed,
    Completed,
    CountedInDoubt,
    DecisionOutcome,
    InDoubt,
    Lost,
    Recovered,
    Released,
    Renewed,
    Swept,
    Waited,
    log_decision,
)
from tests.support.engines import LEASE_S, ROUND_S, Handler, held_up
from tests.support.times import WAIT_S_MAX, Clock, eventually, wait_for


@pytest.fixture
def seen():
    return []


@pytest.fixture
def engine(guards, store, clock, seen):
    return guards.engine(store, observers=[seen.append], clock=clock, sweep_every_s=None)


def parts(decision):
    return decision.outcome, decision.attempt, decision.code


def test_every_request_is_one_decision(guards, engine, seen, store):
    """O3: executed, replayed, refused and failed, each with what belongs to it."""
    guards.run(engine, "k", Handler(), 1, scope="orders")
    guards.run(engine, "k", Handler(), 1, scope="orders")
    with pytest.raises(CoatcheckError):
        guards.run(engine, "k", Handler(), 2, scope="orders")
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "f", Handler(ZeroDivisionError()), scope="orders")
    guards.run(engine, "f", Handler(), scope="orders")
    assert [parts(decision) for decision in seen] == [
        ("executed", 1, ""),
        ("replayed", 1, ""),
        ("refused", 0, "key-reused"),
        ("failed", 0, ""),
        ("executed", 2, ""),
    ]
    assert {decision.label for decision in seen} == {"orders"}
    assert {decision.reference for decision in seen} == {reference_of(r.id) for r in store.records}


def test_a_replay_from_the_store_is_reported_like_one_from_memory(guards, store, seen):
    """O3."""
    guards.run(guards.engine(store), "k", Handler())
    other = guards.engine(store, observers=[seen.append])
    guards.run(other, "k", Handler())
    assert [parts(decision) for decision in seen] == [("replayed", 1, "")]


def test_a_result_that_cannot_be_kept_is_reported_too(guards, engine, seen):
    """O3, L12."""
    for _ in range(2):
        with pytest.raises(CoatcheckError):
            guards.run(engine, "k", Handler(object))
    assert [parts(decision) for decision in seen] == [
        ("executed", 1, ""),
        ("refused", 0, "result-unavailable"),
    ]


def test_a_request_without_a_store_is_reported_too(guards, engine, seen, store):
    """O3, D2: an outage is when the numbers matter most."""
    for troubles in (["down"], ["", "down"]):
        store.troubles = troubles
        with pytest.raises(StoreUnavailable):
            guards.run(engine, "k", Handler(), policy=Policy(patience=0))
        assert [parts(decision) for decision in seen] == [("refused", 0, "store-unavailable")]
        seen.clear()
        store._records.clear()


def test_the_duration_is_that_of_the_whole_request(guards, store, seen):
    """O3."""
    clock = Clock()
    engine = guards.engine(store, observers=[seen.append], clock=clock, sweep_every_s=None)
    handler = held_up()
    call = guards.beside(engine, "k", handler)
    wait_for(handler.is_running)
    clock.advance(1.5)
    handler.may_end.set()
    call.result()
    assert seen[0].duration_ms == 1_500


def test_every_observer_is_called_and_one_that_fails_does_no_harm(guards, store, seen, caplog):
    """O3: the work is done and stored; a broken dashboard must not turn it into an error."""

    def broken(_decision):
        raise RuntimeError("the dashboard is down")

    engine = guards.engine(store, observers=[broken, seen.append])
    assert guards.run(engine, "k", Handler()) == "done"
    assert guards.run(engine, "k", Handler()) == "done"
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "f", Handler(ZeroDivisionError()))
    assert [decision.outcome for decision in seen] == ["executed", "replayed", "failed"]
    assert "the dashboard is down" in caplog.text


# --- the log ----------------------------------------------------------------------------------

DECISION = Decision("executed", "7D3F-92AB-1C4E", "POST /orders", "caller", 1, "", 12)


def test_a_log_line_names_the_outcome_and_the_operation(caplog):
    """O3, K5: and carries its parts for structured handlers."""
    caplog.set_level(logging.INFO, "coatcheck")
    log_decision(DECISION)
    log_decision(DECISION._replace(outcome="refused", attempt=0, code="key-reused"))
    assert caplog.messages == [
        "coatcheck: operation 7D3F-92AB-1C4E (POST /orders) was executed as attempt 1 in 12 ms",
        "coatcheck: operation 7D3F-92AB-1C4E (POST /orders) was refused with key-reused in 12 ms",
    ]
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO"]  # a client's mistake
    first = caplog.records[0]
    assert {name: getattr(first, name) for name in Decision._fields} == DECISION._asdict()
    caplog.clear()
    caplog.set_level(logging.ERROR, "coatcheck")
    log_decision(DECISION)
    assert caplog.records == []


@pytest.mark.parametrize("outcome", get_args(DecisionOutcome))
def test_every_outcome_is_a_log_line(outcome, caplog):
    """O1: also those of observe mode, and of an outage that requests run through."""
    caplog.set_level(logging.INFO, "coatcheck")
    log_decision(Decision(outcome, "7D3F-92AB-1C4E", "POST /orders", "", 1, "key-reused", 12))
    (line,) = caplog.records
    assert line.getMessage().startswith("coatcheck: operation 7D3F-92AB-1C4E (POST /orders) ")
    assert ("without protection" in line.getMessage()) is (outcome == "unguarded")
    assert ("key-reused" in line.getMessage()) is (outcome in ("refused", "would_refuse"))
    assert line.levelname == ("WARNING" if outcome == "unguarded" else "INFO")


def test_each_decision_is_one_log_line_with_and_without_observers(guards, store, caplog):
    """O3."""
    caplog.set_level(logging.INFO, "coatcheck")
    engine = guards.engine(store)
    for _ in range(2):
        guards.run(engine, "k", Handler(), scope="orders")
    assert [line.outcome for line in caplog.records] == ["executed", "replayed"]


SECRETS = ("key-that-is-secret", "argument-that-is-secret", "result-that-is-secret")


def everything_that_can_happen(guards, engine, clock):
    key, argument, result = SECRETS
    guards.run(engine, key, Handler(result), argument)
    guards.run(engine, key, Handler(result), argument)
    for _ in range(2):
        with pytest.raises(CoatcheckError):
            guards.run(engine, key + "a", Handler(object), argument)
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, key + "b", Handler(ZeroDivisionError()), argument)
    with pytest.raises(CoatcheckError):
        guards.run(engine, key, Handler(result), argument, 2)
    with pytest.raises(SystemExit):
        guards.run(engine, key + "c", Handler(SystemExit()), argument)
    with pytest.raises(KeyBusy):
        guards.run(engine, key + "c", Handler(), argument, policy=Policy(in_flight="409"))
    clock.advance(LEASE_S)
    with pytest.raises(OutcomeUnknown):
        guards.run(engine, key + "c", Handler(), argument, policy=Policy(recovery="manual"))
    clock.advance(90_000)
    guards.run(engine, key, Handler(result), argument)
    engine.attempts.heartbeat.store.troubles = ["down"]
    with pytest.raises(StoreUnavailable):
        guards.run(engine, key + "d", Handler(result), argument)


def test_no_key_argument_or_result_is_ever_logged_or_reported(guards, engine, clock, seen, caplog):
    """O3, X3: references are enough to find an operation, and say nothing."""
    caplog.set_level(logging.DEBUG)
    everything_that_can_happen(guards, engine, clock)
    assert len(caplog.records) >= 8
    said = [line.getMessage() + repr(vars(line)) for line in caplog.records]
    said += [repr(decision) for decision in seen]
    assert [text for text in said for secret in SECRETS if secret in text] == []
    outcomes = [decision.code or decision.outcome for decision in seen]
    assert outcomes == [
        *("executed", "replayed", "executed", "result-unavailable", "failed", "key-reused"),
        *("in-progress", "outcome-unknown", "executed", "store-unavailable"),
    ]


def test_keys_in_refusals_are_shortened(guards, engine):
    """O3: a refusal reaches logs of others, too."""
    guards.run(engine, SECRETS[0], Handler())
    with pytest.raises(CoatcheckError) as refused:
        guards.run(engine, SECRETS[0], Handler(), 1)
    assert SECRETS[0] not in str(refused.value)
    assert SECRETS[0][:8] in str(refused.value)


# --- events -----------------------------------------------------------------------------------


@pytest.fixture
def events():
    return []


@pytest.fixture
def heard(guards, store, clock, events):
    """An engine with a listener; it sweeps and recovers only when a test makes it."""
    return guards.engine(store, Policy(wait="20s", patience=0), **listening(clock, events))


def listening(clock, events):
    def listen(event):  # a round of recovery also counts the doubts
        if not isinstance(event, CountedInDoubt):
            events.append(event)

    return {
        "listeners": [listen],
        "clock": clock,
        "sweep_every_s": None,
        "recover_every_s": None,
    }


def kinds(events):
    return [type(event) for event in events]


def test_each_change_of_a_claim_is_one_event(guards, heard, events, store):
    """O3: a failure, the next attempt, and a replay, which changes nothing."""
    with pytest.raises(ZeroDivisionError):
        guards.run(heard, "k", Handler(ZeroDivisionError()), scope="orders")
    guards.run(heard, "k", Handler(), scope="orders")
    guards.run(heard, "k", Handler(), scope="orders")
    what = reference_of(store.record.id), "orders", ""
    assert events == [Claimed(*what, 1), Released(*what, 1), Claimed(*what, 2), Completed(*what, 2)]


def test_each_change_of_a_claim_in_a_transaction_is_one_event(guards, events, clock, tmp_path):
    """O3, L9: a rollback releases the claim."""
    engine = guards.engine(f"sqlite:///{tmp_path}/orders.db", **listening(clock, events))
    for handler in (Handler(ZeroDivisionError()), Handler(), Handler()):
        with suppress(ZeroDivisionError):
            guards.done(engine.transaction("k", guards.flavoured(handler), scope="orders"))
    assert kinds(events) == [Claimed, Released, Claimed, Completed]


def test_an_outcome_that_is_not_known_is_an_event(guards, heard, events):
    """O3, L6."""
    with pytest.raises(ZeroDivisionError):
        guards.run(heard, "k", Handler(ZeroDivisionError()), policy=Policy(recovery="manual"))
    assert kinds(events) == [Claimed, InDoubt]


RAISES = Handler(ZeroDivisionError())
UNSURE = Policy(recovery="reconcile", reconcile=lambda _: Unknown())


@pytest.mark.parametrize(
    ("policy", "handler", "by", "why"),
    [
        (Policy(recovery="manual"), RAISES, "itself", "attempt 1 raised ZeroDivisionError"),
        (Policy(recovery="manual"), Handler(SystemExit()), "retry", "attempt 1 never finished"),
        (Policy(recovery="manual"), Handler(SystemExit()), "round", "attempt 1 never finished"),
        (
            UNSURE,
            Handler(SystemExit()),
            "retry",
            "its reconcile function does not know what happened",
        ),
        (
            UNSURE,
            Handler(SystemExit()),
            "round",
            "its reconcile function does not know what happened",
        ),
    ],
    ids=[
        "raised",
        "dead, found by a retry",
        "dead, found in the background",
        "asked",
        "asked in round",
    ],
)
def test_an_operation_that_becomes_in_doubt_is_one_warning(
    guards, heard, events, store, clock, *, caplog, policy, handler, by, why
):
    """O3, L6: with its reference, its label, the reason and the next command; it is counted, too."""
    handler.calls = 0
    with pytest.raises((ZeroDivisionError, SystemExit)):
        guards.run(heard, "k", handler, scope="charges", policy=policy)
    clock.advance(ROUND_S if by == "round" else LEASE_S + 1)
    if by == "retry":
        with pytest.raises(OutcomeUnknown):
            guards.run(heard, "k", Handler(), scope="charges", policy=policy)
    elif by == "round":
        heard.recovery.round()
    reference = reference_of(store.record.id)
    text = f"operation {reference} (charges) is in doubt: {why}; see coatcheck lookup {reference}"
    (line,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert line.getMessage() == f"coatcheck: {text}"
    assert (line.reference, line.label, line.attempt) == (
        reference,
        "charges",
        store.record.attempt,
    )
    assert heard.attempts.telemetry.in_doubt_count == kinds(events).count(InDoubt) == 1


def test_a_doubt_that_the_heartbeat_writes_is_one_warning_too(guards, heard, store, caplog):
    """O3, D2."""
    store.troubles = ["", "down"]
    with pytest.raises(ZeroDivisionError):
        guards.run(heard, "k", RAISES, policy=Policy(recovery="manual", patience=0))
    warning = "is in doubt: attempt 1 gave no final answer"
    eventually(lambda: warning in caplog.text)
    guards.close()
    assert caplog.text.count(warning) == heard.attempts.telemetry.in_doubt_count == 1


def test_a_write_whose_acknowledgement_was_lost_is_one_event(guards, heard, events, store):
    """O3, L2: it is written twice, and happens once."""
    store.troubles = ["deaf", "", "deaf"]
    guards.run(heard, "k", Handler())
    assert kinds(events) == [Claimed, Completed]


def test_a_completion_that_the_heartbeat_writes_is_an_event_too(guards, heard, events, store):
    """O3, D2."""
    store.troubles = ["", "down"]
    with pytest.raises(StoreUnavailable):
        guards.run(heard, "k", Handler())
    eventually(lambda: kinds(events) == [Claimed, Completed])


def test_a_duplicate_that_waits_is_an_event_with_its_duration(guards, heard, events, store, clock):
    """O3, L3."""
    handler = held_up()
    calls = [guards.beside(heard, "k", handler, scope="orders")]
    wait_for(handler.is_running)
    calls.append(guards.beside(heard, "k", handler, scope="orders"))
    eventually(lambda: heard.attempts.waiters.count(store.record.id) == 1)
    clock.advance(1.5)
    handler.may_end.set()
    assert [call.result() for call in calls] == ["done", "done"]
    (waited,) = [event for event in events if isinstance(event, Waited)]
    assert waited == Waited(reference_of(store.record.id), "orders", "", 1, 1_500)
    assert set(kinds(events)) == {Claimed, Completed, Waited}


def test_a_renewal_is_an_event(guards, heard, events, clock):
    """O3, L5."""
    handler = held_up()
    call = guards.beside(heard, "k", handler)
    wait_for(handler.is_running)
    heard.attempts.heartbeat.tick()  # none is due yet
    clock.advance(LEASE_S / 2)
    heard.attempts.heartbeat.tick()
    handler.may_end.set()
    call.result()
    assert kinds(events) == [Claimed, Renewed, Completed]


@pytest.mark.parametrize("ticks", [0, 2])
def test_a_claim_that_was_taken_over_is_an_event(guards, heard, events, store, clock, *, ticks):
    """O3, L5: in the process that lost it, once; also if it finds out when it completes."""
    handler = held_up()
    call = guards.beside(heard, "k", handler, scope="orders")
    wait_for(handler.is_running)
    clock.advance(LEASE_S + 1)
    other = guards.engine(store, clock=clock, sweep_every_s=None)
    assert guards.run(other, "k", Handler("theirs"), scope="orders") == "theirs"
    for _ in range(ticks):
        heard.attempts.heartbeat.tick()
    handler.may_end.set()
    assert call.result() == "theirs"
    what = reference_of(store.record.id), "orders", ""
    assert events == [Claimed(*what, 1), Lost(*what, 1)]


ANSWERS = {
    "completed": (Happened(value="done"), Completed),
    "released": (DidNotHappen(), Released),
    "in doubt": (Unknown(), InDoubt),
}


@pytest.mark.parametrize("outcome", ANSWERS)
def test_a_recovery_is_an_event_with_its_outcome(guards, heard, events, clock, outcome):
    """O3, L6: and so is what it wrote."""
    answer, ends = ANSWERS[outcome]
    policy = Policy(recovery="reconcile", reconcile=lambda _: answer)
    with pytest.raises(SystemExit):
        guards.run(heard, "k", Handler(SystemExit()), scope="orders", policy=policy)
    clock.advance(ROUND_S)
    heard.recovery.round()
    assert kinds(events) == [Claimed, ends, Recovered]
    assert events[-1] == Recovered(events[0].reference, "orders", "", 1, outcome)


def test_a_registered_function_that_runs_again_is_an_event(guards, heard, events, clock):
    """O3, L6."""
    handler = Handler(SystemExit())
    registered = heard.register("ship", guards.flavoured(handler))
    with pytest.raises(SystemExit):
        guards.done(registered.run("k", {"order": 1}))
    clock.advance(LEASE_S + 1)
    handler.result = "done"
    heard.recovery.round()
    assert kinds(events) == [Claimed, Claimed, Completed, Recovered]
    assert (events[-1].label, events[-1].outcome) == ("ship", "run again")


def test_the_background_counts_the_operations_that_are_in_doubt(
    guards, store, clock, events, monkeypatch
):
    """O3: also those of other processes, page by page, and if every policy is to retry."""
    monkeypatch.setattr(recovery, "RECORDS_MAX", 2)
    other = guards.engine(store, clock=clock)
    for number in range(3):
        with pytest.raises(Uncertain):
            guards.run(other, f"k{number}", Handler(Uncertain()))
    engine = guards.engine(store, listeners=[events.append], clock=clock)
    engine.recovery.round()
    assert events == [CountedInDoubt(2)]  # so far: an alert must not wait for the last page
    engine.recovery.round()
    assert events[1:] == [CountedInDoubt(3)]
    engine.recovery.round()
    assert events[2:] == []  # begun anew, and no less until the last page says so
    engine.recovery.round()
    assert events[2:] == [CountedInDoubt(3)]
    first = next(record for record in store.records if record.state == IN_DOUBT)
    guards.done(engine.resolve(first.id, DidNotHappen(), by="ann", why="seen"))
    for _ in range(2):
        engine.recovery.round()
    assert events[-1] == CountedInDoubt(2)


@pytest.mark.parametrize("is_heard", [False, True])
def test_doubts_are_counted_from_time_to_time_if_there_is_a_listener(
    guards, store, clock, events, is_heard
):
    """O3: without one, the whole table is not searched for it."""
    listeners = [events.append] if is_heard else []
    engine = guards.engine(store, listeners=listeners, clock=clock, recover_every_s=60)
    for _ in range(3):
        clock.advance(ROUND_S)
        engine.attempts.heartbeat.tick()
        if engine.recovery._thread is not None:
            engine.recovery._thread.join(WAIT_S_MAX)
    assert (CountedInDoubt(0) in events) is is_heard
    assert (engine.recovery._thread is not None) is is_heard


def test_a_sweep_is_an_event_with_the_number_of_its_records(guards, store, clock, events):
    """O3, T3: also one that deleted nothing, so that metrics can tell when the last one ended."""
    options = listening(clock, events) | {"sweep_every_s": 60}
    engine = guards.engine(store, Policy(window="1h", margin=0), **options)
    for number in range(3):
        guards.run(engine, f"k{number}", Handler())
    events.clear()
    for _ in range(3):
        clock.advance(3_600)
        engine.attempts.heartbeat.tick()
        eventually(lambda: not engine.sweeper.is_sweeping())
    assert [swept for swept in events if swept.records] == [Swept(3)]
    assert Swept(0) in events


def test_a_listener_that_fails_does_no_harm(guards, store, events, caplog):
    """O3: neither to the operation nor to the other listeners."""

    def broken(_event):
        raise RuntimeError("the dashboard is down")

    engine = guards.engine(store, listeners=[broken, events.append])
    assert guards.run(engine, "k", Handler()) == "done"
    assert kinds(events) == [Claimed, Completed]
    assert "a listener raised" in caplog.text


@pytest.mark.parametrize("option", ["observers", "listeners"])
def test_a_callback_that_could_never_be_called_is_refused(guards, store, option):
    """O3: an async one would never be awaited, and what is no function cannot be called."""

    async def notice(_event):
        raise AssertionError

    for given, words in (([notice], "must not be async"), ([5], "5"), (5, "5")):
        with pytest.raises(Misconfigured, match=rf"{option}.*{words}"):
            guards.engine(store, **{option: given})


def test_events_contain_no_key_argument_or_result(guards, heard, clock, events):
    """O3, X3."""
    everything_that_can_happen(guards, heard, clock)
    assert len(events) >= 8
    assert [event for event in events for secret in SECRETS if secret in repr(event)] == []
