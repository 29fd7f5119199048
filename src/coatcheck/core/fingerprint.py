"""Fingerprints: is this the same request as last time?

Third step of the path. A key that is reused with a different request is a client bug. The old
response would hide that bug, so a request whose fingerprint differs is refused (422).

JSON is compared by value (`json_codec.py`), a multipart body without the spelling of its boundary,
and every other body byte by byte. A body that is too large, too deep or not valid is also compared
byte by byte. Which of these applies depends on the bytes alone: not on the stack, not on limits of
the interpreter, not on the chunks in which the body arrived.

The arguments of a guarded function are compared by value (`fingerprint_of_call`).

A fingerprint is 16 bytes. The first twelve are a digest of the whole request. Each of the last four
is a digest of one part: path, query, headers, body. A refusal names the parts that differ
(`difference`), which is all that these four are for.

Invariant: equal requests have equal fingerprints on every Python version and platform, different
requests have different ones, and no bytes make this module raise.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple
from uuid import UUID

from coatcheck.core.identity import ID_BYTES, digested
from coatcheck.core.json_codec import DEPTH_MAX, Pointer, canonical_json

# 256 KiB: in the worst case such a body is parsed in some tens of milliseconds. A larger one would
# delay all other requests of an event loop.
PARSED_BYTES_MAX = 256 * 1024

# 70: RFC 2046 §5.1.1.
BOUNDARY_CHARS_MAX = 70

# 1 024: several times the longest valid content type. A longer one is compared as it is.
CONTENT_TYPE_BYTES_MAX = 1_024

# In memory, or in chunks that are read from a temporary file.
Body = bytes | Iterable[bytes]

# 12 bytes: two different requests with one key are never equal by chance. An id has 16, because it
# is compared with all others in the store; a fingerprint is compared with one.
WHOLE_BYTES = 12
# What the other four bytes are digests of, in this order.
PARTS = ("the path", "the query", "one of the headers", "the body or its content type")

_of_whole = partial(blake2b, digest_size=WHOLE_BYTES, person=b"coatcheck-same")
_of_path = partial(blake2b, digest_size=1, person=b"coatcheck-path")
_of_query = partial(blake2b, digest_size=1, person=b"coatcheck-query")
_of_headers = partial(blake2b, digest_size=1, person=b"coatcheck-header")
_of_body = partial(blake2b, digest_size=ID_BYTES, person=b"coatcheck-body")
# In place of the digest of a part that is empty, as query and headers mostly are.
_EMPTY = b"\0"
_CALL_DOMAIN = b"coatcheck-call"
_SESSION_DOMAIN = b"coatcheck-sess"
# 12: enough to tell two requests with one key apart. The last four bytes stay those of the request
# without a session, because only the session differs.
SESSION_BYTES = 12

# How a body was read. The digest begins with it, so that two ways of reading never give the same.
_BYTES = "bytes "
_JSON = "json "
_MULTIPART = "multipart "


def fingerprint_of(
    *,
    method: str,
    path: str,
    query: bytes,
    content_type: bytes,
    body: Body,
    ignore: tuple[Pointer, ...] = (),
    headers: Sequence[tuple[bytes, bytes]] = (),
    secret: bytes = b"",
) -> bytes:
    """
    16 bytes that are equal for equal requests.

    Args:
        path: as it was sent.
        ignore: members of a JSON body that may change between retries.
        headers: those that the policy includes and the request has, in the policy's order.
        secret: the deployment's, as a `digest_key`. Without one, short bodies can be guessed from
            the stored digest.
    """
    if len(content_type) <= CONTENT_TYPE_BYTES_MAX:
        media = _media_of(content_type)
    else:
        media = _Media(_BYTES, "", _BYTES + content_type.decode("latin-1"))
    body, read = _read(media, body, ignore)
    content, as_what = (body, media.as_bytes) if read is None else (read, media.as_read)
    included = b""
    for name, value in headers:
        included += b"%d,%d;%b%b" % (len(name), len(value), name.lower(), value)
    # Lengths first: otherwise the end of one part could be read as the beginning of the next.
    typed = f"{len(as_what)};{as_what}".encode("utf-8", "surrogatepass")
    of_body = _of_body(typed, key=secret)
    for chunk in (content,) if isinstance(content, bytes) else content:
        of_body.update(chunk)
    body_digest = of_body.digest()
    lengths = f"{len(method)},{len(path)},{len(query)},{len(included)};"
    place = f"{method}{path}".encode("utf-8", "surrogatepass")
    whole = b"".join((lengths.encode(), place, query, included, body_digest))
    # Every digest is keyed, those of one byte too: a checksum mixed with the secret would give away
    # 8 bits of a body to a reader of the store who knows the body of one other record.
    return b"".join(
        (
            _of_whole(whole, key=secret).digest(),
            _of_path(place, key=secret).digest(),
            _of_query(query, key=secret).digest() if query else _EMPTY,
            _of_headers(included, key=secret).digest() if included else _EMPTY,
            body_digest[:1],
        )
    )


def difference(one: bytes, other: bytes) -> str:
    """
    Which parts differ between two requests with these fingerprints: "the body … differs".

    One byte cannot tell two texts in 256 apart. So a part that differs may not be named, but one
    that is named does differ. If none is, it is most likely the session, which has no byte.
    """
    pairs = zip(PARTS, one[WHOLE_BYTES:], other[WHOLE_BYTES:], strict=False)
    names = [name for name, of_one, of_other in pairs if of_one != of_other]
    if not names:
        return "most likely the session cookie differs"
    *first, last = names
    return f"{', '.join(first)} and {last} differ" if first else f"{last} differs"


def with_session(fingerprint: bytes, session: bytes, secret: bytes) -> bytes:
    """The fingerprint of the same request, sent in *session*."""
    bound = digested(_SESSION_DOMAIN, secret, fingerprint + session)
    return bound[:SESSION_BYTES] + fingerprint[SESSION_BYTES:]


class _Media(NamedTuple):
    """A parsed content type."""

    kind: str  # how to read the body
    as_read: str  # what is compared of the content type if the body was read that way
    as_bytes: str  # what is compared of it if the body was not: every parameter
    boundary: bytes = b""


# 256: an API receives a few content types, and browsers send a new boundary with each form.
@lru_cache(maxsize=256)
def _media_of(content_type: bytes) -> _Media:
    essence, _, rest = content_type.decode("latin-1").partition(";")
    essence = essence.strip(" \t").lower()
    parameters = _parameters_of(rest)
    # No parameter begins with "?", so invalid parameters are never equal to valid ones.
    whole = essence + (f";?{rest}" if parameters is None else _spelled(parameters))
    as_bytes = _BYTES + whole
    if essence == "application/json" or essence.endswith("+json"):
        return _Media(_JSON, _JSON + essence, as_bytes)  # RFC 8259 §11: no parameters
    boundaries = [value for name, value in parameters or () if name == "boundary"]
    if parameters and essence.startswith("multipart/") and _is_boundary(boundaries):
        others = [parameter for parameter in parameters if parameter[0] != "boundary"]
        as_read = _MULTIPART + essence + _spelled(others)
        return _Media(_MULTIPART, as_read, as_bytes, boundaries[0].encode("ascii"))
    return _Media(_BYTES, "", as_bytes)


_WORD = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_parameter = re.compile(
    rf'[ \t]*(?:({_WORD})=(?:({_WORD})|"((?:[^"\\]|\\.)*+)"))?[ \t]*(?:;|\Z)'
).match


def _parameters_of(text: str) -> list[tuple[str, str]] | None:
    """The parameters in *text* (RFC 9110 §5.6.6), names in lower case; None if it is invalid."""
    parameters: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        found = _parameter(text, position)
        if found is None:
            return None
        position = found.end()
        name, token, quoted = found.groups()
        if name is not None:
            value = token if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            name = name.lower()
            parameters.append((name, value.lower() if name == "charset" else value))
    return parameters


def _spelled(parameters: list[tuple[str, str]]) -> str:
    return "".join([f";{name}={len(value)}:{value}" for name, value in parameters])


def _is_boundary(values: list[str]) -> bool:
    """There is exactly one boundary, of printable ASCII characters."""
    return (
        len(values) == 1
        and 1 <= len(values[0]) <= BOUNDARY_CHARS_MAX
        and values[0].isascii()
        and values[0].isprintable()
    )


def _read(media: _Media, body: Body, ignore: tuple[Pointer, ...]) -> tuple[Body, Body | None]:
    """*body*, and its normal form; None if the bytes themselves are compared."""
    if media.kind is _MULTIPART:
        chunks = (body,) if isinstance(body, bytes) else body
        return body, _without_boundary(chunks, media.boundary)
    if media.kind is _JSON:
        body = body if isinstance(body, bytes) else _joined(body)
        if isinstance(body, bytes) and len(body) <= PARSED_BYTES_MAX:
            return body, canonical_json(body, ignore)
    return body, None


def _joined(chunks: Iterable[bytes]) -> Body:
    """All of *chunks* as one; still several if that is too large to parse."""
    iterator = iter(chunks)
    read: list[bytes] = []
    size_bytes = 0
    for chunk in iterator:
        read.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > PARSED_BYTES_MAX:
            return chain(read, iterator)
    return b"".join(read)


# Replaces the boundary. The first byte is doubled where the body contains it.
_MARK = b"\x01\x02"
_ESCAPE = b"\x01"
_ESCAPED = b"\x01\x01"


def _without_boundary(chunks: Iterable[bytes], boundary: bytes) -> Iterator[bytes]:
    """
    A multipart body with the same mark for every boundary; all else byte by byte.

    Clients choose a new boundary for each attempt, and nothing else changes in a retry.
    """
    delimiter = b"--" + boundary
    held_bytes = len(delimiter) - 1  # the next chunk may complete a delimiter that begins here
    tail = b""
    for chunk in chunks:
        *done, last = (tail + chunk.replace(_ESCAPE, _ESCAPED)).split(delimiter)
        done.append(last[:-held_bytes])
        yield _MARK.join(done)
        tail = last[-held_bytes:]
    yield tail


# --- the arguments of a guarded function ----------------------------------------------------


def fingerprint_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """
    16 bytes that are equal for equal arguments.

    An object that is equal only to itself (a session, a client) has no value to compare and is
    left out: the retry brings another one.
    """
    try:
        text = _to_json([args, kwargs])
    except (TypeError, ValueError, RecursionError):  # more than JSON can express
        text = _to_json(_as_json([args, kwargs], ()))
    return digested(_CALL_DOMAIN, b"", text.encode("utf-8", "surrogatepass"))


def _as_json(value: Any, parents: tuple[int, ...]) -> Any:  # noqa: ANN401 - any argument
    """*value* without cycles, keys that are not text and integers too long to print."""
    if id(value) in parents or len(parents) > DEPTH_MAX:
        return {"": "itself"}
    parents = (*parents, id(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return {"int": hex(value)}
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_as_json(member, parents) for member in value]
    if isinstance(value, dict):
        pairs = ([_as_json(name, parents), _as_json(v, parents)] for name, v in value.items())
        return {"dict": sorted(map(_to_json, pairs))}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(_to_json(_as_json(member, parents)) for member in value)}
    ((kind, content),) = _tagged(value).items()
    return [kind, _as_json(content, parents)]


def _tagged(value: Any) -> dict[str, Any]:  # noqa: ANN401 - any argument
    """What is compared of a *value* that is not JSON, under the name of its type."""
    kind = type(value).__name__
    if isinstance(value, Enum):
        return {kind: value.name}
    if isinstance(value, (Decimal, UUID, timedelta, complex)):
        return {kind: str(value)}
    if isinstance(value, (date, time)):
        return {kind: value.isoformat()}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {kind: bytes(value).hex()}
    if isinstance(value, (set, frozenset)):
        return {kind: sorted(_to_json(member) for member in value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {kind: {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}}
    dump = getattr(value, "model_dump", None)  # pydantic's method
    return {kind: dump() if callable(dump) else _attributes_of(value)}


def _attributes_of(value: object) -> dict[str, Any] | None:
    """The attributes of *value*; None if it is equal only to itself."""
    if isinstance(value, type) or type(value).__eq__ is object.__eq__:
        return None
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return attributes | getattr(value, "__dict__", {})


_to_json = json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=_tagged).encode
