"""A task of Procrastinate: it is enqueued twice, and charges once.

Start a worker: QUEUE_URL=postgresql://… procrastinate --app examples.task_procrastinate.app worker
Enqueue it: QUEUE_URL=… python examples/task_procrastinate.py
"""

import os
from pathlib import Path

from procrastinate import App, PsycopgConnector

from coatcheck.consumer import Inbox

URL = os.environ["QUEUE_URL"]
app = App(connector=PsycopgConnector(conninfo=URL))
inbox = Inbox("sqlite:///shop.db", consumer="billing")


@inbox.task(app, key=lambda order: order)
def charge(order: str) -> str:
    with Path("charges.txt").open("a") as ledger:
        ledger.write(f"{order}\n")
    return f"receipt for {order}"


if __name__ == "__main__":
    with app.open():
        charge.defer(order="order-17")
        charge.defer(order="order-17")  # a second click
