"""Fingerprints: is this the same request as last time?

Third step of the path. A key reused with a different request is a client bug, and answering it
with the old response would hide that bug; so we compare fingerprints and refuse (422).

JSON is compared by value (`canonical.py`), forms by their decoded fields, multipart without the
spelling of its boundary, and all else byte by byte. What is too large, too deep or too odd for
that is compared byte by byte as well, and that depends on the bytes alone: not on the stack, not
on the interpreter's limits, not on how the body was cut into chunks.
Invariant: equal requests give equal fingerprints on every Python version and platform, different
ones do not, and no bytes whatsoever raise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from coatcheck.core.identity import digested, digested_chunks
from coatcheck.core.json_codec import Pointer, canonical_json, parse_pointer

__all__ = ["Body", "Pointer", "fingerprint_of", "parse_pointer"]

# 256 KiB: the worst of them is parsed in some tens of milliseconds; more would hold up everybody.
PARSED_BYTES_MAX = 256 * 1024

# 1 024 requests of 2 KiB: what is retried is mostly recent and small.
REMEMBERED_BYTES_MAX = 2_048
REMEMBERED_MAX = 1_024

# 1 000: what PHP, Django and Starlette take of a form before they refuse it.
FORM_FIELDS_MAX = 1_000

# 70: RFC 2046 §5.1.1.
BOUNDARY_CHARS_MAX = 70

# 1 024: several times the longest honest content type; what is longer is not taken apart.
CONTENT_TYPE_BYTES_MAX = 1_024

# In memory, or read piece by piece from where it was spooled.
Body = bytes | Iterable[bytes]

_DOMAIN = b"coatcheck-same"

# How a body was read. It begins what is compared: what was read in two ways is never equal.
_BYTES = "bytes "
_JSON = "json "
_FORM = "form "
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
    is_retry: bool = False,
) -> bytes:
    """
    16 bytes that are equal for equal requests.

    Args:
        path: as it was sent, or the template of the route.
        ignore: members of a JSON body that may change between retries.
        headers: those that the policy includes and the request has, in the policy's order.
        secret: the deployment's; without it, who reads the store can try out short bodies.
        is_retry: the key has come before, so that the same bytes are likely to come again.
    """
    if (
        is_retry
        and not headers
        and isinstance(body, bytes)
        and len(body) + len(path) + len(query) + len(content_type) <= REMEMBERED_BYTES_MAX
    ):
        return _remembered(method, path, query, content_type, body, ignore, secret)
    included = _framed((name.lower(), value) for name, value in headers) if headers else b""
    is_long = len(content_type) > CONTENT_TYPE_BYTES_MAX
    media = _unread(content_type) if is_long else _media_of(content_type)
    if media.kind is _JSON and isinstance(body, bytes) and len(body) <= PARSED_BYTES_MAX:
        read: Body | None = canonical_json(body, ignore)
    else:
        body, read = _read(media, body, ignore)
    content, as_what = (body, media.as_bytes) if read is None else (read, media.as_read)
    # What is remembered is bounded: no honest path, and no honest content type, is longer.
    is_short = len(path) + len(as_what) <= REMEMBERED_BYTES_MAX
    make = _remembered_head if is_short else _head_of
    head = make(as_what, method, path, len(query), len(included))
    if isinstance(content, bytes):
        return digested(_DOMAIN, secret, b"".join((head, query, included, content)))
    return digested_chunks(_DOMAIN, secret, chain((head, query, included), content))


@lru_cache(maxsize=REMEMBERED_MAX)
def _remembered(*request: Any) -> bytes:
    """A retry sends the same bytes, and they need not be read again."""
    method, path, query, content_type, body, ignore, secret = request
    return fingerprint_of(
        method=method,
        path=path,
        query=query,
        content_type=content_type,
        body=body,
        ignore=ignore,
        secret=secret,
    )


def _head_of(as_what: str, method: str, path: str, query_bytes: int, included_bytes: int) -> bytes:
    """What is compared before all else; lengths first, so that no part can lend to the next."""
    lengths = f"{len(as_what)},{len(method)},{len(path)},{query_bytes},{included_bytes};"
    return f"{lengths}{as_what}{method}{path}".encode("utf-8", "surrogatepass")


_remembered_head = lru_cache(maxsize=256)(_head_of)  # 256: an API has a few routes to write to


class _Media(NamedTuple):
    """What a content type says of its body."""

    kind: str  # how to read the body
    as_read: str  # what is compared of the content type where the body was read that way
    as_bytes: str  # what is compared of it where it was not: every parameter
    boundary: bytes


@lru_cache(maxsize=256)  # 256: an API is sent a few content types, and a boundary in some of them
def _media_of(content_type: bytes) -> _Media:
    essence, _, rest = content_type.decode("latin-1").partition(";")
    essence = essence.strip(" \t").lower()
    parameters = _parameters_of(rest)
    # No parameter begins with "?", so a garbled one looks like no other.
    whole = essence + (f";?{rest}" if parameters is None else _spelled(parameters))
    as_bytes = _BYTES + whole
    if essence == "application/json" or essence.endswith("+json"):
        return _Media(_JSON, _JSON + essence, as_bytes, b"")  # RFC 8259 §11: no parameters
    if essence == "application/x-www-form-urlencoded":
        return _Media(_FORM, _FORM + whole, as_bytes, b"")
    boundaries = [value for name, value in parameters or () if name == "boundary"]
    if parameters and essence.startswith("multipart/") and _is_boundary(boundaries):
        others = [parameter for parameter in parameters if parameter[0] != "boundary"]
        as_read = _MULTIPART + essence + _spelled(others)
        return _Media(_MULTIPART, as_read, as_bytes, boundaries[0].encode("ascii"))
    return _Media(_BYTES, "", as_bytes, b"")


def _unread(content_type: bytes) -> _Media:
    """What is said of a body whose content type is not taken apart."""
    return _Media(_BYTES, "", _BYTES + content_type.decode("latin-1"), b"")


_WORD = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_parameter = re.compile(
    rf'[ \t]*(?:({_WORD})=(?:({_WORD})|"((?:[^"\\]|\\.)*+)"))?[ \t]*(?:;|\Z)'
).match


def _parameters_of(text: str) -> list[tuple[str, str]] | None:
    """The parameters in *text* (RFC 9110 §5.6.6), names in lower case; None if it is garbled."""
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
    """*body*, and what is compared of it; None where that is the body itself."""
    if media.kind is _BYTES:
        return body, None
    if media.kind is _MULTIPART:
        chunks = (body,) if isinstance(body, bytes) else body
        return body, _without_boundary(chunks, media.boundary)
    if not isinstance(body, bytes):
        body = _gathered(body)
    if not isinstance(body, bytes) or not 0 < len(body) <= PARSED_BYTES_MAX:
        return body, None
    return body, canonical_json(body, ignore) if media.kind is _JSON else _canonical_form(body)


def _gathered(chunks: Iterable[bytes]) -> Body:
    """All of *chunks* in one piece, or still in several if that is too much to parse."""
    iterator = iter(chunks)
    gathered: list[bytes] = []
    size_bytes = 0
    for chunk in iterator:
        gathered.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > PARSED_BYTES_MAX:
            return chain(gathered, iterator)
    return b"".join(gathered)


_stray_percent = re.compile(rb"%(?![0-9A-Fa-f]{2})").search


def _canonical_form(body: bytes) -> bytes | None:
    """The fields of a form, decoded and in order; None if it is garbled or has too many."""
    if body.count(b"&") >= FORM_FIELDS_MAX or _stray_percent(body) is not None:
        return None
    fields = [field.partition(b"=") for field in body.replace(b"+", b" ").split(b"&") if field]
    return _framed((unquote_to_bytes(name), unquote_to_bytes(value)) for name, _, value in fields)


def _framed(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%d,%d;%b%b" % (len(one), len(two), one, two) for one, two in pairs])


# What stands for the boundary, and for a byte in the body that looks like the beginning of it.
_MARK = b"\x01\x02"
_ESCAPE = b"\x01"
_ESCAPED = b"\x01\x01"


def _without_boundary(chunks: Iterable[bytes], boundary: bytes) -> Iterator[bytes]:
    """
    A multipart body with a mark for its boundary, whatever that was; all else byte by byte.

    Clients draw a fresh boundary for every attempt, and that is all that changes in an honest
    retry. A garbled body has its marks in odd places and is compared as it is.
    """
    delimiter = b"--" + boundary
    held_bytes = len(delimiter) - 1  # the next chunk may complete a delimiter that begins here
    tail = b""
    for chunk in chunks:
        *settled, last = (tail + chunk.replace(_ESCAPE, _ESCAPED)).split(delimiter)
        settled.append(last[:-held_bytes])
        yield _MARK.join(settled)
        tail = last[-held_bytes:]
    yield tail
