"""Identity: the id of an operation, made from its caller, its route and its key.

Second step of the path. A key has a meaning only together with its caller and its route. The same
key from another caller, or on another route, is another operation, and shows nothing of the first.

Invariant: two different (caller, route, key) never give the same bytes to the digest. So one
operation can be taken for another only by a collision of 128 bits.

Digests are keyed with the deployment's secret, if there is one. Without a secret, a reader of the
store can guess short API keys and idempotency keys by computing their digests.
"""

from __future__ import annotations

import re
from hashlib import blake2b, sha1

# 16 bytes: 128 bits are wide enough that collisions do not happen, not even by trying.
ID_BYTES = 16

# A record keeps this much of a `caller_digest`: enough to tell callers apart in a listing. No
# lookup uses it.
SCOPE_CHARS = 16

# The longest label of a record. 200: longer than the routes of any API. A path that matches no
# route may have any length.
LABEL_CHARS_MAX = 200

# One domain for each use, so that digests of two uses are never equal. At most 16 bytes each.
_ID_DOMAIN = b"coatcheck-id"
_CALLER_DOMAIN = b"coatcheck-caller"
_DERIVE_DOMAIN = b"coatcheck-life"
_LABEL_DOMAIN = b"coatcheck-label"

# The fixed bits of a UUID: four for the version, two for the variant.
_UUID_FIXED = 0xF << 76 | 0b11 << 62
_UUID_VERSION_5 = 0x5 << 76 | 0b10 << 62


def operation_id(*, caller: str, route: str, key: str, secret: bytes = b"") -> bytes:
    """
    The id of the record for *key*, sent by *caller* to *route*.

    Args:
        caller: the full `caller_digest`, never its short form.
        route: method and path ("POST /orders"), or the scope of a function.
        secret: a `digest_key`, like every secret below.
    """
    # Lengths first: without them ("ab", "c") and ("a", "bc") would be one operation. Surrogates
    # pass: a path may contain any bytes, and none of them may raise.
    text = f"{len(caller)},{len(route)};{caller}{route}{key}"
    spelled = text.encode("utf-8", "surrogatepass")
    # As in `digested`, without the call: this is on the path of every request.
    return blake2b(spelled, digest_size=ID_BYTES, key=secret, person=_ID_DOMAIN).digest()


def label_of(route: str, chars_max: int = LABEL_CHARS_MAX) -> str:
    """The label of *route*: the route itself, or its beginning and a digest if it is too long."""
    if len(route) <= chars_max:
        return route
    # With a digest, because policies are looked up by label: no two routes may have the same.
    digest = digested(_LABEL_DOMAIN, b"", route.encode("utf-8", "surrogatepass")).hex()
    return f"{route[: chars_max - len(digest) - 1]}…{digest}"


def caller_digest(*parts: bytes | str, secret: bytes = b"") -> str:
    """
    The identity of a caller, as 32 hexadecimal characters made from *parts*.

    Begin with the kind of identity (`caller_digest("bearer", token)`), so that a user whose name
    equals an API key is another caller. A part may be any text or bytes, also a credential: it
    cannot be read back from the digest.
    """
    framed = []
    for part in parts:
        text = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        framed.append(b"%d:%b" % (len(text), text))  # with its length, as above
    return digested(_CALLER_DOMAIN, secret, b"".join(framed)).hex()


def scope_of_caller(caller: str, secret: bytes = b"") -> str:
    """
    The scope in the records of *caller*: what a `caller=` function returned, or a scope itself.

    A scope is 16 digits, 0-9 and a-f, as `coatcheck lookup` prints it.
    """
    if _scope_digits(caller) is not None:
        return caller
    return caller_digest("own", caller, secret=secret)[:SCOPE_CHARS]


_scope_digits = re.compile(f"[0-9a-f]{{{SCOPE_CHARS}}}").fullmatch


def derive(
    id: bytes, name: str, *, generation: int, request: bytes = b"", secret: bytes = b""
) -> str:
    """
    The key to send downstream in step *name* of an operation: a UUID, the same in every attempt.

    *generation* is the record's `created_ms`. A key that is used again after its window is a new
    operation, and its downstream calls must be new as well: with the id alone, the provider
    would replay the charge of the generation before. *request* is the record's `fingerprint`:
    after a refusal before the handler, a corrected request may follow with the same key.

    A version 5 UUID (RFC 9562 §5.5) in a namespace of this generation: many providers require a
    UUID, and older validators know only versions 1 to 5.
    """
    assert len(id) == ID_BYTES
    seed = digested(_DERIVE_DOMAIN, secret, id + generation.to_bytes(8, "big") + request)
    named = sha1(seed + name.encode("utf-8"), usedforsecurity=False)
    bits = int.from_bytes(named.digest()[:16], "big")
    text = f"{bits & ~_UUID_FIXED | _UUID_VERSION_5:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def digest_key(secret: bytes) -> bytes:
    """*secret* as digests take it: one that is too long is hashed, not cut off."""
    return secret if len(secret) <= blake2b.MAX_KEY_SIZE else blake2b(secret).digest()


def digested(domain: bytes, secret: bytes, text: bytes) -> bytes:
    """A digest of *text* for use in *domain* only, 16 bytes, keyed with a `digest_key`."""
    return blake2b(text, digest_size=ID_BYTES, key=secret, person=domain).digest()
