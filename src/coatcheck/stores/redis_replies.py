"""Replies of a Redis server: what one is, and how it is read from what has arrived.

Below `redis_flow.py`, which says what a reply means. Blocking lines have the driver read for them;
event loops have `Replies`, which takes whatever has arrived and keeps the rest for the next time.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

Reply: TypeAlias = Any  # bytes, int, None, a list of them, or a `Refusal`; see `Place.write`

_ARRAY, _BULK, _NUMBER, _SIMPLE, _ERROR = b"*$:+-"
# 64 KiB: longer than any line there is; a server that says more without an end speaks no Redis.
_LINE_BYTES_MAX = 1 << 16


class Refusal(NamedTuple):
    """What the server said instead of doing what it was asked."""

    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code} {self.text}"


def refusal_of(message: str) -> Refusal:
    """The refusal that a server's *message* is."""
    code, _, text = message.partition(" ")
    return Refusal(code, text)


class NotRedis(ValueError):
    """What has arrived is not what a Redis server would say to us."""


class Replies:
    """
    The replies on one connection, as they arrive.

    Lists in lists are not read: no command that an event loop sends is answered by one.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # what has arrived of the reply that is not complete
        self._rest_bytes = 0
        self._enough_bytes = 0  # before there are so many, looking again is in vain
        self._items: list[Reply] | None = None  # the list that is not complete
        self._items_count = 0

    def feed(self, data: bytes) -> list[Reply]:
        """The replies that are complete with *data*."""
        if self._rest:
            self._rest.append(data)
            self._rest_bytes += len(data)
            if self._rest_bytes < self._enough_bytes:
                return []
            data = b"".join(self._rest)
        replies: list[Reply] = []
        read = self._read(data, replies)
        self._rest = [data[read:]] if read < len(data) else []
        self._rest_bytes = len(data) - read
        return replies

    def _read(self, data: bytes, replies: list[Reply]) -> int:
        """Read all that is complete; how many bytes that were."""
        start, size = 0, len(data)
        items, items_count = self._items, self._items_count
        while (end := data.find(b"\r\n", start)) >= 0:
            kind = data[start]
            after = end + 2
            if kind == _ARRAY and items is None:
                items, items_count = [], int(data[start + 1 : end])
            else:
                reply: Reply
                if kind == _BULK:
                    length = int(data[start + 1 : end])
                    after += length + 2 if length >= 0 else 0
                    if after > size:
                        self._enough_bytes = after - start
                        break
                    reply = data[end + 2 : after - 2] if length >= 0 else None
                else:
                    reply = _short(kind, data[start + 1 : end])
                (replies if items is None else items).append(reply)
            start = after
            if items is not None and len(items) >= items_count:
                replies.append(items)
                items = None
        else:
            if size - start > _LINE_BYTES_MAX:
                raise NotRedis("a line that does not end")
            self._enough_bytes = 0
        self._items, self._items_count = items, items_count
        return start


def _short(kind: int, line: bytes) -> Reply:
    """A reply that is one line."""
    if kind == _NUMBER:
        return int(line)
    if kind == _SIMPLE:
        return line
    if kind == _ERROR:
        return refusal_of(line.decode("utf-8", "replace"))
    raise NotRedis(f"{bytes([kind])!r} begins no reply")
