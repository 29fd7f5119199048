"""A task of RQ: it is enqueued twice, and charges once.

Start a worker: rq worker shop --url redis://localhost/0 --with-scheduler
Enqueue it: QUEUE_URL=… python examples/task_rq.py
"""

import os
from pathlib import Path

from redis import Redis
from rq import Queue

from coatcheck.consumer import Inbox

URL = os.environ["QUEUE_URL"]
queue = Queue("shop", connection=Redis.from_url(URL))
inbox = Inbox("sqlite:///shop.db", consumer="billing")


@inbox.task(queue, key=lambda order: order)
def charge(order: str) -> str:
    with Path("charges.txt").open("a") as ledger:
        ledger.write(f"{order}\n")
    return f"receipt for {order}"


if __name__ == "__main__":
    from task_rq import charge as job  # by the name under which a worker imports it

    job.delay("order-17")
    job.delay("order-17")  # a second click
