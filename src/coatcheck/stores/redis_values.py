"""Values of the Redis store: how a record becomes one and comes back, and the commands for it.

Between `redis.py`, which says when, and `redis_line.py`, which sends. A record is one string value:
408 bytes of memory beside a response of 150, where a hash would take 1312, because it gives up its
compact form for a field that long.

Commands are spelt in Redis's protocol right here. A batch is one call of one script for up to 64
records, whose answer is empty where all have won. With a call and an answer for each, a claim in
company would take 15 µs instead of 9, there and here.

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
        raise UnreadableValue(f"the value of {id.hex()} is not a record that this release can read")
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
            value[a:b].decode("utf-8", "surrogatepass"),
            value[b:c].decode("utf-8", "surrogatepass"),
            value[c:d].decode("utf-8", "surrogatepass"),
            None if progress_bytes == _NONE else value[d:e],
            value[e:] if has_response else None,
        )
    )


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
        names = self._between.join(map(hexlify, ids))
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
    """One command, packed, and a key by which a cluster knows whose it is."""

    key: bytes
    packed: bytes


class Call(NamedTuple):
    """One call of the script, for the swaps from *start* on."""

    start: int
    size: int
    key: bytes
    body: bytes

    def by_name(self) -> Command:
        """The call of a script that the server knows."""
        count = b"%d" % self.size
        head = b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$%d\r\n%b\r\n"
        packed = head % (3 + 4 * self.size, _NAME, len(count), count)
        return Command(self.key, packed + self.body)

    def by_text(self) -> Command:
        """The call that also makes the script known: for a server that has forgotten it."""
        count = b"%d" % self.size
        head = b"*%d\r\n$4\r\nEVAL\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n"
        packed = head % (3 + 4 * self.size, len(_SCRIPT), _SCRIPT, len(count), count)
        return Command(self.key, packed + self.body)


class Packer:
    """Makes commands of swaps and ids."""

    def __init__(self, keys: Keys, *, compact: bool, is_spread: bool) -> None:
        self._keys = keys
        self._compact = compact
        # In a cluster every key may live elsewhere, so every command is about one.
        self._keys_max = 1 if is_spread else _KEYS_MAX
        self.read_max = 1 if is_spread else READ_MAX

    def calls_of(self, swaps: Sequence[Swap]) -> Iterator[Call]:
        """The calls of the script that perform *swaps*."""
        start = bytes_packed = 0
        values = [self._value(swap) for swap in swaps]
        for number, value in enumerate(values):
            if number - start >= self._keys_max or bytes_packed > _CALL_BYTES_MAX:
                yield self._call(start, swaps[start:number], values[start:number])
                start, bytes_packed = number, 0
            bytes_packed += len(value)
        yield self._call(start, swaps[start:], values[start:])

    def _call(self, start: int, swaps: Sequence[Swap], values: Sequence[bytes]) -> Call:
        ids = [swap.id for swap in swaps]
        body = self._keys.spelt(ids) + b"".join(values)
        return Call(start, len(ids), self._keys.key_of(ids[0]), body)

    def _value(self, swap: Swap) -> bytes:
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
            yield Command(self._keys.key_of(some[0]), head + self._keys.spelt(some))


def packed(*words: bytes) -> bytes:
    """One command in the protocol's spelling."""
    spelt = [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"*%d\r\n%b" % (len(words), b"".join(spelt))
