"""A guarded Litestar application with users and a database, and its own tests: `pytest litestar_app.py`."""

import sqlite3
import tempfile
from contextlib import closing
from dataclasses import dataclass

import pytest
from litestar import Litestar, Router, post
from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException
from litestar.middleware import DefineMiddleware
from litestar.middleware.authentication import (
    AbstractAuthenticationMiddleware,
    AuthenticationResult,
)
from litestar.params import JSONBody
from litestar.testing import TestClient

from coatcheck.server.litestar import CurrentOperation, IdempotencyPlugin, idempotent


@post("/search")
@idempotent(methods=())  # never guarded
async def search() -> list[str]:
    return []


@post("/refunds")
async def refund(operation: CurrentOperation) -> str:
    return operation.reference


payments = Router(
    "/payments",
    route_handlers=[refund],
    opt={"idempotent": {"required": True, "window": "72h"}},
)


@dataclass
class User:
    """A user, known by the token of a request."""

    id: str


TOKENS = {"Bearer ada-1": User("ada"), "Bearer ada-2": User("ada"), "Bearer bob-1": User("bob")}


class Authentication(AbstractAuthenticationMiddleware):
    """Finds the user of a request; Litestar's own `JWTAuth` and `SessionAuth` do the same."""

    async def authenticate_request(self, connection: ASGIConnection) -> AuthenticationResult:
        token = connection.headers.get("Authorization", "")
        if token not in TOKENS:
            raise NotAuthorizedException
        return AuthenticationResult(user=TOKENS[token], auth=token)


@dataclass
class Order:
    """What a client orders."""

    item: str


@post("/orders")
@idempotent(required=True, mode="transaction")
async def place(data: JSONBody[Order], operation: CurrentOperation) -> dict[str, int]:
    cursor = await operation.connection.execute("insert into orders values (?)", (data.item,))
    return {"order": cursor.lastrowid}


def create_app(database: str) -> Litestar:
    plugin = IdempotencyPlugin(store=f"sqlite:///{database}")
    return Litestar(
        [place, search, payments],
        middleware=[DefineMiddleware(Authentication, exclude="/schema")],
        plugins=[plugin],
    )


# --- tests ------------------------------------------------------------------------------------


@pytest.fixture
def client():
    with tempfile.TemporaryDirectory() as directory:
        database = f"{directory}/shop.db"
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("create table orders (item text)")
        with TestClient(create_app(database)) as client:
            yield client


def place_order(client, token="ada-1", key="order-1", item="coat"):
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": key}
    return client.post("/orders", json={"item": item}, headers=headers)


def test_a_retried_order_is_placed_once(client):
    first, again = place_order(client), place_order(client)
    assert (first.status_code, first.json()) == (201, {"order": 1})
    assert again.json() == first.json()
    assert again.headers["Idempotent-Replayed"] == "true"


def test_a_new_token_of_the_same_user_is_the_same_caller(client):
    assert place_order(client, "ada-1").json() == {"order": 1}
    assert place_order(client, "ada-2").json() == {"order": 1}
    assert place_order(client, "bob-1").json() == {"order": 2}


def test_a_refused_order_does_not_use_up_its_key(client):
    assert place_order(client, "unknown").status_code == 401
    assert place_order(client, item=17).status_code == 400
    assert place_order(client).json() == {"order": 1}


def test_every_handler_of_the_router_needs_a_key(client):
    headers = {"Authorization": "Bearer ada-1"}
    assert client.post("/payments/refunds", headers=headers).json()["code"] == "key-missing"
    headers["Idempotency-Key"] = "refund-1"
    first, again = (client.post("/payments/refunds", headers=headers) for _ in range(2))
    assert first.text == again.text == first.headers["Idempotency-Reference"]
