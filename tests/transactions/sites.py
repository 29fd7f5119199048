"""Small sites behind the middleware, over ASGI and WSGI, and clients for them.

A site calls *place*, a coroutine function that gets the number of an order and returns the answer
and its status.
"""

from __future__ import annotations

import io
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import httpx
import psycopg

from coatcheck.server.asgi import IdempotencyMiddleware as AsgiMiddleware
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from tests.transactions.idioms import drive

Place = Callable[[int], Awaitable[tuple[Any, int]]]


class Answer(NamedTuple):
    """A response; a 500 is what a server makes of an exception."""

    status: int
    body: Any = None
    headers: Any = None

    @property
    def is_replayed(self) -> bool:
        return self.headers is not None and self.headers.get("idempotent-replayed") == "true"


class AsgiSite:
    """
    A site of an `AsyncEngine`.

    *run* runs a coroutine; *look* is called when a response starts, and *seen* has what it returns.
    """

    def __init__(
        self, engine: Any, place: Place, run: Callable[..., Any], look: Callable[[], Any] = bool
    ) -> None:
        self.seen: list[Any] = []
        self._place, self._run, self._look = place, run, look
        self._guarded = AsgiMiddleware(self._app, engine=engine)

    async def _app(self, _asgi_scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        answer, status = await self._place(json.loads(message["body"])["number"])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _watched(self, asgi_scope: Any, receive: Any, send: Any) -> None:
        async def watching(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.seen.append(self._look())
            await send(message)

        await self._guarded(asgi_scope, receive, watching)

    async def posted(self, number: int, key: str = "order-1") -> Answer:
        """The answer to an order."""
        transport = httpx.ASGITransport(self._watched)
        headers = {"Idempotency-Key": key}
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            try:
                response = await client.post("/orders", json={"number": number}, headers=headers)
            except (psycopg.Error, ValueError):
                return Answer(500)
        return Answer(response.status_code, response.json(), response.headers)

    def post(self, *numbers: int, key: str = "order-1") -> Sequence[Answer]:
        """The answers to orders of *numbers*, one after the other."""
        return [self._run(self.posted(number, key)) for number in numbers]


class WsgiSite:
    """The same for an `Engine`."""

    def __init__(
        self, engine: Any, place: Place, _run: object, look: Callable[[], Any] = bool
    ) -> None:
        self.seen: list[Any] = []
        self._place, self._look = place, look
        self._guarded = WsgiMiddleware(self._app, engine=engine)

    def _app(self, environ: Any, start_response: Any) -> list[bytes]:
        number = json.loads(environ["wsgi.input"].read())["number"]
        answer, status = drive(self._place(number))  # type: ignore[arg-type]  # a coroutine
        start_response(f"{status} -", [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]

    def _posted(self, number: int, key: str) -> Answer:
        sent, started = json.dumps({"number": number}).encode(), []
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/orders",
            "QUERY_STRING": "",
            "CONTENT_TYPE": "application/json",
            "CONTENT_LENGTH": str(len(sent)),
            "HTTP_IDEMPOTENCY_KEY": key,
            "wsgi.input": io.BytesIO(sent),
        }

        def start_response(status: str, headers: Any, *_: object) -> None:
            self.seen.append(self._look())
            started.append((int(status[:3]), httpx.Headers(headers)))

        try:
            body = b"".join(self._guarded(environ, start_response))
        except (psycopg.Error, ValueError):
            return Answer(500)
        ((status, headers),) = started
        return Answer(status, json.loads(body), headers)

    def post(self, *numbers: int, key: str = "order-1") -> Sequence[Answer]:
        """The answers to orders of *numbers*, one after the other."""
        return [self._posted(number, key) for number in numbers]
