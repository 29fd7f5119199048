"""Litestar, guarded by one line."""

from dataclasses import dataclass

from litestar import Litestar, post
from litestar.params import JSONBody

from coatcheck.server.litestar import IdempotencyPlugin


@dataclass
class Order:
    """What a client orders."""

    item: str


orders: list[Order] = []


@post("/orders")
async def place(data: JSONBody[Order]) -> dict[str, int]:
    orders.append(data)
    return {"order": len(orders)}


app = Litestar([place], plugins=[IdempotencyPlugin(store="sqlite:///orders.db")])
