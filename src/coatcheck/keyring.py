"""Key rings: they encrypt what stores and outboxes write, with AES-256-GCM under the newest key.

An encrypted value names its key. The context, such as the id of its record, is authenticated with
it: a value that was copied to another place cannot be decrypted there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from coatcheck.core.response import SEALED
from coatcheck.errors import Misconfigured, MissingExtra, Unreadable

_KEY_BYTES = 32
_HEAD_BYTES = 2  # the marker, and the length of the key's name
_NONCE_BYTES = 12  # the size GCM is made for; random, so a key is good for 2³² encryptions
_NAME_BYTES_MAX = 255


class KeyRing:
    """
    The keys that decrypt what is stored; the last one encrypts.

    To rotate, first put the new key before the old one, on every node: it decrypts, but does not
    encrypt yet. Then put it at the end, on every node. Remove the old one when the window of
    everything that it encrypted is over.

    Args:
        keys: name → 32 random bytes. Names are stored beside the encrypted values; keys are not.
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

    def encrypt(self, text: bytes, context: bytes) -> bytes:
        """Encrypt *text* with the newest key; it can be decrypted with the same *context* only."""
        name, nonce = self._newest, os.urandom(_NONCE_BYTES)
        encrypted = self._ciphers[name].encrypt(nonce, text, context)
        return b"%c%c%b%b%b" % (SEALED, len(name), name, nonce, encrypted)

    def decrypt(self, blob: bytes, context: bytes) -> bytes:
        """Return the text that `encrypt` made *blob* of; raise `Unreadable` if that fails."""
        if len(blob) < _HEAD_BYTES or blob[0] != SEALED:
            raise Unreadable("the stored value is not encrypted: it was cut off or changed")
        start = _HEAD_BYTES + blob[1]
        name, nonce = blob[_HEAD_BYTES:start], blob[start : start + _NONCE_BYTES]
        shown = repr(name.decode(errors="replace"))
        cipher = self._ciphers.get(name)
        if cipher is None:
            known = ", ".join(name.decode() for name in self._ciphers)
            raise Unreadable(f"encrypted with the key {shown}; this key ring has {known}")
        try:
            text: bytes = cipher.decrypt(nonce, blob[start + _NONCE_BYTES :], context)
        except (self._invalid, ValueError) as error:  # the latter: it was cut off in its nonce
            message = (
                f"the key {shown} does not decrypt the stored value: another key has this name, "
                "or the value was changed"
            )
            raise Unreadable(message) from error
        return text


def _checked(keys: object) -> Iterator[tuple[bytes, bytes]]:
    """Yield the *keys* of a ring with their names as they are stored; refuse invalid ones."""
    if not keys:
        raise Misconfigured("a key ring needs at least one key: {'2026-11': os.urandom(32)}")
    if not isinstance(keys, Mapping):
        kind = type(keys).__name__
        raise Misconfigured(f"a key ring is a mapping, name → 32 random bytes, not a {kind}")
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
