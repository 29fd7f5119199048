"""A shop that may be killed at any moment: each order is paid once, or reported as in doubt.

    python -m examples.shop.provider &
    python -m examples.shop.app

It has one way to pay for each recovery; which one a route needs depends on its provider.
"""

import json
import os
import sqlite3
from contextlib import closing
from typing import Any

import httpx
import psycopg
import uvicorn
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel

from coatcheck import DidNotHappen, Happened, Operation
from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent

SALES = "create table if not exists sales (number integer, cents integer)"
JSON = [("content-type", "application/json")]


class Order(BaseModel):
    """An order to be paid."""

    number: int
    cents: int


class Provider:
    """The payment provider, called over HTTP; its effects cannot be undone."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url)

    async def take(self, service: str, order: Order, key: str = "") -> dict[str, Any]:
        """Ask *service* to act on *order*."""
        headers = {"Idempotency-Key": key} if key else {}
        answer = await self._http.post(f"/{service}", json=order.model_dump(), headers=headers)
        return dict(answer.raise_for_status().json())

    async def find(self, service: str, key: str) -> dict[str, Any] | None:
        """Return what *service* has done under *key*."""
        answer = await self._http.get(f"/{service}/{key}")
        return None if answer.status_code == 404 else dict(answer.raise_for_status().json())


provider = Provider(os.environ.get("PROVIDER", "http://127.0.0.1:8001"))
shop = APIRouter()


# "retry": the service accepts keys, and the same key is the same payment.
@shop.post("/cards", status_code=201)
@idempotent(recovery="retry")
async def pay_by_card(order: Order, operation: CurrentOperation) -> dict[str, Any]:
    return await provider.take("cards", order, operation.derive("pay"))


# "reconcile": the bank accepts no key, but can be queried before the handler runs again.
async def ask_bank(operation: Operation) -> Happened | DidNotHappen:
    found = await provider.find("bank", operation.derive("pay"))
    if found is None:
        return DidNotHappen()
    return Happened(201, JSON, json.dumps(found).encode(), value=found)


@shop.post("/transfers", status_code=201)
@idempotent(recovery="reconcile", reconcile=ask_bank)
async def pay_by_transfer(order: Order, operation: CurrentOperation) -> dict[str, Any]:
    return await provider.take("bank", order, operation.derive("pay"))


# "manual": the terminal offers neither, so a person has to check its receipts.
@shop.post("/terminals", status_code=201)
@idempotent(recovery="manual")
async def pay_at_terminal(order: Order) -> dict[str, Any]:
    return await provider.take("terminals", order)


# "transaction": the payment is a row in the shop's own database, committed with the record.
@shop.post("/vouchers", status_code=201)
@idempotent(mode="transaction", transaction_retries=5)
async def pay_by_voucher(order: Order, operation: CurrentOperation) -> dict[str, Any]:
    await write_sale(operation.connection, order)
    return {"receipt": order.number}


async def write_sale(connection: Any, order: Order) -> None:
    marks = "%s, %s" if isinstance(connection, psycopg.AsyncConnection) else "?, ?"
    await connection.execute(f"insert into sales values ({marks})", (order.number, order.cents))


# Steps: two effects, each recovered in its own way.
@shop.post("/baskets", status_code=201)
@idempotent(recovery="retry")
async def pay_and_send(order: Order, operation: CurrentOperation) -> dict[str, Any]:
    key = operation.derive("pay")
    paid = await operation.step(
        "pay", provider.take, "bank", order, key, at_most_once=True, probe=ask_bank
    )
    await operation.step("send", provider.take, "parcels", order, operation.derive("send"))
    return dict(paid)


def shop_app(**options: Any) -> FastAPI:
    """Return the application; *options* are those of the middleware."""
    app = FastAPI()
    app.include_router(shop)
    app.add_middleware(IdempotencyMiddleware, **options)
    return app


def open_sales(url: str) -> None:
    """Create the shop's own table."""
    is_file = url.startswith("sqlite:///")
    path = url.removeprefix("sqlite:///").partition("?")[0]
    with closing(sqlite3.connect(path) if is_file else psycopg.connect(url)) as connection:
        connection.execute(SALES)
        connection.commit()


if __name__ == "__main__":
    database = os.environ.get("SHOP", "sqlite:///shop.db")
    open_sales(database)
    uvicorn.run(shop_app(store=database))
