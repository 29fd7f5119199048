"""Flows: driven the same way with and without `await`."""

import asyncio
from dataclasses import dataclass

import pytest

from coatcheck.core.flow import Effect, run, run_async


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
