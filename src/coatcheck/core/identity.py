"""Scope: whose key it is, and the ids that follow from it.

Second step of the path. A key means something only together with its caller and its route: the
same key from somebody else, or on another endpoint, is another operation, and nothing of the
first one may show through.
Invariant: two different (caller, route, key) never give the same bytes to the digest, so one
operation can be taken for another only by a collision of 128 bits.

Digests are keyed with the deployment's secret when there is one. Without it, whoever reads the
store can try out short API keys and keys offline against what is stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b, sha1

# 16 bytes: 128 bits, the width at which nobody meets a collision by chance or by trying.
ID_BYTES = 16

# What a record keeps of a `caller_digest`. 16 hexadecimal characters: tells callers apart in a
# listing; nothing is ever looked up by it.
SCOPE_CHARS = 16

# What a record keeps of what it is called. 200: longer than the routes of any API; but a path that
# matches none is as long as its client has made it.
LABEL_CHARS_MAX = 200

# One domain for each use, so that no digest can stand in for another. At most 16 bytes each.
_ID_DOMAIN = b"coatcheck-id"
_CALLER_DOMAIN = b"coatcheck-caller"
_LIFE_DOMAIN = b"coatcheck-life"
_LABEL_DOMAIN = b"coatcheck-label"

# The bits of a UUID that say what it is: four for the version, two for the variant.
_UUID_FIXED = 0xF << 76 | 0b11 << 62
_UUID_VERSION_5 = 0x5 << 76 | 0b10 << 62


def operation_id(*, caller: str, route: str, key: str, secret: bytes = b"") -> bytes:
    """
    The id of the record for *key*, sent by *caller* to *route*.

    Args:
        caller: the full `caller_digest`, never its short form.
        route: method and path or template ("POST /orders"), or the scope of a function.
    """
    # Lengths first: without them ("ab", "c") and ("a", "bc") would be one operation.
    # Surrogates pass, because a path may carry any bytes and must not become an error.
    text = f"{len(caller)},{len(route)};{caller}{route}{key}"
    return digested(_ID_DOMAIN, secret, text.encode("utf-8", "surrogatepass"))


def label_of(route: str, chars_max: int = LABEL_CHARS_MAX) -> str:
    """What *route* is called in its record: its beginning and a digest, where it is too long."""
    if len(route) <= chars_max:
        return route
    # The digest, because policies are looked up by it: two routes must not be called the same.
    digest = digested(_LABEL_DOMAIN, b"", route.encode("utf-8", "surrogatepass")).hex()
    return f"{route[: chars_max - len(digest) - 1]}…{digest}"


def caller_digest(*parts: bytes | str, secret: bytes = b"") -> str:
    """
    Who calls, as 32 hexadecimal characters made from *parts*: the border between callers.

    Begin with the kind of identity (`caller_digest("bearer", token)`), so that a user named like
    somebody's API key is somebody else. A part may be any text or bytes, credentials too: nothing
    of it can be read back.
    """
    framed = []
    for part in parts:
        text = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        framed.append(b"%d:%b" % (len(text), text))  # as above: no two lists of parts are one
    return digested(_CALLER_DOMAIN, secret, b"".join(framed)).hex()


def derive(id: bytes, name: str, *, life: int, request: bytes = b"", secret: bytes = b"") -> str:
    """
    The key to send downstream in step *name* of an operation: a UUID, the same in every attempt.

    *life* is the record's `created_ms`. A key that is used again after its window is a new
    operation, and its downstream calls must be new as well; with the id alone, the provider
    would replay the charge of the life before. *request* is its `fingerprint`: after a refusal at
    the door another request may follow in the same life, and it asks for something else.

    A version 5 UUID (RFC 9562 §5.5) in a namespace that is this life's own: many providers
    insist on a UUID, and older validators know versions 1 to 5 only.
    """
    assert len(id) == ID_BYTES
    of_life = digested(_LIFE_DOMAIN, secret, id + life.to_bytes(8, "big") + request)
    named = sha1(of_life + name.encode("utf-8"), usedforsecurity=False)
    bits = int.from_bytes(named.digest()[:16], "big")
    text = f"{bits & ~_UUID_FIXED | _UUID_VERSION_5:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def digested(domain: bytes, secret: bytes, text: bytes) -> bytes:
    """128 bits of *text*, of use in *domain* alone, keyed with the deployment's *secret*."""
    digest = begun(domain, secret).copy()
    digest.update(text)
    return digest.digest()


def digested_chunks(domain: bytes, secret: bytes, chunks: Iterable[bytes]) -> bytes:
    """The same of a text that comes in pieces."""
    digest = begun(domain, secret).copy()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


@lru_cache(maxsize=64)  # 64: a few domains, and a few secrets in the tests of whoever uses this
def begun(domain: bytes, secret: bytes) -> blake2b:
    """A digest of nothing yet, to be copied: to key one anew takes as long as all the rest."""
    if len(secret) > blake2b.MAX_KEY_SIZE:  # digested then, never cut off
        secret = blake2b(secret).digest()
    return blake2b(digest_size=ID_BYTES, key=secret, person=domain)
