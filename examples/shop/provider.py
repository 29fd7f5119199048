"""Another company, which takes payments and parcels; its effects cannot be undone.

    python -m examples.shop.provider

Each effect is a row of its ledger, which the shop cannot access. Its services differ in what they
offer to a client that does not know whether an earlier call took effect.
"""

import asyncio
import os
import sqlite3
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

# These accept an idempotency key: a second call with it gets the first response.
ACCEPT_KEYS = {"cards", "parcels"}
# The bank can be queried; a card terminal only prints receipts.
CAN_BE_QUERIED = {"bank"}
# 20 ms before and after the effect: time in which the waiting shop may be killed.
DELAY_S = 0.02


class Order(BaseModel):
    """An order and its price."""

    number: int
    cents: int


def provider_app(path: str) -> FastAPI:
    """Return the provider, with its ledger in the file at *path*."""
    app, ledger = FastAPI(), open_ledger(path)

    @app.post("/{service}", status_code=201)
    async def take(
        service: str, order: Order, idempotency_key: Annotated[str, Header()] = ""
    ) -> dict[str, Any]:
        await asyncio.sleep(DELAY_S)
        ledger.execute("insert into asked values (?, ?)", (service, order.number))
        done = find(service, idempotency_key) if service in ACCEPT_KEYS else None
        if done is None:
            row = (service, idempotency_key, order.number, order.cents)
            done = ledger.execute("insert into done values (null, ?, ?, ?, ?)", row).lastrowid
        await asyncio.sleep(DELAY_S)
        return {"receipt": done}

    @app.get("/{service}/{key}")
    async def ask(service: str, key: str) -> dict[str, Any]:
        done = find(service, key) if service in CAN_BE_QUERIED else None
        if done is None:
            raise HTTPException(404, "the service knows no such key")
        return {"receipt": done}

    def find(service: str, key: str) -> int | None:
        rows = ledger.execute(
            "select receipt from done where service = ? and key = ?", (service, key)
        )
        return next((receipt for (receipt,) in rows), None)

    return app


def open_ledger(path: str) -> sqlite3.Connection:
    """Open the tables of calls and of effects."""
    ledger = sqlite3.connect(path, isolation_level=None)
    ledger.execute("pragma synchronous = off")  # only the shop is killed, never this machine
    ledger.execute("create table if not exists asked (service text, number integer)")
    ledger.execute(
        "create table if not exists done"
        " (receipt integer primary key, service text, key text, number integer, cents integer)"
    )
    return ledger


if __name__ == "__main__":
    uvicorn.run(provider_app(os.environ.get("LEDGER", "ledger.db")), port=8001)
