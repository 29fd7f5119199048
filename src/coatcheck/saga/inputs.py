"""Inputs: the arguments of a saga's function as JSON, which any node can turn back.

An annotated parameter is stored as its annotation says. Without one, JSON is stored as it is, and
an object together with the name of its class; a node that continues the saga must have imported
that class.
"""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from coatcheck.core.saga.actions import Blocked
from coatcheck.core.values import Codec, codec_of
from coatcheck.errors import Misconfigured, Unreadable

_PLAIN = (str, int, float, bool, type(None), list, dict)
_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Inputs:
    """The parameters of one saga's function, without the saga itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(function).parameters.values())
        others = parameters[1:]
        if not parameters:
            raise Misconfigured("the function of a saga takes the saga as its first argument")
        if any(parameter.kind in _KINDS for parameter in others):
            raise Misconfigured(
                "the function of a saga names its arguments: they are stored by name, so it cannot "
                "have *args or **kwargs"
            )
        self._function = function
        self._signature = inspect.Signature(others)
        self._classes: dict[str, type] = {}  # those that were given here, by their name

    @functools.cached_property
    def _codecs(self) -> dict[str, Codec[Any] | None]:
        """How each annotated parameter is stored; read late, for names that are defined later."""
        hints = typing.get_type_hints(self._function, include_extras=True)
        found = {name: hints[name] for name in self._signature.parameters if name in hints}
        return {name: codec_of(hint) for name, hint in found.items() if hint is not Any}

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call, as JSON; raises `TypeError` if the function does not take it."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return {name: self._stored(name, value) for name, value in bound.arguments.items()}

    def _stored(self, name: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 - an argument
        try:
            if name in self._codecs:
                codec = self._codecs[name]
                return {"value": value if codec is None else codec.encode(value)}
            if type(value) in _PLAIN:
                return {"value": value}
            return self._stored_with_class(value)
        except Misconfigured:
            raise
        except Exception as error:
            raise Misconfigured(
                f"the argument {name!r} is a {type(value).__name__}, which cannot be stored: "
                "annotate it, or give JSON"
            ) from error

    def _stored_with_class(self, value: Any) -> dict[str, Any]:  # noqa: ANN401 - as above
        kind = type(value)
        path = f"{kind.__module__}:{kind.__qualname__}"
        self._classes[path] = kind
        if kind is SimpleNamespace:
            return {"class": path, "value": vars(value)}
        codec = codec_of(kind)
        return {"class": path, "value": value if codec is None else codec.encode(value)}

    def decode(self, stored: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in *stored*; raises `Blocked` if this function does not take them."""
        try:
            values = {name: self._value(name, **one) for name, one in stored.items()}
            bound = self._signature.bind_partial()
            bound.arguments.update(
                {n: values[n] for n in self._signature.parameters if n in values}
            )
            unknown = [name for name in values if name not in self._signature.parameters]
            if unknown:
                raise TypeError(f"it has no argument {unknown[0]!r}")
            self._signature.bind(*bound.args, **bound.kwargs)
        except (TypeError, LookupError, AttributeError, Unreadable) as error:
            why = f"its stored arguments do not fit the function: {error}"
            raise Blocked("", why) from error
        return bound.args, bound.kwargs

    def _value(self, name: str, value: Any, **named: str) -> Any:  # noqa: ANN401 - as above
        if "class" in named:
            kind = self._class(named["class"])
            if kind is SimpleNamespace:
                return SimpleNamespace(**value)
            codec = codec_of(kind)
        else:
            codec = self._codecs.get(name)
        return value if codec is None else codec.decode(value)

    def _class(self, path: str) -> type:
        """The class of that name, if it is imported here: a store must not import anything."""
        if path not in self._classes:
            module, _, name = path.partition(":")
            found: Any = sys.modules[module]
            for part in name.split("."):
                found = getattr(found, part)
            if not isinstance(found, type):
                raise TypeError(f"{path} is not a class")
            self._classes[path] = found
        return self._classes[path]
