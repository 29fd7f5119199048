"""A consumer of Kafka, with confluent-kafka: an event that is delivered twice has its effect once.

Run it: KAFKA=localhost:9092 python examples/consumer_kafka.py
"""

import asyncio
import os
import sqlite3

from confluent_kafka import Producer

from coatcheck.consumer import Inbox, kafka

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


def publish():
    producer = Producer({"bootstrap.servers": SERVERS})
    for order in (17, 17, 18):  # a publisher that is restarted publishes again
        headers = {"message-id": f"paid-{order}"}
        producer.produce(TOPIC, b'{"order": %d}' % order, key="customer-7", headers=headers)
    producer.flush()


async def main():
    publish()
    settings = {
        "bootstrap.servers": SERVERS,
        "group.id": "billing",
        "auto.offset.reset": "earliest",
    }
    async with inbox:
        await kafka.consume(settings, on_paid, topics=[TOPIC], stop=done)


if __name__ == "__main__":
    with sqlite3.connect("payments.db") as database:
        database.execute("create table if not exists invoices (number integer)")
    asyncio.run(main())
