"""Where everything is: the same for all processes, from the environment."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

RABBITMQ = os.environ.get("RABBITMQ", "amqp://guest:guest@localhost/")
QUEUE = os.environ.get("QUEUE", "orders.placed")
DIRECTORY = Path(os.environ.get("PIPELINE", "."))
PORT = int(os.environ.get("PORT", "8000"))

SHOP = DIRECTORY / "shop.db"  # the orders, the records of their keys, and the outgoing events
WORKER = DIRECTORY / "worker.db"  # the handled events, and the records of the inbox and the sagas
OUTSIDE = DIRECTORY / "outside.db"  # the bank and the warehouse

# 1 second: how long after the death of a process another one takes over its work.
LEASE = "1s"
PRICE = 30
# Every fifth order is out of stock.
REFUSED_EVERY = 5


def execute(path: Path, statement: str, *values: object) -> list[tuple]:
    """Run one statement in a transaction of its own, and return its rows."""
    with closing(sqlite3.connect(path, timeout=30)) as database, database:
        return database.execute(statement, values).fetchall()


def create_tables() -> None:
    """Only what lies outside has unique keys: coatcheck prevents the second order and event."""
    execute(SHOP, "create table if not exists orders (number integer)")
    execute(WORKER, "create table if not exists handled (number integer, event text, outcome text)")
    execute(OUTSIDE, "create table if not exists calls (key text)")
    effects = "effects (key text primary key, what text, number integer, amount integer)"
    execute(OUTSIDE, f"create table if not exists {effects}")
