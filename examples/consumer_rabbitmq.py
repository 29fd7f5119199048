"""A consumer of RabbitMQ: an event that is delivered twice has its effect once.

Run it: RABBITMQ=amqp://guest:guest@localhost/ python examples/consumer_rabbitmq.py
"""

import asyncio
import os
import sqlite3

import aio_pika

from coatcheck.consumer import Inbox, rabbitmq

URL = os.environ.get("RABBITMQ", "amqp://guest:guest@localhost/")
QUEUE = os.environ.get("QUEUE", "payments")

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


async def publish(channel):
    for order in (17, 17, 18):  # a publisher that did not get its confirmation publishes again
        event = aio_pika.Message(b'{"order": %d}' % order, message_id=f"paid-{order}")
        await channel.default_exchange.publish(event, routing_key=QUEUE)


async def main():
    connection = await aio_pika.connect_robust(URL)
    async with connection, inbox:
        channel = await connection.channel()
        queue = await channel.declare_queue(QUEUE, durable=True)
        await publish(channel)
        await rabbitmq.consume(queue, on_paid, stop=done, concurrency=1)


if __name__ == "__main__":
    with sqlite3.connect("payments.db") as database:
        database.execute("create table if not exists invoices (number integer)")
    asyncio.run(main())
