"""The guarded shop in frameworks, each with its own test client; one handler serves every path."""

from __future__ import annotations

import asyncio
import contextvars
from abc import abstractmethod
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import fastapi
import fastapi.testclient
import flask
import litestar
import litestar.testing
import starlette.responses

from coatcheck import Engine
from coatcheck.operation import current_async_operation
from coatcheck.server import fastapi as on_fastapi
from coatcheck.server import flask as on_flask
from coatcheck.server import litestar as on_litestar
from coatcheck.server.asgi import IdempotencyMiddleware
from tests.support.http import AsgiExchange, Headers, Response
from tests.support.times import eventually

from .api import AsgiApi, WsgiApi
from .shop import Call, Said

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
# Routes of their own, because the template of a route is its label.
LABELLED = ("/orders", "/refunds")


class FlaskApi(WsgiApi):
    """Through the Flask extension and Flask's test client."""

    def _open(self, settings: dict[str, Any], middleware: dict[str, Any]) -> None:
        self.engine = Engine(self.store, **settings)
        app = flask.Flask("shop")
        for rule in ("/", *LABELLED, "/<path:path>"):
            app.add_url_rule(rule, view_func=self._view, methods=METHODS)
        on_flask.Coatcheck(app, engine=self.engine, **middleware)
        self.middleware = app.extensions["coatcheck"]
        self._client = app.test_client
        self.app = app.wsgi_app

    def _view(self, path: str = "") -> flask.Response:
        call = flask.request
        headers = {name.lower(): value for name, value in call.headers}
        operation = on_flask.current_operation()
        said = self.shop.handle(Call(call.method, call.path, call.get_data(), headers, operation))
        return flask.Response(said.chunks, said.status, list(said.headers))

    def start(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Future[Response]:
        return self.workers.submit(self._exchange, method, target, headers, body)

    def _exchange(self, method: str, target: str, headers: Headers, body: bytes) -> Response:
        client = self._client(use_cookies=False)
        try:
            said = client.open(
                target, method=method, headers=list(headers), data=body, buffered=True
            )
        except Exception as error:  # noqa: BLE001 - as `exchange_wsgi`
            return Response(500, [], b"", error)
        lines = [(name.lower(), value) for name, value in said.headers]
        return self.with_error(Response(said.status_code, lines, said.data))


class PortalApi(AsgiApi):
    """Through a test client that runs its application on an event loop of its own."""

    _client: Any  # httpx's, in both frameworks

    def _open(self, settings: dict[str, Any], middleware: dict[str, Any]) -> None:
        super()._open(settings, {})
        self.app = self._new_app(middleware)
        self._connect()

    def _connect(self) -> None:
        self._client = self._new_client()
        self._client.__enter__()
        self._client.headers.clear()

    @abstractmethod
    def _new_app(self, middleware: dict[str, Any]) -> Any:
        """The application, guarded by `self.engine`."""

    @abstractmethod
    def _new_client(self) -> Any:
        """The framework's test client."""

    @property
    @abstractmethod
    def _portal(self) -> Any:
        """Calls functions on the event loop of the test client."""

    def start(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Future[Response]:
        return self.workers.submit(self._exchange, method, target, headers, body)

    def _exchange(self, method: str, target: str, headers: Headers, body: bytes) -> Response:
        sent = [(name, value.encode("latin-1")) for name, value in headers]
        try:
            said = self._client.request(method, target, headers=sent, content=body)
        except Exception as error:  # noqa: BLE001 - as `AsgiExchange`
            return Response(500, [], b"", error)
        raw = said.headers.raw
        lines = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw]
        return Response(said.status_code, lines, said.content)

    def abandon(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> None:
        entered = len(self.shop.effects)
        running = self._portal.start_task_soon(self._run, method, target, headers, body)
        eventually(lambda: len(self.shop.effects) > entered)
        running.cancel()

    async def _run(self, method: str, target: str, headers: Headers, body: bytes) -> None:
        await AsgiExchange(method, target, headers, body).run(self.app)

    def close(self) -> None:
        self._portal.call(self.engine.close)
        self._client.__exit__(None, None, None)

    async def _handle(self, request: Any) -> starlette.responses.Response:
        """Both frameworks take such a response, and both have requests with these attributes."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        path, body = request.scope["path"], await request.body()
        call = Call(request.method, path, body, headers, current_async_operation())
        context = contextvars.copy_context()
        said = await asyncio.wrap_future(self.workers.submit(context.run, self.shop.handle, call))
        return _response_of(said)


def _response_of(said: Said) -> starlette.responses.Response:
    chunks = said.chunks
    if isinstance(chunks, list) and len(chunks) <= 1:
        made = starlette.responses.Response(b"".join(chunks), said.status)
        length = [line for line in made.raw_headers if line[0] == b"content-length"]
    else:
        made = starlette.responses.StreamingResponse(_each(chunks), said.status)
        length = []
    own = [(name.lower().encode(), value.encode("latin-1")) for name, value in said.headers]
    has_length = any(name == b"content-length" for name, _ in own)
    made.raw_headers = [*own, *([] if has_length else length)]
    return made


async def _each(chunks: Any) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


class FastApiApi(PortalApi):
    """Through a marked FastAPI route and Starlette's test client."""

    def _new_app(self, middleware: dict[str, Any]) -> Any:
        app = fastapi.FastAPI(openapi_url=None)
        # The middleware of the laws is not that of FastAPI, which makes it at its first request.
        app.add_middleware(self._noted, engine=self.engine, **middleware)

        async def serve(request: fastapi.Request) -> Any:
            return await self._handle(request)

        marked = on_fastapi.idempotent(methods=self.engine.policy.methods)(serve)
        for path in (*LABELLED, "/{path:path}"):
            app.add_api_route(path, marked, methods=METHODS)
        return app

    def _noted(self, app: Any, **settings: Any) -> IdempotencyMiddleware:
        self.middleware = IdempotencyMiddleware(app, **settings)
        return self.middleware

    def _new_client(self) -> Any:
        return fastapi.testclient.TestClient(self.app)

    @property
    def _portal(self) -> Any:
        return self._client.portal


class LitestarApi(PortalApi):
    """Through a marked Litestar handler and Litestar's test client."""

    def _new_app(self, middleware: dict[str, Any]) -> Any:
        async def serve(request: litestar.Request) -> litestar.types.ASGIApp:
            return await self._handle(request)

        marked = on_litestar.idempotent(methods=self.engine.policy.methods)(serve)
        paths = ["/", *LABELLED, "/{path:path}"]
        route = litestar.route(paths, http_method=METHODS, status_code=200)
        plugin = on_litestar.IdempotencyPlugin(engine=self.engine, **middleware)
        self.middleware = plugin.middleware
        return litestar.Litestar(
            [route(marked)],
            plugins=[plugin],
            openapi_config=None,
            logging_config=None,
        )

    def _exchange(self, method: str, target: str, headers: Headers, body: bytes) -> Response:
        return self.with_error(super()._exchange(method, target, headers, body))

    def _new_client(self) -> Any:
        return litestar.testing.TestClient(self.app)

    @property
    def _portal(self) -> Any:
        return self._client.blocking_portal
