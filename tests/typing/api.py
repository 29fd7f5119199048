"""How users write it, as type checkers see it: read by mypy and pyright, never run."""

# A lambda in a decorator stands before the function it is for, so nobody knows its types yet.
# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

import httpx2
import requests
from fastapi import APIRouter, FastAPI
from flask import Flask
from litestar import Litestar, post
from starlette.applications import Starlette
from starlette.middleware import Middleware

import coatcheck
import coatcheck.client.requests
from coatcheck import client
from coatcheck.client import httpx2 as our_httpx2
from coatcheck.client.optimistic import AsyncOptimisticQueue, OptimisticQueue
from coatcheck.client.outbox import (
    AsyncOutbox,
    AsyncTicket,
    Done,
    Outbox,
    Pending,
    Refused,
    SendAgain,
    Ticket,
    Unknown,
)
from coatcheck.client.outbox_store import Stored
from coatcheck.errors import CoatcheckError, KeyBusy
from coatcheck.metrics import opentelemetry, prometheus
from coatcheck.openapi import annotate
from coatcheck.saga import AsyncSaga, Retry, Saga, SagaRun, Sagas
from coatcheck.server import asgi, callers, fastapi, keys, litestar, starlette, wsgi
from coatcheck.server import django as our_django
from coatcheck.server.fastapi import (
    CurrentOperation,
    CurrentSyncOperation,
    OptionalOperation,
    idempotent,
)
from coatcheck.server.flask import Coatcheck, current_operation
from coatcheck.server.request import Request
from coatcheck.testing import (
    LossyNetwork,
    TimedEngine,
    assert_every_unsafe_route_takes_a_key,
    assert_idempotent,
    assert_idempotent_async,
    new_operation,
    next_attempt_of,
)
from coatcheck.testing import Request as TestedRequest
from coatcheck.verify import crash


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
coatcheck.Policy(patience="5s", unrecorded="answer")
coatcheck.Policy(mode="transaction", transaction_retries=3)
coatcheck.Policy(recovery="manual", in_flight="202")
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


async def ask_provider_async(operation: coatcheck.Operation) -> coatcheck.Happened:
    """It may be async, and sees what was noted."""
    for note in operation.notes:
        assert_type(note.at_ms, int)
        assert_type(note.attempt, int)
    return coatcheck.Happened(value={"charge": operation.fence})


coatcheck.Policy(recovery="reconcile", reconcile=ask_provider)
coatcheck.Policy.preset("payments", reconcile=ask_provider_async)

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


# -------------------------------------------------------------------- what a handler writes down


def take_steps(operation: coatcheck.Operation, order: Order) -> int:
    """In sync code."""
    operation.note({"about to charge": order.cents})
    charged = operation.step("charge", place, order, at_most_once=True, probe=ask_provider)
    assert_type(charged, int)
    operation.step("ship", lambda: b"shipped")
    operation.progress(0.5, "half of it")
    operation.progress(words="packing")
    assert_type(operation.steps, Sequence[str])
    return charged


async def take_steps_async(operation: coatcheck.AsyncOperation, order: Order) -> int:
    """The same words with `await`."""
    await operation.note("about to charge")
    charged = await operation.step("charge", place_async, order, probe=ask_provider_async)
    assert_type(charged, int)
    assert_type(await operation.step("ship", place, order, at_most_once=True), int)
    await operation.progress(1)
    know_the_claim(operation)
    return charged


def know_the_claim(operation: coatcheck.Operation) -> None:
    """Who it is, whether it is still ours, and what others may be given."""
    assert_type(operation.fence, int)
    assert_type(operation.derive("charge"), str)
    assert_type(operation.is_lost, bool)
    assert_type(operation.is_in_doubt, bool)
    operation.on_lost(lambda: None)
    operation.resumable()
    assert_type(operation.reference, str)
    assert_type(operation.key, str)
    assert_type(operation.label, str)
    assert_type(operation.attempt, int)
    if operation.is_lost:
        raise coatcheck.Resumable("nothing has been sent yet")


