"""Flows: driven the same way with and without `await`."""

import asyncio
from dataclasses import dataclass

import pytest

from coatcheck.core.flow import Call, Effect, Sleep, run, run_async


@dataclass(slots=True)
class Ask(Effect[int]):
    number: int


def doubled():
    first = yield from Ask(1)
    try:
        second = yield from Ask(-1)
    except ValueError:
        second = 100
    return first + second


def perform(effect):
    if effect.number < 0:
        raise ValueError(effect.number)
    return effect.number * 2


async def perform_async(effect):
    return perform(effect)


def test_a_flow_is_sent_results_and_thrown_errors():
    assert run(doubled(), perform) == 102


def test_an_async_driver_does_the_same():
    assert asyncio.run(run_async(doubled(), perform_async)) == 102


def unguarded():
    yield from Ask(-1)


def test_an_error_that_a_flow_does_not_catch_reaches_its_driver():
    with pytest.raises(ValueError, match="-1"):
        run(unguarded(), perform)
    with pytest.raises(ValueError, match="-1"):
        asyncio.run(run_async(unguarded(), perform_async))


def pauses_and_calls():
    assert (yield from Sleep(0.25)) is None
    return (yield from Call(max, (1, 3, 2))), (yield from Call(dict))


def performed(effect, slept):
    if isinstance(effect, Sleep):
        slept.append(effect.seconds)
        return None
    return effect.function(*effect.args)


def test_a_flow_pauses_and_calls_functions_by_effects():
    """The runner sleeps and calls: a flow only says for how long, what, and with which arguments."""
    slept = []
    assert run(pauses_and_calls(), lambda effect: performed(effect, slept)) == (3, {})
    assert slept == [0.25]


def test_an_async_runner_performs_the_same_pauses_and_calls():
    slept = []

    async def perform(effect):
        return performed(effect, slept)

    assert asyncio.run(run_async(pauses_and_calls(), perform)) == (3, {})
    assert slept == [0.25]


def failing_call():
    def fail():
        raise ValueError("no")

    try:
        yield from Call(fail)
    except ValueError as error:
        return f"failed: {error}"


def test_the_error_of_a_called_function_is_raised_in_the_flow():
    assert run(failing_call(), lambda effect: performed(effect, [])) == "failed: no"
