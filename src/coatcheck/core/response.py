"""Responses: the bytes that a record stores, and how a replay is made from them.

A retry gets the first answer verbatim: its status, its body and those of its headers that describe
the answer and not one message on one connection. The stored bytes are versioned, so that the next
release can read what this one wrote.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from coatcheck.core.json_spelling import speller
from coatcheck.errors import Unreadable

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]


class Response(NamedTuple):
    """A whole answer; header names are lower case."""

    status: int
    headers: Headers
    body: bytes


# RFC 9110 §15: nothing follows the headers of these.
NO_CONTENT = frozenset({204, 205, 304})

# Headers of one message, one connection or one moment (RFC 9110 §7.6.1, RFC 9111 §3.1), and
# Set-Cookie, which must reach one client once. Content-Length is made anew for each replay.
_NOT_KEPT = frozenset(
    b"""connection keep-alive proxy-connection te trailer transfer-encoding upgrade
    proxy-authenticate proxy-authorization proxy-authentication-info
    date age server via warning set-cookie set-cookie2 content-length alt-svc
    server-timing traceparent tracestate traceresponse x-request-id x-correlation-id""".split()
)


def _end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """*headers* without `Connection` and what it names: those are of this connection only."""
    named = {b"connection"}
    for name, value in headers:
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return [header for header in headers if header[0] not in named]


# --- the stored bytes -----------------------------------------------------------------------
# One byte says what follows: an HTTP response, a JSON value or bytes.
#   response: status (2 bytes), number of headers (varint), headers, body
#   header:   code of a common name or 0 and the name; then the value
# Common names and whole common headers take one byte, because a record should cost little more
# than the body it keeps. The tables only ever grow at their ends: old records refer to them.

_RESPONSE, _JSON, _BYTES = 1, 2, 3
# What a store may make of them before it keeps them: see stores/encryption.py.
# Sealed is far from all others: no single bit that flips on a disk makes one of them of it.
COMPRESSED, SEALED = 4, 0xA5
PACKED = (b"\x04", b"\xa5")
KINDS = frozenset((_RESPONSE, _JSON, _BYTES, COMPRESSED, SEALED))
_COMMON = (
    (b"content-type", b"application/json"),
    (b"content-type", b"application/problem+json"),
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-type", b"application/json; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"vary", b"Accept-Encoding"),
    (b"content-encoding", b"gzip"),
)
_COMMON_CODES = {header: bytes((0x80 | code,)) for code, header in enumerate(_COMMON)}
_NAMES = (
    b"",
    b"content-type",
    b"location",
    b"etag",
    b"last-modified",
    b"cache-control",
    b"content-language",
    b"content-encoding",
    b"link",
    b"vary",
    b"retry-after",
)
_NAME_CODES = {name: code for code, name in enumerate(_NAMES) if name}


def encode_response(response: Response) -> bytes:
    """The bytes a record keeps of *response*."""
    status, headers, body = response
    kept = []
    for header in headers:
        code = _COMMON_CODES.get(header)
        if code is None:
            name, value = header
            if name in _NOT_KEPT:
                if name == b"connection":
                    return encode_response(Response(status, _end_to_end(headers), body))
                continue
            code = _encoded(name, value)
        kept.append(code)
    head = b"%c%c%c" % (_RESPONSE, status >> 8, status & 0xFF)
    return b"%b%b%b%b" % (head, _varint(len(kept)), b"".join(kept), body)


def _encoded(name: bytes, value: bytes) -> bytes:
    code = _NAME_CODES.get(name, 0)
    spelled = b"" if code else _varint(len(name)) + name
    return b"%c%b%b%b" % (code, spelled, _varint(len(value)), value)


def decode_response(blob: bytes) -> Response:
    """What `encode_response` made *blob* from, also where a store has compressed it since."""
    try:
        return _decoded_response(decompressed(blob) if blob[0] == COMPRESSED else blob)
    except IndexError as error:
        raise Unreadable("what is kept ends in the middle") from error


def _decoded_response(blob: bytes) -> Response:
    if blob[0] != _RESPONSE:
        raise Unreadable("what is kept is no response")
    status = int.from_bytes(blob[1:3], "big")
    count, at = _read_varint(blob, 3)
    headers: list[tuple[bytes, bytes]] = []
    for _ in range(count):
        code = blob[at]
        at += 1
        if code & 0x80:
            headers.append(_COMMON[code & 0x7F])
            continue
        name = _NAMES[code]
        if not code:
            name, at = _read_bytes(blob, at)
        value, at = _read_bytes(blob, at)
        headers.append((name, value))
    return Response(status, headers, blob[at:])


_to_json = speller(allow_nan=False)
_from_json = json.JSONDecoder().raw_decode


def encode_value(value: Any) -> bytes | None:  # noqa: ANN401 - any result of a user's function
    """The bytes a record keeps of a function's result; None if JSON cannot say it."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return b"\x03" + bytes(value)
    try:
        return b"\x02" + _to_json(value).encode()
    except (TypeError, ValueError, RecursionError):
        return None


