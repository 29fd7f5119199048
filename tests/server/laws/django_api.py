"""The guarded shop in a Django project, with Django's test clients; one view serves every path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future
from typing import Any

from asgiref.sync import ThreadSensitiveContext

from tests.support import django_project

django_project.set_up()

from django.core.handlers.asgi import ASGIHandler  # noqa: E402 - settings come first
from django.core.handlers.exception import convert_exception_to_response  # noqa: E402
from django.core.handlers.wsgi import WSGIHandler  # noqa: E402
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse  # noqa: E402
from django.test import AsyncClient, Client, override_settings  # noqa: E402
from django.test.client import FakePayload  # noqa: E402

from coatcheck.server.django import IdempotencyMiddleware  # noqa: E402
from coatcheck.server.django.settings import Configuration  # noqa: E402
from coatcheck.server.django.site import Site  # noqa: E402
from tests.support.http import AsgiExchange, Headers, Response, environ_of  # noqa: E402
from tests.support.times import eventually  # noqa: E402

from .api import AsgiApi, WsgiApi  # noqa: E402
from .shop import Call, Said  # noqa: E402

SHOP = "tests.shop"


class DjangoApi(WsgiApi):
    """Through Django's test client."""

    def _open(self, settings: dict[str, Any], middleware: dict[str, Any]) -> None:
        self._site = Site(Configuration(self.store, None, None, settings, middleware))
        self.engine, self.middleware = self._site.engine, self._site.wsgi
        with override_settings(MIDDLEWARE=[]):
            self._handler = WSGIHandler()
        connect(self._handler, self._handler._get_response, self._site)

    def app(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """As `get_wsgi_application` returns it."""
        return self._handler({**environ, SHOP: self.shop}, start_response)

    def start(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Future[Response]:
        return self.workers.submit(self._exchange, method, target, headers, body)

    def _exchange(self, method: str, target: str, headers: Headers, body: bytes) -> Response:
        client = Client(raise_request_exception=False)
        connect(client.handler, client.handler._get_response, self._site)
        said = client.request(**environ_of(method, target, headers, body), **{SHOP: self.shop})
        content = b"".join(said.streaming_content) if said.streaming else said.content
        return self.with_error(Response(said.status_code, lines_of(said), content))

    def abandon(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> None:
        environ = environ_of(method, target, headers, body)
        entered = len(self.shop.effects)
        # A WSGI server notices that the client has gone when it sends the response.
        self.workers.submit(lambda: self.app(environ, lambda *_: None).close())
        eventually(lambda: len(self.shop.effects) > entered)


class AsyncDjangoApi(AsgiApi):
    """Through Django's asynchronous test client."""

    def _open(self, settings: dict[str, Any], middleware: dict[str, Any]) -> None:
        self._site = Site(Configuration(self.store, None, None, settings, middleware))
        self.middleware = self._site.open_async()
        self.engine = self.middleware.engine
        with override_settings(MIDDLEWARE=[]):
            self._handler = ASGIHandler()
        connect(self._handler, self._handler._get_response_async, self._site)

    async def app(self, asgi_scope: dict[str, Any], receive: Any, send: Any) -> None:
        """As `get_asgi_application` returns it."""
        await self._handler({**asgi_scope, SHOP: self.shop}, receive, send)

    def start(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Future[Response]:
        return self.workers.start(self._exchange(method, target, headers, body))

    async def _exchange(self, method: str, target: str, headers: Headers, body: bytes) -> Response:
        client = AsyncClient(raise_request_exception=False)
        connect(client.handler, client.handler._get_response_async, self._site)
        asgi_scope = AsgiExchange(method, target, headers, body).asgi_scope
        given = {SHOP: self.shop, "_body_file": FakePayload(body)}
        async with ThreadSensitiveContext():  # as Django's ASGI handler has one for each request
            said = await client.request(**asgi_scope, **given)
        content = b"".join([c async for c in said]) if said.streaming else said.content
        return self.with_error(Response(said.status_code, lines_of(said), content))

    def abandon(self, method: str, target: str, headers: Headers = (), body: bytes = b"") -> None:
        exchange = AsgiExchange(method, target, headers, body)
        entered = len(self.shop.effects)
        self.workers.start(self.app(exchange.asgi_scope, exchange.receive, exchange.send))
        eventually(lambda: len(self.shop.effects) > entered)
        # The next message is "http.disconnect", at which Django cancels the request.
        self.workers.loop.call_soon_threadsafe(exchange.is_done.set)


def connect(handler: Any, get_response: Any, site: Site) -> None:
    """Put the middleware of *site* into *handler*, as Django does with that of the settings."""
    ours = IdempotencyMiddleware(convert_exception_to_response(get_response), site=site)
    handler._middleware_chain = convert_exception_to_response(ours)
    handler._exception_middleware = [ours.process_exception]
    handler._view_middleware = handler._template_response_middleware = []


def lines_of(said: Any) -> list[tuple[str, str]]:
    cookies = [("set-cookie", cookie.OutputString()) for cookie in said.cookies.values()]
    return [*((name.lower(), value) for name, value in said.items()), *cookies]


def view(request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    """What the shop says; under ASGI Django runs it in a thread of this request's own."""
    given = getattr(request, "scope", request.META)
    said = given[SHOP].handle(_call_of(request))
    return _response_of(said, is_async=given is not request.META)


def _call_of(request: HttpRequest) -> Call:
    headers = {name.lower(): value for name, value in request.headers.items()}
    return Call(request.method, request.path, request.body, headers, request.coatcheck)


def _response_of(said: Said, *, is_async: bool) -> HttpResponse | StreamingHttpResponse:
    chunks = said.chunks
    if not isinstance(chunks, list) or len(chunks) > 1:
        content = _one_by_one(chunks) if is_async else chunks
        response = StreamingHttpResponse(content, status=said.status)
    else:
        response = HttpResponse(chunks, status=said.status)
    del response["Content-Type"]
    for name, value in said.headers:
        if name.lower() == "set-cookie":
            response.cookies.load(value)
        else:
            response[name] = value
    return response


async def _one_by_one(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
