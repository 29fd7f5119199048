"""Calls: the fingerprint of a guarded function's arguments.

A function guarded by an engine has no body to compare, but its arguments say as much. They are
compared by value where they have one. An object that is equal to nothing but itself (a session, a
client) has none and is left out, because two of them never look the same.
"""

from __future__ import annotations

import dataclasses
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from coatcheck.core.identity import digested
from coatcheck.core.json_spelling import speller

_DOMAIN = b"coatcheck-call"
_PLAIN = (Decimal, UUID, timedelta, complex)

# 64 deep, as JSON bodies are read; what is below is left out.
DEPTH_MAX = 64


def fingerprint_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """16 bytes that are equal for equal arguments."""
    try:
        text = _spelled([args, kwargs])
    except (TypeError, ValueError, RecursionError):  # JSON alone cannot say it
        text = _spelled(_plainer([args, kwargs], ()))
    return digested(_DOMAIN, b"", text.encode("utf-8", "surrogatepass"))


def _plainer(thing: Any, within: tuple[int, ...]) -> Any:  # noqa: ANN401 - any argument
    """*thing* without what JSON cannot say: keys that are no text, circles, numbers of any size."""
    if id(thing) in within or len(within) > DEPTH_MAX:
        return {"": "itself"}
    within = (*within, id(thing))
    if isinstance(thing, int) and not isinstance(thing, bool):
        return {"int": hex(thing)}
    if thing is None or isinstance(thing, (bool, float, str)):
        return thing
    if isinstance(thing, (list, tuple)):
        return [_plainer(member, within) for member in thing]
    if isinstance(thing, dict):
        pairs = ([_plainer(key, within), _plainer(value, within)] for key, value in thing.items())
        return {"dict": sorted(map(_spelled, pairs))}
    if isinstance(thing, (set, frozenset)):
        return {"set": sorted(_spelled(_plainer(member, within)) for member in thing)}
    ((kind, value),) = _value_of(thing).items()
    return [kind, _plainer(value, within)]


def _value_of(thing: Any) -> Any:  # noqa: ANN401 - one line for each kind of value
    """What JSON can say of *thing*, tagged with its kind."""
    kind = type(thing).__name__
    if isinstance(thing, Enum):
        return {kind: thing.name}
    if isinstance(thing, _PLAIN):
        return {kind: str(thing)}
    if isinstance(thing, (date, time)):
        return {kind: thing.isoformat()}
    if isinstance(thing, (bytes, bytearray, memoryview)):
        return {kind: bytes(thing).hex()}
    if isinstance(thing, (set, frozenset)):
        return {kind: sorted(_spelled(member) for member in thing)}
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return {kind: {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}}
    dump = getattr(thing, "model_dump", None)  # pydantic and its like
    return {kind: dump() if callable(dump) else _state_of(thing)}


def _state_of(thing: object) -> object:
    """The attributes of what can be equal to another of its kind; None of whatever cannot."""
    if isinstance(thing, type) or type(thing).__eq__ is object.__eq__:
        return None
    slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
    state = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return state | getattr(thing, "__dict__", {})


_spelled = speller(sort_keys=True, default=_value_of)
