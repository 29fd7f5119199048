"""The Litestar plugin: marks, `opt`, callers, transactions and the OpenAPI document."""

from __future__ import annotations  # the annotations below are text, as in many applications

import functools
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from litestar import Controller, Litestar, Request, Router, delete, get, post, put
from litestar.datastructures import UploadFile
from litestar.di import Provide
from litestar.exceptions import HTTPException, NotAuthorizedException, PermissionDeniedException
from litestar.middleware.authentication import (
    AbstractAuthenticationMiddleware,
    AuthenticationResult,
)
from litestar.openapi.config import OpenAPIConfig
from litestar.params import FromPath, JSONBody, MultipartBody
from litestar.testing import TestClient

from coatcheck import AsyncEngine, Misconfigured, Policy
from coatcheck.server.litestar import (
    CurrentOperation,
    CurrentSyncOperation,
    IdempotencyPlugin,
    OptionalOperation,
    authenticated_user,
    idempotent,
)
from coatcheck.server.request import Request as OurRequest
from coatcheck.stores import Query
from tests.support.times import eventually
from tests.support.web_servers import ROOT


@dataclass
class Charge:
    amount: int


seen: list[Any] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    seen.clear()


def new_app(handlers: Any, plugin: IdempotencyPlugin, **settings: Any) -> Litestar:
    """Without Litestar's logging, which would change that of all tests."""
    return Litestar([*handlers], plugins=[plugin], logging_config=None, **settings)


Open = Callable[..., Any]


@pytest.fixture
def open_app() -> Iterator[Open]:
    """Opens a guarded application with handlers, and returns its test client."""
    with ExitStack() as stack:

        def open_one(*handlers: Any, plugin: dict[str, Any] | None = None, **settings: Any) -> Any:
            chosen = {"store": "memory://", **(plugin or {})}
            added = IdempotencyPlugin(**chosen)
            app = new_app(handlers, added, **settings)
            client = stack.enter_context(TestClient(app))
            client.plugin = added  # type: ignore[attr-defined]  # for the tests
            stack.callback(client.blocking_portal.call, added.engine.close)
            return client

        yield open_one


def send(client: Any, path: str, key: str | None = "k-1", body: Any = None, **headers: str) -> Any:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        sent["Idempotency-Key"] = key
    return client.post(path, json=body or {"amount": 1}, headers=sent)


def is_replay(response: Any) -> bool:
    return response.headers.get("idempotent-replayed") == "true"


def records_of(client: Any) -> list[Any]:
    engine: AsyncEngine = client.plugin.engine
    return list(client.blocking_portal.call(engine.store.find, Query()).records)


# --- handlers -------------------------------------------------------------------------------


@post("/charges")
@idempotent(required=True, window="72h")
async def charge(data: JSONBody[Charge], operation: CurrentOperation) -> dict[str, str]:
    """Charge a card."""
    seen.append((data.amount, operation.key, operation.attempt))
    await operation.note("charged")
    return {"reference": operation.reference}


@post("/orders/{number:int}/pay")
async def pay(number: FromPath[int], operation: OptionalOperation) -> str:
    seen.append(number)
    return "unguarded" if operation is None else operation.key


def test_a_handler_has_its_policy_beside_it(open_app: Open):
    """S3, K3, K5: the label is the template, and the operation is a parameter."""
    client = open_app(charge, pay)
    assert send(client, "/charges", None).json()["code"] == "key-missing"
    first, again = send(client, "/charges"), send(client, "/charges")
    assert first.status_code == again.status_code == 201
    assert first.json() == again.json() == {"reference": first.headers["idempotency-reference"]}
    assert (is_replay(first), is_replay(again)) == (False, True)
    assert seen == [(1, "k-1", 1)]
    assert send(client, "/charges", body={"amount": 2}).json()["code"] == "key-reused"
    (record,) = records_of(client)
    assert record.label == "POST /charges"
    assert (record.window_until_ms - record.created_ms) == 72 * 3_600_000


