"""Functions that are called and not awaited may not be async."""

import asyncio

import pytest

from coatcheck import Misconfigured
from coatcheck.core.callables import check_function, refuse_async, refuse_awaitable


async def key(_request: object) -> str:
    return "k"


class Number:
    async def __call__(self, _request: object) -> str:
        return "k"


@pytest.mark.parametrize("function", [key, Number(), Number().__call__])
def test_an_async_function_is_refused_by_the_name_it_was_given_as(function):
    """K4: what it returned would be another key with every retry."""
    with pytest.raises(Misconfigured, match=r"key= .* must not be async"):
        refuse_async("key", function)


@pytest.mark.parametrize("function", [None, "final", str, lambda _request: "k"])
def test_whatever_else_is_taken(function):
    """K4."""
    refuse_async("key", function)


def test_what_cannot_be_called_is_refused_by_the_name_it_was_given_as():
    """K4: else every request would find out."""
    for function in ("number", 5):
        with pytest.raises(Misconfigured, match=r"key= is a (str|int); it is a function"):
            check_function("key", function)
    with pytest.raises(Misconfigured, match=r"key= .* must not be async"):
        check_function("key", key)
    check_function("key", str)


def test_what_is_to_be_awaited_is_refused_though_its_function_did_not_look_like_it():
    """K4: and nothing is left that Python would complain about."""
    loop = asyncio.new_event_loop()
    try:
        for found in (key(None), loop.create_future()):
            with pytest.raises(Misconfigured, match=r"caller= .* must not be async"):
                refuse_awaitable("caller", found)
    finally:
        loop.close()
    refuse_awaitable("caller", "ada")
