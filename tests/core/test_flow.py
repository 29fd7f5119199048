"""Flows: run in the same way with and without `await`."""

import asyncio
from dataclasses import dataclass

import pytest

from coatcheck.core.flow import Call, Effect, Sleep, run, run_async


@dataclass(slots=True)
class Ask(Effect[int]):
    number: int


def perform(effect):
    if isinstance(effect, Sleep):
        return f"slept {effect.seconds} s"
    if isinstance(effect, Call):
        return effect.function(*effect.args)
    if effect.number < 0:
        raise ValueError(effect.number)
    return effect.number * 2


async def perform_async(effect):
    return perform(effect)


@pytest.fixture(params=["sync", "async"])
def run_flow(request):
    if request.param == "sync":
        return lambda flow: run(flow, perform)
    return lambda flow: asyncio.run(run_async(flow, perform_async))


def doubled():
    first = yield from Ask(1)
    try:
        second = yield from Ask(-1)
    except ValueError:
        second = 100
    return first + second


def test_a_flow_receives_results_and_errors(run_flow):
    assert run_flow(doubled()) == 102


def test_an_error_that_a_flow_does_not_catch_reaches_its_runner(run_flow):
    with pytest.raises(ValueError, match="-1"):
        run_flow(flow_of(Ask(-1)))


def flow_of(effect):
    return (yield from effect)


def test_a_flow_sleeps_and_calls_functions_by_effects(run_flow):
    """It only describes for how long, what, and with which arguments."""
    assert run_flow(flow_of(Sleep(0.25))) == "slept 0.25 s"
    assert run_flow(flow_of(Call(max, (1, 3, 2)))) == 3
    assert run_flow(flow_of(Call(dict))) == {}


def failing_call():
    try:
        yield from Call(int, ("no",))
    except ValueError as error:
        return f"failed: {error}"


def test_the_error_of_a_called_function_is_raised_in_the_flow(run_flow):
    assert run_flow(failing_call()).startswith("failed: ")
