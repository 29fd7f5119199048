"""Values of the Redis store: how a record becomes one and comes back, and the commands for it.

Between `redis.py`, which says when, and `redis_line.py`, which sends. A record is one string value:
408 bytes of memory beside a response of 150, where a hash would take 1312, because it gives up its
compact form for a field that long.

Commands are spelt in Redis's protocol right here. A batch is one call of one script for up to 64
records, whose answer is empty where all have won. With a call and an answer for each, a claim in
company would take 15 µs instead of 9, there and here.
Alone, a claim is `SET … NX GET`, and takes the server 4 µs instead of 15.

Invariant: `record_of` of what `stored` made is the same record, whatever it holds.
"""

from __future__ import annotations

import hashlib
from binascii import hexlify
from collections.abc import Iterator, Sequence
from importlib.resources import files
from struct import Struct
from typing import NamedTuple

from coatcheck.core.record import Record, Swap, new_record
from coatcheck.core.scope import ID_BYTES

_SCRIPT = files("coatcheck.stores").joinpath("lua/swap.lua").read_bytes()
# A name for the script, as the server names it; nothing depends on its being hard to forge.
_NAME = hashlib.sha1(_SCRIPT, usedforsecurity=False).hexdigest().encode()

# 64: about half a millisecond in which the server serves nobody else.
_KEYS_MAX = 64
# 1 MiB: where responses are large, fewer records share a call for the same reason.
_CALL_BYTES_MAX = 1 << 20
# 256: as many as a batch has.
READ_MAX = 256

# The first byte says how the rest is to be read; the version follows it at once, for the script.
# After that: state, attempt, four times, the nonce, and how long the parts are that follow.
_FORMAT = 1
_HEAD = Struct(">BqBIqqqqqBIIIIB")
_VERSION = Struct(">q")
# The length of what is None. A value of 4 GiB is eight times what Redis would take.
_NONE = 0xFFFFFFFF


class UnreadableValue(ValueError):
    """A key of ours holds what this release has not written and cannot read, or replace."""


def stored(record: Record, *, compact: bool) -> tuple[bytes, int]:
    """
    What is stored for *record*, and when the server may forget it, in ms.

    That is not before any sweep could take it.
    """
    # Each by name: to gather some of them in lists takes as long as all the rest.
    # fmt: off
    (_, version, state, attempt, fingerprint, created_ms, lease_until_ms, window_until_ms,
        expires_ms, nonce, label, scope, key, progress, response) = record
    if compact:
        label = scope = key = ""
    # All at once, which is quicker. A path may hold any bytes, so a text may be no proper Unicode.
    names = f"{label}{scope}{key}".encode("utf-8", "surrogatepass")
    a, b, c = len(label), len(scope), len(key)
    if a + b + c != len(names):  # not all of it is ASCII
        a, b, c = (len(name.encode("utf-8", "surrogatepass")) for name in (label, scope, key))
    head = _HEAD.pack(
        _FORMAT, version, state, attempt, created_ms, lease_until_ms, window_until_ms,
        expires_ms, nonce, len(fingerprint), a, b, c,
        _NONE if progress is None else len(progress), response is not None,
    )
    # fmt: on
    value = b"".join((head, fingerprint, names, progress or b"", response or b""))
    return value, max(expires_ms, lease_until_ms, version + 1)


def record_of(id: bytes, value: bytes) -> Record:
    """The record that *value* was made of."""
    if len(value) < _HEAD.size or value[0] != _FORMAT:
        raise _unreadable(id)
    # fmt: off
    (_, version, state, attempt, created_ms, lease_until_ms, window_until_ms,
        expires_ms, nonce, a, b, c, d, progress_bytes, has_response) = _HEAD.unpack_from(value)
    # fmt: on
    # Where each part ends: fingerprint, label, scope, key, progress; the response is the rest.
    a += _HEAD.size
    b += a
    c += b
    d += c
    e = d if progress_bytes == _NONE else d + progress_bytes
    try:
        label, scope, key = (
            value[a:b].decode("utf-8", "surrogatepass"),
            value[b:c].decode("utf-8", "surrogatepass"),
            value[c:d].decode("utf-8", "surrogatepass"),
        )
    except UnicodeDecodeError as error:
        raise _unreadable(id) from error
    return new_record(
        (
            id,
            version,
            state,
            attempt,
            value[_HEAD.size : a],
            created_ms,
            lease_until_ms,
            window_until_ms,
            expires_ms,
            nonce,
            label,
            scope,
            key,
            None if progress_bytes == _NONE else value[d:e],
            value[e:] if has_response else None,
        )
    )


def _unreadable(id: bytes) -> UnreadableValue:
    return UnreadableValue(f"the value of {id.hex()} is not a record that this release can read")


