"""A consumer of Redis Streams: an event that is delivered twice has its effect once.

Run it: REDIS=redis://localhost:6379/0 python examples/consumer_redis_streams.py
"""

import asyncio
import json
import os
import sqlite3

from redis.asyncio import Redis

from coatcheck.consumer import Inbox, redis_streams

URL = os.environ.get("REDIS", "redis://localhost:6379/0")
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


async def publish(client):
    for order in (17, 17, 18):  # a publisher that did not get its answer publishes again
        body = json.dumps({"order": order})
        await client.xadd(STREAM, {"message-id": f"paid-{order}", "body": body})


async def main():
    async with Redis.from_url(URL) as client, inbox:
        await publish(client)
        await redis_streams.consume(
            client, on_paid, stream=STREAM, group="billing", stop=done, concurrency=1
        )


if __name__ == "__main__":
    with sqlite3.connect("payments.db") as database:
        database.execute("create table if not exists invoices (number integer)")
    asyncio.run(main())
