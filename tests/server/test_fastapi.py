"""A route's policy beside the route: FastAPI and Starlette."""

from __future__ import annotations  # the annotations below are text, as in many applications

import asyncio
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Mount, Route, Router

from coatcheck import AsyncEngine, DidNotHappen, Misconfigured, Operation, Policy
from coatcheck.server import starlette as on_starlette
from coatcheck.server.fastapi import (
    CurrentOperation,
    CurrentSyncOperation,
    IdempotencyMiddleware,
    OptionalOperation,
    idempotent,
    idempotent_router,
)
from coatcheck.server.routes import policy_of_mark
from coatcheck.stores import Query
from tests.support.http import ORDER, AsgiExchange, Response, with_key


class Charge(BaseModel):
    amount: int


class Shop:
    """A FastAPI application, what its routes did, and a way to send requests."""

    def __init__(self, engine: AsyncEngine | None, app: Any = None) -> None:
        self.app = app or FastAPI()
        self.seen: list[Any] = []
        if engine is not None:
            self.app.add_middleware(IdempotencyMiddleware, engine=engine)

    def send(
        self,
        method: str,
        path: str,
        key: str | None = "k-1",
        body: bytes = b'{"amount": 1}',
        headers=(),
    ) -> Response:
        exchange = AsgiExchange(method, path, with_key(key, headers), body)
        return asyncio.run(exchange.run(self.app))

    def post(self, path: str, key: str | None = "k-1", **rest: Any) -> Response:
        return self.send("POST", path, key, **rest)


@pytest.fixture
def engine():
    engine = AsyncEngine("memory://")
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def shop(engine: AsyncEngine) -> Shop:
    return Shop(engine)


# --- the spelling of the design -------------------------------------------------------------


def test_a_route_has_its_policy_beside_it(shop: Shop):
    """S3, K3: required here, and optional there."""

    @shop.app.post("/charges", status_code=201)
    @idempotent(required=True, window="72h")
    async def charge(body: Charge, operation: CurrentOperation) -> dict[str, Any]:
        shop.seen.append((body.amount, operation.key, operation.attempt))
        return {"reference": operation.reference}

    @shop.app.post("/notes")
    async def note() -> str:
        return "noted"

    assert shop.post("/charges", None).code == "key-missing"
    assert shop.post("/notes", None).status == 200
    first, again = shop.post("/charges"), shop.post("/charges")
    assert first.status == 201
    assert first.body == again.body == b'{"reference":"%b"}' % first.reference.encode()
    assert again.is_replay
    assert shop.seen == [(1, "k-1", 1)]


def test_the_window_of_a_route_is_its_own(shop: Shop, engine: AsyncEngine):
    """T1, S3."""

    @shop.app.post("/short")
    @idempotent(window="2h")
    async def short() -> str:
        return "short"

    @shop.app.post("/long")
    async def long() -> str:
        return "long"

    shop.post("/short")
    shop.post("/long")
    windows = {}
    for record in asyncio.run(engine.store.find(Query())).records:
        windows[record.label] = (record.window_until_ms - record.created_ms) // 3_600_000
    assert windows == {"POST /short": 2, "POST /long": 24}


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_sync_and_async_endpoints_know_their_operation(shop: Shop, kind: str):
    """K5: a sync endpoint runs in a thread of the framework's."""

    async def on_the_loop(operation: CurrentOperation) -> str:
        shop.seen.append(operation.derive("charge"))
        return operation.reference

    def in_a_thread(operation: CurrentSyncOperation) -> str:
        assert operation.note("about to charge") is None
        shop.seen.append(operation.derive("charge"))
        return operation.reference

    endpoint = on_the_loop if kind == "async" else in_a_thread
    shop.app.post("/charges")(idempotent(required=True)(endpoint))
    first, again = shop.post("/charges"), shop.post("/charges")
    assert first.body == again.body == b'"%b"' % first.reference.encode()
    assert len(shop.seen) == 1


