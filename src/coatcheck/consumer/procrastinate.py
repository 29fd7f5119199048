"""Procrastinate: a task runs once for its key.

    @inbox.task(app, key=lambda order_id: order_id)
    async def charge(order_id): ...

    await charge.defer_async(order_id="order-17")

A job whose worker dies stays "doing" until it is retried as Procrastinate documents it for stalled
jobs; a retried job then does not repeat what is done.
"""

from __future__ import annotations

from typing import Any, NoReturn

from coatcheck.consumer.tasks import GuardedTask, TryLater
from coatcheck.errors import MissingExtra

try:
    import procrastinate
    from procrastinate.jobs import Job
    from procrastinate.retry import BaseRetryStrategy, RetryDecision, RetryStrategy
except ImportError as error:
    raise MissingExtra("procrastinate", "procrastinate") from error


class RetryLater(BaseRetryStrategy):
    """Retries a job that has not run, and any other as its own strategy says."""

    def __init__(self, own: BaseRetryStrategy | None) -> None:
        self._own = own

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
        """When to run *job* again; None: never."""
        if isinstance(exception, TryLater):
            return RetryDecision(retry_in={"seconds": exception.after_s})
        if self._own is None:
            return None
        return self._own.get_retry_decision(exception=exception, job=job)


def guarded_task(
    app: procrastinate.App, task: GuardedTask, name: str, options: dict[str, Any]
) -> Any:  # noqa: ANN401 - a task of any signature
    """A task of *app*."""
    given = options.pop("retry", False)
    own: BaseRetryStrategy | None = None
    if isinstance(given, BaseRetryStrategy):
        own = given
    elif given:  # True: without an end; a number: so many attempts
        own = RetryStrategy(max_attempts=None if given is True else int(given))
    decorate: Any = app.task(name=name, retry=RetryLater(own), **options)
    return decorate(task.wrapped(_try_later))


def _try_later(later: TryLater) -> NoReturn:
    raise later
