"""The floor over HTTP: the least a middleware has to do, written by hand.

A dictionary or a bare grouped writer, a digest of the body, the response kept and given back.
No leases, no waiting, no limits, no scopes, no problem documents: what is missing here is what the
product is for, and the distance between the two is what it costs.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Writer(Protocol):
    """Writes what has gathered; one of `floors.py` or `grouped.py`."""

    def insert(self, id: bytes, fingerprint: bytes) -> Awaitable[None]:
        """Claim, durably."""
        ...

    def update(self, id: bytes, response: bytes) -> Awaitable[None]:
        """Complete, durably."""
        ...


OpenWriter = Callable[[], Awaitable[Writer]]

REPLAYED = (b"idempotent-replayed", b"true")


class _Kept(NamedTuple):
    fingerprint: bytes
    start: Message
    body: Message


class HandMade:
    """Guards an ASGI application with next to nothing; in memory only, where there is no writer."""

    def __init__(self, app: App, open_writer: OpenWriter | None = None) -> None:
        self.app = app
        self.open_writer = open_writer
        self.kept: dict[bytes, _Kept | None] = {}
        self.opening: asyncio.Future[Writer] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Replay what is known, else execute and keep."""
        headers = scope.get("headers", ())
        key = next((value for name, value in headers if name == b"idempotency-key"), None)
        if key is None:
            await self.app(scope, receive, send)
            return
        request = await receive()
        id = hashlib.blake2b(key, digest_size=16).digest()
        fingerprint = hashlib.blake2b(request["body"], digest_size=16).digest()
        if id in self.kept:
            await self._replay(self.kept[id], fingerprint, send)
        elif self.open_writer is None:
            self.kept[id] = None
            self.kept[id] = kept = await self._execute(scope, request, fingerprint)
            await send(kept.start)
            await send(kept.body)
        else:
            if self.opening is None:  # the first of all requests opens it, and the others wait
                self.opening = asyncio.ensure_future(self.open_writer())
            writer = await self.opening
            await writer.insert(id, fingerprint)
            kept = await self._execute(scope, request, fingerprint)
            await writer.update(id, kept.body["body"])
            await send(kept.start)
            await send(kept.body)

    async def _replay(self, kept: _Kept | None, fingerprint: bytes, send: Send) -> None:
        if kept is None or kept.fingerprint != fingerprint:
            await send({"type": "http.response.start", "status": 409, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await send({**kept.start, "headers": [*kept.start["headers"], REPLAYED]})
        await send(kept.body)

    async def _execute(self, scope: Scope, request: Message, fingerprint: bytes) -> _Kept:
        messages: list[Message] = []

        async def receive() -> Message:
            return request

        async def take(message: Message) -> None:
            messages.append(message)

        await self.app(scope, receive, take)
        start, body = messages
        return _Kept(fingerprint, start, body)
