"""The worker: each event runs a saga that charges and ships, or undoes what it has done.

Run it: python -m examples.order_pipeline.worker
"""

import asyncio
import signal

import aio_pika

from coatcheck import Policy
from coatcheck.consumer import Inbox, rabbitmq
from coatcheck.saga import Sagas, SagaUndone
from examples.order_pipeline import outside
from examples.order_pipeline.settings import LEASE, QUEUE, RABBITMQ, WORKER, execute

STORE = f"sqlite:///{WORKER}"
inbox = Inbox(STORE, consumer="shipping", policy=Policy(lease=LEASE), backoff_max="2s")
saga_policy = Policy(window="30d", lease=LEASE, wait="30s", on_expired="refuse")
sagas = Sagas(STORE, policy=saga_policy, recover_every_s=1)


@sagas.saga("order", key=lambda number: number)
async def fulfil(saga, number: int):
    await saga.step("charge", outside.charge, number, undo=outside.refund)
    await saga.step("ship", outside.ship, number)


@inbox.handler()
async def on_placed(message):
    number = message.json()["number"]
    try:
        await fulfil(number)
        outcome = "shipped"
    except SagaUndone:
        outcome = "undone"
    await asyncio.to_thread(note, number, message.message_id, outcome)


def note(number: int, event: str, outcome: str) -> None:
    """A handler that is killed here runs again, so it writes only what is missing."""
    missing = "where not exists (select 1 from handled where event = ?)"
    row = (number, event, outcome, event)
    execute(WORKER, f"insert into handled select ?, ?, ? {missing}", *row)


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sagas.start()  # continues the sagas of a worker that died
    connection = await aio_pika.connect_robust(RABBITMQ)
    async with connection, inbox, sagas:
        channel = await connection.channel()
        queue = await channel.declare_queue(QUEUE, durable=True)
        await rabbitmq.consume(queue, on_placed, stop=stop, concurrency=4)


if __name__ == "__main__":
    asyncio.run(main())