def handle_trouble(error: CoatcheckError) -> str:
    """What can go wrong in the middle."""
    if isinstance(error, coatcheck.ClaimLost | coatcheck.StepInDoubt | coatcheck.StepsChanged):
        return str(error)
    if isinstance(error, coatcheck.NotResolved) and error.record is not None:
        return str(error.record.state)
    return ""


# ------------------------------------------------------------------------------------ in doubt


def decide(engine: coatcheck.Engine, order: Order) -> None:
    """As a person has found out."""
    happened = coatcheck.Happened(status=201, body=b"charged")
    record = engine.resolve("7D3F-92AB-1C4E", happened, by="ada", why="in the bank list")
    assert_type(record, coatcheck.Record)
    engine.resolve(record.id, coatcheck.DidNotHappen(), by="ada", why="not there", abandoned=True)
    assert_type(engine.rerun("7D3F-92AB-1C4E", place, order, by="ada", why="it was lost"), int)
    engine.resolve("7D3F", coatcheck.Unknown(), by="ada", why="?")  # type: ignore[arg-type]  # nothing to decide


async def decide_async(engine: coatcheck.AsyncEngine, order: Order) -> None:
    """The same words with `await`."""
    happened = coatcheck.Happened(value=7)
    record = await engine.resolve("7D3F-92AB-1C4E", happened, by="ada", why="in the bank list")
    assert_type(record, coatcheck.Record)
    rerun = engine.rerun(record.id, place_async, order, by="ada", why="it was lost")
    assert_type(await rerun, int)


# ------------------------------------------------------------------- long work and transactions


async def answer_first(operation: coatcheck.AsyncOperation, queue: list[str]) -> None:
    """The client is told to ask later; the work goes on here, or elsewhere."""
    await operation.accept()
    queue.append(await operation.defer(lease="10m"))


def answer_first_over_wsgi(operation: coatcheck.Operation, queue: list[str]) -> None:
    """The same in a thread."""
    operation.accept()
    queue.append(operation.defer(timedelta(minutes=10)))


def work_off(engine: coatcheck.Engine, handed: str, order: Order) -> None:
    """What was handed over ends as the response of its request."""
    response = engine.run_deferred(handed, place, order, policy=coatcheck.Policy(recovery="manual"))
    assert_type(response, coatcheck.Response)
    assert_type(response.status, int)


async def work_off_async(engine: coatcheck.AsyncEngine, handed: str, order: Order) -> None:
    """The same words with `await`."""
    assert_type(await engine.run_deferred(handed, place_async, order), coatcheck.Response)


def commit_at_once(engine: coatcheck.Engine, order: Order, connection: object) -> None:
    """What the function writes and its record are one commit."""
    paid = engine.transaction("order-42", place, order, connection=connection, scope="orders")
    assert_type(paid, int)


async def commit_at_once_async(engine: coatcheck.AsyncEngine, order: Order) -> None:
    """The same words with `await`."""
    assert_type(await engine.transaction("order-42", place_async, order), int)


# ------------------------------------------------------------------------------ faults on purpose

injector = crash.Injector("after step", crash.kill, number=2)
coatcheck.Engine(injector.store(coatcheck.open_store("memory://")), recover_every_s=None)
assert_type(injector.effect(place)(Order("42", 100)), int)


# ---------------------------------------------------------------------------------- operators


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
injector.asgi(guarded_asgi)
guarded_wsgi = wsgi.IdempotencyMiddleware(wsgi_app, store="sqlite:///orders.db")
injector.wsgi(guarded_wsgi)
wsgi.IdempotencyMiddleware(guarded_wsgi, engine=coatcheck.Engine("memory://"))
wsgi.IdempotencyMiddleware(wsgi_app, store="memory://", caller=callers.client_address(proxies=1))


