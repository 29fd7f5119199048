"""Records in Redis: their keys, their stored bytes, and the commands that write and read them.

Each record is one string value. A hash would take three times the memory, because Redis drops its
compact encoding for a field as long as a response.

Invariant: `decode` of what `encode` made is the same record, whatever it holds.
"""

from __future__ import annotations

import hashlib
from binascii import hexlify
from collections.abc import Iterator, Sequence
from importlib.resources import files
from struct import Struct
from typing import NamedTuple, TypeAlias

from coatcheck.core.identity import ID_BYTES
from coatcheck.core.record import Record, Swap, new_record

_SCRIPT = files("coatcheck.stores.redis").joinpath("swap.lua").read_bytes()
# EVALSHA names a script by its SHA-1; the digest protects nothing.
_SCRIPT_SHA = hashlib.sha1(_SCRIPT, usedforsecurity=False).hexdigest()

# 64: the server runs a script alone, and this many keys take it about half a millisecond.
KEYS_MAX = 64
# 256: as many ids as a batch has; MGET is much cheaper than the script.
READ_MAX = 256

# The first byte is the format. The version follows it directly, because the script compares it.
# Then: state, attempt, four times, nonce, and the lengths of the variable parts.
_FORMAT = 1
_HEAD = Struct(">BqBIqqqqqBIIIIB")
_NUMBERS = 8
_VERSION = Struct(">q")
# The length that means None. A Redis value is at most 512 MiB, so no real length is this.
_NONE = 0xFFFFFFFF

# One command as redis-py takes it: its name and arguments.
Words: TypeAlias = tuple[bytes | str | int, ...]


class UnreadableValue(ValueError):
    """One key of a batch holds something that this release did not write and cannot decode."""


def encode(record: Record) -> tuple[bytes, int]:
    """
    Return the stored bytes of *record*, and when the server may delete it (ms since 1970).

    That time is never before a sweep would be allowed to delete the record.
    """
    # surrogatepass: a label holds a URL path, which may be any bytes and so not valid Unicode.
    texts = [text.encode("utf-8", "surrogatepass") for text in record[10:13]]
    fingerprint, progress, response = record.fingerprint, record.progress, record.response
    head = _HEAD.pack(
        _FORMAT,
        *(*record[1:4], *record[5:10]),
        *(len(fingerprint), *map(len, texts), _NONE if progress is None else len(progress)),
        response is not None,
    )
    value = b"".join((head, fingerprint, *texts, progress or b"", response or b""))
    return value, max(record.expires_ms, record.lease_until_ms, record.version + 1)


def decode(id: bytes, value: bytes) -> Record:
    """Return the record that *value* was made from; raise `UnreadableValue` if it is not one."""
    if len(value) < _HEAD.size or value[0] != _FORMAT:
        raise _unreadable(id)
    _, *numbers, has_response = _HEAD.unpack_from(value)
    numbers, lengths = numbers[:_NUMBERS], numbers[_NUMBERS:]
    has_progress = lengths[-1] != _NONE
    if not has_progress:
        lengths[-1] = 0
    start = _HEAD.size
    parts: list[bytes] = []  # fingerprint, label, scope, key, progress; the response is the rest
    for length in lengths:
        parts.append(value[start : start + length])
        start += length
    fingerprint, *texts, progress = parts
    try:
        label, scope, key = (text.decode("utf-8", "surrogatepass") for text in texts)
    except UnicodeDecodeError as error:
        raise _unreadable(id) from error
    blobs = (progress if has_progress else None, value[start:] if has_response else None)
    return new_record((id, *numbers[:3], fingerprint, *numbers[3:], label, scope, key, *blobs))


def _unreadable(id: bytes) -> UnreadableValue:
    return UnreadableValue(f"the value of {id.hex()} is not a record that this release can decode")


class Keys:
    """
    The keys under one prefix: the prefix, then the id as hexadecimal digits in braces.

    Redis Cluster computes the slot from what is in braces, so the prefix does not change it.
    """

    def __init__(self, prefix: str) -> None:
        self._head = prefix.encode() + b"{"

    def key_of(self, id: bytes) -> bytes:
        """Return the key of the record with this *id*."""
        return b"%b%b}" % (self._head, hexlify(id))

    def id_of(self, key: bytes) -> bytes | None:
        """Return the id of the record under *key*; None if the key is not one of ours."""
        digits = key.removeprefix(self._head).removesuffix(b"}")
        try:
            id = bytes.fromhex(digits.decode("ascii"))
        except ValueError:
            return None
        return id if len(id) == ID_BYTES and self.key_of(id) == key else None

    def pattern_of(self, id_prefix: bytes) -> bytes:
        """Return the SCAN pattern for all ids that begin with *id_prefix*."""
        special = b"*?[]\\"
        head = b"".join(
            b"\\" + bytes([byte]) if byte in special else bytes([byte]) for byte in self._head
        )
        return b"%b%b*}" % (head, id_prefix.hex().encode())


class Command(NamedTuple):
    """One command."""

    words: Words  # its name and arguments
    id: bytes = b""  # of one of its records; a cluster sends it to the server that owns this one
    start: int = 0  # the position of its first swap in the batch
    swaps: Sequence[Swap] = ()  # that it performs


def _arguments_of(swap: Swap) -> tuple[bytes, bytes, int]:
    """Return the script's three arguments for one swap; see `swap.lua`."""
    expected = _VERSION.pack(swap.expected) if swap.expected else b""
    return (expected, b"", 0) if swap.record is None else (expected, *encode(swap.record))


class Commands:
    """Builds the commands for swaps and reads."""

    def __init__(self, keys: Keys, *, is_cluster: bool) -> None:
        self.keys = keys
        # One key for each command, if every key may be on another server.
        self._keys_max = 1 if is_cluster else KEYS_MAX
        self.read_max = 1 if is_cluster else READ_MAX

    def swap(self, swaps: Sequence[Swap]) -> list[Command]:
        """Return the script calls that perform *swaps*."""
        starts = range(0, len(swaps), self._keys_max)
        return [self._call(start, swaps[start : start + self._keys_max]) for start in starts]

    def _call(self, start: int, swaps: Sequence[Swap]) -> Command:
        keys = [self.keys.key_of(swap.id) for swap in swaps]
        arguments = [word for swap in swaps for word in _arguments_of(swap)]
        words = ("EVALSHA", _SCRIPT_SHA, len(keys), *keys, *arguments)
        return Command(words, swaps[0].id, start, swaps)

    def with_script_text(self, call: Command) -> Command:
        """Return *call* for a server that does not have the script, which it then keeps."""
        _, _, *rest = call.words
        return call._replace(words=("EVAL", _SCRIPT, *rest))

    def get(self, ids: Sequence[bytes]) -> Iterator[Command]:
        """Yield the commands that read *ids* in order; each is answered by a list."""
        for start in range(0, len(ids), self.read_max):
            some = ids[start : start + self.read_max]
            yield Command(("MGET", *map(self.keys.key_of, some)), some[0])
