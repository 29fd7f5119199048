"""An outgoing event: it is published if, and only if, the order is committed.

Run it: python examples/outgoing_events.py
"""

import asyncio
import sqlite3

from coatcheck import AsyncEngine, current_async_operation
from coatcheck.consumer.relay import Relay

STORE = "sqlite:///shop.db"
engine = AsyncEngine(STORE)


async def place(order):
    operation = current_async_operation()
    await operation.connection.execute("insert into orders values (?)", (order,))
    await operation.emit("orders.placed", {"order": order}, key=f"order-{order}")


async def publish(event):  # in place of rabbitmq.publisher(exchange)
    print(event.topic, event.body.decode())


async def main():
    relay = Relay(STORE, publish)
    await relay.publish_all()  # creates the table of events; a service awaits relay.run()
    for _ in range(2):  # a retry
        await engine.transaction("order-17", place, 17, scope="orders")
    await relay.publish_all()
    await relay.close()
    await engine.close()


if __name__ == "__main__":
    with sqlite3.connect("shop.db") as database:
        database.execute("create table orders (number integer)")
    asyncio.run(main())
