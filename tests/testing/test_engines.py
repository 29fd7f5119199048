"""Engines whose time a test moves, and operations that nothing stores (V2)."""

import asyncio
import gc
from datetime import timedelta

import pytest

from coatcheck import Policy
from coatcheck.errors import KeyBusy, Misconfigured, OutcomeUnknown
from coatcheck.testing import (
    AsyncTimedEngine,
    AttemptKilled,
    Clock,
    TimedEngine,
    kill_attempt,
    new_operation,
    next_attempt_of,
)
from coatcheck.testing.engines import START_MS
from coatcheck.verify.crash import Injector


def test_a_clock_moves_only_when_a_test_moves_it():
    clock = Clock(1_000)
    clock.travel("2s")
    clock.travel(timedelta(milliseconds=5))
    assert clock() == 3_005
    for wrong in (-1, "soon"):
        with pytest.raises(Misconfigured):
            clock.travel(wrong)
    assert clock() == 3_005


def test_after_its_window_a_key_executes_again():
    calls = []
    with TimedEngine(Policy(window="1h")) as engine:
        engine.run("k", calls.append, 1)
        engine.travel("59m")
        engine.run("k", calls.append, 1)
        assert calls == [1]
        engine.travel_past_window()
        engine.run("k", calls.append, 1)
    assert calls == [1, 1]


@pytest.mark.parametrize(("recovery", "effects"), [("retry", 2), ("manual", 1)])
def test_a_killed_attempt_is_recovered_after_its_lease(recovery, effects):
    """V2, L5: nothing is written for it, so the policy decides when the lease has expired."""
    done = []
    injector = Injector("after effect", kill_attempt)
    with TimedEngine(Policy(recovery=recovery, wait=0)) as engine:
        with pytest.raises(AttemptKilled):
            engine.run("k", injector.effect(done.append), 1, scope="orders")
        engine.travel_past_lease()
        if recovery == "manual":
            with pytest.raises(OutcomeUnknown):
                engine.run("k", done.append, 1, scope="orders")
        else:
            engine.run("k", done.append, 1, scope="orders")
    assert len(done) == effects


def test_a_duplicate_of_a_killed_attempt_waits_and_is_then_refused():
    """V2: the clock of the test stands still, but not while a request waits."""
    policy = Policy(wait="100ms")
    injector = Injector("after effect", kill_attempt)
    with TimedEngine(policy) as engine:
        with pytest.raises(AttemptKilled):
            engine.run("k", injector.effect(list), scope="orders")
        with pytest.raises(KeyBusy):
            engine.run("k", list, scope="orders")
        assert engine.clock() - START_MS < policy.lease_ms
        engine.travel_past_lease()
        assert engine.run("k", list, scope="orders") == []


def test_the_async_engine_travels_too():
    calls = []

    async def call():
        calls.append(1)

    async def use():
        await engine.run("k", call)
        await engine.run("k", call)
        engine.travel_past_window()
        await engine.run("k", call)

    engine = AsyncTimedEngine()
    asyncio.run(use())
    engine.stop()
    assert calls == [1, 1]


def charge(operation):
    operation.note({"about to charge": 7})
    receipt = operation.step("charge", lambda: {"id": 1})
    operation.progress(0.5, "charged")
    return receipt, operation.derive("charge")


def test_a_handler_can_be_called_with_an_operation_that_nothing_stores():
    """V2, L7: steps, notes and derived keys work as in production."""
    operation = new_operation(key="order-7", label="POST /orders")
    receipt, key = charge(operation)
    assert receipt == {"id": 1}
    assert operation.steps == ["charge"]
    assert [note.what for note in operation.notes] == [{"about to charge": 7}]
    assert key == new_operation(key="order-7", label="POST /orders").derive("charge")
    assert key != new_operation(key="order-8", label="POST /orders").derive("charge")
    assert (operation.key, operation.label, operation.attempt) == ("order-7", "POST /orders", 1)


def test_async_handlers_await_the_same_operation():
    operation = new_operation()

    async def receipt():
        return 7

    async def handle():
        await operation.note("about to charge")
        return await operation.step("charge", receipt)

    assert asyncio.run(handle()) == 7
    assert operation.steps == ["charge"]


def test_the_next_attempt_gets_the_steps_of_the_first():
    first, calls = new_operation(), []
    assert first.step("charge", lambda: calls.append(1) or "receipt") == "receipt"
    second = next_attempt_of(first)
    assert second.step("charge", lambda: calls.append(2) or "another") == "receipt"
    assert calls == [1]
    assert (second.attempt, second.fence > first.fence) == (2, True)
    assert second.derive("psp") == first.derive("psp")


def test_an_operation_can_have_notes_and_a_connection_from_the_start():
    operation = new_operation(attempt=2, notes=["about to charge"])
    assert [(note.attempt, note.what) for note in operation.notes] == [(1, "about to charge")]
    connection = object()
    operation = new_operation(connection=connection)
    assert operation.connection is connection
    assert next_attempt_of(operation).connection is connection
    with pytest.raises(Misconfigured):
        operation.step("charge", int)
    gc.collect()  # nothing is left to be awaited
