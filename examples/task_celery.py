"""A task of Celery: it is enqueued twice, and charges once.

Start a worker: QUEUE_URL=redis://localhost/0 celery -A examples.task_celery worker
Enqueue it: QUEUE_URL=… python examples/task_celery.py
"""

import os
from pathlib import Path

from celery import Celery

from coatcheck.consumer import Inbox

URL = os.environ["QUEUE_URL"]
app = Celery("shop", broker=URL)
inbox = Inbox("sqlite:///shop.db", consumer="billing")


@inbox.task(app, key=lambda order: order)
def charge(order: str) -> str:
    with Path("charges.txt").open("a") as ledger:
        ledger.write(f"{order}\n")
    return f"receipt for {order}"


if __name__ == "__main__":
    charge.delay("order-17")
    charge.delay("order-17")  # a second click
