"""The relay: it publishes the events of committed orders to RabbitMQ.

Run it: python -m examples.order_pipeline.relay
"""

import asyncio
import signal

import aio_pika

from coatcheck.consumer import rabbitmq
from coatcheck.consumer.relay import Relay
from examples.order_pipeline.settings import LEASE, QUEUE, RABBITMQ, SHOP


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    connection = await aio_pika.connect_robust(RABBITMQ)
    async with connection:
        channel = await connection.channel()
        await channel.declare_queue(QUEUE, durable=True)
        publish = rabbitmq.publisher(channel.default_exchange)
        await Relay(f"sqlite:///{SHOP}", publish, lease=LEASE).run(stop)


if __name__ == "__main__":
    asyncio.run(main())