def test_the_paths_of_one_handler_have_keys_of_their_own(open_app: Open):
    """S1: and a key that is optional may be missing."""
    client = open_app(pay)
    assert send(client, "/orders/1/pay", None).text == "unguarded"
    assert [send(client, f"/orders/{number}/pay").text for number in (1, 1, 2)] == ["k-1"] * 3
    assert seen == [1, 1, 2]


@pytest.mark.parametrize("in_thread", [True, False])
def test_a_sync_handler_knows_its_operation(open_app: Open, in_thread: bool):
    """K5: in a thread of Litestar's, or on the event loop."""

    @post("/notes", sync_to_thread=in_thread)
    @idempotent(required=True)
    def note(operation: CurrentSyncOperation) -> str:
        seen.append(operation.derive("note"))
        return operation.reference

    client = open_app(note)
    first = send(client, "/notes")
    assert first.text == send(client, "/notes").text == first.headers["idempotency-reference"]
    assert len(seen) == 1


@pytest.mark.parametrize(
    "body",
    [{"amount": "much"}, {}, {"amount": 1, "fails": "guard"}],
    ids=["type", "missing", "guard"],
)
def test_a_request_that_is_refused_before_its_handler_does_not_use_up_its_key(
    open_app: Open, body: dict[str, Any]
):
    """L4: by validation, and by a guard."""

    async def guard(connection: Any, _handler: Any) -> None:
        if "refuse" in connection.headers:
            raise PermissionDeniedException

    client = open_app(charge, guards=[guard])
    headers = {"refuse": "1"} if "fails" in body else {}
    refused = send(client, "/charges", body=body or {"other": 1}, **headers)
    assert refused.status_code in (400, 403)
    assert send(client, "/charges").status_code == 201
    assert seen == [(1, "k-1", 2)]


def test_an_answer_of_the_handler_uses_up_its_key(open_app: Open):
    """L4: a refusal of the handler is its answer."""

    @post("/charges")
    @idempotent
    async def decline() -> None:
        seen.append(1)
        raise HTTPException("no money", status_code=402)

    client = open_app(decline)
    assert [send(client, "/charges").status_code for _ in range(2)] == [402, 402]
    assert seen == [1]


def test_an_error_of_the_handler_lets_a_retry_run_again(open_app: Open):
    """L4: Litestar answers 500, which is not kept."""

    @post("/charges")
    @idempotent
    async def fail() -> str:
        seen.append(1)
        if len(seen) == 1:
            raise ZeroDivisionError
        return "done"

    client = open_app(fail)
    assert send(client, "/charges").status_code == 500
    assert send(client, "/charges").text == "done"


def test_a_handler_that_needs_its_operation_says_what_is_missing(open_app: Open):
    """K3: where the request brought no key and none was required."""

    @post("/charges")
    @idempotent()
    async def needs(operation: CurrentOperation) -> str:
        return operation.key

    client = open_app(needs, debug=True)
    failed = send(client, "/charges", None)
    assert (failed.status_code, "OptionalOperation" in failed.text) == (500, True)
    assert send(client, "/charges").text == "k-1"


# --- which handlers -------------------------------------------------------------------------


class Addresses(Controller):
    path = "/addresses"
    opt: ClassVar = {"idempotent": {"required": True}}

    @post("/")
    async def add(self) -> str:
        seen.append("added")
        return "added"

    @put("/")
    @idempotent(window="1h")
    async def change(self) -> str:
        seen.append("changed")
        return "changed"

    @post("/search")
    @idempotent(methods=())
    async def search(self) -> str:
        seen.append("searched")
        return "found"

    @get("/")
    async def all(self) -> str:
        return "all"


