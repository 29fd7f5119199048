"""Tasks of Procrastinate, sync and async; see `task_apps.py`."""

import asyncio

from procrastinate import App, PsycopgConnector, RetryStrategy

from tests.consumer.task_apps import QUICK, URL, charged, inbox

app = App(connector=PsycopgConnector(conninfo=URL))
RETRY = RetryStrategy(max_attempts=5, wait=0)


@inbox.task(app, key=lambda order: order, name="charge", policy=QUICK, retry=RETRY)
async def charge(order: str) -> str:
    return await asyncio.to_thread(charged, order)
