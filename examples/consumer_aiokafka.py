"""A consumer of Kafka, with aiokafka: an event that is delivered twice has its effect once.

Run it: KAFKA=localhost:9092 python examples/consumer_aiokafka.py
"""

import asyncio
import os
import sqlite3

from aiokafka import AIOKafkaProducer

from coatcheck.consumer import Inbox, aiokafka

SERVERS = os.environ.get("KAFKA", "localhost:9092")
TOPIC = os.environ.get("QUEUE", "payments")

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


async def publish():
    async with AIOKafkaProducer(bootstrap_servers=SERVERS) as producer:
        for order in (17, 17, 18):  # a publisher that is restarted publishes again
            headers = [("message-id", b"paid-%d" % order)]
            body = b'{"order": %d}' % order
            await producer.send_and_wait(TOPIC, body, key=b"customer-7", headers=headers)


async def main():
    await publish()
    settings = {
        "bootstrap_servers": SERVERS,
        "group_id": "invoices",
        "auto_offset_reset": "earliest",
    }
    async with inbox:
        await aiokafka.consume(settings, on_paid, topics=[TOPIC], stop=done)


if __name__ == "__main__":
    with sqlite3.connect("payments.db") as database:
        database.execute("create table if not exists invoices (number integer)")
    asyncio.run(main())
