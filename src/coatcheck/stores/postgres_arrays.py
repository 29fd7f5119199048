"""Arrays for PostgreSQL in its binary format, made whole columns at a time.

The driver makes arrays one element at a time, in Python, which takes longer than the server needs
to write them. The columns of a batch are of few types, so they are packed here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import chain, repeat
from typing import Any

from psycopg import Connection
from psycopg.adapt import Dumper, PyFormat
from psycopg.pq import Format


class _Array(bytes):
    """An array, packed."""


class Int2Array(_Array):
    """smallint[]."""


class Int4Array(_Array):
    """integer[]."""


class Int8Array(_Array):
    """bigint[]."""


class ByteaArray(_Array):
    """bytea[]."""


class TextArray(_Array):
    """text[]."""


class UuidArray(_Array):
    """uuid[]."""


# Of each type: the array's number in the server's catalogue, and its element's.
_NUMBERS = {
    Int2Array: (1005, 21),
    Int4Array: (1007, 23),
    Int8Array: (1016, 20),
    ByteaArray: (1001, 17),
    TextArray: (1009, 25),
    UuidArray: (2951, 2950),
}
_INTEGERS = {Int2Array: (2, "h"), Int4Array: (4, "i"), Int8Array: (8, "q")}
_NULL = b"\xff\xff\xff\xff"
_UUID_BYTES = 16


def register(connection: Connection[Any]) -> None:
    """Teach *connection* to send them as they are."""
    for array, (number, _) in _NUMBERS.items():
        connection.adapters.register_dumper(array, _dumper(number))


@cache
def _dumper(number: int) -> type[Dumper]:
    class AsItIs(Dumper):
        format = Format.BINARY
        oid = number

        def dump(self, obj: bytes) -> bytes:
            return obj

        def get_key(self, obj: bytes, format: PyFormat) -> type:  # noqa: ARG002 - the driver's
            return self.cls

    return AsItIs


def _integers(array: type[_Array], values: Sequence[int]) -> _Array:
    size, _ = _INTEGERS[array]
    packed = _packing(array, len(values))(*chain.from_iterable(zip(repeat(size), values)))
    return array(_head(array, len(values), 0) + packed)


@lru_cache(maxsize=1_024)
def _packing(array: type[_Array], count: int) -> Callable[..., bytes]:
    return struct.Struct(">" + ("i" + _INTEGERS[array][1]) * count).pack


@lru_cache(maxsize=4_096)
def _head(array: type[_Array], count: int, has_nulls: int) -> bytes:
    """One dimension, counted from 1."""
    return struct.pack(">iiiii", 1, has_nulls, _NUMBERS[array][1], count, 1)


_length = struct.Struct(">i").pack


def _bytes(array: type[_Array], values: Sequence[bytes | None]) -> _Array:
    nulls = values.count(None)
    if nulls == len(values):
        return _nothing(array, nulls)
    pieces: list[bytes] = [_head(array, len(values), int(nulls > 0))]
    for value in values:
        if value is None:
            pieces.append(_NULL)
        else:
            pieces += (_length(len(value)), value)
    return array(b"".join(pieces))


@lru_cache(maxsize=1_024)
def _nothing(array: type[_Array], count: int) -> _Array:
    """So many nulls: what most columns of most batches are."""
    return array(_head(array, count, 1) + _NULL * count)


def _texts(values: Sequence[str]) -> _Array:
    """An empty text is none."""
    return _bytes(TextArray, [value.encode() if value else None for value in values])


def _uuids(values: Sequence[bytes]) -> _Array:
    """16 bytes each, or none."""
    lengths = {*map(len, values)}
    if lengths == {_UUID_BYTES}:
        size = _length(_UUID_BYTES)
        return UuidArray(_head(UuidArray, len(values), 0) + size + size.join(values))
    if not lengths <= {0, _UUID_BYTES}:
        raise ValueError(f"{max(lengths)} bytes, where PostgreSQL keeps {_UUID_BYTES}")
    return _bytes(UuidArray, [value or None for value in values])


# How a column of each type is packed.
PACKED: dict[str, Callable[[Sequence[Any]], bytes]] = {
    "smallint": partial(_integers, Int2Array),
    "integer": partial(_integers, Int4Array),
    "bigint": partial(_integers, Int8Array),
    "bytea": partial(_bytes, ByteaArray),
    "text": _texts,
    "uuid": _uuids,
}
