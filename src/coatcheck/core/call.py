"""Calls: the fingerprint of a guarded function's arguments.

A function guarded by an engine has no body to compare, but its arguments say as much. They are
compared by value where they have one; an object that has none (a session, a client) is left out,
because two of them never look the same.
"""

from __future__ import annotations

import dataclasses
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from coatcheck.core.scope import digested
from coatcheck.core.spelling import speller

_DOMAIN = b"coatcheck-call"
_PLAIN = (Decimal, UUID, timedelta, complex)


def fingerprint_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """16 bytes that are equal for equal arguments."""
    try:
        text = _spelled([args, kwargs])
    except (TypeError, ValueError, RecursionError):  # keys that do not sort, circles, depth
        text = ""
    return digested(_DOMAIN, b"", text.encode("utf-8", "surrogatepass"))


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
    return {kind: dump() if callable(dump) else None}


_spelled = speller(sort_keys=True, default=_value_of)