def test_a_route_without_its_operation_fails_with_what_is_missing(shop: Shop):
    """K3: where the request brought no key and none was required."""

    @shop.app.post("/charges")
    @idempotent()
    async def charge(operation: CurrentOperation) -> str:
        return operation.reference

    failed = error_of(shop, "/charges", key=None)
    assert "required" in str(failed)
    assert shop.post("/charges").status == 200


def test_a_route_with_an_optional_key_may_have_no_operation(shop: Shop):
    """K3, R5: and a decorator without settings needs no parentheses."""

    @shop.app.post("/charges")
    @idempotent
    async def charge(operation: OptionalOperation) -> str:
        if operation is None:
            return "unguarded"
        assert isinstance(operation, Operation)
        await operation.note("about to charge")
        return operation.key

    assert [shop.post("/charges", key).body for key in (None, "k-1")] == [b'"unguarded"', b'"k-1"']


def test_settings_are_given_to_a_route_by_name():
    for given in ("payments", Policy()):
        with pytest.raises(Misconfigured, match=r"settings by name: @idempotent\(required=True\)"):
            idempotent(given)


def error_of(shop: Shop, path: str, key: str | None = "k-1") -> Exception:
    with pytest.raises(Misconfigured) as caught:
        shop.post(path, key)
    return caught.value


# --- which routes ---------------------------------------------------------------------------


def test_a_route_can_be_taken_out(shop: Shop):
    """S3: `methods=()`."""

    @shop.app.post("/events")
    @idempotent(methods=())
    async def event() -> str:
        shop.seen.append(1)
        return "ok"

    assert shop.post("/events").all("idempotency-reference") == []
    shop.post("/events")
    assert shop.seen == [1, 1]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH"])
def test_a_route_with_any_unsafe_method_can_be_put_in(shop: Shop, method: str):
    """S3: whatever the middleware's own methods are; other routes keep theirs."""

    @shop.app.api_route("/in", methods=[method])
    @idempotent()
    async def put_in() -> str:
        shop.seen.append("in")
        return "ok"

    @shop.app.api_route("/out", methods=["PUT"])
    async def left_out() -> str:
        shop.seen.append("out")
        return "ok"

    for path, used in (("/in", method), ("/out", "PUT")):
        shop.send(used, path)
        shop.send(used, path)
    assert shop.seen == ["in", "out", "out"]


def test_a_marked_route_serves_its_safe_methods_as_well(shop: Shop):
    """S3: and before any other request came."""

    @shop.app.api_route("/charges", methods=["GET", "POST"])
    @idempotent(required=True)
    async def charges(request: Request) -> str:
        shop.seen.append(request.method)
        return request.method

    assert shop.send("GET", "/charges", None).body == b'"GET"'
    assert shop.send("POST", "/charges", None).status == 400
    assert shop.send("POST", "/charges").body == b'"POST"'
    assert shop.seen == ["GET", "POST"]


def test_the_paths_of_one_route_have_keys_of_their_own(shop: Shop):
    """S1: as those of a route without a mark."""

    @shop.app.post("/orders/{number}/pay")
    @idempotent()
    async def pay(number: int) -> int:
        shop.seen.append(number)
        return number

    assert shop.post("/orders/1/pay").body == b"1"
    assert shop.post("/orders/1/pay").is_replay
    assert shop.post("/orders/2/pay").body == b"2"
    assert shop.seen == [1, 2]


def test_a_request_from_before_its_route_was_marked_is_replayed(engine: AsyncEngine):
    """S1, L1, R1: the mark arrives with a release, and retries cross it in both directions."""
    served: list[int] = []

    def release(mark: Any) -> Shop:
        shop = Shop(engine)

        async def pay(number: int) -> int:
            served.append(number)
            return number

        shop.app.post("/orders/{number}/pay")(mark(pay))
        return shop

    def unmarked(endpoint: Any) -> Any:
        return endpoint

    marked = idempotent(window="72h")
    first = release(unmarked).post("/orders/1/pay")
    again = release(marked).post("/orders/1/pay")
    assert again.is_replay
    assert (again.body, again.reference) == (first.body, first.reference)
    release(marked).post("/orders/2/pay", "k-2")
    assert release(unmarked).post("/orders/2/pay", "k-2").is_replay
    assert served == [1, 2]


