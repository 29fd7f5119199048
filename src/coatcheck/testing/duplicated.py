"""The marker `duplicated`: a test that must pass again on what its first run left."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

# A redelivered message or a retried request comes twice, usually.
TIMES = 2


def prepare(item: pytest.Item) -> None:
    """Have the test of *item* run several times, if it is marked `duplicated`."""
    mark = item.get_closest_marker("duplicated")
    if mark is None:
        return
    times = _times_of(mark)
    if not isinstance(item, pytest.Function) or hasattr(item.obj, "hypothesis"):
        raise pytest.UsageError(
            f"{item.nodeid}: the marker `duplicated` is for plain test functions and methods"
        )
    item.obj = duplicate(item.obj, times)


def _times_of(mark: pytest.Mark) -> int:
    times: object = mark.kwargs.get("times", TIMES)
    is_number = isinstance(times, int) and not isinstance(times, bool)
    if mark.args or set(mark.kwargs) - {"times"} or not is_number or times < TIMES:  # type: ignore[operator]  # a number
        raise pytest.UsageError(
            "write @pytest.mark.duplicated, or @pytest.mark.duplicated(times=3) with a number of "
            f"at least {TIMES}"
        )
    return times  # type: ignore[return-value]  # as above


def duplicate(function: Callable[..., Any], times: int = TIMES) -> Callable[..., Any]:
    """*function*, sync or async, that runs *times* times in a row with the same arguments."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> None:
            for number in range(1, times + 1):
                try:
                    await function(*args, **kwargs)
                except BaseException as error:
                    _explain(error, number, times)
                    raise

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        for number in range(1, times + 1):
            try:
                function(*args, **kwargs)
            except BaseException as error:
                _explain(error, number, times)
                raise

    return run


def _explain(error: BaseException, number: int, times: int) -> None:
    if number > 1:
        error.add_note(
            f"This was run {number} of {times} of a test that is marked `duplicated`: run 1 "
            "passed, and the same request or message again did not leave everything as it was."
        )
