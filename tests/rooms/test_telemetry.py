"""Telemetry: one decision for each request, one log line for each decision, and no secrets."""

import logging

import pytest
from engines import Clock, Handler, WatchedStore, held_up, wait_for

from coatcheck import (
    CoatcheckError,
    Decision,
    KeyBusy,
    Misconfigured,
    OutcomeUnknown,
    Policy,
    StoreUnavailable,
)
from coatcheck.core.key import reference_of
from coatcheck.telemetry import log_decision

LEASE_S = 60


@pytest.fixture
def store():
    return WatchedStore()


@pytest.fixture
def seen():
    return []


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def engine(guards, store, clock, seen):
    return guards.engine(store, observers=[seen.append], clock=clock, sweep_every_s=None)


def told(decision):
    return decision.outcome, decision.attempt, decision.code


def test_every_request_is_told_once(guards, engine, seen, store):
    """O3: executed, replayed, refused and failed, each with what belongs to it."""
    guards.run(engine, "k", Handler(), 1, scope="orders")
    guards.run(engine, "k", Handler(), 1, scope="orders")
    with pytest.raises(CoatcheckError):
        guards.run(engine, "k", Handler(), 2, scope="orders")
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "f", Handler(ZeroDivisionError()), scope="orders")
    guards.run(engine, "f", Handler(), scope="orders")
    assert [told(decision) for decision in seen] == [
        ("executed", 1, ""),
        ("replayed", 1, ""),
        ("refused", 0, "key-reused"),
        ("failed", 0, ""),
        ("executed", 2, ""),
    ]
    assert {decision.label for decision in seen} == {"orders"}
    assert {decision.reference for decision in seen} == {reference_of(r.id) for r in store.records}


def test_a_replay_from_the_store_is_told_like_one_from_memory(guards, store, seen):
    """O3."""
    guards.run(guards.engine(store), "k", Handler())
    other = guards.engine(store, observers=[seen.append])
    guards.run(other, "k", Handler())
    assert [told(decision) for decision in seen] == [("replayed", 1, "")]


def test_a_result_that_cannot_be_kept_is_told_too(guards, engine, seen):
    """O3, L12."""
    guards.run(engine, "k", Handler(object))
    with pytest.raises(CoatcheckError):
        guards.run(engine, "k", Handler(object))
    assert [told(decision) for decision in seen] == [
        ("executed", 1, ""),
        ("refused", 0, "result-unavailable"),
    ]


def test_a_request_that_found_no_store_is_told_too(guards, engine, seen, store):
    """O3, D2: an outage is when the numbers matter most."""
    for troubles in (["down"], ["", "down"]):
        store.troubles = troubles
        with pytest.raises(StoreUnavailable):
            guards.run(engine, "k", Handler(), policy=Policy(patience=0))
        assert [told(decision) for decision in seen] == [("refused", 0, "store-unavailable")]
        seen.clear()
        store._records.clear()


def test_the_duration_is_that_of_the_whole_request(guards, store, seen):
    """O3."""
    clock = Clock()
    engine = guards.engine(store, observers=[seen.append], clock=clock, sweep_every_s=None)
    handler = held_up()
    call = guards.beside(engine, "k", handler)
    wait_for(handler.is_running)
    clock.pass_s(1.5)
    handler.may_end.set()
    call.result()
    assert seen[0].duration_ms == 1_500


def test_every_observer_is_told_and_one_that_fails_hurts_nobody(guards, store, seen, caplog):
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


def test_an_observer_that_could_never_be_told_is_refused(guards, store):
    """O3: one that is async is never awaited, and what is no function cannot be called."""

    async def observe(_decision):
        raise AssertionError

    for observers, words in (([observe], "must not be async"), ([5], "5"), (5, "5")):
        with pytest.raises(Misconfigured, match=rf"observers.*{words}"):
            guards.engine(store, observers=observers)


# --- the log ----------------------------------------------------------------------------------

DECISION = Decision("executed", "7D3F-92AB-1C4E", "POST /orders", "caller", 1, "", 12)


def test_a_log_line_says_what_happened_to_which_operation(caplog):
    """O3, K5."""
    caplog.set_level(logging.INFO, "coatcheck")
    log_decision(DECISION)
    log_decision(DECISION._replace(outcome="refused", attempt=0, code="key-reused"))
    assert caplog.messages == [
        "executed 7D3F-92AB-1C4E POST /orders attempt=1 12ms",
        "refused 7D3F-92AB-1C4E POST /orders attempt=0 key-reused 12ms",
    ]
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING"]


def test_a_log_line_carries_its_parts_for_structured_handlers(caplog):
    """O3."""
    caplog.set_level(logging.INFO, "coatcheck")
    log_decision(DECISION)
    (line,) = caplog.records
    assert {name: getattr(line, name) for name in Decision._fields} == DECISION._asdict()


def test_nothing_is_logged_below_the_level_that_was_set(caplog):
    """O3."""
    caplog.set_level(logging.ERROR, "coatcheck")
    log_decision(DECISION)
    assert caplog.records == []


def test_each_decision_is_one_line_whether_or_not_anybody_observes(guards, store, caplog):
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
    guards.run(engine, key + "a", Handler(object), argument)
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
    clock.pass_s(LEASE_S)
    with pytest.raises(OutcomeUnknown):
        guards.run(engine, key + "c", Handler(), argument, policy=Policy(recovery="manual"))
    clock.pass_s(90_000)
    guards.run(engine, key, Handler(result), argument)
    engine.heart.store.troubles = ["down"]
    with pytest.raises(StoreUnavailable):
        guards.run(engine, key + "d", Handler(result), argument)


def test_no_key_argument_or_result_is_ever_logged_or_told(guards, engine, clock, seen, caplog):
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
