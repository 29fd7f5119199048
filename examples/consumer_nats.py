"""A consumer of NATS JetStream: an event that is delivered twice has its effect once.

Run it: NATS=nats://localhost:4222 python examples/consumer_nats.py
"""

import asyncio
import os
import sqlite3

import nats

from coatcheck.consumer import Inbox
from coatcheck.consumer.nats import consume

URL = os.environ.get("NATS", "nats://localhost:4222")
STREAM = os.environ.get("QUEUE", "payments")

inbox = Inbox("sqlite:///payments.db", consumer="billing")
done = asyncio.Event()


@inbox.handler(event_id=lambda message: message.headers["message-id"], mode="transaction")
async def on_paid(message, operation):
    await operation.connection.execute(
        "insert into invoices (number) values (?)", (message.json()["order"],)
    )
    print("invoice for order", message.json()["order"])
    if message.json()["order"] == 18:
        done.set()


async def publish(jetstream):
    for order in (17, 17, 18):  # a publisher that did not get its confirmation publishes again
        headers = {"message-id": f"paid-{order}"}
        await jetstream.publish(STREAM, b'{"order": %d}' % order, headers=headers)


async def main():
    client = await nats.connect(URL)
    jetstream = client.jetstream()
    await jetstream.add_stream(name=STREAM, subjects=[STREAM])
    await jetstream.add_stream(name="dead-letters", subjects=["dead-letters.*"])
    subscription = await jetstream.pull_subscribe(STREAM, durable="billing")
    await publish(jetstream)
    async with inbox:
        await consume(subscription, on_paid, stop=done, concurrency=1)
    await client.close()


if __name__ == "__main__":
    with sqlite3.connect("payments.db") as database:
        database.execute("create table if not exists invoices (number integer)")
    asyncio.run(main())
