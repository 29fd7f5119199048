"""Signatures: what is known of a guarded function before it is called.

Its parameters, so that a call that is written in two ways is one call: `place(7)` and
`place(order=7)`. And its return annotation, which decides how its results are stored; see
`values.py`.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from contextlib import suppress
from inspect import Parameter
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from coatcheck.core.fingerprint import fingerprint_of_call
from coatcheck.core.values import Codec, check_codec, codec_of
from coatcheck.errors import Misconfigured

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class _Facts(NamedTuple):
    """What is known of one function."""

    signature: inspect.Signature | None = None
    required: int = 0  # so many positional arguments, and no others, are compared as they are
    codec: Codec[Any] | None = None
    problem: str = ""  # why its results cannot be stored
    is_known: bool = True  # False: its annotation names what is not defined yet


class _NotReadable(Misconfigured):
    """An annotation names what is not defined, or not yet."""


_NOTHING = _Facts()
# Weak, because a function may be made for one call, and hold a session of that call.
_FACTS: WeakKeyDictionary[Callable[..., Any], _Facts] = WeakKeyDictionary()


def read_call(
    call: functools.partial[Any], codec: Codec[Any] | None = None, *, binds: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any], Codec[Any] | None]:
    """
    The arguments of *call* as they are compared, and the codec of its result.

    The arguments include those that partials hold, and are bound to the parameters of the function.
    A method's object counts as its first argument if it has a value; see `fingerprint.py`. *codec*
    takes the place of the return annotation. No codec: the result is JSON or bytes. Raises
    `TypeError` if the function does not take the arguments, and `Misconfigured` if its annotation
    cannot be stored.
    """
    args, kwargs, inner = call.args, call.keywords, call.func
    while isinstance(inner, functools.partial):  # not always folded into one by Python
        args, kwargs, inner = (*inner.args, *args), inner.keywords | kwargs, inner.func
    owner: tuple[Any, ...] = ()
    is_compared = False
    if isinstance(inner, MethodType):
        owner, is_compared = (inner.__self__,), type(inner.__self__).__eq__ is not object.__eq__
        inner = inner.__func__
    elif not isinstance(inner, (FunctionType, type)):
        owner, inner = (inner,), type(inner).__call__
    facts = _FACTS.get(inner) if isinstance(inner, (FunctionType, type)) else _NOTHING
    if facts is None:
        facts = _learned(inner)
    if codec is None:
        codec = facts.codec
        if facts.problem:
            raise (Misconfigured if facts.is_known else _NotReadable)(facts.problem)
    else:
        check_codec(codec)
    args = (*owner, *args)
    if binds and facts.signature is not None and (kwargs or len(args) != facts.required):
        args, kwargs = _bound(facts.signature, args, kwargs)
    return args if is_compared else args[len(owner) :], kwargs, codec


def codec_of_call(call: functools.partial[Any]) -> Codec[Any] | None:
    """The codec for the result of *call*; raises `Misconfigured` if that cannot be stored."""
    return read_call(call, binds=False)[2]


def check_result(function: Callable[..., Any], codec: Codec[Any] | None) -> None:
    """
    Refuse a *function* whose annotation shows that its results cannot be stored.

    An annotation that names what is not defined yet is read at the first call.
    """
    with suppress(_NotReadable):
        read_call(functools.partial(function), codec, binds=False)


def _bound(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """
    The same arguments for each way to write the call: by position where that is possible.

    Arguments that have their default value are left out, as far as they can be. So a parameter with
    a default can be added to a function, and a retry is still the same call.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    by_position = [p for p in signature.parameters.values() if p.kind in _BY_POSITION]
    found = list(bound.args)
    if len(found) == len(by_position):
        while found and _is_default(by_position[len(found) - 1], found[-1]):
            found.pop()
    by_name = {p.name: p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    named = {
        name: value
        for name, value in bound.kwargs.items()
        if name not in by_name or not _is_default(by_name[name], value)
    }
    return tuple(found), named


_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def _is_default(parameter: Parameter, value: object) -> bool:
    default = parameter.default
    if default is parameter.empty or value is default:
        return value is default
    if default is None or value is None:  # the most common default; the rest takes longer
        return False
    return fingerprint_of_call((value,), {}) == fingerprint_of_call((default,), {})


def _learned(function: Any) -> _Facts:  # noqa: ANN401 - a function or a class
    """What is known of *function*; remembered, unless its annotation cannot be read yet."""
    try:
        # Not of what a decorator wraps, which may take other arguments than the decorated one.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # of a class that is not written in Python
        signature = None
    if signature is not None and _kinds_of(signature) >= _NOT_BOUND:
        signature = None
    facts = _Facts(signature, _required(signature))
    try:
        facts = facts._replace(codec=codec_of(_result_of(function)))
    except Misconfigured as error:
        problem = f"the result of {function.__qualname__}: {error}"
        facts = facts._replace(problem=problem, is_known=error.__cause__ is None)
    if facts.is_known:
        _FACTS[function] = facts
    return facts


# Python 3.11 does not bind `f(a=1)` to `def f(a, /, **more)`, though that can be called.
_NOT_BOUND = {Parameter.POSITIONAL_ONLY, Parameter.VAR_KEYWORD}


def _kinds_of(signature: inspect.Signature) -> set[object]:
    return {parameter.kind for parameter in signature.parameters.values()}


def _required(signature: inspect.Signature | None) -> int:
    parameters = () if signature is None else signature.parameters.values()
    required = [p.kind for p in parameters if p.default is p.empty]
    if Parameter.KEYWORD_ONLY in required:
        return -1
    return sum(kind in _BY_POSITION for kind in required)


def _result_of(function: Any) -> Any:  # noqa: ANN401 - a function or a class
    """The type of the results of *function*; `Any` if it does not say."""
    if isinstance(function, type):
        return function
    try:
        annotation = function.__annotations__.get("return", Any)
        if annotation is Any:
            return Any
        # Only this one is read: the names of parameters may exist for type checkers alone.
        # A decorator copies the annotations of what it wraps, unless that has none.
        names = getattr(inspect.unwrap(function), "__globals__", function.__globals__)
        annotated = FunctionType(_result_of.__code__, names)
        annotated.__annotations__ = {"return": annotation}
        hint = typing.get_type_hints(annotated)["return"]
    except Exception as error:
        raise Misconfigured(
            f"its annotation cannot be read: {error}; import that name where Python finds it when "
            "the program runs, or give codec="
        ) from error
    if hasattr(typing.get_origin(hint) or hint, "__await__"):  # then its result is what counts
        hint = (typing.get_args(hint) or (Any,))[-1]
    return hint