def test_the_record_is_labelled_with_the_template(shop: Shop, engine: AsyncEngine):
    """K5: so that operators see routes, not paths."""

    @shop.app.post("/orders/{number}/pay")
    @idempotent()
    async def pay(number: int) -> int:
        return number

    shop.post("/orders/1/pay")
    (record,) = asyncio.run(engine.store.find(Query())).records
    assert record.label == "POST /orders/{number}/pay"


def test_routers_with_prefixes_keep_the_marks_of_their_routes(shop: Shop):
    """S3: also a router in a router."""
    inner, outer = APIRouter(prefix="/inner"), APIRouter(prefix="/outer")

    @inner.post("/charges/{number}")
    @idempotent(required=True)
    async def charge(number: int) -> int:
        shop.seen.append(number)
        return number

    outer.include_router(inner)
    shop.app.include_router(outer, prefix="/api")
    path = "/api/outer/inner/charges/7"
    assert shop.post(path, None).code == "key-missing"
    assert shop.post(path).body == b"7"
    assert shop.post(path).is_replay
    assert shop.seen == [7]


@pytest.mark.parametrize("kind", ["fastapi", "starlette"])
def test_mounted_applications_keep_the_marks_of_their_routes(shop: Shop, kind: str):
    """S3."""

    @idempotent(required=True)
    async def charge(request: Request) -> PlainTextResponse:
        shop.seen.append(request.url.path)
        return PlainTextResponse("ok")

    if kind == "fastapi":
        below: Any = FastAPI()
        below.post("/charges/{number}")(charge)
    else:
        below = Starlette(routes=[Route("/charges/{number}", charge, methods=["POST"])])
    shop.app.mount("/below", below)
    assert shop.post("/below/charges/1", None).code == "key-missing"
    assert shop.post("/below/charges/1").status == 200
    assert shop.post("/below/charges/1").is_replay
    assert shop.post("/below/charges/2").status == 200
    assert len(shop.seen) == 2


def test_a_mounted_application_can_have_a_middleware_of_its_own(engine: AsyncEngine):
    """S3: it guards what is below it, under its own marks."""
    outer, shop = FastAPI(), Shop(engine)

    @shop.app.post("/charges")
    @idempotent(required=True)
    async def charge() -> str:
        shop.seen.append(1)
        return "ok"

    @outer.post("/charges")
    async def other() -> str:
        return "unguarded"

    outer.mount("/below", shop.app)
    shop.app = outer
    assert shop.post("/below/charges", None).code == "key-missing"
    shop.post("/below/charges")
    assert shop.post("/below/charges").is_replay
    assert not shop.post("/charges").is_replay
    assert shop.seen == [1]


def test_a_refusal_of_the_handler_counts_for_every_guard_around_it(engine: AsyncEngine):
    """L4, S1: two guards with callers of their own; the handler has begun for both of them."""
    seen: list[bytes] = []
    app = FastAPI()

    @app.post("/charges")
    @idempotent
    async def charge(request: Request) -> None:
        seen.append(await request.body())
        raise HTTPException(409, "sold out")

    @app.post("/checked")
    @idempotent
    async def checked(number: int) -> int:
        return number

    inner = IdempotencyMiddleware(app, engine=engine, caller=lambda _request: "inner")
    outer = IdempotencyMiddleware(inner, engine=engine, caller=lambda _request: "outer")

    def post(target: str, body: bytes) -> Response:
        return asyncio.run(AsgiExchange("POST", target, with_key("k"), body).run(outer))

    assert post("/charges", b"1").status == 409
    assert post("/charges", b"1").is_replay
    assert post("/charges", b"2").code == "key-reused"
    assert seen == [b"1"]
    # What is refused before the handler uses up the key of neither.
    assert post("/checked?number=x", b"").status == 422
    assert post("/checked?number=1", b"").status == 200


