"""Tasks of Celery; see `task_apps.py`."""

from celery import Celery

from tests.consumer.task_apps import QUICK, URL, charged, inbox

app = Celery("shop", broker=URL, backend=URL)
# 2 s: Redis hands out a task again whose worker was killed.
app.conf.broker_transport_options = {"visibility_timeout": 2}
app.conf.worker_hijack_root_logger = False


@inbox.task(
    app,
    key=lambda order: order,
    name="charge",
    policy=QUICK,
    autoretry_for=(ValueError,),
    retry_backoff=False,
    default_retry_delay=0,
)
def charge(order: str) -> str:
    return charged(order)
