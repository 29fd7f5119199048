"""ASGI requests: read whole before the claim, and then passed to the application as usual."""

from __future__ import annotations

import asyncio
import re
import string
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, TypeAlias

from coatcheck.core.policy import Policy
from coatcheck.core.problem import Problem
from coatcheck.server.body import (
    MEMORY_BYTES_MAX,
    Body,
    BodyReader,
    LargeBody,
    body_too_large,
)
from coatcheck.server.request import Request, escaped

AsgiScope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[AsgiScope, Receive, Send], Awaitable[None]]


async def read(
    fields: dict[bytes, bytes], receive: Receive, policy: Policy
) -> Body | Problem | None:
    """The whole body; the refusal if it is too large; None if the client left."""
    declared = fields.get(b"content-length", b"")
    if declared.isdigit() and int(declared[:20]) > policy.body_bytes_max:
        return body_too_large(policy)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        whole: bytes = message.get("body", b"")
        if len(whole) <= min(MEMORY_BYTES_MAX, policy.body_bytes_max):  # nearly always
            return whole
    reader = BodyReader(policy)
    while message["type"] != "http.disconnect":
        refusal = reader.add(message.get("body", b""))
        if refusal is None and reader.is_full:
            refusal = await asyncio.to_thread(reader.spool)
        if refusal is not None:
            return refusal
        if not message.get("more_body", False):
            return await asyncio.to_thread(reader.body) if reader.is_large else reader.body()
        message = await receive()
    reader.close()
    return None


def request_of(asgi_scope: AsgiScope, fields: dict[bytes, bytes], body: Body) -> Request:
    """The request in *asgi_scope*."""
    raw_path = asgi_scope.get("raw_path")
    if raw_path is None:  # then the path is decoded, and may have line breaks in it
        path = escaped(asgi_scope["path"].encode("utf-8", "surrogatepass"))
    else:
        path = raw_path.decode("latin-1")
        if "?" in path:  # in Litestar's test client; in a path it would be %3F
            path, _, _ = path.partition("?")
        if "%" in path:
            path = _each_escape(_normal, path)
    return Request(
        asgi_scope["method"].upper(),
        path,
        asgi_scope.get("query_string", b""),
        fields,
        body,
        asgi_scope,
        asgi_scope.get("root_path", ""),
    )


_each_escape = re.compile("%[0-9A-Fa-f]{2}").sub
_UNRESERVED = frozenset(string.ascii_letters + string.digits + "-._~")


def _normal(escape: re.Match[str]) -> str:
    """The one spelling of an *escape* in a path (RFC 3986 §6.2.2), as `escaped` writes it."""
    character = chr(int(escape[0][1:], 16))
    return character if character in _UNRESERVED else escape[0].upper()


class BufferedReceive:
    """`receive` for the application, of a body that was read already."""

    __slots__ = ("_body", "_messages")

    def __init__(self, body: Body) -> None:
        self._body = body
        self._messages: Iterator[Message] | None = None  # None: nothing was received yet

    async def receive(self) -> Message:
        """The next piece of the body."""
        if self._messages is None:
            if isinstance(self._body, bytes):
                self._messages = iter(())
                return {"type": "http.request", "body": self._body, "more_body": False}
            self._messages = _messages_of(self._body)
        for message in self._messages:
            return message
        return await self._after()

    async def _after(self) -> Message:
        """The message after the body."""
        return {"type": "http.disconnect"}


class ForwardedReceive(BufferedReceive):
    """The same for a request that is not guarded: then the server's own messages follow."""

    __slots__ = ("_receive",)

    def __init__(self, body: Body, receive: Receive) -> None:
        super().__init__(body)
        self._receive = receive

    async def _after(self) -> Message:
        return await self._receive()


def _messages_of(body: LargeBody) -> Iterator[Message]:
    for chunk in body.chunks():
        yield {"type": "http.request", "body": chunk, "more_body": True}
    yield {"type": "http.request", "body": b"", "more_body": False}


def without_short_cuts(extensions: MutableMapping[str, Any]) -> dict[str, Any]:
    """*extensions* without those that send a response past us, such as a file's path."""
    return {
        name: value for name, value in extensions.items() if not name.startswith("http.response.")
    }
