"""Arrays for PostgreSQL in its binary format, made whole columns at a time.

The driver makes arrays one element at a time, in Python, which takes longer than the server needs
to write them. The columns of a batch are of few types, so they are packed here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain, repeat
from typing import Any

# Of each type: its number in the server's catalogue.
_NUMBERS = {"smallint": 21, "integer": 23, "bigint": 20, "bytea": 17, "text": 25, "uuid": 2950}
# Of each that is a number: how many bytes, and their name in `struct`.
_INTEGERS = {"smallint": (2, "h"), "integer": (4, "i"), "bigint": (8, "q")}
_NULL = b"\xff\xff\xff\xff"
UUID_BYTES = 16


def _integers(type: str, values: Sequence[int]) -> bytes:
    first = values[0]
    if values.count(first) == len(values):
        return _same(type, len(values), first)
    size, _ = _INTEGERS[type]
    packed = _packing(type, len(values))(*chain.from_iterable(zip(repeat(size), values)))
    return _head(type, len(values), 0) + packed


@lru_cache(maxsize=1_024)
def _same(type: str, count: int, value: int) -> bytes:
    """One value so many times: what the state of a batch is, its attempts and its expectations."""
    size, name = _INTEGERS[type]
    return _head(type, count, 0) + struct.pack(f">i{name}", size, value) * count


@lru_cache(maxsize=1_024)
def _packing(type: str, count: int) -> Callable[..., bytes]:
    return struct.Struct(">" + ("i" + _INTEGERS[type][1]) * count).pack


@lru_cache(maxsize=4_096)
def _head(type: str, count: int, has_nulls: int) -> bytes:
    """One dimension, counted from 1."""
    return struct.pack(">iiiii", 1, has_nulls, _NUMBERS[type], count, 1)


_length = struct.Struct(">i").pack


def _bytes(type: str, values: Sequence[bytes | None]) -> bytes:
    nulls = values.count(None)
    if nulls == len(values):
        return _nothing(type, nulls)
    pieces: list[bytes] = [_head(type, len(values), int(nulls > 0))]
    for value in values:
        if value is None:
            pieces.append(_NULL)
        else:
            pieces += (_length(len(value)), value)
    return b"".join(pieces)


@lru_cache(maxsize=1_024)
def _nothing(type: str, count: int) -> bytes:
    """So many nulls: what most columns of most batches are."""
    return _head(type, count, 1) + _NULL * count


def _texts(values: Sequence[str]) -> bytes:
    """An empty text is none."""
    first = values[0]
    if values.count(first) == len(values):
        return _same_text(first, len(values))
    return _bytes("text", [value.encode() if value else None for value in values])


@lru_cache(maxsize=1_024)
def _same_text(value: str, count: int) -> bytes:
    """One text so many times: what a batch from one route or of one caller has."""
    return _bytes("text", [value.encode() if value else None] * count)


def _uuids(values: Sequence[bytes]) -> bytes:
    """16 bytes each, or none."""
    lengths = {*map(len, values)}
    if lengths == {UUID_BYTES}:
        size = _length(UUID_BYTES)
        return _head("uuid", len(values), 0) + size + size.join(values)
    if not lengths <= {0, UUID_BYTES}:
        raise ValueError(f"{max(lengths)} bytes, where PostgreSQL keeps {UUID_BYTES}")
    return _bytes("uuid", [value or None for value in values])


# How a column of each type is packed.
PACKED: dict[str, Callable[[Sequence[Any]], bytes]] = {
    "smallint": partial(_integers, "smallint"),
    "integer": partial(_integers, "integer"),
    "bigint": partial(_integers, "bigint"),
    "bytea": partial(_bytes, "bytea"),
    "text": _texts,
    "uuid": _uuids,
}