def test_two_hosts_have_two_policies(engine: AsyncEngine):
    """S3: one path, two hosts, two policies."""
    calls: list[str] = []

    @on_starlette.idempotent(required=True)
    async def strict(request: Request) -> PlainTextResponse:
        return PlainTextResponse("strict")

    async def lax(request: Request) -> PlainTextResponse:
        calls.append("lax")
        return PlainTextResponse("lax")

    app = Starlette(
        routes=[
            Host("pay.example", Router([Route("/", strict, methods=["POST"])])),
            Mount("/", Router([Route("/", lax, methods=["POST"])])),
        ]
    )
    app.add_middleware(on_starlette.IdempotencyMiddleware, engine=engine)
    shop = Shop(None, app)
    for _ in range(2):
        assert shop.post("/", None, headers=[("Host", "notes.example")]).body == b"lax"
        assert shop.post("/", None, headers=[("Host", "pay.example")]).code == "key-missing"
    assert shop.post("/", headers=[("Host", "pay.example")]).body == b"strict"


def test_routes_that_are_added_later_are_found(shop: Shop):
    """S3: an application may grow after its first request."""

    @shop.app.post("/first")
    async def first() -> str:
        return "ok"

    shop.post("/first")

    @shop.app.post("/second")
    @idempotent(required=True)
    async def second() -> str:
        return "ok"

    assert shop.post("/second", None).code == "key-missing"


def test_a_method_that_the_route_does_not_have_is_refused_as_always(shop: Shop):
    """S3: 405 and 404 come from the application."""

    @shop.app.get("/charges")
    async def charges() -> str:
        return "ok"

    @shop.app.post("/marked")
    @idempotent(required=True)
    async def marked() -> str:
        return "ok"

    assert shop.post("/charges").status == 405
    assert shop.post("/nowhere").status == 404
    assert shop.post("/nowhere").is_replay


def test_the_middleware_around_the_application_finds_the_marks(engine: AsyncEngine):
    """S3: `IdempotencyMiddleware(app, …)`, as for any ASGI application."""
    shop = Shop(None)

    @shop.app.post("/charges")
    @idempotent(required=True)
    async def charge() -> str:
        shop.seen.append(1)
        return "ok"

    shop.app = IdempotencyMiddleware(shop.app, engine=engine)
    assert shop.post("/charges", None).code == "key-missing"
    shop.post("/charges")
    assert shop.post("/charges").is_replay
    assert shop.seen == [1]


# --- mistakes -------------------------------------------------------------------------------


def test_a_mark_without_a_middleware_is_an_error_that_helps():
    """S3: it protects nothing, and must not look as if it did."""
    shop = Shop(None)

    @shop.app.post("/charges")
    @idempotent(required=True)
    async def charge() -> str:
        raise AssertionError("unguarded")

    assert "add_middleware(IdempotencyMiddleware" in str(error_of(shop, "/charges"))


@pytest.mark.parametrize(
    "changes",
    [
        {"requierd": True},
        {"window": "soon"},
        {"keep": "some"},
        {"mismatch": 418},
        {"window": "1s"},
        {"recovery": "hope"},
        {"recovery": "reconcile"},
        {"mode": "hope"},
        {"methods": {"GET"}},
        {"ignore": "/sent_at"},
    ],
    ids=str,
)
def test_a_nonsensical_policy_is_refused_where_it_is_written(changes: dict[str, Any]):
    """S3: when the module is imported, not when the first request comes."""
    with pytest.raises(Misconfigured):
        idempotent(**changes)


def test_a_route_cannot_have_a_status_path_of_its_own():
    """S3, L3: its clients would be sent to an address that does not exist."""
    with pytest.raises(Misconfigured, match=r"status_path .*=Policy\(status_path='/how-far/'\)"):
        idempotent(in_flight="202", status_path="/how-far/")


