"""The floor over HTTP: the least that a middleware has to do.

A dictionary, a digest of the body, and the response kept and returned. It has no leases, no
waiting, no limits, no scopes and no problem documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REPLAYED = (b"idempotent-replayed", b"true")


class _Kept(NamedTuple):
    fingerprint: bytes
    start: Message
    body: Message


class FloorMiddleware:
    """Keeps responses of an ASGI application in memory."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.kept: dict[bytes, _Kept | None] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Replay a kept response, or execute and keep it."""
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
            return
        self.kept[id] = None
        self.kept[id] = kept = await self._execute(scope, request, fingerprint)
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

        async def collect(message: Message) -> None:
            messages.append(message)

        await self.app(scope, receive, collect)
        start, body = messages
        return _Kept(fingerprint, start, body)
