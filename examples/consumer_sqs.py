"""A consumer of SQS: an event that is delivered twice has its effect once.

Run it: AWS_ENDPOINT_URL=http://localhost:5000 python examples/consumer_sqs.py
"""

import asyncio
import json
import os
import sqlite3

import boto3

from coatcheck.consumer import Inbox, sqs

NAME = os.environ.get("QUEUE", "payments")

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


def make_queue(service):
    letters = service.create_queue(QueueName=f"{NAME}-dead-letters")
    target = letters.attributes["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": target, "maxReceiveCount": "20"})
    return service.create_queue(QueueName=NAME, Attributes={"RedrivePolicy": policy})


def publish(queue):
    for order in (17, 17, 18):  # a publisher that did not get its answer publishes again
        id = {"DataType": "String", "StringValue": f"paid-{order}"}
        body = json.dumps({"order": order})
        queue.send_message(MessageBody=body, MessageAttributes={"message-id": id})


async def main():
    queue = make_queue(boto3.resource("sqs"))
    publish(queue)
    async with inbox:
        await sqs.consume(queue, on_paid, stop=done, concurrency=1, wait_s=1)


if __name__ == "__main__":
    with sqlite3.connect("payments.db") as database:
        database.execute("create table if not exists invoices (number integer)")
    asyncio.run(main())
