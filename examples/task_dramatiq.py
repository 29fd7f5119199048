"""A task of Dramatiq: it is enqueued twice, and charges once.

Start a worker: QUEUE_URL=redis://localhost/0 dramatiq examples.task_dramatiq
Enqueue it: QUEUE_URL=… python examples/task_dramatiq.py
"""

import os
from pathlib import Path

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from coatcheck.consumer import Inbox

URL = os.environ["QUEUE_URL"]
broker = RedisBroker(url=URL)
dramatiq.set_broker(broker)
inbox = Inbox("sqlite:///shop.db", consumer="billing")


@inbox.task(broker, key=lambda order: order)
def charge(order: str) -> str:
    with Path("charges.txt").open("a") as ledger:
        ledger.write(f"{order}\n")
    return f"receipt for {order}"


if __name__ == "__main__":
    charge.send("order-17")
    charge.send("order-17")  # a second click
