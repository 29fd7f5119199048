"""RQ: a job runs once for its key.

    @inbox.task(queue, key=lambda order_id: order_id)
    def charge(order_id): ...

    charge.delay("order-17")

RQ forgets a job whose worker dies, unless the job may be retried. So these jobs are enqueued with
retries; enqueue them with `delay`, not with `queue.enqueue`.
"""

from __future__ import annotations

from typing import Any

from coatcheck.consumer.tasks import GuardedTask, TryLater
from coatcheck.errors import Misconfigured, MissingExtra

try:
    from rq import Queue, Retry
    from rq.decorators import job
except ImportError as error:
    raise MissingExtra("rq", "rq") from error

# With these pauses, a job survives a crash of its worker and an hour's outage of its store.
RETRY = Retry(max=10, interval=[1, 5, 10, 30, 60, 60, 300, 600, 600, 1_800])
# A job that has not run is tried again without a limit that it could reach.
LATER_MAX = 1_000_000


def guarded_task(queue: Queue, task: GuardedTask, name: str, options: dict[str, Any]) -> Any:  # noqa: ANN401 - with `delay`
    """A function whose `delay` enqueues a job in *queue*."""
    if task.is_async:
        raise Misconfigured(f"the job {name} is async; give RQ a sync function")
    if "retry" in options and not isinstance(options["retry"], Retry):
        raise Misconfigured(f"the job {name} is lost if its worker dies: give retry=Retry(…)")

    decorate: Any = job(queue, connection=queue.connection, **{"retry": RETRY, **options})
    return decorate(task.wrapped(_try_later))


def _try_later(later: TryLater) -> Retry:
    """What a job returns to be run again."""
    return Retry(max=LATER_MAX, interval=later.after_s)
