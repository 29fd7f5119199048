"""A subscriber of FastStream: an event that is delivered twice has its effect once.

Run it: NATS=nats://localhost:4222 python examples/consumer_faststream.py
"""

import asyncio
import os
import sqlite3

from faststream import FastStream
from faststream.nats import JStream, NatsBroker, PullSub
from pydantic import BaseModel

from coatcheck import current_async_operation
from coatcheck.consumer import Inbox
from coatcheck.consumer.faststream import InboxMiddleware

URL = os.environ.get("NATS", "nats://localhost:4222")
STREAM = os.environ.get("QUEUE", "payments")

inbox = Inbox("sqlite:///payments.db", consumer="billing")


async def keep_dead_letter(message, reason):
    headers = {**message.headers, "x-coatcheck-reason": reason}
    await broker.publish(message.body, "dead-letters", stream="dead-letters", headers=headers)


guard = InboxMiddleware(inbox, dead_letter=keep_dead_letter, mode="transaction")
broker = NatsBroker(URL, middlewares=[guard], logger=None)


class Paid(BaseModel):
    """An order that was paid."""

    order: int


@broker.subscriber(STREAM, stream=JStream(STREAM), durable="billing", pull_sub=PullSub(timeout=0.5))
async def on_paid(paid: Paid):
    operation = current_async_operation()
    await operation.connection.execute("insert into invoices (number) values (?)", (paid.order,))
    print("invoice for order", paid.order)
    if paid.order == 18:
        app.exit()


app = FastStream(broker, on_startup=[lambda: guard.check(broker)], logger=None)


@app.after_startup
async def publish():
    for order in (17, 17, 18):  # a publisher that did not get its confirmation publishes again
        await broker.publish({"order": order}, STREAM, headers={"message-id": f"paid-{order}"})


@app.after_shutdown
async def close():
    await inbox.aclose()


if __name__ == "__main__":
    with sqlite3.connect("payments.db") as database:
        database.execute("create table if not exists invoices (number integer)")
    asyncio.run(app.run())
