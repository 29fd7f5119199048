"""The request as `caller=` and `key=` functions see it: the same over ASGI and WSGI."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from coatcheck.core.response import Headers
from coatcheck.server.body import Body


@dataclass(slots=True)
class Request:
    """
    One request, wholly read: what `caller=` and `key=` functions are called with.

    `request.header(b"x-tenant")` is bytes, `request.json()["order"]` is from the body, and what a
    framework or a server has put beside it is in `request.native`.
    """

    method: str
    path: str  # percent-encoded, in one spelling
    query: bytes
    fields: Mapping[bytes, bytes]  # the headers, names in lower case; see `fields_of`
    body: Body
    native: MutableMapping[str, Any]  # the ASGI scope or the WSGI environ
    root: bytes | str = ""  # where the application is mounted, not escaped
    caller: str | None = None  # what `caller=` returned; None: the default identifies the caller
    caller_name: str = ""  # for operators, if `caller=` returned one
    # The caller's digest and the session, when the request came: a handler may change the session.
    identity: tuple[str, bytes] | None = None

    def header(self, name: bytes) -> bytes:
        """The value of the header *name*, which is in lower case: `b"x-tenant"`; b"" if absent."""
        return self.fields.get(name, b"")

    def json(self) -> Any:  # noqa: ANN401 - whatever the client sent
        """The body as JSON; raises ValueError if it is none."""
        body = self.body
        return json.loads(body if isinstance(body, bytes) else b"".join(body.chunks()))


def escaped(path: bytes) -> str:
    """The decoded *path*, percent-encoded as clients write it."""
    return quote(path, "/:@!$&'()*+,;=")  # RFC 3986 §3.3: what needs no escape


def fields_of(headers: Headers) -> dict[bytes, bytes]:
    """*headers* by name; lines of one name joined as RFC 9110 §5.3 says, cookies as 9113 does."""
    lines: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        lines.setdefault(name, []).append(value)
    return {
        name: (b"; " if name == b"cookie" else b", ").join(values) for name, values in lines.items()
    }
