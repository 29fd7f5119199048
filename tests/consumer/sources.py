"""How a worker consumes from each broker: a function of its URL, the queue, the handler and `stop`.

What a dead worker did not acknowledge comes again after `AGAIN_S`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

# 1 s: short, because each killed worker has the law wait for it.
AGAIN_S = 1.0


async def nats(url: str, name: str, handler: Any, stop: asyncio.Event) -> None:
    import nats as nats_py
    from nats.js.api import ConsumerConfig

    from coatcheck.consumer.nats import consume

    client = await nats_py.connect(url)
    try:
        subscription = await client.jetstream().pull_subscribe(
            name, durable="ledger", config=ConsumerConfig(ack_wait=AGAIN_S)
        )
        await consume(subscription, handler, stop=stop, dead_letters=f"{name}.dead-letters")
    finally:
        await client.close()


async def redis_streams(url: str, name: str, handler: Any, stop: asyncio.Event) -> None:
    from redis.asyncio import Redis

    from coatcheck.consumer.redis_streams import consume

    async with Redis.from_url(url) as client:
        await consume(client, handler, stream=name, group="ledger", stop=stop, idle=AGAIN_S)


async def kafka(url: str, name: str, handler: Any, stop: asyncio.Event) -> None:
    from coatcheck.consumer.kafka import consume

    await consume(_kafka_settings(url), handler, topics=[name], stop=stop)


def _kafka_settings(url: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": url,
        "group.id": "ledger",
        "auto.offset.reset": "earliest",
        "session.timeout.ms": int(AGAIN_S * 1_000),
        "heartbeat.interval.ms": int(AGAIN_S * 250),
    }


async def aiokafka(url: str, name: str, handler: Any, stop: asyncio.Event) -> None:
    from aiokafka.errors import KafkaError

    from coatcheck.consumer.aiokafka import consume

    settings = {key.replace(".", "_"): value for key, value in _kafka_settings(url).items()}
    while not stop.is_set():
        try:
            await consume(settings, handler, topics=[name], stop=stop)
        except KafkaError as error:  # the stand-in refuses some synchronisations of groups
            sys.stderr.write(f"{error}\n")


async def sqs(url: str, name: str, handler: Any, stop: asyncio.Event) -> None:
    import boto3

    from coatcheck.consumer.sqs import consume
    from tests.support.servers.sqs import KEYS

    queue = boto3.resource("sqs", endpoint_url=url, **KEYS).get_queue_by_name(QueueName=name)
    await consume(queue, handler, stop=stop, wait_s=1)


async def faststream(url: str, name: str, handler: Any, stop: asyncio.Event) -> None:
    from faststream import Context
    from faststream.nats import JStream, NatsBroker, PullSub
    from nats.js.api import ConsumerConfig

    from coatcheck import current_async_operation
    from coatcheck.consumer import Headers, Message
    from coatcheck.consumer.faststream import InboxMiddleware
    from tests.consumer import crashes

    current = Context("message")

    async def keep(_message: Any, reason: str) -> None:
        sys.stderr.write(f"{reason}\n")

    guard = InboxMiddleware(handler.inbox, dead_letter=keep, mode="transaction")
    broker = NatsBroker(url, middlewares=[guard], logger=None)

    @broker.subscriber(
        name,
        stream=JStream(name, declare=False),
        durable="ledger",
        pull_sub=PullSub(batch_size=10, timeout=1),
        config=ConsumerConfig(ack_wait=AGAIN_S),
        max_workers=10,
    )
    async def ledger(body: bytes, message: Any = current) -> None:
        # The law's own handler writes the effect, in the operation of the guard.
        given = Message(body, Headers(message.headers.items()))
        await handler(given, current_async_operation())

    crashes.dying(guard.handler_of("Ledger"))
    await broker.start()
    await stop.wait()
    await broker.stop()


BROKERS: dict[str, Callable[..., Awaitable[None]]] = {
    "nats": nats,
    "redis_streams": redis_streams,
    "kafka": kafka,
    "aiokafka": aiokafka,
    "sqs": sqs,
    "faststream": faststream,
}
