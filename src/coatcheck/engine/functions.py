"""Guarded functions: their labels, keys, fingerprints and results, and stored inputs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Generic, TypeVar

from coatcheck.core.answers import Happened
from coatcheck.core.callables import refuse_awaitable
from coatcheck.core.fingerprint import fingerprint_of_call
from coatcheck.core.identity import ID_BYTES, operation_id
from coatcheck.core.keep import Outcome
from coatcheck.core.lifecycle import Answer, ClaimRequest, Refuse, Replay
from coatcheck.core.policy import Policy
from coatcheck.core.problem import problem
from coatcheck.core.progress import (
    NOTHING,
    PROGRESS_BYTES_MAX,
    Note,
    encoded,
    progress_of,
)
from coatcheck.core.record import Record
from coatcheck.core.response import decode_value, encode_value
from coatcheck.core.values import Codec
from coatcheck.engine.attempts import Attempts
from coatcheck.engine.outcomes import outcome_of_result, stored_result
from coatcheck.errors import Misconfigured, Resumable
from coatcheck.operation import Operation


def request_of_call(
    attempts: Attempts, key: object, label: str, fingerprint: bytes, policy: Policy
) -> ClaimRequest:
    """The request of a guarded call."""
    text = key_of_call(key)
    if not 1 <= len(text) <= policy.key_chars_max:
        reason = f"a key has 1 to {policy.key_chars_max} characters, this has {len(text)}"
        raise problem("key-invalid", reason=reason).error()
    id = operation_id(caller="", route=label, key=text, secret=attempts.secret)
    return attempts.new_request(id, fingerprint, key=text, caller="", label=label)


def fingerprint_given(value: object) -> bytes:
    """The fingerprint that the caller gave: 16 bytes as they are, else that of the value."""
    if isinstance(value, bytes) and len(value) == ID_BYTES:
        return value
    return fingerprint_of_call((value,), {})


def outcome_of_call(
    operation: Operation,
    result: object,
    codec: Codec[Any] | None = None,
    *,
    may_differ: bool = False,
) -> Outcome:
    """
    What the *result* of a guarded function means; raises if it may not end with it.

    *may_differ*: an operator has it run, and may take other steps than earlier attempts.
    """
    refuse_unstarted(result)
    if operation.has_notes:
        is_refusal = isinstance(result, Happened) and result.status >= HTTPStatus.BAD_REQUEST
        step_problem = operation.check_steps(may_differ=may_differ or is_refusal)
        if step_problem is not None:
            raise step_problem
    assert operation.request is not None
    return outcome_of_result(operation.request, result, operation.policy, codec)


def value_of(
    answer: Answer,
    codec: Codec[Any] | None = None,
    outcome: Outcome | None = None,
    result: object = None,
) -> Any:  # noqa: ANN401 - what the user's function returned
    """
    What the caller of a guarded function gets; raises a refusal.

    Decoded from the stored bytes even the first time, so that a retry gets the same. Only a
    *result* that is too large to be stored goes to its first caller as it is. One that cannot be
    stored at all raises `Misconfigured`.
    """
    if isinstance(answer, Refuse):
        raise answer.cause or answer.problem.error()
    if isinstance(answer, Replay):
        stored = decode_value(answer.response)
    elif outcome is not None and outcome.response is not None:
        stored = decode_value(outcome.response)
    else:
        stored_result(result, codec)  # raises, unless it is only too large
        return result
    return stored if codec is None else codec.decode(stored)


def name_of(function: Callable[..., object]) -> str:
    """The label of a guarded function without a scope: its module and its name."""
    while isinstance(function, functools.partial):
        function = function.func
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    if named.__qualname__.endswith("<lambda>"):
        raise Misconfigured(
            "a lambda has no name, so all lambdas would share their keys: give it a scope="
        )
    return f"{_module_of(named)}.{named.__qualname__}"


# The names of a module that is run, not imported; the second is that of `multiprocessing` in the
# processes it spawns.
_RUN = ("__main__", "__mp_main__")


def _module_of(named: Any) -> str:  # noqa: ANN401 - whatever can be called
    """The module of *named*, by the name under which a worker imports it."""
    name: str = named.__module__
    if name not in _RUN:
        return name
    module = sys.modules.get(name)
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if spec is not None:  # python -m shop.jobs
        return str(spec.name)
    return name if file is None else Path(file).stem  # typed in, or python jobs.py


def key_of_call(found: object) -> str:
    """
    The key of a call, as text; *found* is what was given, or what a `key=` function returned.

    None is no key. An object without a text of its own is refused: its address would be another
    key for each retry, or one key for two calls.
    """
    if isinstance(found, str):
        return found
    if isinstance(found, bytes):  # messages and headers: their text, not Python's b'…'
        return found.decode("utf-8", "surrogateescape")
    refuse_awaitable("key", found)
    kind = type(found)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        raise Misconfigured(f"a {kind.__name__} is not a key: give text, a number or an id")
    return "" if found is None else str(found)


# What is returned when nothing has run yet.
_UNSTARTED = (CoroutineType, GeneratorType, AsyncGeneratorType)


class _NotStarted(Misconfigured, Resumable):
    """Nothing has run, so that nothing is in doubt under any recovery policy."""


def refuse_unstarted(result: object) -> None:
    """Refuse a coroutine or generator as a result: it must not use up the key."""
    if isinstance(result, _UNSTARTED):
        if not isinstance(result, AsyncGeneratorType):
            result.close()  # or Python warns that it was never awaited
        raise _NotStarted(
            f"the guarded function returned a {type(result).__name__}, which has not run yet: "
            "guard async functions with an AsyncEngine, and let generators return what they make"
        )


# --- functions whose input is stored with the claim, so that any node can run them again -------

T_co = TypeVar("T_co", covariant=True)


class RegisteredFunction(Generic[T_co]):
    """A function that `Engine.register` has named."""

    def __init__(self, name: str, run: Callable[[str, Any, Any], T_co]) -> None:
        self.name = name
        self._run = run

    def run(self, key: str, given: object, note: object = None) -> T_co:
        """
        Call the function with *given* once for *key*, and return its result to every retry.

        *given* is a JSON value or bytes; an async engine's is awaited. *note* is stored as the
        first note of the operation, and is not compared when the call is repeated.
        """
        return self._run(key, given, note)


def request_with_input(
    attempts: Attempts, key: str, name: str, given: object, policy: Policy, *, note: object = None
) -> ClaimRequest:
    """The request of a registered function, with its input and its first *note* to be stored."""
    value = encode_value(given)
    if value is None:
        raise Misconfigured(
            f"the input of {name!r} is a {type(given).__name__}, which is neither JSON nor bytes, "
            "so that it cannot be stored"
        )
    notes = () if note is None else (Note(attempts.now_ms(), 1, note),)
    progress = encoded(NOTHING._replace(input=value, notes=notes))
    if len(progress) > PROGRESS_BYTES_MAX:
        raise Misconfigured(
            f"the input of {name!r} takes {len(progress)} bytes; {PROGRESS_BYTES_MAX} can be "
            "stored: keep it in your database, and give its id"
        )
    request = request_of_call(attempts, key, name, fingerprint_given(given), policy)
    return request._replace(progress=progress)


def stored_input(record: Record) -> Any:  # noqa: ANN401 - what the application gave
    """The input that *record* was claimed with."""
    value = progress_of(record).input
    assert value is not None
    return decode_value(value)
