"""Responses: the bytes that a record stores, and how a replay is made from them.

A retry gets the first answer verbatim: its status, its body and those headers that describe the
answer, not one message on one connection. The first byte names the format, so that later releases
can read what this one wrote.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from coatcheck.errors import Unreadable

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]


class Response(NamedTuple):
    """A whole answer; header names are lower case."""

    status: int
    headers: Headers
    body: bytes


# RFC 9110 §15: responses with these statuses have no body.
NO_CONTENT = frozenset({204, 205, 304})

# Headers of one message, one connection or one moment (RFC 9110 §7.6.1, RFC 9111 §3.1), and
# Set-Cookie, which only one client may get. Content-Length is computed for each replay.
_NOT_KEPT = frozenset(
    b"""connection keep-alive proxy-connection te trailer transfer-encoding upgrade
    proxy-authenticate proxy-authorization proxy-authentication-info
    date age server via warning set-cookie set-cookie2 content-length alt-svc
    server-timing traceparent tracestate traceresponse x-request-id x-correlation-id""".split()
)


# --- the stored bytes -----------------------------------------------------------------------
# The first byte names what follows: an HTTP response, a JSON value or bytes.
#   response: status (2 bytes), number of headers (varint), headers, body
#   header:   code of a common name or 0 and the name; then the value
# Common names and whole common headers take one byte, so that a record takes little more room than
# its body. The tables may only grow at their ends: stored records refer to them.

_RESPONSE, _JSON, _BYTES = 1, 2, 3
# Written by stores that compress or encrypt; see stores/encryption.py. SEALED differs from all
# others in several bits, so that one flipped bit on a disk does not turn it into another kind.
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
    """*response* as a record stores it."""
    status, headers, body = response
    dropped = _NOT_KEPT
    for name, value in headers:
        if name == b"connection":  # it names further headers of this one connection
            dropped = dropped.union(token.strip().lower() for token in value.split(b","))
    count, kept = 0, b""
    for name, value in headers:
        if name not in dropped:
            count += 1
            kept += _COMMON_CODES.get((name, value)) or _encoded(name, value)
    counted = b"%c" % count if count < 0x80 else _varint(count)
    return b"%c%c%c%b%b%b" % (_RESPONSE, status >> 8, status & 0xFF, counted, kept, body)


def _encoded(name: bytes, value: bytes) -> bytes:
    code = _NAME_CODES.get(name, 0)
    spelled = b"" if code else _varint(len(name)) + name
    return b"%c%b%b%b" % (code, spelled, _varint(len(value)), value)


def decode_response(blob: bytes) -> Response:
    """The response in *blob*, compressed or not; raises `Unreadable`."""
    try:
        return _decoded_response(decompressed(blob) if blob[0] == COMPRESSED else blob)
    except IndexError as error:
        raise Unreadable("the stored response is damaged: it ends too early") from error


def _decoded_response(blob: bytes) -> Response:
    if blob[0] != _RESPONSE:
        raise Unreadable("the stored bytes are not a response")
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


_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode_value(value: Any) -> bytes | None:  # noqa: ANN401 - any result of a user's function
    """*value*, a function's result, as a record stores it; None if it is neither JSON nor bytes."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return b"\x03" + bytes(value)
    try:
        return b"\x02" + _to_json(value).encode()
    except (TypeError, ValueError, RecursionError):
        return None


def decode_value(blob: bytes) -> Any:  # noqa: ANN401 - any result of a user's function
    """The value in *blob*; raises `Unreadable`."""
    kind = blob[0] if blob else None
    if kind not in (_JSON, _BYTES):
        raise Unreadable("the stored bytes are not the result of a function")
    try:
        return blob[1:] if kind == _BYTES else json.loads(blob[1:].decode())
    except ValueError as error:
        raise Unreadable(f"the stored result is damaged: {error}") from error


def decompressed(blob: bytes) -> bytes:
    """*blob* before a store compressed it; raises `Unreadable`."""
    assert blob[0] == COMPRESSED
    try:
        return zlib.decompress(blob[1:])
    except zlib.error as error:
        raise Unreadable(f"the compressed response is damaged: {error}") from error


def outline_of(blob: bytes) -> tuple[int | None, int]:
    """The status of the response in *blob*, or None, and its size in bytes: for operators."""
    try:
        if blob[:1] == b"%c" % COMPRESSED:
            blob = decompressed(blob)
        if blob[:1] == b"%c" % _RESPONSE:
            response = decode_response(blob)
            return response.status, len(response.body)
    except Unreadable:
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


# --- replays --------------------------------------------------------------------------------


def for_client(response: Response, accept_encoding: bytes | None) -> Response | None:
    """
    *response* in a coding that this client accepts; None if that is not possible.

    The first client may have accepted gzip, and this one may not (RFC 9110 §12.5.3). Then the body
    is decoded, its entity tag becomes weak, and digests and signatures of the coded bytes are left
    out. A client that sends no `Accept-Encoding` (None) accepts any coding.
    """
    if accept_encoding is None:
        return response
    coding = b""
    for name, value in response.headers:
        if name == b"content-encoding":
            coding = value.strip().lower()
    if coding in (b"", b"identity") or _accepts(accept_encoding, coding):
        return response
    body = _decoded(response.body, coding)
    if body is None:
        return None
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
    """*body* without its coding; None if it is damaged or the coding is not known."""
    # 47: zlib or gzip by their own headers; -15: bare deflate, which some servers send.
    window_bits = {b"gzip": (47,), b"x-gzip": (47,), b"deflate": (47, -15)}.get(coding, ())
    for bits in window_bits:
        try:
            return _inflated(body, bits)
        except zlib.error:
            continue
    return None


def _inflated(body: bytes, bits: int) -> bytes:
    """All members of *body*: gzip may have several (RFC 1952 §2.2), each of them complete."""
    parts: list[bytes] = []
    while body:
        member = zlib.decompressobj(bits)
        parts.append(member.decompress(body))
        if not member.eof:
            raise zlib.error("the body ends too early")
        body = member.unused_data.lstrip(b"\0")  # zeros may pad a member
    return b"".join(parts)
