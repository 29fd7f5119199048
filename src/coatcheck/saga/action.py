"""Actions: the functions of a step with their arguments and keys, and how they are called."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coatcheck.core.callables import is_async_function
from coatcheck.core.flow import Flow
from coatcheck.core.policy import Duration, positive_ms
from coatcheck.core.response import decode_value
from coatcheck.core.saga.actions import (
    UNDO,
    Blocked,
    Ended,
    Retry,
    check_name,
    derived_key,
)
from coatcheck.core.saga.unknown_errors import UNKNOWN_ERRORS
from coatcheck.core.signatures import codec_of_call
from coatcheck.core.steps import ALWAYS_MS
from coatcheck.core.values import Codec
from coatcheck.engine.reconcile_calls import ReconcileCall, ReconcileCalls, Unanswered
from coatcheck.errors import Misconfigured
from coatcheck.operation import Operation

# 64 bytes: what a recorded step without a result takes beside its name.
ENTRY_BYTES = 64


class Setting(NamedTuple):
    """What all runs of one saga share."""

    name: str
    run: Callable[[Flow[Any]], Any]  # runs a flow; on an event loop its result is awaited
    now_ms: Callable[[], int]
    confirm: Callable[[Operation], Any]  # raises `ClaimLost` if another attempt has taken over
    calls: ReconcileCalls  # makes calls with a time limit
    is_async: bool
    retry: Retry = Retry()
    unknown_errors: tuple[type[Exception], ...] = UNKNOWN_ERRORS


class Given(NamedTuple):
    """The function of a step, and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Options(NamedTuple):
    """The options of a step that say how its function is called."""

    retry: int | Retry | None = None
    timeout: Duration | None = None
    at_most_once: bool = False
    remembered_for: Duration | None = None


@dataclass(slots=True, eq=False)
class Action:
    """A step or an undo, as the saga's function asks for it."""

    name: str
    call: functools.partial[Any]
    key: str
    given: Given
    undo: Callable[..., Any] | None = None
    probe: functools.partial[Any] | None = None
    retry: Retry | None = None
    timeout_s: float | None = None
    at_most_once: bool = False
    remembered_ms: int = 0  # how long its call may simply be repeated, from the first one on
    is_undo: bool = False
    codec: Codec[Any] | None = None
    was_begun: bool = False  # by an earlier attempt, which ended inside it
    ended: Ended | None = None
    result_bytes: int = 0  # of the record, for a result that is about to be written
    error: BaseException | None = field(default=None, repr=False)

    @property
    def entry_bytes(self) -> int:
        """How many bytes of the record it takes, without its result."""
        return len(json.dumps(self.name)) + ENTRY_BYTES

    @property
    def undo_bytes(self) -> int:
        """How many bytes of the record its undo will take."""
        return 0 if self.undo is None else self.entry_bytes + len(UNDO)

    def result(self) -> Any:  # noqa: ANN401 - what its function returned
        """What its function returned, or a person has said; None if that is not known."""
        if self.ended is None or self.ended.failure is not None:
            return None
        stored = decode_value(self.ended.result)
        if stored is None or self.codec is None:  # a person may have skipped it
            return stored
        try:
            return self.codec.decode(stored)
        except Exception as error:
            why = f"its stored result cannot be read: has the function changed? ({error})"
            raise Blocked(self.name, why) from error


def action_of(
    setting: Setting,
    saga_key: str,
    name: str,
    given: Given,
    undo: Callable[..., Any] | None,
    *,
    probe: Callable[..., Any] | None,
    options: Options,
) -> Action:
    """The action of a step; a mistake is found here, before anything runs."""
    check_name("step", name)
    if not setting.is_async:
        for what, function in (("function", given.function), ("undo", undo), ("probe", probe)):
            if function is not None and is_async_function(function):
                raise Misconfigured(
                    f"the {what} of the step {name!r} is async: write the saga with async def"
                )
    key = derived_key(setting.name, saga_key, name)
    if undo is not None:  # before it is needed
        _with_keys(undo, given, key=key, result=None, action_key=key)
    retry, timeout, at_most_once, _ = options
    call = _with_keys(given.function, given, key=key)
    return Action(
        *(name, call, key, given, undo),
        probe=None if probe is None else _with_keys(probe, given, key=key),
        retry=retry if retry is None or isinstance(retry, Retry) else Retry(tries=retry),
        timeout_s=None if timeout is None else positive_ms("timeout", timeout) / 1_000,
        at_most_once=at_most_once,
        remembered_ms=_remembered_ms(options, has_probe=probe is not None, has_undo=bool(undo)),
        codec=codec_of_call(call),
    )


def _remembered_ms(options: Options, *, has_probe: bool, has_undo: bool) -> int:
    if options.remembered_for is not None:
        return positive_ms("remembered_for", options.remembered_for)
    # With a time, the step is written when it begins. This registers its undo.
    is_plain = not has_probe and not options.at_most_once
    return ALWAYS_MS if is_plain and has_undo else 0


def undo_of(setting: Setting, saga_key: str, action: Action) -> Action:
    """The undo of *action* as an action of its own; raises `Blocked`."""
    assert action.undo is not None
    name = action.name + UNDO
    key = derived_key(setting.name, saga_key, name)
    call = _with_keys(
        action.undo, action.given, key=key, result=action.result(), action_key=action.key
    )
    return Action(name, call, key, action.given, timeout_s=action.timeout_s, is_undo=True)


def _with_keys(function: Callable[..., Any], step: Given, **known: Any) -> functools.partial[Any]:
    """*function* with the arguments of *step*, or without, and those *known* ones that it takes."""
    is_own = function is step.function
    given = {n: value for n, value in step.kwargs.items() if is_own or n not in known}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not written in Python
        return functools.partial(function, *step.args, **given)
    taken = {p.name for p in signature.parameters.values() if p.kind is not p.POSITIONAL_ONLY}
    extra = {name: value for name, value in known.items() if name in taken and name not in given}
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(step.args, given)]
    if not is_own:  # an undo or a probe may need nothing but its key
        ways.append(((), {}))
    for args, kwargs in ways:
        try:
            bound = signature.bind_partial(*args, **kwargs).arguments
            free = {name: value for name, value in extra.items() if name not in bound}
            signature.bind(*args, **kwargs, **free)
        except TypeError:
            continue
        return functools.partial(function, *args, **kwargs, **free)
    name = getattr(function, "__qualname__", repr(function))
    raise Misconfigured(f"{name} does not take the arguments of its step")


# --- calling them ---------------------------------------------------------------------------------


def called(setting: Setting, action: Action, call: functools.partial[Any]) -> Any:  # noqa: ANN401 - what it returns
    """Call a function of the application, within the time limit of *action*."""
    if setting.is_async:
        return _called_on_loop(setting, action, call)
    if action.timeout_s is None:
        return call()
    try:
        return setting.calls.wait(ReconcileCall(call, action.timeout_s), None)
    except Unanswered as error:
        raise _timed_out(action) from error


async def _called_on_loop(setting: Setting, action: Action, call: functools.partial[Any]) -> Any:  # noqa: ANN401 - as above
    if action.timeout_s is not None:
        try:
            return await setting.calls.answer(ReconcileCall(call, action.timeout_s))
        except Unanswered as error:
            raise _timed_out(action) from error
    if is_async_function(call.func):
        return await call()
    result = await asyncio.to_thread(call)  # it may block
    return await result if inspect.isawaitable(result) else result


def _timed_out(action: Action) -> TimeoutError:
    return TimeoutError(f"{action.name!r} did not end within {action.timeout_s:g} s")