def test_a_route_sends_its_clients_to_the_status_path_of_the_middleware():
    """L3."""
    engine = AsyncEngine("memory://", Policy(status_path="/how-far/"))
    shop = Shop(engine)

    @shop.app.post("/reports", status_code=201)
    @idempotent(in_flight="202")
    async def write(operation: CurrentOperation) -> str:
        await operation.accept()
        return "written"

    address = shop.post("/reports").header("location")
    assert address is not None
    assert address.startswith("/how-far/")
    assert shop.send("GET", address).header("idempotency-reference") is not None
    asyncio.run(engine.close())


def test_a_reconcile_function_implies_recovery_by_reconcile(engine: AsyncEngine):
    """L5: the two knobs belong together."""
    shop = Shop(engine)

    @shop.app.post("/charges")
    @idempotent(reconcile=lambda operation: DidNotHappen())
    async def charge() -> str:
        return "ok"

    assert shop.post("/charges").status == 200


@pytest.mark.parametrize("changes", [{"recovery": "manual"}, {"mode": "transaction"}], ids=str)
def test_a_route_that_must_not_run_twice_refuses_during_an_outage(changes: dict[str, Any]):
    """D2: although the application executes the others unguarded."""
    policy = policy_of_mark(Policy(on_outage="execute"), "POST", changes)
    assert policy.on_outage == "refuse"
    assert policy_of_mark(Policy(on_outage="execute"), "POST", {}).on_outage == "execute"


def test_a_route_can_choose_another_recovery_than_the_application():
    """L5: also a simpler one."""
    policy = Policy(recovery="reconcile", reconcile=lambda operation: DidNotHappen())
    engine = AsyncEngine("memory://", policy)
    shop = Shop(engine)

    @shop.app.post("/charges")
    @idempotent(recovery="retry")
    async def charge() -> str:
        return "ok"

    assert shop.post("/charges").status == 200
    asyncio.run(engine.close())


# --- the rest of the framework --------------------------------------------------------------


def test_a_body_that_does_not_validate_does_not_use_up_its_key(shop: Shop):
    """L4: the handler has not begun, so that a corrected body may follow with the same key."""

    @shop.app.post("/charges")
    @idempotent(recovery="manual", attempts_max=2)
    async def charge(body: Charge) -> int:
        shop.seen.append(1)
        return body.amount

    first = shop.post("/charges", body=b'{"amount": "x"}')
    again = shop.post("/charges", body=b'{"amount": "x"}')
    assert first.status == again.status == 422
    assert not again.is_replay
    assert shop.post("/charges", body=b'{"amount": 1}').status == 200
    assert shop.post("/charges", body=b'{"amount": 1}').is_replay
    assert shop.post("/charges", body=b'{"amount": 2}').code == "key-reused"
    assert shop.seen == [1]


def test_a_dependency_that_refuses_does_not_use_up_the_key(shop: Shop):
    """L4: a 404 of a dependency, which the handler's own 404 would be kept as."""
    known: list[str] = []

    def customer() -> str:
        if not known:
            raise HTTPException(404, "no such customer")
        return known[0]

    @shop.app.post("/charges")
    @idempotent()
    def charge(name: str = Depends(customer)) -> str:
        shop.seen.append(1)
        raise HTTPException(404, f"{name} has no card")

    assert shop.post("/charges").status == 404
    known.append("Ada")
    assert shop.post("/charges").status == 404
    assert shop.post("/charges").is_replay
    assert shop.seen == [1]


