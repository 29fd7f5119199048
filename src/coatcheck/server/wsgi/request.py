"""WSGI requests: read whole before the claim, and then passed to the application as usual."""

from __future__ import annotations

import io
from typing import Any, TypeAlias

from coatcheck.core.policy import Policy
from coatcheck.core.problem import Problem, problem
from coatcheck.server.body import CHUNK_BYTES, Body, BodyReader, body_too_large
from coatcheck.server.request import Request, escaped

Environ: TypeAlias = dict[str, Any]


def _declared_bytes(environ: Environ) -> int | None:
    """The length of the body; None: up to the end of the input; negative: it is not known."""
    declared = environ.get("CONTENT_LENGTH") or ""
    if declared.isdecimal():
        return int(declared.lstrip("0")[:20] or "0")  # 20 digits are too large for any limit
    # A server that decodes chunked bodies says that its input ends by itself.
    if environ.get("wsgi.input_terminated"):
        return None
    return _UNKNOWN if declared or "HTTP_TRANSFER_ENCODING" in environ else 0


_UNKNOWN = -1


def read(environ: Environ, policy: Policy) -> Body | Problem:
    """The whole body and not a byte more: what follows is the next request of the connection."""
    left = _declared_bytes(environ)
    if left is not None and left > policy.body_bytes_max:
        return body_too_large(policy)
    reader = BodyReader(policy)
    source = environ["wsgi.input"]
    while left is None or left > 0:
        chunk = source.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left))
        if not chunk:
            break
        refusal = reader.add(chunk)
        if refusal is None and reader.is_full:
            refusal = reader.spool()
        if refusal is not None:
            return refusal
        left = None if left is None else left - len(chunk)
    if left:
        reader.close()
        unknown = "the length of the body is not known: send a Content-Length"
        cut_off = "the body ended before its announced length"
        return problem("body-incomplete", reason=unknown if left == _UNKNOWN else cut_off)
    return reader.body()


# 64 KiB: a small body is read to its end before a refusal, so that the connection can be kept.
_DRAIN_BYTES_MAX = 64 * 1024


def drain(environ: Environ) -> None:
    """Read a small body that is not used, so that it is not read as the next request."""
    declared = _declared_bytes(environ)
    # A client that expects 100-continue may never send it: the refusal is what it waits for.
    if declared and 0 < declared <= _DRAIN_BYTES_MAX and "HTTP_EXPECT" not in environ:
        environ["wsgi.input"].read(declared)


def give(environ: Environ, body: Body) -> None:
    """Put *body* where the input was that it was read from."""
    if isinstance(body, bytes):
        environ["wsgi.input"], size = io.BytesIO(body), len(body)
    else:
        environ["wsgi.input"], size = body.stream(), body.size
    environ["CONTENT_LENGTH"] = str(size)
    environ.pop("HTTP_TRANSFER_ENCODING", None)


def rewound(request: Request) -> Environ:
    """The environ for the application; a `key=` function or an earlier run has read its input."""
    environ = request.native
    assert isinstance(environ, dict)  # PEP 3333 wants no other mapping
    give(environ, request.body)
    return environ


def request_of(environ: Environ, body: Body) -> Request:
    """The request in *environ*."""
    path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    return Request(
        environ["REQUEST_METHOD"].upper(),
        escaped(path.encode("latin-1")),
        environ.get("QUERY_STRING", "").encode("latin-1"),
        _fields_of(environ),
        body,
        environ,
        environ.get("SCRIPT_NAME", "").encode("latin-1"),
    )


def _fields_of(environ: Environ) -> dict[bytes, bytes]:
    fields = {
        name[5:].replace("_", "-").lower().encode("latin-1", "replace"): bytes_of(value)
        for name, value in environ.items()
        if name.startswith("HTTP_")
    }
    fields[b"content-type"] = bytes_of(environ.get("CONTENT_TYPE", ""))
    return fields


def bytes_of(value: str) -> bytes:
    """*value* as it was sent; some middleware in front may have put in what no client could."""
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")
