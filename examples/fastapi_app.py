"""A guarded FastAPI application with users and a database, and its own tests: `pytest fastapi_app.py`."""

import sqlite3
import tempfile
from contextlib import closing
from typing import Annotated

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException
from fastapi.testclient import TestClient
from pydantic import BaseModel

from coatcheck.server import callers
from coatcheck.server.fastapi import (
    CurrentOperation,
    IdempotencyMiddleware,
    idempotent,
    idempotent_router,
)
from coatcheck.server.request import Request


class Charge(BaseModel):
    """How much to charge."""

    amount: int
    currency: str


router = APIRouter()


@router.post("/charges", status_code=201)
@idempotent(required=True, window="72h", recovery="manual")
async def charge(body: Charge, operation: CurrentOperation) -> dict[str, object]:
    """Charge once, however often the request is sent."""
    # The key for the payment provider: the same in every attempt of this operation.
    provider_key = operation.derive("charge")
    return {"amount": body.amount, "provider_key": provider_key, "see": operation.reference}


refunds = idempotent_router(APIRouter(prefix="/refunds"), required=True, window="72h")


@refunds.post("")
async def refund(operation: CurrentOperation) -> str:
    """Return money; the policy is that of the router."""
    return operation.reference


TOKENS = {"Bearer ada-1": "ada", "Bearer ada-2": "ada", "Bearer bob-1": "bob"}


def caller(request: Request) -> str:
    """Whose key it is: the user, with an old or a new token."""
    user = TOKENS.get(request.header(b"authorization").decode("latin-1"))
    if user is None:
        raise callers.Refused(401)
    return user


def current_user(authorization: Annotated[str, Header()] = "") -> str:
    """Return the user, for endpoints."""
    if authorization not in TOKENS:
        raise HTTPException(401)
    return TOKENS[authorization]


class Order(BaseModel):
    """What a client orders."""

    item: str


@router.post("/orders", status_code=201)
@idempotent(required=True, mode="transaction")
async def place(
    order: Order, operation: CurrentOperation, user: Annotated[str, Depends(current_user)]
) -> dict[str, int]:
    """Take an order."""
    cursor = await operation.connection.execute(
        "insert into orders values (?, ?)", (user, order.item)
    )
    return {"order": cursor.lastrowid}


def create_app(database: str) -> FastAPI:
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, store=f"sqlite:///{database}", caller=caller)
    app.include_router(router)
    app.include_router(refunds)
    return app


# --- tests ------------------------------------------------------------------------------------


@pytest.fixture
def client():
    with tempfile.TemporaryDirectory() as directory:
        database = f"{directory}/shop.db"
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("create table orders (user text, item text)")
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
    assert place_order(client, item=17).status_code == 422
    assert place_order(client).json() == {"order": 1}


def test_a_charge_and_a_refund_need_a_key(client):
    charge = {"amount": 5, "currency": "EUR"}
    for path, body in (("/charges", charge), ("/refunds", None)):
        headers = {"Authorization": "Bearer ada-1"}
        assert client.post(path, json=body, headers=headers).json()["code"] == "key-missing"
        headers["Idempotency-Key"] = "key-1"
        first, again = (client.post(path, json=body, headers=headers) for _ in range(2))
        assert first.json() == again.json()
        assert first.headers["Idempotency-Reference"] in first.text
