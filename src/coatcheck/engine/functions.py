"""Guarded functions: what they are called, where their keys come from, and what they return.

Requests have a route, a header and a response for that; the engines' own side of it is here.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from types import (
    AsyncGeneratorType,
    CoroutineType,
    GeneratorType,
    MethodType,
)
from typing import Any, TypeVar

from coatcheck.core.not_awaited import refuse_awaitable
from coatcheck.core.policy import Policy
from coatcheck.core.replay import Fate, encode_value
from coatcheck.core.serve import Ending, Ticket
from coatcheck.errors import Misconfigured
from coatcheck.operation import Happened, Operation

logger = logging.getLogger("coatcheck")

T = TypeVar("T")


def name_of(function: Callable[..., object]) -> str:
    """What a guarded function is called where no scope is given: its module and its name."""
    while isinstance(function, functools.partial):
        function = function.func
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    if named.__qualname__.endswith("<lambda>"):
        raise Misconfigured(
            "a lambda has no name, and its keys would be those of every other one: give it a scope="
        )
    return f"{_module_of(named)}.{named.__qualname__}"


# What a module is called that is run, and not imported; the other one by `multiprocessing`, in the
# processes that it spawns.
_RUN = ("__main__", "__mp_main__")


def _module_of(named: Any) -> str:  # noqa: ANN401 - whatever can be called
    """The module of *named*, by the name that whoever imports it knows: it may be a worker."""
    name: str = named.__module__
    if name not in _RUN:
        return name
    module = sys.modules.get(name)
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if spec is not None:  # python -m shop.jobs
        return str(spec.name)
    return name if file is None else Path(file).stem  # typed in, or python jobs.py


def arguments_of(call: functools.partial[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """
    The arguments of *call*, with all that partials hold.

    The first of a method is its object, where that has a value; see `core/call.py`.
    """
    args, kwargs, inner = call.args, call.keywords, call.func
    while isinstance(inner, functools.partial):  # not always folded into one by Python
        args, kwargs, inner = (*inner.args, *args), inner.keywords | kwargs, inner.func
    if isinstance(inner, MethodType) and type(inner.__self__).__eq__ is not object.__eq__:
        args = (inner.__self__, *args)
    return args, kwargs


def key_of_call(found: object) -> str:
    """
    The key of a call, as text: what it was given, or what a `key=` function has *found* (K4).

    None is none. What has no text of its own is refused: its address would be another key for
    each retry, or one key for two calls.
    """
    if isinstance(found, str):
        return found
    if isinstance(found, bytes):  # as messages and headers have theirs: their text, not Python's
        return found.decode("utf-8", "surrogateescape")
    refuse_awaitable("key", found)
    kind = type(found)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        raise Misconfigured(f"a {kind.__name__} is no key: give text, or a number or an id")
    return "" if found is None else str(found)


def ending_of_result(ticket: Ticket, result: object, policy: Policy) -> Ending:
    """What a guarded function's *result* means for its claim."""
    response, why = encode_value(result), "neither JSON nor bytes"
    if response is not None and len(response) > policy.response_bytes_max:
        response, why = None, f"over response_bytes_max, which is {policy.response_bytes_max:,}"
    if response is None:
        logger.error(
            "%s returned a %s, which is %s: it is not kept, and a retry is told so",
            *(ticket.label, type(result).__name__, why),
        )
    return Ending(Fate.KEEP, response)


def checked(operation: Operation, result: T, *, is_persons: bool) -> T:
    """*result*, if the function may end with it; *is_persons*: a person has it run."""
    has_run(result)
    if operation.has_more_to_say:
        is_refusal = isinstance(result, Happened) and result.status >= HTTPStatus.BAD_REQUEST
        doubt = operation.unmet(may_differ=is_persons or is_refusal)
        if doubt is not None:
            raise doubt
    return result


def is_failure(error: BaseException) -> bool:
    """
    *error* is the handler's own, which is over then; nobody has ended it from outside.

    What awaits a task that was cancelled raises the same as what is cancelled itself.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return isinstance(error, Exception)


# What is returned where nothing has run yet.
_UNRUN = (CoroutineType, GeneratorType, AsyncGeneratorType)


def has_run(result: T) -> T:
    """*result*, unless it is only the promise of one: no key must be used up by that."""
    if isinstance(result, _UNRUN):
        if not isinstance(result, AsyncGeneratorType):
            result.close()  # else Python complains that nobody has awaited it
        raise Misconfigured(
            f"the guarded function returned a {type(result).__name__}, of which nothing has run: "
            "guard async functions with an AsyncEngine, and let generators return what they make"
        )
    return result