def decode_value(blob: bytes) -> Any:  # noqa: ANN401 - any result of a user's function
    """What `encode_value` made *blob* from."""
    kind = blob[0] if blob else None
    if kind not in (_JSON, _BYTES):
        raise Unreadable("what is kept is no result of a function")
    try:
        return blob[1:] if kind == _BYTES else _from_json(blob.decode(), 1)[0]
    except ValueError as error:
        raise Unreadable(f"what is kept of a result is damaged: {error}") from error


def decompressed(blob: bytes) -> bytes:
    """What a store had compressed, which every engine can read."""
    assert blob[0] == COMPRESSED
    try:
        return zlib.decompress(blob[1:])
    except zlib.error as error:
        raise Unreadable(f"what was compressed is damaged: {error}") from error


def outline_of(blob: bytes) -> tuple[int | None, int]:
    """What operators may see of *blob*: its status, None for a value, and its size in bytes."""
    try:
        if blob[:1] == b"%c" % COMPRESSED:
            blob = decompressed(blob)
        if blob[:1] == b"%c" % _RESPONSE:
            response = decode_response(blob)
            return response.status, len(response.body)
    except Unreadable:  # then how much of it there is
        pass
    return None, max(0, len(blob) - 1)


def _varint(number: int) -> bytes:
    if number < 0x80:
        return b"%c" % number
    return b"%c%b" % (number & 0x7F | 0x80, _varint(number >> 7))


def _read_varint(blob: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = blob[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return number, at
        shift += 7


def _read_bytes(blob: bytes, at: int) -> tuple[bytes, int]:
    length, at = _read_varint(blob, at)
    return blob[at : at + length], at + length


# --- giving it back -------------------------------------------------------------------------


def for_client(response: Response, accept_encoding: bytes) -> Response | None:
    """
    *response* in a coding this client accepts; None if that cannot be made.

    The first caller may have asked for gzip where this one does not understand it (RFC 9110
    §12.5.3): then the body is decoded, an entity tag that named the coded bytes turns weak, and
    digests of them, with the signatures that may cover those, are left out.
    """
    coding = b""
    for name, value in response.headers:
        if name == b"content-encoding":
            coding = value.strip().lower()
    if coding in (b"", b"identity") or _accepts(accept_encoding, coding):
        return response
    body = _decoded(response.body, coding)
    if body is None:  # who names none takes any (RFC 9110 §12.5.3); who names others cannot read it
        return None if accept_encoding else response
    return Response(response.status, list(_identity_headers(response.headers)), body)


# RFC 9530 §2 and §3, RFC 3230, RFC 1864, RFC 9421; Unencoded-Digest stays true.
_OF_CODED_BYTES = frozenset(
    b"""content-encoding content-digest repr-digest digest content-md5 signature
    signature-input""".split()
)


def _identity_headers(headers: Headers) -> Iterable[tuple[bytes, bytes]]:
    for name, value in headers:
        if name in _OF_CODED_BYTES:
            continue
        weakened = name == b"etag" and not value.startswith(b"W/")
        yield name, b"W/" + value if weakened else value


def _accepts(accept_encoding: bytes, coding: bytes) -> bool:
    """RFC 9110 §12.5.3, with the x- alias of gzip."""
    weights: dict[bytes, bool] = {}
    for member in accept_encoding.lower().split(b","):
        name, *parameters = (part.strip() for part in member.split(b";"))
        refused = any(p.startswith(b"q=") and not p[2:].strip(b"0. ") for p in parameters)
        weights[name.removeprefix(b"x-")] = not refused
    codings = (one.strip().removeprefix(b"x-") for one in coding.split(b","))
    return all(weights.get(one, weights.get(b"*", False)) for one in codings)


def _decoded(body: bytes, coding: bytes) -> bytes | None:
    """*body* without its coding; None if it is broken, or a coding that nobody here knows."""
    # 47: zlib or gzip by their own headers; -15: bare deflate, which some servers send.
    window_bits = {b"gzip": (47,), b"x-gzip": (47,), b"deflate": (47, -15)}.get(coding, ())
    for bits in window_bits:
        try:
            return _inflated(body, bits)
        except zlib.error:
            continue
    return None


def _inflated(body: bytes, bits: int) -> bytes:
    """Every member of *body*, for gzip may have several (RFC 1952 §2.2); none may be cut short."""
    parts: list[bytes] = []
    while body:
        member = zlib.decompressobj(bits)
        parts.append(member.decompress(body))
        if not member.eof:
            raise zlib.error("the body ends in the middle")
        body = member.unused_data.lstrip(b"\0")  # zeros may pad a member
    return b"".join(parts)
