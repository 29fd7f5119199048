"""A bank: money moves once, however often a transfer is sent and whatever crashes meanwhile.

The transfer and the record of its key are committed in one transaction of one database, so a crash
cannot leave one without the other.

Run it: python -m examples.bank.app
"""

import os
import sqlite3
from contextlib import closing
from typing import Any

import psycopg
import uvicorn
from fastapi import APIRouter, FastAPI, HTTPException
from pydantic import BaseModel, Field

from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware, idempotent

ACCOUNTS = "create table if not exists accounts (id integer primary key, balance bigint not null)"
# The key has no unique constraint here: the record of coatcheck prevents a second transfer.
TRANSFERS = """
create table if not exists transfers
(idempotency_key text, source integer, target integer, amount bigint)
"""

bank = APIRouter()


class Transfer(BaseModel):
    """How much to move, and between which accounts."""

    source: int
    target: int
    amount: int = Field(gt=0)


# Two transfers in opposite directions (1 to 2, and 2 to 1) can deadlock. The database then rolls one
# of them back, and `transaction_retries` runs it again.
@bank.post("/transfers", status_code=201)
@idempotent(mode="transaction", required=True, transaction_retries=5)
async def transfer(order: Transfer, operation: CurrentOperation) -> dict[str, object]:
    """Move money; all statements and the response are committed together."""
    source, target, amount = order.source, order.target, order.amount
    connection = operation.connection
    # A response of 400 or above undoes what was written before it. Retries get the same response.
    known = await execute(connection, "select id from accounts where id in (?, ?)", source, target)
    if len(known) != 2:
        raise HTTPException(404, "one of the accounts does not exist")
    debit = "update accounts set balance = balance - ? where id = ? returning balance"
    left = await execute(connection, debit, amount, source)
    if left[0][0] < 0:
        raise HTTPException(402, "not enough money")
    credit = "update accounts set balance = balance + ? where id = ?"
    await execute(connection, credit, amount, target)
    row = (operation.key, source, target, amount)
    await execute(connection, "insert into transfers values (?, ?, ?, ?)", *row)
    return {"amount": amount, "left": left[0][0]}


async def execute(connection: Any, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """Return the rows of *statement*; the two drivers differ only in their placeholders."""
    if isinstance(connection, psycopg.AsyncConnection):
        statement = statement.replace("?", "%s")
    cursor = await connection.execute(statement, values)
    return list(await cursor.fetchall()) if cursor.description else []


def bank_app(**options: Any) -> FastAPI:
    """Return the application; *options* are those of the middleware."""
    app = FastAPI()
    app.include_router(bank)
    app.add_middleware(IdempotencyMiddleware, **options)
    return app


def open_accounts(url: str, *balances: int) -> None:
    """Create the tables, and accounts 1, 2, … with *balances* unless they exist."""
    is_file = url.startswith("sqlite:///")
    opened = sqlite3.connect(url.removeprefix("sqlite:///")) if is_file else psycopg.connect(url)
    with closing(opened) as connection:
        cursor = connection.cursor()
        for table in (ACCOUNTS, TRANSFERS):
            cursor.execute(table)
        for id, balance in enumerate(balances, 1):
            row = f"insert into accounts values ({id:d}, {balance:d})"
            cursor.execute(f"{row} on conflict do nothing")
        connection.commit()


if __name__ == "__main__":
    database = os.environ.get("BANK_URL", "sqlite:///bank.db")
    open_accounts(database, 100, 100)
    # The store uses connections of its own; with transactions=pool it uses the application's.
    uvicorn.run(bank_app(store=database))
