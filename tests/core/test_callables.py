"""Functions that the library calls without awaiting may not be async."""

import asyncio

import pytest

from coatcheck import Misconfigured
from coatcheck.core.callables import check_function, refuse_async, refuse_awaitable


async def key(_request: object) -> str:
    return "k"


class AsyncKey:
    async def __call__(self, _request: object) -> str:
        return "k"


@pytest.mark.parametrize("function", [key, AsyncKey(), AsyncKey().__call__])
def test_an_async_function_is_refused(function):
    """K4: a coroutine would be another key with every retry."""
    with pytest.raises(Misconfigured, match=r"key= .* must not be async"):
        refuse_async("key", function)


@pytest.mark.parametrize("function", [None, "final", str, lambda _request: "k"])
def test_any_other_function_is_accepted(function):
    """K4."""
    refuse_async("key", function)


def test_only_a_sync_function_passes_the_check():
    """K4."""
    for function in ("number", 5):
        with pytest.raises(Misconfigured, match=r"key= is a (str|int); it must be a function"):
            check_function("key", function)
    with pytest.raises(Misconfigured, match=r"key= .* must not be async"):
        check_function("key", key)
    check_function("key", str)


def test_an_awaitable_result_is_refused_and_closed():
    """K4: a plain function may return one, too."""
    loop = asyncio.new_event_loop()
    try:
        for result in (key(None), loop.create_future()):
            with pytest.raises(Misconfigured, match=r"caller= .* must not be async"):
                refuse_awaitable("caller", result)
    finally:
        loop.close()
    refuse_awaitable("caller", "ada")
