"""A bank: money moves once, however often a transfer is sent, and whoever dies in the middle.

The transfer and the record of its key are one transaction of one database: both are there, or
neither is. So there is no moment at which a crash could leave one without the other.

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
# Nothing about the key is unique: that is not what keeps a transfer from being made twice.
TRANSFERS = """
create table if not exists transfers
(idempotency_key text, source integer, target integer, amount bigint)
"""

bank = APIRouter()


class Transfer(BaseModel):
    """What is to be moved, and between which accounts."""

    source: int
    target: int
    amount: int = Field(gt=0)


# Two that cross each other (1 to 2, and 2 to 1) can lock each other out; the database then undoes
# one of them, and it is started again.
@bank.post("/transfers", status_code=201)
@idempotent(mode="transaction", required=True, transaction_retries=5)
async def transfer(order: Transfer, operation: CurrentOperation) -> dict[str, object]:
    """Move money: all of this commits at once, and the answer with it."""
    source, target, amount = order.source, order.target, order.amount
    connection = operation.connection
    # What is refused is refused before the first write. A refusal is an answer like any other: it
    # is kept, and what was written until then would be committed with it.
    known = await ask(connection, "select id from accounts where id in (?, ?)", source, target)
    if len(known) != 2:
        raise HTTPException(404, "there are no such two accounts")
    debit = "update accounts set balance = balance - ? where id = ? and balance >= ?"
    left = await ask(connection, f"{debit} returning balance", amount, source, amount)
    if not left:
        raise HTTPException(402, "not enough money")
    credit = "update accounts set balance = balance + ? where id = ?"
    await ask(connection, credit, amount, target)
    row = (operation.key, source, target, amount)
    await ask(connection, "insert into transfers values (?, ?, ?, ?)", *row)
    return {"amount": amount, "left": left[0][0]}


async def ask(connection: Any, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """What *statement* returns; the two drivers differ in their marks alone."""
    if isinstance(connection, psycopg.AsyncConnection):
        statement = statement.replace("?", "%s")
    cursor = await connection.execute(statement, values)
    return list(await cursor.fetchall()) if cursor.description else []


def bank_app(**options: Any) -> FastAPI:
    """The application; *options* are those of the middleware."""
    app = FastAPI()
    app.include_router(bank)
    app.add_middleware(IdempotencyMiddleware, **options)
    return app


def open_accounts(url: str, *balances: int) -> None:
    """Make the tables, and accounts 1, 2, … with *balances*; those that are there stay."""
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
    # The store lends its own connections; with transactions=pool the application lends of its own.
    uvicorn.run(bank_app(store=database))