def test_a_controller_and_a_router_have_defaults_for_their_handlers(open_app: Open):
    """S3: in `opt`; the mark of a handler wins."""

    @delete("/{number:int}", opt={"idempotent": {"required": False}})
    async def remove(number: FromPath[int]) -> None:
        seen.append(number)

    router = Router(
        "/api",
        route_handlers=[Addresses, remove],
        opt={"idempotent": {"required": True, "window": "2h"}},
    )
    client = open_app(router)
    assert client.get("/api/addresses").text == "all"
    for path, method in (("/api/addresses", "POST"), ("/api/addresses", "PUT")):
        assert client.request(method, path).json()["code"] == "key-missing"
        responses = [
            client.request(method, path, headers={"Idempotency-Key": "k"}) for _ in range(2)
        ]
        assert [is_replay(response) for response in responses] == [False, True]
    assert client.delete("/api/7").status_code == 204
    assert client.delete("/api/7", headers={"Idempotency-Key": "k"}).status_code == 204
    assert is_replay(client.delete("/api/7", headers={"Idempotency-Key": "k"}))
    for _ in range(2):
        assert send(client, "/api/addresses/search").text == "found"
    assert seen == ["added", "changed", 7, 7, "searched", "searched"]
    windows = {r.label: (r.window_until_ms - r.created_ms) // 3_600_000 for r in records_of(client)}
    assert windows["PUT /api/addresses"] == 1


def test_handlers_that_are_added_later_are_guarded(open_app: Open):
    client = open_app()
    client.app.register(charge)
    assert send(client, "/charges", None).json()["code"] == "key-missing"
    assert send(client, "/charges").status_code == 201


@pytest.mark.parametrize(
    ("opt", "message"),
    [
        ("required", "has the fields of a policy"),
        ({"requird": True}, "'requird'"),
        ({"window": "soon"}, "window"),
        ({"status_path": "/x/"}, "status_path"),
    ],
)
def test_wrong_defaults_are_refused_when_the_handler_is_registered(opt: Any, message: str):
    @post("/", opt={"idempotent": opt})
    async def place() -> None: ...

    with pytest.raises(Misconfigured, match=message):
        new_app([place], IdempotencyPlugin(store="memory://"))


def test_the_mark_is_below_the_decorator_of_the_route():
    with pytest.raises(Misconfigured, match="below"):
        idempotent(post("/")(charge.fn))


def test_a_marked_handler_without_the_plugin_fails():
    """S3: a mark alone protects nothing."""

    @post("/")
    @idempotent
    async def place() -> None: ...

    with TestClient(Litestar([place], debug=True, logging_config=None)) as client:
        assert "no IdempotencyMiddleware" in client.post("/").text


def test_one_plugin_guards_one_application():
    plugin = IdempotencyPlugin(store="memory://")
    new_app([], plugin)
    with pytest.raises(Misconfigured, match="one application"):
        new_app([], plugin)


def test_the_name_of_the_dependency_can_be_chosen(open_app: Open):
    """An application that has a dependency `operation` of its own keeps it."""

    async def own() -> str:
        return "mine"

    dependencies = {"operation": Provide(own)}
    with pytest.raises(Misconfigured, match="another_name"):
        open_app(dependencies=dict(dependencies))

    @post("/charges")
    @idempotent(required=True)
    async def both(operation: OptionalOperation, attempt: CurrentOperation) -> str:
        return f"{operation} {attempt.key}"

    client = open_app(both, dependencies=dependencies, plugin={"dependency": "attempt"})
    assert send(client, "/charges").text == "mine k-1"


def test_wrong_settings_stop_the_server(tmp_path: Path):
    with pytest.raises(Misconfigured):
        IdempotencyPlugin(store="nothing://")
    # What only shows when the store is opened, stops the server's start.
    (tmp_path / "orders.db").write_bytes(b"no database" * 1_000)
    app = new_app([], IdempotencyPlugin(store=f"sqlite:///{tmp_path}/orders.db"))
    with pytest.raises(Exception, match=r"."), TestClient(app):
        pass


# --- the caller -----------------------------------------------------------------------------


@dataclass
class User:
    id: str


class Unnamed:
    """A user without a name."""


USERS: dict[str, Any] = {
    "ada-1": User("ada"),
    "ada-2": User("ada"),
    "bob": User("bob"),
    "text": "ada",
    "claims": {"sub": "ada"},
    "nameless": Unnamed(),
}


class Authentication(AbstractAuthenticationMiddleware):
    async def authenticate_request(self, connection: Any) -> AuthenticationResult:
        token = connection.headers.get("authorization")
        if token not in USERS:
            raise NotAuthorizedException
        return AuthenticationResult(USERS[token], token if token == "nameless" else None)


@post("/whose")
@idempotent
async def whose(request: Request[Any, Any, Any]) -> str:
    seen.append(request.headers["authorization"])
    return request.headers["authorization"]


def test_the_authenticated_user_is_the_caller(open_app: Open):
    """S2: a refreshed token is the same user's; two users never share a key."""
    client = open_app(whose, middleware=[Authentication])
    tokens = ("ada-1", "ada-2", "bob", "text", "claims", "nameless")
    got = [send(client, "/whose", Authorization=token).text for token in tokens]
    assert got == ["ada-1", "ada-1", "bob", "text", "claims", "nameless"]
    assert send(client, "/whose", Authorization="stranger").status_code == 401
    two_applications = [send(client, "/whose", Authorization="bob", X_API_Key=k) for k in "ab"]
    assert [is_replay(one) for one in two_applications] == [False, False]


def test_users_of_two_kinds_with_the_same_number_are_two_callers():
    """S1."""

    @dataclass
    class Customer:
        id: int

    @dataclass
    class Merchant:
        id: int

    def caller_of(user: object) -> str | None:
        return authenticated_user(OurRequest("POST", "/", b"", {}, b"", {"user": user}))

    assert caller_of(Customer(7)) == caller_of(Customer(7))
    assert caller_of(Customer(7)) != caller_of(Merchant(7))


def test_an_own_caller_replaces_the_user(open_app: Open):
    """S2."""
    caller = {"caller": lambda request: request.header(b"x-tenant")}
    client = open_app(whose, middleware=[Authentication], plugin=caller)
    for token in ("ada-1", "bob"):
        assert send(client, "/whose", Authorization=token, X_Tenant="t").text == "ada-1"


def test_a_request_without_authentication_has_the_default_caller(open_app: Open):
    """S2: the credentials of the request."""
    client = open_app(whose)
    assert [send(client, "/whose", Authorization=t).text for t in ("a", "b", "a")] == [
        "a",
        "b",
        "a",
    ]
    assert seen == ["a", "b"]


# --- long work, and transactions --------------------------------------------------------------


def test_a_client_polls_for_an_accepted_operation(open_app: Open):
    """L12: the plugin adds the route, which Litestar's router needs."""

    @post("/reports")
    @idempotent(in_flight="202")
    async def report(operation: CurrentOperation) -> str:
        await operation.accept()
        return "ready"

    client = open_app(report)
    accepted = send(client, "/reports")
    assert accepted.status_code == 202
    location = accepted.headers["location"]
    eventually(lambda: client.get(location).text == "ready")
    assert client.head(location).status_code == 201
    assert client.get("/idempotency/operations/unknown").status_code == 404


@pytest.fixture
def database(tmp_path: Path) -> str:
    path = f"{tmp_path}/shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table orders (item text)")
    return path


