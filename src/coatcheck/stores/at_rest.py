"""At rest: what is stored of a response, smaller and, with a key ring, unreadable to others (X1).

A store around a store. It changes two fields of a record on their way in, `response` and
`progress`, and changes them back on their way out, so nobody else knows of it. Large responses are
compressed where that saves something, which every engine can read; with a key ring both are sealed
with AES-256-GCM, under the newest key, bound to their record and field: what was copied to another
record does not open there. What was stored before there was a ring stays readable.

Invariant: what cannot be opened is an error (`Unreadable`), never an empty answer: a record that
nobody can read still says that the work was done.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coatcheck.core.record import Record, Swap
from coatcheck.core.replay import COMPRESSED, KINDS, PACKED, SEALED, decompressed
from coatcheck.errors import Misconfigured, MissingExtra, Unreadable
from coatcheck.stores.contract import SWEEP_BATCH, Bell, Finding, Page, Query, Store, bell_of
from coatcheck.stores.declared import Declaration
from coatcheck.stores.fates import Divided, Fate
from coatcheck.stores.ledger import Ledger

# 1 KiB: below this there is little to save. An eighth must go, or it is not worth the unpacking.
COMPRESSED_BYTES_MIN = 1_024
_SAVED_MIN = 1 / 8

_KEY_BYTES = 32
_HEAD_BYTES = 2  # the mark, and how long the name of the key is
_NONCE_BYTES = 12  # what GCM is made for; random, so 2³² seals for each key
_NAME_BYTES_MAX = 255


class KeyRing:
    """
    The keys that open what is stored; the last one seals.

    To rotate, first put the new key before the old one, on every node: it opens, and does not seal
    yet. Then put it at the end, on every node. Take the old one away when the window of all that it
    sealed is over.

    Args:
        keys: name → 32 random bytes. Names are stored beside what they seal; keys are not.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        try:
            from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - only if asked for
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - as above
        except ModuleNotFoundError as error:
            raise MissingExtra("encryption", "cryptography") from error
        self._invalid: type[Exception] = InvalidTag
        self._ciphers: dict[bytes, Any] = {name: AESGCM(key) for name, key in _checked(keys)}
        self._newest = list(self._ciphers)[-1]

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(name.decode() for name in self._ciphers)})"

    def seal(self, text: bytes, about: bytes) -> bytes:
        """*text*, so that only this ring opens it, and only for the same *about*."""
        name, nonce = self._newest, os.urandom(_NONCE_BYTES)
        sealed = self._ciphers[name].encrypt(nonce, text, about)
        return b"%c%c%b%b%b" % (SEALED, len(name), name, nonce, sealed)

    def open(self, blob: bytes, about: bytes) -> bytes:
        """What `seal` made *blob* of."""
        if len(blob) < _HEAD_BYTES or blob[0] != SEALED:
            raise Unreadable("it is not what was sealed: it was cut off, or changed")
        start = _HEAD_BYTES + blob[1]
        name, nonce = blob[_HEAD_BYTES:start], blob[start : start + _NONCE_BYTES]
        shown = repr(name.decode(errors="replace"))
        cipher = self._ciphers.get(name)
        if cipher is None:
            known = ", ".join(name.decode() for name in self._ciphers)
            raise Unreadable(f"sealed with the key {shown}; the ring has {known}")
        try:
            text: bytes = cipher.decrypt(nonce, blob[start + _NONCE_BYTES :], about)
        except (self._invalid, ValueError) as error:  # the latter: it was cut off in its nonce
            message = f"the key {shown} does not open it: another key, or it was changed"
            raise Unreadable(message) from error
        return text


def _checked(keys: object) -> Iterator[tuple[bytes, bytes]]:
    """The *keys* of a ring, with their names as they are stored; what cannot work is refused."""
    if not keys:
        raise Misconfigured("a key ring needs at least one key: {'2026-11': os.urandom(32)}")
    if not isinstance(keys, Mapping):
        kind = type(keys).__name__
        raise Misconfigured(f"a key ring is a mapping, name → 32 random bytes, and no {kind}")
    for name, key in keys.items():
        if not isinstance(name, str):
            raise Misconfigured(f"the key {name!r}: names are text")
        if not 1 <= len(name.encode()) <= _NAME_BYTES_MAX:
            raise Misconfigured(f"the key {name[:20]!r}: a name has 1 to 255 bytes")
        if not isinstance(key, (bytes, bytearray)):
            kind = {str: "text", type(None): "None"}.get(type(key), type(key).__name__)
            raise Misconfigured(f"the key {name!r} is {kind}, not bytes; AES-256 takes 32")
        if len(key) != _KEY_BYTES:
            raise Misconfigured(f"the key {name!r} has {len(key)} bytes; AES-256 takes 32")
        yield name.encode(), bytes(key)


