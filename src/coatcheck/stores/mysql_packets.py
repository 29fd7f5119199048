"""Packets of the MySQL protocol: how a command is sent, and what comes back for it.

Beneath `mysql_talk.py`. The driver connects, encrypts and logs in (`mysql_line.py`); from then on
its socket is used by us, because its cursors take as long as packing all of a record. Pure: bytes
in, values out, in whatever pieces they come.

Invariant: what is no answer to what was asked is an error, and never somebody's answer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

# What was found: bytes, or None where it is null.
Row: TypeAlias = Sequence[Any]

# What a packet holds at most; more is sent in several.
_PACKET_BYTES_MAX = (1 << 24) - 1
_HEAD_BYTES = 4
_QUERY, _PREPARE, _EXECUTE = b"\x03", b"\x16", b"\x17"

# How a packet begins that is no row and no number of columns; an end is shorter than any row.
_OK, _FILE, _END, _ERROR = 0x00, 0xFB, 0xFE, 0xFF
_END_BYTES_MAX = 8
# What a status says: a transaction is open; another statement of the same command follows.
_IN_TRANSACTION, _MORE = 1, 8
_NULL = 0xFB
# How many bytes hold a length, by the one before them.
_LENGTH_BYTES = {0xFC: 2, 0xFD: 3, 0xFE: 8}
# 5 characters of `SQLSTATE`, and a mark before them.
_STATE_BYTES = 6


class Refusal(Exception):
    """What the server, or the driver, has said instead of an answer."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class Answer(NamedTuple):
    """What a command has done: how many rows it has changed, or which it has found."""

    affected: int
    rows: Sequence[Row]
    is_open: bool  # a transaction is, after it


Reply: TypeAlias = Answer | Refusal


def query(statement: bytes) -> bytes:
    """The command that performs *statement*; or several, between semicolons, until one fails."""
    return _QUERY + statement


def preparation(statement: bytes) -> bytes:
    """The command that prepares *statement*."""
    return _PREPARE + statement


def execution(number: int, nulls: int, types: bytes, values: bytes) -> bytes:
    """The command that performs the prepared statement *number*, of as many values as *types*."""
    head = _EXECUTE + struct.pack("<IBI", number, 0, 1)
    count = len(types) // 2
    return b"".join((head, nulls.to_bytes((count + 7) // 8, "little"), b"\1", types, values))


def framed(command: bytes) -> bytes:
    """*command* as it is sent."""
    if len(command) < _PACKET_BYTES_MAX:
        return len(command).to_bytes(_HEAD_BYTES, "little") + command
    return b"".join(_packets(command))


def _packets(command: bytes) -> Iterator[bytes]:
    """The last of them is shorter than the others, and may be empty."""
    for number, start in enumerate(range(0, len(command) + 1, _PACKET_BYTES_MAX)):
        part = command[start : start + _PACKET_BYTES_MAX]
        yield len(part).to_bytes(3, "little") + bytes((number % 256,)) + part


def with_length(value: bytes) -> bytes:
    """*value*, and before it how long it is."""
    size = len(value)
    if size < _NULL:
        return bytes((size,)) + value
    for mark, width in _LENGTH_BYTES.items():
        if size < 1 << 8 * width:
            return bytes((mark,)) + size.to_bytes(width, "little") + value
    raise AssertionError


class Hearing:
    """What has come so far of the reply to what was *sent*."""

    def __init__(self, sent: bytes) -> None:
        self._unread = bytearray()
        self._parts: list[bytes] = []  # of a packet that is longer than one can be
        # Of the next packet. They are counted from those of the command.
        self._number = (1 + len(sent) // (_HEAD_BYTES + _PACKET_BYTES_MAX)) % 256
        self._columns_left = -1  # -1: nothing was said yet; 0: what comes are rows
        self._rows: list[Row] = []
        self._affected = 0

    def feed(self, data: bytes) -> Reply | None:
        """Take *data*; the reply, if that is all of it. `ValueError`: it is none."""
        self._unread += data
        start, reply = 0, None
        while (packet := self._packet_at(start)) is not None:
            if reply is not None or packet[3] != self._number:
                raise ValueError("what the server has said is no answer to what was asked")
            self._number = (self._number + 1) % 256
            start += len(packet)
            self._parts.append(packet[_HEAD_BYTES:])
            if len(packet) < _HEAD_BYTES + _PACKET_BYTES_MAX:
                whole, self._parts = b"".join(self._parts), []
                reply = self._reply_of(whole)
        del self._unread[:start]
        return reply

    def _packet_at(self, start: int) -> bytes | None:
        """The packet that begins at *start*, if all of it has come."""
        size = _HEAD_BYTES + int.from_bytes(self._unread[start : start + 3], "little")
        return (
            bytes(self._unread[start : start + size]) if len(self._unread) >= start + size else None
        )

    def _reply_of(self, packet: bytes) -> Reply | None:
        """What *packet* ends; None where more belongs to it."""
        if not packet:
            raise ValueError("the server has said nothing, where it should have answered")
        kind = packet[0]
        if kind == _ERROR:
            return _refusal_of(packet)
        if self._columns_left < 0:
            return self._first_of(packet)
        if kind == _END and len(packet) <= _END_BYTES_MAX:
            if self._columns_left:
                return self._columns_known()
            return self._end_of(packet[3])
        if not self._columns_left:
            self._rows.append(tuple(_values_in(packet)))
        return None

    def _first_of(self, packet: bytes) -> Reply | None:
        if packet[0] == _OK:
            affected, start = _number_in(packet, 1)
            _, start = _number_in(packet, start)  # the last id that the server has made
            self._affected += affected
            return self._end_of(packet[start])
        if packet[0] == _FILE:
            raise ValueError("the server has asked for a file")
        self._columns_left, _ = _number_in(packet, 0)
        return None

    def _columns_known(self) -> Reply | None:
        self._columns_left = 0
        return None

    def _end_of(self, status: int) -> Answer | None:
        """What all statements of the command have done, when this was the last."""
        if status & _MORE:
            self._columns_left = -1
            return None
        return Answer(self._affected, self._rows, bool(status & _IN_TRANSACTION))


class Preparation(Hearing):
    """The reply to a statement that is to be prepared, and finds no rows: its number."""

    def _first_of(self, packet: bytes) -> Reply | None:
        self._prepared = int.from_bytes(packet[1:5], "little")
        self._columns_left = 1  # those of its values follow
        return None

    def _columns_known(self) -> Reply:
        return Answer(self._prepared, (), is_open=False)


def _refusal_of(packet: bytes) -> Refusal:
    code = int.from_bytes(packet[1:3], "little")
    text = packet[3:]
    if text.startswith(b"#"):
        text = text[_STATE_BYTES:]
    return Refusal(code, text.decode("utf-8", "replace"))


def _values_in(packet: bytes) -> Iterator[bytes | None]:
    start = 0
    while start < len(packet):
        if packet[start] == _NULL:
            start += 1
            yield None
        else:
            size, begin = _number_in(packet, start)
            start = begin + size
            yield packet[begin:start]


def _number_in(packet: bytes, start: int) -> tuple[int, int]:
    """The number that begins at *start*, and where it ends."""
    first = packet[start]
    if first < _NULL:
        return first, start + 1
    end = start + 1 + _LENGTH_BYTES[first]
    return int.from_bytes(packet[start + 1 : end], "little"), end
