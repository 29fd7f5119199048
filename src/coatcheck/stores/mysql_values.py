"""Values of prepared statements of the MySQL store: a record as bytes, as the server reads them.

Beside `mysql_rows.py`, which writes the same as text. Only what goes alone is prepared: reading a
text takes the server as long as writing the row. All numbers are sent as the longest there are.
"""

from __future__ import annotations

import struct

from coatcheck.core.record import Record, Swap
from coatcheck.stores.mysql_packets import execution, with_length
from coatcheck.stores.mysql_rows import COLUMNS, bytes_of

_NUMBER, _BYTES = b"\x08\0", b"\xfc\0"
# As in `Record`: the id, three numbers, the fingerprint, five numbers, texts and blobs; the stamp.
_TYPES = (_BYTES, *[_NUMBER] * 3, _BYTES, *[_NUMBER] * 5, *[_BYTES] * 5, _NUMBER)
_CLAIM_TYPES = b"".join(_TYPES)
_CHANGE_TYPES = b"".join((*_TYPES[1:], _BYTES, _NUMBER))
assert len(_TYPES) == len(COLUMNS)

_one, _three, _five = struct.Struct("<q").pack, struct.Struct("<3q").pack, struct.Struct("<5q").pack
_PROGRESS, _RESPONSE = (1 << COLUMNS.index(name) for name in ("progress", "response"))
_NO_TEXTS = b"\0\0\0"


def claim(number: int, record: Record, stamp: int, *, compact: bool) -> bytes:
    """The command that executes statement *number*, which claims."""
    nulls, values = _values_of(record, stamp, compact=compact)
    return execution(number, nulls, _CLAIM_TYPES, with_length(record.id) + values)


def change(number: int, swap: Swap, record: Record, stamp: int, *, compact: bool) -> bytes:
    """The command that executes statement *number*, which changes."""
    nulls, values = _values_of(record, stamp, compact=compact)
    where = with_length(swap.id) + _one(swap.expected)
    return execution(number, nulls >> 1, _CHANGE_TYPES, values + where)


def _values_of(record: Record, stamp: int, *, compact: bool) -> tuple[int, bytes]:
    """Which are null, and all the others but the id."""
    texts = _NO_TEXTS if compact else b"".join(map(_text, record[10:13]))
    progress, response = record[13:]
    nulls = (_PROGRESS if progress is None else 0) | (_RESPONSE if response is None else 0)
    try:
        values = (
            _three(*record[1:4]),
            with_length(record[4]),
            _five(*record[5:10]),
            texts,
            b"" if progress is None else with_length(progress),
            b"" if response is None else with_length(response),
            _one(stamp),
        )
    except struct.error as error:
        raise ValueError(f"a record cannot be written: {error}") from error
    return nulls, b"".join(values)


def _text(text: str) -> bytes:
    return with_length(bytes_of(text))
