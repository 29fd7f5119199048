"""Run the whole pipeline, kill its processes at random, and print a ledger that adds up.

Run it: RABBITMQ=amqp://guest:guest@localhost/ python -m examples.order_pipeline
"""

import argparse
import asyncio
import random
import socket
import subprocess
import sys

import aio_pika

from examples.order_pipeline import settings
from examples.order_pipeline.customers import POLL_S, Customers, until
from examples.order_pipeline.ledger import handled, write_ledger
from examples.order_pipeline.settings import SHOP, execute

PROGRAMS = ("api", "relay", "worker")
# A process is killed up to so long after the progress that its turn waits for.
KILL_WITHIN_S = 0.3


class Processes:
    """The programs of the pipeline, each in a process of its own."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen] = {}

    def start(self, program: str) -> None:
        command = [sys.executable, "-m", f"examples.order_pipeline.{program}"]
        self._running[program] = subprocess.Popen(command)

    def kill(self, program: str) -> None:
        """Kill it (-9), without a warning."""
        process = self._running.pop(program)
        process.kill()
        process.wait()

    def stop(self, program: str) -> None:
        """Have it end what it has begun."""
        process = self._running.pop(program)
        process.terminate()
        process.wait()

    async def watch(self) -> None:
        """Raise if a process ends that was neither killed nor stopped."""
        while True:
            for program, process in self._running.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{program} has ended with {process.returncode}")
            await asyncio.sleep(POLL_S)

    def kill_all(self) -> None:
        for program in list(self._running):
            self.kill(program)


def victims(kills: int) -> list[str]:
    """Each program in its turn, in a random order."""
    turns = [random.sample(PROGRAMS, len(PROGRAMS)) for _ in range(kills)]
    return [program for turn in turns for program in turn][:kills]


async def kill_some(kills: int, orders: int, processes: Processes, customers: Customers) -> None:
    """Kill a process, and start it again, each time that some more work is done."""
    chosen = victims(kills)
    for count, victim in enumerate(chosen, 1):
        enough = 2 * orders * count / (kills + 1)
        await until(lambda enough=enough: customers.placed + handled().total() >= enough)
        await asyncio.sleep(random.uniform(0, KILL_WITHIN_S))
        processes.kill(victim)
        processes.start(victim)
    print("killed:", *chosen)


async def messages(queue: str) -> int:
    """How many messages wait in *queue*, without those that a worker has."""
    connection = await aio_pika.connect(settings.RABBITMQ)
    async with connection:
        channel = await connection.channel()
        declared = await channel.declare_queue(queue, durable=True)
        return declared.declaration_result.message_count or 0


async def settle(orders: int, processes: Processes) -> None:
    """Wait until no event is left: not in the database, not in RabbitMQ, not in a worker."""
    await until(lambda: handled().total() >= orders)
    await until(lambda: not execute(SHOP, "select 1 from coatcheck_events"))
    processes.stop("api")
    processes.stop("relay")
    while True:
        while await messages(settings.QUEUE):  # noqa: ASYNC110 - RabbitMQ does not tell
            await asyncio.sleep(POLL_S)
        processes.stop("worker")  # what it had and could not handle is in the queue again
        if not await messages(settings.QUEUE):
            return
        processes.start("worker")


def is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


async def place_and_handle(
    orders: int, kills: int, processes: Processes, customers: Customers
) -> None:
    await until(lambda: is_open(settings.PORT))
    await asyncio.gather(customers.send_all(), kill_some(kills, orders, processes, customers))
    await settle(orders, processes)


async def run(orders: int, kills: int) -> bool:
    """Place and handle all orders; True if the ledger adds up."""
    processes, customers = Processes(), Customers(orders)
    try:
        for program in PROGRAMS:
            processes.start(program)
        working = asyncio.ensure_future(place_and_handle(orders, kills, processes, customers))
        watching = asyncio.ensure_future(processes.watch())
        done, _ = await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        await done.pop()
        watching.cancel()
    finally:
        processes.kill_all()
    print(f"{'requests sent':20}{customers.attempts:5}")
    dead = await messages(f"{settings.QUEUE}.dead-letters")
    print(f"{'dead letters':20}{dead:5}")
    return write_ledger(orders) and not dead


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--orders", type=int, default=40)
    parser.add_argument("--kills", type=int, default=6)
    given = parser.parse_args()
    settings.create_tables()
    migrate = [sys.executable, "-m", "coatcheck", "migrate", "--events", f"sqlite:///{SHOP}"]
    subprocess.run(migrate, check=True, stdout=subprocess.DEVNULL)
    adds_up = asyncio.run(run(given.orders, given.kills))
    print("the ledger adds up" if adds_up else "the ledger does NOT add up")
    sys.exit(not adds_up)


if __name__ == "__main__":
    main()
