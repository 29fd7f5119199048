"""The floor over HTTP: the least a middleware has to do, written by hand.

A dictionary or a bare grouped SQLite writer, a digest of the body, the response kept and given
back. No leases, no waiting, no limits, no scopes, no problem documents: what is missing here is
what the product is for, and the distance between the two is what it costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.floors import GroupedWriter

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


class HandMade:
    """Guards an ASGI application with next to nothing; *path* None keeps records in memory only."""

    def __init__(self, app: App, path: Path | None = None) -> None:
        self.app = app
        self.path = path
        self.kept: dict[bytes, _Kept | None] = {}
        self.writer: GroupedWriter | None = None

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
        elif self.path is None:
            self.kept[id] = None
            self.kept[id] = kept = await self._execute(scope, request, fingerprint)
            await send(kept.start)
            await send(kept.body)
        else:
            kept = await self._execute_durably(scope, request, id, fingerprint)
            await send(kept.start)
            await send(kept.body)

    async def _replay(self, kept: _Kept | None, fingerprint: bytes, send: Send) -> None:
        if kept is None or kept.fingerprint != fingerprint:
            await send({"type": "http.response.start", "status": 409, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await send({**kept.start, "headers": [*kept.start["headers"], REPLAYED]})
        await send(kept.body)

    async def _execute_durably(
        self, scope: Scope, request: Message, id: bytes, fingerprint: bytes
    ) -> _Kept:
        assert self.path is not None
        if self.writer is None:
            self.writer = GroupedWriter(self.path)
        await self.writer.insert(id, fingerprint)
        kept = await self._execute(scope, request, fingerprint)
        await self.writer.update(id, kept.body["body"])
        return kept

    async def _execute(self, scope: Scope, request: Message, fingerprint: bytes) -> _Kept:
        messages: list[Message] = []

        async def receive() -> Message:
            return request

        async def take(message: Message) -> None:
            messages.append(message)

        await self.app(scope, receive, take)
        start, body = messages
        return _Kept(fingerprint, start, body)
