"""Values as we send them on psycopg's connections: no type need be known, nor the encoding.

Beneath `psycopg.py`, whose statements they are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from psycopg.pq import Format


def encoded(values: Sequence[Any]) -> list[bytes | None]:
    """*values* as they are sent, in what is the same in all encodings."""
    return [
        value if value is None or type(value) is bytes else str(value).encode("ascii")
        for value in values
    ]


def in_ascii(text: str, values: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """The same, but letters beyond ASCII go as bytes: the session's encoding may not have them."""
    is_beyond = [isinstance(value, str) and not value.isascii() for value in values]
    if not any(is_beyond):
        return text, values
    start, *rest = text.split("%s")
    parts = zip(is_beyond, rest, strict=True)
    marked = [f"{_BEYOND if is_so else '%s'}{part}" for is_so, part in parts]
    both = zip(is_beyond, values, strict=True)
    return start + "".join(marked), [value.encode() if is_so else value for is_so, value in both]


_BEYOND = "convert_from(%s::bytea, 'utf8')"


@lru_cache(maxsize=64)
def formats_of(text: str) -> list[Format]:
    """How the values of *text* go: the marks of bytes say so."""
    marks = text.split("%s")[1:]
    return [Format.BINARY if mark.startswith("::bytea") else Format.TEXT for mark in marks]