def test_an_answer_of_the_handler_itself_is_kept_where_its_mark_cannot_see_it(shop: Shop):
    """L4: the mark above the route's own decorator, and an endpoint that is a class."""

    @idempotent()
    @shop.app.post("/charges")
    async def charge() -> str:
        shop.seen.append(1)
        raise HTTPException(404)

    @idempotent()
    class Refunds(HTTPEndpoint):
        async def post(self, request: Request) -> PlainTextResponse:
            shop.seen.append(2)
            return PlainTextResponse("no", 404)

    shop.app.router.routes.append(Route("/refunds", Refunds))
    for path in ("/charges", "/refunds"):
        assert [shop.post(path).is_replay for _ in range(2)] == [False, True]
    assert shop.seen == [1, 2]


def test_the_openapi_document_shows_the_endpoint_as_it_is(shop: Shop):
    """S3: the mark changes nothing of the signature."""

    @shop.app.post("/charges")
    @idempotent()
    async def charge(body: Charge, operation: CurrentOperation, dry: bool = False) -> int:
        """Charge a card."""
        return 1

    described = shop.app.openapi()["paths"]["/charges"]["post"]
    assert described["description"] == "Charge a card."
    assert [parameter["name"] for parameter in described["parameters"]] == ["dry"]
    assert described["requestBody"]["required"] is True


def test_starlettes_endpoints_are_marked_in_the_same_way(engine: AsyncEngine):
    """S3, K5: the operation is in the scope."""

    @on_starlette.idempotent(required=True)
    async def charge(request: Request) -> PlainTextResponse:
        operation: Operation = request.scope["coatcheck.operation"]
        assert on_starlette.current_operation() is operation
        return PlainTextResponse(operation.reference)

    app = Starlette(routes=[Route("/charges", charge, methods=["POST"])])
    app.add_middleware(on_starlette.IdempotencyMiddleware, engine=engine)
    shop = Shop(None, app)
    first = shop.post("/charges", body=ORDER)
    assert first.body == first.reference.encode()
    assert shop.post("/charges", body=ORDER).is_replay


def test_the_store_can_be_named_where_the_middleware_is_added(tmp_path):
    """D1, L2: the one line of the design, and a second process finds what the first has done."""
    calls: list[int] = []
    for _process in range(2):
        shop = Shop(None)
        shop.app.add_middleware(IdempotencyMiddleware, store=f"sqlite:///{tmp_path}/orders.db")

        @shop.app.post("/orders", status_code=201)
        async def order(body: Charge) -> int:
            calls.append(body.amount)
            return len(calls)

        assert shop.post("/orders", body=b'{"amount": 3}').body == b"1"
        stack = shop.app.middleware_stack
        while not isinstance(stack, IdempotencyMiddleware):
            stack = stack.app
        asyncio.run(stack.engine.close())
    assert calls == [3]


