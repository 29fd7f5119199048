"""Another company: it takes money and parcels, and what it has taken it does not give back.

    python -m examples.shop.provider

Each thing that it does is a row of its ledger, which the shop cannot reach. Its desks differ in
what they offer to who does not know whether he has asked before.
"""

import asyncio
import os
import sqlite3
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

# These take an idempotency key: whoever asks twice gets what he got the first time.
KNOW_KEYS = {"cards", "parcels"}
# The bank can be asked what it has done; a card terminal has a roll of paper, for people.
CAN_BE_ASKED = {"bank"}
# 20 ms on the way there, and on the way back: where a shop that waits may die.
WAY_S = 0.02


class Order(BaseModel):
    """Who pays how much."""

    number: int
    cents: int


def provider_app(path: str) -> FastAPI:
    """The provider, with its ledger in the file at *path*."""
    app, ledger = FastAPI(), open_ledger(path)

    @app.post("/{desk}", status_code=201)
    async def take(
        desk: str, order: Order, idempotency_key: Annotated[str, Header()] = ""
    ) -> dict[str, Any]:
        await asyncio.sleep(WAY_S)
        ledger.execute("insert into asked values (?, ?)", (desk, order.number))
        done = find(desk, idempotency_key) if desk in KNOW_KEYS else None
        if done is None:
            row = (desk, idempotency_key, order.number, order.cents)
            done = ledger.execute("insert into done values (null, ?, ?, ?, ?)", row).lastrowid
        await asyncio.sleep(WAY_S)
        return {"receipt": done}

    @app.get("/{desk}/{key}")
    async def ask(desk: str, key: str) -> dict[str, Any]:
        done = find(desk, key) if desk in CAN_BE_ASKED else None
        if done is None:
            raise HTTPException(404, "of this the desk knows nothing")
        return {"receipt": done}

    def find(desk: str, key: str) -> int | None:
        rows = ledger.execute("select receipt from done where desk = ? and key = ?", (desk, key))
        return next((receipt for (receipt,) in rows), None)

    return app


def open_ledger(path: str) -> sqlite3.Connection:
    """What was asked for, and what was done."""
    ledger = sqlite3.connect(path, isolation_level=None)
    ledger.execute("pragma synchronous = off")  # it is the shop that is killed, and no power is cut
    ledger.execute("create table if not exists asked (desk text, number integer)")
    ledger.execute(
        "create table if not exists done"
        " (receipt integer primary key, desk text, key text, number integer, cents integer)"
    )
    return ledger


if __name__ == "__main__":
    uvicorn.run(provider_app(os.environ.get("LEDGER", "ledger.db")), port=8001)
