"""A worker process that the tests kill: consumes from one broker, and writes each effect once.

    python -m tests.consumer.worker rabbitmq URL QUEUE STORE_URL

It prints a line for each message that it has handled, and ends at SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from coatcheck.consumer import Inbox, event_ids
from tests.consumer import crashes, sources
from tests.consumer.law import POISON


def handler_of(store: str) -> Any:
    inbox = Inbox(store, consumer="ledger", attempts_max=3, backoff="10ms")
    place = "%s" if store.startswith("postgres") else "?"

    @inbox.handler(mode="transaction", name="write")
    async def write(message, operation):
        event = event_ids.published_id(message).split()[-1]
        statement = f"insert into effects (event) values ({place})"
        await operation.connection.execute(statement, (event,))
        crashes.reach("in the handler")
        if message.body == POISON:
            raise ValueError("this message can never be handled")
        sys.stdout.write(f"{event}\n")
        sys.stdout.flush()

    return write


async def rabbitmq(url: str, name: str, handler: Any, stop: asyncio.Event) -> None:
    import aio_pika

    from coatcheck.consumer.rabbitmq import consume

    connection = await aio_pika.connect_robust(url)
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(
            name, durable=True, arguments={"x-queue-type": "quorum"}
        )
        await consume(queue, handler, stop=stop)


# How each broker is consumed: a function of its URL, the name of the queue, the handler and `stop`.
BROKERS: dict[str, Callable[..., Awaitable[None]]] = {"rabbitmq": rabbitmq, **sources.BROKERS}


async def main(broker: str, url: str, name: str, store: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    handler = crashes.dying(handler_of(store))
    try:
        await BROKERS[broker](url, name, handler, stop)
    finally:
        await handler.inbox.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
