"""How users write it, as type checkers see it: read by mypy and pyright, never run."""

# A lambda in a decorator stands before the function it is for, so nobody knows its types yet.
# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware

import coatcheck
from coatcheck.errors import CoatcheckError, KeyBusy
from coatcheck.server import asgi, callers, fastapi, starlette, wsgi
from coatcheck.server.fastapi import CurrentOperation, idempotent


@dataclass
class Order:
    """Something to place once."""

    number: str
    cents: int


def place(order: Order) -> int:
    """Place it, sync."""
    return order.cents


async def place_async(order: Order) -> int:
    """Place it, async."""
    return order.cents


# ------------------------------------------------------------------------------------ policies

coatcheck.Policy()
coatcheck.Policy(required=True, window="72h", margin=timedelta(hours=1), lease=30, wait=0.5)
coatcheck.Policy(methods={"POST", "PUT"}, ignore=["/sent_at"], include_headers=("X-Tenant",))
coatcheck.Policy(in_flight="409", mismatch=409, keep="all", on_expired="refuse")
coatcheck.Policy(keep=lambda response: response.status < 300)
assert_type(coatcheck.Policy.preset("stripe"), coatcheck.Policy)
assert_type(coatcheck.Policy.preset("payments", window="7d"), coatcheck.Policy)


def ask_provider(
    operation: coatcheck.Operation,
) -> coatcheck.Happened | coatcheck.DidNotHappen | coatcheck.Unknown:
    """What a reconcile function looks like."""
    if operation.attempt == 1:
        return coatcheck.DidNotHappen()
    if not operation.derive("charge"):
        return coatcheck.Unknown()
    return coatcheck.Happened(status=201, headers=[("content-type", "text/plain")], body=b"done")


coatcheck.Policy(recovery="reconcile", reconcile=ask_provider)

# ----------------------------------------------------------------------------------- functions


def with_sync_engine(order: Order) -> None:
    """A guarded function keeps its types."""
    with coatcheck.Engine("sqlite:///orders.db", coatcheck.Policy(window="1h")) as engine:
        assert_type(engine, coatcheck.Engine)
        assert_type(engine.run("order-42", place, order, scope="orders"), int)

        @engine.guard(key=lambda o: o.number, scope="orders")
        def guarded(order: Order) -> int:
            return place(order)

        assert_type(guarded(order=order), int)
        guarded("not an order")  # type: ignore[arg-type]  # and mypy says so


async def with_async_engine(order: Order) -> None:
    """The same words with `await`."""
    async with coatcheck.AsyncEngine("memory://", "payments") as engine:
        assert_type(engine, coatcheck.AsyncEngine)
        assert_type(await engine.run("order-42", place_async, order, scope="orders"), int)

        @engine.guard(key=lambda o: o.number, scope="orders")
        async def guarded(order: Order) -> int:
            return await place_async(order)

        assert_type(await guarded(order=order), int)


def observe(decision: coatcheck.Decision) -> None:
    """An observer counts what became of requests."""
    assert_type(decision.reference, str)


coatcheck.Engine(coatcheck.open_store("memory://"), observers=[observe], secret="s", archive=print)
coatcheck.AsyncEngine(coatcheck.open_async_store("memory://"), sweep_every_s=None)


def when_to_retry(error: CoatcheckError) -> int | None:
    """A refusal says when the same key may come again."""
    if isinstance(error, KeyBusy):
        assert_type(error.reference, str | None)
        return error.retry_after_s
    return None


# ---------------------------------------------------------------------------------------- HTTP

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


async def asgi_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Any ASGI application."""


def wsgi_app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Any WSGI application."""
    return [environ["PATH_INFO"].encode(), start_response("200 OK", [])]


guarded_asgi = asgi.IdempotencyMiddleware(asgi_app, store="sqlite:///orders.db")
asgi.IdempotencyMiddleware(guarded_asgi, engine=coatcheck.AsyncEngine("memory://"))
asgi.IdempotencyMiddleware(
    asgi_app, store="memory://", policy="stripe", caller=callers.user, key=lambda r: r.path
)
guarded_wsgi = wsgi.IdempotencyMiddleware(wsgi_app, store="sqlite:///orders.db")
wsgi.IdempotencyMiddleware(guarded_wsgi, engine=coatcheck.Engine("memory://"))
wsgi.IdempotencyMiddleware(wsgi_app, store="memory://", caller=callers.client_address(proxies=1))

app = FastAPI()
app.add_middleware(fastapi.IdempotencyMiddleware, store="sqlite:///orders.db", policy="payments")
Starlette(middleware=[Middleware(starlette.IdempotencyMiddleware, store="memory://")])


@app.post("/charges", status_code=201)
@idempotent(required=True, window="72h", recovery="reconcile", reconcile=ask_provider)
async def charge(cents: int, operation: CurrentOperation) -> str:
    """A route with a policy of its own keeps its signature."""
    assert_type(operation.derive("charge"), str)
    return f"{operation.reference} {cents}"


async def call_the_route(operation: coatcheck.Operation) -> None:
    """The decorated route can still be called as it is written."""
    assert_type(await charge(100, operation), str)
