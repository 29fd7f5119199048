"""Jobs of RQ; see `task_apps.py`."""

from redis import Redis
from rq import Queue, Retry

from tests.consumer.task_apps import QUICK, URL, charged, inbox

queue = Queue("shop", connection=Redis.from_url(URL))


@inbox.task(queue, key=lambda order: order, name="charge", policy=QUICK, retry=Retry(max=5))
def charge(order: str) -> str:
    return charged(order)