def test_routes_that_were_replaced_are_looked_through_again(engine: AsyncEngine):
    """K3: as a framework does that loads its routes anew, also where they are as many."""

    async def plain(request: Request) -> PlainTextResponse:
        return PlainTextResponse("charged")

    app = Starlette(routes=[Route("/charges", plain, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, engine=engine)
    shop = Shop(None, app)
    assert shop.post("/charges", None).status == 200
    marked = on_starlette.idempotent(required=True)(plain)
    app.router.routes = [Route("/charges", marked, methods=["POST"])]
    assert shop.post("/charges", None).code == "key-missing"


def test_a_mark_above_the_route_does_not_run_unguarded(shop: Shop):
    """K3, S3: the framework has the function without it, so nothing of it would be guarded."""

    @idempotent(required=True)
    @shop.app.post("/charges")
    async def charge() -> None:
        shop.seen.append("charged")

    shop.post("/charges", None)
    assert shop.seen == []


def test_a_class_is_marked_as_a_whole_or_refused(engine: AsyncEngine):
    """S3: what it must not become is a function that answers 405."""

    class Charges(HTTPEndpoint):
        async def post(self, _request: Request) -> PlainTextResponse:
            return PlainTextResponse("charged")

    try:
        marked = on_starlette.idempotent(required=True)(Charges)
    except Misconfigured:
        return
    app = Starlette(routes=[Route("/charges", marked)])
    app.add_middleware(IdempotencyMiddleware, engine=engine)
    shop = Shop(None, app)
    assert shop.post("/charges").body == b"charged"
    assert shop.post("/charges", None).code == "key-missing"


# --- sessions that commit after their yield ---------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_session_of_the_functions_scope_commits_before_its_response_is_recorded(tmp_path, fails):
    """L2: as the how-to says; on the file that the store is in, and where the commit fails."""
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("create table orders (item text)")
    commits = []

    async def session():
        with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
            yield connection
            commits.append(1)
            if fails and len(commits) == 1:
                raise ZeroDivisionError
            connection.commit()

    depends = Depends(session, scope="function")
    shop = Shop(AsyncEngine(f"sqlite:///{path}"))

    @shop.app.post("/orders", status_code=201)
    async def order(connection: Any = depends) -> int:
        connection.execute("insert into orders values ('coat')")
        return len(commits)

    if fails:
        with pytest.raises(ZeroDivisionError):
            shop.send("POST", "/orders")
    first, again = (shop.send("POST", "/orders") for _ in range(2))
    assert (first.status, again.status, again.is_replay) == (201, 201, True)
    with closing(sqlite3.connect(path)) as made:
        assert made.execute("select count(*) from orders").fetchone() == (1,)


# --- policies of routers ----------------------------------------------------------------------


def test_all_routes_of_a_router_have_its_policy(shop: Shop, engine: AsyncEngine):
    """S3, K3: and what a route says itself wins."""
    payments = idempotent_router(APIRouter(prefix="/payments"), required=True, window="72h")

    @payments.post("/charges")
    async def charge(body: Charge, operation: CurrentOperation) -> str:
        shop.seen.append(operation.key)
        return operation.reference

    @payments.put("/refunds/{number}")
    @idempotent(window="1h")
    async def refund(number: int) -> int:
        return number

    @payments.post("/search")
    @idempotent(methods=())
    async def search() -> str:
        return "found"

    outer = APIRouter(prefix="/outer")
    outer.include_router(payments)
    shop.app.include_router(outer, prefix="/api")
    for method, path in (("POST", "/charges"), ("PUT", "/refunds/7")):
        place = f"/api/outer/payments{path}"
        assert shop.send(method, place, None).code == "key-missing"
        assert [shop.send(method, place).is_replay for _ in range(2)] == [False, True]
    assert shop.post("/api/outer/payments/search", None).body == b'"found"'
    assert shop.seen == ["k-1"]
    hours = {}
    for record in asyncio.run(engine.store.find(Query())).records:
        hours[record.label] = (record.window_until_ms - record.created_ms) // 3_600_000
    assert hours == {
        "POST /api/outer/payments/charges": 72,
        "PUT /api/outer/payments/refunds/{number}": 1,
    }


def test_a_refusal_before_an_endpoint_of_a_router_does_not_use_up_the_key(shop: Shop):
    """L4: as on a route with a mark of its own."""
    payments = idempotent_router(APIRouter(), required=True)

    @payments.post("/charges")
    async def charge(body: Charge) -> int:
        shop.seen.append(body.amount)
        return body.amount

    shop.app.include_router(payments)
    assert shop.post("/charges", body=b'{"amount": "much"}').status == 422
    assert shop.post("/charges").body == b"1"
    assert shop.post("/charges").is_replay
    assert shop.seen == [1]


def test_routers_inside_have_policies_of_their_own(shop: Shop):
    """S3: as FastAPI's `route_class`, it is for the routes that are declared on the router."""
    outer = idempotent_router(APIRouter(prefix="/outer"), required=True)
    inner = APIRouter(prefix="/inner")

    @inner.post("/notes")
    async def note() -> str:
        return "noted"

    @outer.post("/charges")
    async def charge() -> str:
        return "charged"

    outer.include_router(inner)
    shop.app.include_router(outer)
    assert shop.post("/outer/charges", None).code == "key-missing"
    assert shop.post("/outer/inner/notes", None).status == 200


def test_a_mounted_application_has_one_policy_for_all_its_routes(shop: Shop):
    """S3: an application of FastAPI's, whose document states it, too."""
    below = idempotent_router(FastAPI(), required=True)

    @below.post("/charges")
    async def charge() -> str:
        shop.seen.append(1)
        return "charged"

    shop.app.mount("/below", below)
    assert shop.post("/below/charges", None).code == "key-missing"
    assert [shop.post("/below/charges").is_replay for _ in range(2)] == [False, True]
    (parameter,) = below.openapi()["paths"]["/charges"]["post"]["parameters"]
    assert (parameter["name"], parameter["required"]) == ("Idempotency-Key", True)


def test_starlettes_routers_and_mounts_have_policies(engine: AsyncEngine):
    """S3: the innermost wins; a route beside them keeps the middleware's policy."""

    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.url.path)

    def route(path: str) -> Route:
        return Route(path, answer, methods=["POST", "PUT"])

    lax = on_starlette.idempotent_router(Mount("/lax", routes=[route("/x")]), required=False)
    strict = on_starlette.idempotent_router(
        Mount("/strict", app=Router([route("/x"), lax])), required=True
    )
    app = Starlette(routes=[strict, route("/plain")])
    app.add_middleware(IdempotencyMiddleware, engine=engine)
    shop = Shop(None, app)
    assert shop.post("/strict/x", None).code == "key-missing"
    assert shop.post("/strict/lax/x", None).status == 200
    assert shop.post("/plain", None).status == 200
    for path in ("/strict/x", "/strict/lax/x"):
        assert [shop.send("PUT", path).is_replay for _ in range(2)] == [False, True]
    assert not any(shop.send("PUT", "/plain").is_replay for _ in range(2))


def test_the_methods_of_a_class_have_marks_of_their_own(engine: AsyncEngine):
    """S3: the mark of a method replaces that of its class."""
    seen: list[str] = []

    @on_starlette.idempotent(required=True)
    class Charges(HTTPEndpoint):
        async def post(self, request: Request) -> PlainTextResponse:
            seen.append("post")
            return PlainTextResponse("posted")

        @on_starlette.idempotent(window="1h")
        async def put(self, request: Request) -> PlainTextResponse:
            seen.append("put")
            return PlainTextResponse("put")

        @on_starlette.idempotent(methods=())
        async def delete(self, request: Request) -> PlainTextResponse:
            seen.append("delete")
            return PlainTextResponse("deleted")

        async def get(self, request: Request) -> PlainTextResponse:
            return PlainTextResponse("got")

    app = Starlette(routes=[Route("/charges", Charges)])
    app.add_middleware(IdempotencyMiddleware, engine=engine)
    shop = Shop(None, app)
    assert shop.send("GET", "/charges", None).body == b"got"
    assert shop.post("/charges", None).code == "key-missing"
    assert shop.send("PUT", "/charges", None).body == b"put"
    for method in ("POST", "PUT", "DELETE"):
        for _ in range(2):
            assert shop.send(method, "/charges").status == 200
    assert seen == ["put", "post", "put", "delete", "delete"]
    assert shop.send("PATCH", "/charges").status == 405


@pytest.mark.parametrize("kind", [Router, object, Starlette], ids=lambda kind: kind.__name__)
def test_what_has_no_routes_cannot_have_a_policy(kind: type[Any]):
    with pytest.raises(Misconfigured, match="without routes"):
        idempotent_router(kind(), required=True)


def test_the_policy_of_a_router_comes_before_its_routes():
    router = APIRouter()
    router.post("/charges")(lambda: None)
    with pytest.raises(Misconfigured, match="before you declare"):
        idempotent_router(router, required=True)


def test_a_nonsensical_policy_of_a_router_is_refused():
    with pytest.raises(Misconfigured, match="'requird'"):
        idempotent_router(APIRouter(), requird=True)