def orders_in(database: str) -> int:
    with closing(sqlite3.connect(database)) as connection:
        return int(connection.execute("select count(*) from orders").fetchone()[0])


@post("/orders")
@idempotent(mode="transaction", required=True)
async def place(data: JSONBody[dict[str, bool]], operation: CurrentOperation) -> dict[str, int]:
    cursor = await operation.connection.execute("insert into orders values ('coat')")
    if data.get("fails"):
        raise ZeroDivisionError
    return {"order": cursor.lastrowid}


def test_an_order_is_committed_with_its_record(open_app: Open, database: str):
    """T1: both are there, or neither."""
    client = open_app(place, plugin={"store": f"sqlite:///{database}"})
    assert send(client, "/orders", "k-0", {"fails": True}).status_code == 500
    assert orders_in(database) == 0
    first, again = (send(client, "/orders", body={"fails": False}) for _ in range(2))
    assert first.json() == again.json() == {"order": 1}
    assert is_replay(again)
    assert orders_in(database) == 1


class CollidesOnce(sqlite3.Connection):
    """Its first statement of a kind collides with another process."""

    at = ""  # how such a statement begins
    collided = False

    def execute(self, statement: str, *args: Any) -> Any:
        if statement.startswith(CollidesOnce.at) and not CollidesOnce.collided:
            CollidesOnce.collided = True
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY_SNAPSHOT  # type: ignore[misc]
            raise error
        return super().execute(statement, *args)