class AtRest:
    """*store*, with what it keeps compressed where it pays, and sealed where there is a ring."""

    def __init__(self, store: Store, keyring: KeyRing | None = None) -> None:
        self._store = store
        self._keyring = keyring

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if the version its caller saw still stands."""
        try:
            lost = self._store.swap([self._packed_swap(swap) for swap in swaps])
        except Divided as error:
            wanted = zip(swaps, error.fates, strict=True)
            fates = [_opened(fate, self._standing, swap.record) for swap, fate in wanted]
            raise Divided(fates) from error.__cause__
        return [
            None if record is None else self._standing(record, swap.record)
            for swap, record in zip(swaps, lost, strict=True)
        ]

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand, in the order of *ids*."""
        try:
            found = self._store.get(ids)
        except Divided as error:
            fates = [_opened(fate, self._unpacked) for fate in error.fates]
            raise Divided(fates) from error.__cause__
        return [None if record is None else self._unpacked(record) for record in found]

    def find(self, query: Query) -> Page:
        """Records for operators; what cannot be opened is shown as it is."""
        page = self._store.find(query)
        return Page([self._shown(record) for record in page.records], page.next_after_id)

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete what retention allows."""
        return self._store.sweep(now_ms, limit)

    def check(self) -> Sequence[Finding]:
        """What the doctor sees of the store beneath."""
        return self._store.check()

    def now_ms(self) -> int:
        """The clock of the store beneath."""
        return self._store.now_ms()

    def bell(self) -> Bell | None:
        """The bell of the store beneath; it carries no records."""
        return bell_of(self._store)

    def close(self) -> None:
        """Close the store beneath."""
        self._store.close()

    @property
    def declared(self) -> Declaration | None:
        """What the store beneath declares of itself."""
        return getattr(self._store, "declared", None)

    @property
    def ledger(self) -> Ledger | None:
        """The ledger of the store beneath, where it has one."""
        inner = getattr(self._store, "ledger", None)
        if not isinstance(inner, Ledger):
            return None
        return replace(
            inner,
            claim=lambda swap, wait_ms: inner.claim(self._packed_swap(swap), wait_ms),
            change=lambda swap: inner.change(self._packed_swap(swap)),
        )

    def _packed_swap(self, swap: Swap) -> Swap:
        record = swap.record
        if record is None or (record.response is None and record.progress is None):
            return swap
        # Unsealed progress stays as it is: who goes on with it may know nothing of packing.
        is_sealed = self._keyring is not None
        packed = record._replace(
            progress=self._packed(record.progress, record.id + _PROGRESS, compresses=is_sealed),
            response=self._packed(record.response, record.id + _RESPONSE),
        )
        return Swap(swap.id, swap.expected, packed)

    def _packed(self, blob: bytes | None, about: bytes, *, compresses: bool = True) -> bytes | None:
        if blob is None:
            return None
        looks_packed = blob[:1] in PACKED  # none of ours does, but whatever is given comes back
        if looks_packed or (compresses and len(blob) >= COMPRESSED_BYTES_MIN):
            smaller = b"%c%b" % (COMPRESSED, zlib.compress(blob))
            if looks_packed or len(smaller) <= len(blob) * (1 - _SAVED_MIN):
                blob = smaller
        return blob if self._keyring is None else self._keyring.seal(blob, about)

    def _standing(self, record: Record, wanted: Record | None) -> Record:
        """What *wanted* has lost against; nobody need open what was said in a life that is over."""
        try:
            return self._unpacked(record)
        except Unreadable:
            if wanted is None or wanted.created_ms < record.window_until_ms:
                raise
            return record._replace(progress=None, response=None)

    def _unpacked(self, record: Record) -> Record:
        if record.response is None and record.progress is None:
            return record
        return record._replace(
            progress=self._unpacked_blob(record.progress, record.id + _PROGRESS),
            response=self._unpacked_blob(record.response, record.id + _RESPONSE),
        )

    def _unpacked_blob(self, blob: bytes | None, about: bytes) -> bytes | None:
        if blob is None:
            return None
        is_sealed = blob.startswith(b"%c" % SEALED)
        if self._keyring is not None and (is_sealed or not blob):  # empty, it would be cut off
            blob = self._keyring.open(blob, about)
        elif is_sealed:
            raise Unreadable("it is sealed, and there is no key ring here")
        elif self._keyring is not None and about.endswith(_RESPONSE) and blob[0] not in KINDS:
            raise Unreadable("it is neither sealed nor what was stored before there was a ring")
        return decompressed(blob) if blob.startswith(b"%c" % COMPRESSED) else blob

    def _shown(self, record: Record) -> Record:
        try:
            return self._unpacked(record)
        except Unreadable:
            return record


def _opened(fate: Fate, open: Callable[..., Record], *about: Record | None) -> Fate:
    """What *open* makes of it, where it is a record."""
    if not isinstance(fate, Record):
        return fate
    try:
        return open(fate, *about)
    except Unreadable as error:
        return error


_PROGRESS = b"progress"
_RESPONSE = b"response"
