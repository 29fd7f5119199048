"""Dramatiq: an actor runs once for its key.

    @inbox.task(broker, key=lambda order_id: order_id)
    def charge(order_id): ...

    charge.send("order-17")

Dramatiq acknowledges a message after its actor has ended, so that nothing needs to be set for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from coatcheck.consumer.tasks import GuardedTask, TryLater
from coatcheck.errors import Misconfigured, MissingExtra

try:
    import dramatiq
    from dramatiq.middleware import Retries
except ImportError as error:
    raise MissingExtra("dramatiq", "dramatiq") from error


def guarded_task(
    broker: dramatiq.Broker, task: GuardedTask, name: str, options: dict[str, Any]
) -> Any:  # noqa: ANN401 - an actor of any signature
    """An actor of *broker*."""
    retries = next((one for one in broker.middleware if isinstance(one, Retries)), None)
    if retries is None:
        raise Misconfigured(
            f"the broker has no Retries middleware, so that the actor {name} would be lost if its "
            "worker dies, or if another one runs it"
        )
    options["retry_when"] = _retry_when(retries, options)
    actor = dramatiq.actor(broker=broker, actor_name=name, **options)
    return actor(task.wrapped(_try_later))


SECOND_MS = 1_000


class _NotRun(dramatiq.Retry):
    """The actor has not run now."""


def _retry_when(retries: Retries, options: dict[str, Any]) -> Callable[[int, Exception], bool]:
    """
    An actor that has not run is retried without a limit, any other as the application says.

    Dramatiq itself would give up after `max_retries`, so that a message is lost in an outage.
    """
    own = options.get("retry_when", retries.retry_when)
    retries_max = options.get("max_retries", retries.max_retries)

    def retry_when(count: int, error: Exception) -> bool:
        if isinstance(error, _NotRun):
            return True
        if own is not None:
            return bool(own(count, error))
        return retries_max is None or count < retries_max

    return retry_when


def _try_later(later: TryLater) -> NoReturn:
    raise _NotRun(str(later), delay=later.after_s * SECOND_MS)