async def user_of(request: Request) -> str:
    """An async caller, which may refuse."""
    if not request.header(b"authorization"):
        raise callers.Refused(401, "who are you?", headers=[("WWW-Authenticate", "Bearer")])
    return "ada"


asgi.IdempotencyMiddleware(
    asgi_app, store="memory://", caller=user_of, session_cookies=["a_*"], session_secret="s"
)
wsgi.IdempotencyMiddleware(wsgi_app, store="memory://", caller=user_of)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
wsgi.IdempotencyMiddleware(
    wsgi_app, store="memory://", caller=callers.jwt({"keys": []}, algorithms=["RS256"], leeway=5)
)

app = FastAPI()
app.add_middleware(fastapi.IdempotencyMiddleware, store="sqlite:///orders.db", policy="payments")
Starlette(middleware=[Middleware(starlette.IdempotencyMiddleware, store="memory://")])
flask_app = Flask("shop")
Coatcheck(flask_app, store="memory://", policy="payments", caller=callers.user)
Coatcheck(secret="s", disabled_by="/etc/disabled").init_app(flask_app)


assert_type(fastapi.idempotent_router(APIRouter(), required=True, window="72h"), APIRouter)
fastapi.idempotent_router(APIRouter(), requird=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
asgi.IdempotencyMiddleware(asgi_app, store="memory://", key=keys.by_content(window="10s"))
wsgi.IdempotencyMiddleware(wsgi_app, store="memory://", key=keys.by_content(timedelta(seconds=5)))
assert_type(
    annotate({"openapi": "3.1.0"}, {("/orders", "POST"): coatcheck.Policy()}), dict[str, Any]
)


@post("/charges")
@litestar.idempotent(required=True)
async def charge_in_litestar(operation: litestar.CurrentOperation) -> str:
    """The operation is a dependency."""
    assert_type(await operation.note("charged"), None)
    return operation.derive("charge")


plugin = litestar.IdempotencyPlugin(store="memory://", policy="payments", key=keys.by_content())
Litestar([charge_in_litestar], plugins=[plugin])
assert_type(plugin.engine, coatcheck.AsyncEngine)


@flask_app.post("/refunds")
@idempotent(required=True)
def refund_in_flask() -> str:
    """The proxy is an operation, and may be called."""
    assert_type(current_operation(), coatcheck.Operation | None)
    return current_operation.derive("refund")


@our_django.idempotent(required=True, mode="transaction")
def refund_in_django(number: int) -> str:
    """A view keeps its signature."""
    assert_type(our_django.current_operation(), coatcheck.Operation | None)
    assert_type(our_django.get_engine(), coatcheck.Engine)
    return str(number)


assert_type(refund_in_django(7), str)


@app.post("/charges", status_code=201)
@idempotent(required=True, window="72h", recovery="reconcile", reconcile=ask_provider)
async def charge(cents: int, operation: CurrentOperation) -> str:
    """A route with a policy of its own keeps its signature."""
    assert_type(operation.derive("charge"), str)
    return f"{operation.reference} {cents}"


@idempotent
async def refund(cents: int, operation: OptionalOperation = None) -> int:
    """Without parentheses; the key is optional."""
    if operation is not None:
        await operation.note("about to refund")
    return cents


@app.post("/invoices")
@idempotent(keep="all", methods=("POST",))
def invoice(operation: CurrentSyncOperation) -> int:
    """In a thread."""
    assert_type(operation.defer("1h"), str)
    return operation.step("charge", place, Order("42", 100))


async def call_the_route(operation: coatcheck.AsyncOperation) -> None:
    """The decorated route can still be called as it is written."""
    assert_type(await charge(100, operation), str)
    assert_type(await refund(cents=100), int)


async def find_the_operation() -> None:
    """Anywhere below a handler."""
    operation = coatcheck.current_async_operation()
    if operation is not None:
        await operation.accept()
    async with coatcheck.AsyncEngine().attempt("order-42", scope="orders") as attempt:
        await attempt.operation.note("about to charge")
        await attempt.complete(Order("42", 100))


# ------------------------------------------------------------------------------------- results


class OrderCodec:
    """An application's own way to store a result."""

    def encode(self, value: Order) -> object:
        """As JSON or bytes."""
        return [value.number, value.cents]

    def decode(self, stored: Any) -> Order:
        """As it was."""
        return Order(*stored)


def find_order(number: str) -> Order:
    """Return what is no JSON."""
    return Order(number, 100)


def store_results(engine: coatcheck.Engine) -> None:
    """The annotation decides, or a codec does."""
    assert_type(engine.run("order-42", find_order, "42"), Order)
    assert_type(engine.run("order-42", find_order, "42", codec=OrderCodec()), Order)
    assert_type(coatcheck.codec_for(Order), coatcheck.Codec[Order])
    assert_type(coatcheck.codec_for(list[Order]), coatcheck.Codec[list[Order]])
    engine.attempt("order-42", scope="orders", codec=coatcheck.codec_for(Order))
    engine.guard(key=str, codec=OrderCodec())(find_order)


# ------------------------------------------------------------------------------------- clients


def charge_as_client() -> None:
    """The clients are those of the libraries, and their actions know the response."""
    budget = client.RetryBudget(10)
    retry = client.RetryPolicy(deadline="10s", attempts_max=3, timeout=2.5, renew_expired=True)
    with our_httpx2.Client(base_url="https://api.example", retry=retry, budget=budget) as http:
        assert_type(http.post("/charges", json={}), httpx2.Response)
        with http.action(reference="order-17") as action:
            response = action.post("/charges", json={})
            assert_type(response, httpx2.Response)
            assert_type(action.key, str | None)
            assert_type(action.attempts, int)
            assert_type(action.was_replayed, bool)
        result = client.result_of(response)
        assert_type(result, client.Result | None)
    our_httpx2.Client(retries=3)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    plain = httpx2.Client(transport=our_httpx2.Transport(preset="stripe"))
    assert_type(plain.post("/charges"), httpx2.Response)
    session = coatcheck.client.requests.Session(preset=client.PRESETS["ietf"], key_version=7)
    assert_type(session.post("https://api.example/charges"), requests.Response)
    assert_type(session.action().post("https://api.example/charges"), requests.Response)


async def charge_as_async_client() -> None:
    """The same on an event loop."""
    async with our_httpx2.AsyncClient(preset="paypal") as http:
        assert_type(await http.post("/charges"), httpx2.Response)
        async with http.action(key="k-1") as action:
            assert_type(await action.post("/charges"), httpx2.Response)


async def submit_actions() -> None:
    """An outbox, and what its tickets know."""
    outbox = Outbox("sqlite:///outbox.db", client=our_httpx2.Client(), server_window="24h")
    ticket = outbox.submit("POST", "/charges", json={"amount": 30}, lane="order-17")
    assert_type(ticket.key, str)
    assert_type(ticket.result(timeout=10), Done | Refused | Pending | Unknown)
    queue = OptimisticQueue(outbox)
    queue.register("put", apply=print, revert=print)
    assert_type(queue.submit("put", "POST", "/charges", json=1), Ticket)
    async_outbox = AsyncOutbox("sqlite:///outbox.db", client=our_httpx2.AsyncClient())
    async_ticket = await async_outbox.submit("POST", "/charges", content=b"")
    assert_type(await async_ticket.result(), Done | Refused | Pending | Unknown)
    assert_type(await async_outbox.retry("k"), bool)
    assert_type(await async_outbox.dead_letters(), list[Stored])
    async_queue = AsyncOptimisticQueue(async_outbox)
    assert_type(await async_queue.submit("put", "POST", "/charges", json=1), AsyncTicket)


def find_charge(action: Stored) -> Done | SendAgain | None:
    """A probe."""
    return SendAgain() if action.calls < 3 else None


async def find_charge_async(action: Stored) -> Refused | None:
    """A probe for an event loop."""
    return Refused(None, action.reason)


def open_outboxes(ring: coatcheck.KeyRing) -> None:
    """An outbox with all that it takes."""
    url = "postgresql://host/db"
    outbox = Outbox(url, client=our_httpx2.Client(), probe=find_charge, keyring=ring)
    assert_type(outbox.retry("k", did_not_happen=True), bool)
    AsyncOutbox(url, client=our_httpx2.AsyncClient(), probe=find_charge_async, lane_wait="1d")


assert_type(coatcheck.plan(coatcheck.Policy(), "48h", rate=50, store="redis"), coatcheck.Plan)


# ------------------------------------------------------------------------------------- testing


async def check_an_application(app: FastAPI, engine: TimedEngine, network: LossyNetwork) -> None:
    """The assertions, and what the fixtures are."""
    request = TestedRequest("POST", "/orders", json={"item": "coat"}, headers={"Accept": "*/*"})
    assert_idempotent(app, request, effects=lambda: 7, at_once=3, same_answer=False)
    assert_idempotent(Flask(""), lambda: request, effects=list[str], interface="wsgi")
    await assert_idempotent_async(app, request, effects=lambda: 7, lifespan=False)
    assert_every_unsafe_route_takes_a_key(app, exceptions=["POST /login"])
    assert_every_unsafe_route_takes_a_key({"paths": {}}, methods={"POST"})
    assert_type(engine.run("order-1", place, Order("1", 2)), int)
    engine.travel("90s")
    engine.travel_past_lease(coatcheck.Policy())
    network.lose_answers(2)
    FastAPI().mount("/", network.asgi(app))
    operation = new_operation(key="order-1", notes=["about to charge"], connection=object())
    assert_type(next_attempt_of(operation), coatcheck.Operation)


# ------------------------------------------------------------------------------------- metrics

metrics = prometheus.Metrics(labels_max=50, label=lambda label: label.lower())
coatcheck.AsyncEngine("memory://", observers=[metrics.observe], listeners=[metrics.listen])
assert_type(metrics.instrument(coatcheck.Engine("memory://")), prometheus.Metrics)


def instruments(
    guarded: asgi.IdempotencyMiddleware, also: wsgi.IdempotencyMiddleware
) -> prometheus.Metrics:
    """A middleware stands for its engine."""
    opentelemetry.instrument(guarded, also, guarded.engine)
    return prometheus.instrument(guarded, also)


# --- sagas --------------------------------------------------------------------------------------

sagas = Sagas("sqlite:///sagas.db", retry=Retry(tries=3, pause="1s"), unknown_errors=(OSError,))


@sagas.saga("checkout", key=lambda order: order.number)
async def checkout(saga: AsyncSaga, order: Order) -> int:
    """A saga in async code."""
    charged = await saga.step("charge", place_async, order, undo=print, remembered_for="24h")
    assert_type(charged, int)
    assert_type(await saga.step("count", place, order), int)
    await saga.gather(saga.step("a", place, order), saga.step("b", place_async, order))
    await saga.pivot()
    return charged


@sagas.saga("pack", key=lambda order: order.number)
def pack(saga: Saga, order: Order) -> int:
    """A saga in sync code."""
    saga.pivot()
    return assert_type(saga.step("pack", place, order, retry=3, timeout=timedelta(seconds=3)), int)


async def buy(order: Order) -> None:
    """Both are called like the functions that they are made of."""
    assert_type(await checkout(order), int)
    assert_type(pack(order), int)
    assert_type(sagas.show("42"), SagaRun)
    assert_type(sagas.resume("42", by="ada", why="again"), SagaRun)
    assert_type(pack.picture(), str)