@pytest.mark.parametrize("at", ["insert into orders", "commit"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_handler_whose_transaction_collided_runs_again(
    open_app: Open, database: str, fails: bool, at: str
):
    """L9: it gets the same request, with an open file, and Litestar answers what it raises then."""

    @post("/uploads", sync_to_thread=True)
    @idempotent(mode="transaction", transaction_retries=1)
    def upload(data: MultipartBody[dict[str, UploadFile]], operation: CurrentSyncOperation) -> str:
        seen.append(data["file"].file.read())
        operation.connection.execute("insert into orders values ('coat')")
        if fails and len(seen) == 2:
            raise HTTPException("no room", status_code=409)
        return "kept"

    CollidesOnce.collided, CollidesOnce.at = False, at
    connect = functools.partial(
        sqlite3.connect, database, check_same_thread=False, factory=CollidesOnce
    )
    settings = {"store": f"sqlite:///{database}", "transactions": connect}
    client = open_app(upload, plugin=settings)
    files, headers = {"file": b"content"}, {"Idempotency-Key": "k-1"}
    answer = client.post("/uploads", files=files, headers=headers)
    assert answer.status_code == (409 if fails else 201), answer.text
    assert ("no room" in answer.text) is fails
    assert seen == [b"content", b"content"]
    assert orders_in(database) == (0 if fails else 1)


# --- the OpenAPI document ---------------------------------------------------------------------


def test_the_document_states_what_is_guarded(open_app: Open):
    """D2: the header where it is taken, and the refusals."""

    @post("/observed")
    @idempotent(mode="observe")
    async def observed() -> None: ...

    config = OpenAPIConfig(title="Shop", version="1")
    client = open_app(charge, pay, Addresses, observed, openapi_config=config)
    paths = client.get("/schema/openapi.json").json()["paths"]
    assert client.app.openapi_schema.to_schema()["paths"] == paths

    def header_of(path: str, method: str = "post") -> Any:
        parameters = paths[path][method].get("parameters", [])
        return next((p["required"] for p in parameters if p["name"] == "Idempotency-Key"), None)

    assert header_of("/charges") is True
    assert header_of("/orders/{number}/pay") is False
    assert header_of("/addresses") is header_of("/addresses", "put") is True
    assert [header_of(path) for path in ("/addresses/search", "/observed")] == [None, None]
    assert header_of("/addresses", "get") is None
    assert "key-reused" in paths["/charges"]["post"]["responses"]["422"]["description"]
    assert "/idempotency/operations/{token}" not in paths
    assert "Idempotency-Key" not in str(config.to_openapi_schema().to_schema())


# --- the default ------------------------------------------------------------------------------


def test_the_default_policy_guards_unmarked_handlers(open_app: Open):
    """S3: by the methods of the plugin's policy."""

    @put("/unmarked")
    async def unmarked() -> str:
        seen.append(1)
        return "done"

    client = open_app(unmarked, plugin={"policy": Policy(methods={"PUT"})})
    for _ in range(2):
        assert client.put("/unmarked", headers={"Idempotency-Key": "k"}).text == "done"
    assert seen == [1]


def test_the_quickstart_places_a_retried_order_once(tmp_path: Path):
    """In a process of its own, because it configures the logs as Litestar does by default."""
    script = f"""
import runpy, sys
from litestar.testing import TestClient
app = runpy.run_path({str(ROOT / "examples" / "quickstart_litestar.py")!r})["app"]
with TestClient(app) as client:
    for _ in range(2):
        headers = {{"Idempotency-Key": "k-1"}}
        print(client.post("/orders", json={{"item": "coat"}}, headers=headers).json())
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "{'order': 1}\n" * 2