class Keys:
    """
    The keys under one prefix.

    An id stands in braces, so that a cluster places the key by the id, whatever the prefix.
    """

    def __init__(self, prefix: str) -> None:
        assert "{" not in prefix  # it would be taken for the one before the id
        self._head = prefix.encode() + b"{"
        size = len(self._head) + 2 * ID_BYTES + len(b"}")
        self._before = b"$%d\r\n%b" % (size, self._head)
        self._between = b"}\r\n" + self._before
        self._bytes = len(self._between) + 2 * ID_BYTES

    def spelt(self, ids: Sequence[bytes]) -> bytes:
        """The keys of the records with these *ids*, in the protocol's spelling."""
        names = hexlify(ids[0]) if len(ids) == 1 else self._between.join(map(hexlify, ids))
        spelt = b"%b%b}\r\n" % (self._before, names)
        assert len(spelt) == len(ids) * self._bytes  # else the server would not understand us
        return spelt

    def key_of(self, id: bytes) -> bytes:
        """The key of the record with this *id*."""
        return b"%b%b}" % (self._head, hexlify(id))

    def id_of(self, key: bytes) -> bytes | None:
        """The id whose record is under *key*; None where the key is somebody else's."""
        if not (key.startswith(self._head) and key.endswith(b"}")):
            return None
        try:
            id = bytes.fromhex(key[len(self._head) : -1].decode("ascii"))
        except ValueError:
            return None
        return id if self.key_of(id) == key else None

    def pattern_of(self, id_prefix: bytes) -> bytes:
        """What `SCAN` must match to find every id that begins with *id_prefix*."""
        special = b"*?[]\\"
        head = b"".join(
            b"\\" + bytes([byte]) if byte in special else bytes([byte]) for byte in self._head
        )
        return b"%b%b*}" % (head, id_prefix.hex().encode())


class Command(NamedTuple):
    """
    One command.

    Args:
        id: of a record, by which a cluster knows whose the command is.
        packed: what is sent.
        start: the number of the first swap that it performs, in its batch.
        swaps: all of them.
    """

    id: bytes
    packed: bytes
    start: int = 0
    swaps: Sequence[Swap] = ()


class Packer:
    """
    Makes commands of swaps and ids.

    A claim that is alone is a command of the server's own, which takes a quarter of the script's
    time. But not before that has run: who may not run it could begin, and not end.
    """

    def __init__(self, keys: Keys, *, compact: bool, is_spread: bool) -> None:
        self._keys = keys
        self._compact = compact
        # In a cluster every key may live elsewhere, so every command is about one.
        self._keys_max = 1 if is_spread else _KEYS_MAX
        self.read_max = 1 if is_spread else READ_MAX
        self.has_run = False  # the script has
        self.is_old = False  # the server is: it has no such command (before Redis 7.0)

    def calls_of(self, swaps: Sequence[Swap]) -> list[Command]:
        """The commands that perform *swaps*."""
        if len(swaps) == 1:
            return [self._call(0, swaps)]
        calls: list[Command] = []
        start = bytes_packed = 0
        for number, swap in enumerate(swaps):
            if number - start >= self._keys_max or bytes_packed > _CALL_BYTES_MAX:
                calls.append(self._call(start, swaps[start:number]))
                start, bytes_packed = number, 0
            if swap.record is not None:
                bytes_packed += len(swap.record.response or b"") + len(swap.record.progress or b"")
        return [*calls, self._call(start, swaps[start:])]

    def _call(self, start: int, swaps: Sequence[Swap]) -> Command:
        size, first = len(swaps), swaps[0]
        if size == 1 and not first.expected and self.has_run and not self.is_old and first.record:
            packed = self._claim(first.id, first.record)
        else:
            packed = _BY_NAME[size] + self._body(swaps)
        return Command(first.id, packed, start, swaps)

    def _claim(self, id: bytes, record: Record) -> bytes:
        """The command that writes where nothing stands, and else answers what does."""
        value, forget_ms = stored(record, compact=self._compact)
        at_ms = b"%d" % forget_ms
        return _CLAIM % (self._keys.spelt((id,)), len(value), value, len(at_ms), at_ms)

    def by_text(self, call: Command) -> Command:
        """*call* for a server that does not know the script, or that command; any knows this."""
        head = _head(b"EVAL", _SCRIPT, len(call.swaps))
        return call._replace(packed=head + self._body(call.swaps))

    def _body(self, swaps: Sequence[Swap]) -> bytes:
        """The keys and arguments of the script."""
        keys = self._keys.spelt([swap.id for swap in swaps])
        return keys + b"".join([self._arguments(swap) for swap in swaps])

    def _arguments(self, swap: Swap) -> bytes:
        """The three arguments of one swap."""
        record = swap.record
        expected = b"$8\r\n%b" % _VERSION.pack(swap.expected) if swap.expected else b"$0\r\n"
        if record is None:
            return b"%b\r\n$0\r\n\r\n$1\r\n0\r\n" % expected
        value, forget_ms = stored(record, compact=self._compact)
        at_ms = b"%d" % forget_ms
        spelt = (expected, len(value), value, len(at_ms), at_ms)
        return b"%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % spelt

    def reads_of(self, ids: Sequence[bytes]) -> Iterator[Command]:
        """The commands that read *ids* in their order, each answered by a list."""
        for start in range(0, len(ids), self.read_max):
            some = ids[start : start + self.read_max]
            head = b"*%d\r\n$4\r\nMGET\r\n" % (1 + len(some))
            yield Command(some[0], head + self._keys.spelt(some))


def packed(*words: bytes) -> bytes:
    """One command in the protocol's spelling."""
    spelt = [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"*%d\r\n%b" % (len(words), b"".join(spelt))


def _head(command: bytes, script: bytes, size: int) -> bytes:
    """The call of a script, up to its keys and arguments, for *size* swaps."""
    words = (3 + 4 * size, len(command), command, len(script), script, len(b"%d" % size), size)
    return b"*%d\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%d\r\n" % words


_BY_NAME = [_head(b"EVALSHA", _NAME, size) for size in range(_KEYS_MAX + 1)]
_CLAIM = b"*7\r\n$3\r\nSET\r\n%b$%d\r\n%b\r\n$4\r\nPXAT\r\n$%d\r\n%b\r\n$2\r\nNX\r\n$3\r\nGET\r\n"
