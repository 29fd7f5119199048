"""Where an exchange runs: in the server's own task, unless something in front may cancel it."""

import asyncio
import socket

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from coatcheck import current_operation
from coatcheck.server.asgi import IdempotencyMiddleware, detach

SERVERS = "RequestResponseCycle.run_asgi"
OWN = "Exchange._run_and_pass_result"
REQUEST = b"POST / HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: %b\r\nConnection: close\r\n\r\n"


async def where(request: Request) -> PlainTextResponse:
    """The name of what the present task runs."""
    task = asyncio.current_task()
    return PlainTextResponse(task.get_coro().__qualname__)


def starlette():
    return Starlette(routes=[Route("/", where, methods=["POST"])])


def fastapi():
    app = FastAPI()
    app.router.routes += starlette().routes
    return app


def guarded(app):
    app.add_middleware(IdempotencyMiddleware, store="memory://")
    return app


def wrapped(app):
    return IdempotencyMiddleware(app, store="memory://")


def behind_a_base_middleware(app):
    async def dispatch(request, call_next):
        return await call_next(request)

    guarded(app).add_middleware(BaseHTTPMiddleware, dispatch=dispatch)
    return app


def behind_another_app(app):
    app = guarded(app)

    async def front(asgi_scope, receive, send) -> None:
        await app(asgi_scope, receive, send)

    return front


class Serving:
    """A real uvicorn on the running event loop."""

    def __init__(self, app, http: str = "httptools") -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=http, lifespan="off", log_level="error")
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None

    async def __aenter__(self):
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listening]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._task
        self._listening.close()

    async def post(self, key: bytes = b"k-1") -> str:
        reader, writer = await asyncio.open_connection(*self._listening.getsockname())
        writer.write(REQUEST % key)
        answer = await reader.read()
        writer.close()
        return answer.decode().rpartition("\r\n")[2]


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize("make", [starlette, fastapi])
@pytest.mark.parametrize("guard", [guarded, wrapped])
def test_an_exchange_that_nothing_cancels_needs_no_task_of_its_own(guard, make, http):
    async def story() -> None:
        async with Serving(guard(make()), http) as server:
            assert await server.post() == SERVERS

    asyncio.run(story())


@pytest.mark.parametrize("guard", [behind_a_base_middleware, behind_another_app])
def test_behind_an_unknown_middleware_an_exchange_has_its_own_task(guard):
    """L11."""

    async def story() -> None:
        async with Serving(guard(starlette())) as server:
            assert await server.post() == OWN

    asyncio.run(story())


def test_a_timeout_in_front_of_a_served_application_does_not_stop_the_work():
    """L11."""

    async def story() -> None:
        calls, may_go_on, is_refused = [], asyncio.Event(), asyncio.Event()

        async def slow(request: Request) -> PlainTextResponse:
            calls.append(request)
            await may_go_on.wait()
            return PlainTextResponse("whole")

        app = guarded(Starlette(routes=[Route("/", slow, methods=["POST"])]))

        async def impatient(asgi_scope, receive, send) -> None:
            try:
                await asyncio.wait_for(app(asgi_scope, receive, send), 0.05)
            except TimeoutError:
                is_refused.set()
                await PlainTextResponse("too slow", 503)(asgi_scope, receive, send)

        async with Serving(impatient) as server:
            assert await server.post() == "too slow"
            may_go_on.set()
            assert await server.post() == "whole"
        assert len(calls) == 1

    asyncio.run(story())


def test_the_operation_has_ended_for_a_middleware_in_front(monkeypatch):
    """The server's task goes on after an exchange, and must not look as if it were still in it."""
    inside, after = [], []

    async def tell(request: Request) -> PlainTextResponse:
        inside.append(current_operation())
        return await where(request)

    guard = guarded(Starlette(routes=[Route("/", tell, methods=["POST"])]))

    async def front(asgi_scope, receive, send) -> None:
        await guard(asgi_scope, receive, send)
        after.append(current_operation())

    # Known to be harmless, so that all of it runs in one task, as behind the framework's own.
    known = detach._HARMLESS | {(__name__, front.__qualname__)}
    monkeypatch.setattr(detach, "_HARMLESS", known)

    async def story() -> None:
        async with Serving(front) as server:
            assert await server.post() == SERVERS

    asyncio.run(story())
    assert inside[0] is not None
    assert after == [None]
