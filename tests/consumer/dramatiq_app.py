"""Actors of Dramatiq; see `task_apps.py`."""

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from tests.consumer.task_apps import QUICK, URL, charged, inbox

# 1 s: after that the messages of a worker that was killed are given to others.
broker = RedisBroker(url=URL, heartbeat_timeout=1_000, maintenance_chance=1_000_000)
dramatiq.set_broker(broker)


@inbox.task(
    broker, key=lambda order: order, name="charge", policy=QUICK, min_backoff=1, max_backoff=10
)
def charge(order: str) -> str:
    return charged(order)
