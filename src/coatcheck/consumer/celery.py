"""Celery: a task runs once for its key, and is acknowledged after that.

@inbox.task(app, key=lambda order_id: order_id)
def charge(order_id): ...

charge.delay("order-17")
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NoReturn

from coatcheck.consumer.tasks import GuardedTask, TryLater
from coatcheck.errors import Misconfigured, MissingExtra

try:
    import celery  # type: ignore[import-untyped]  # ships no types
except ImportError as error:
    raise MissingExtra("celery", "celery") from error

# A task that has not run is tried again without a limit that it could reach. None would mean the
# limit of the task, which is 3 by default.
LATER_MAX = 1_000_000
# By default Celery acknowledges a task before it runs, and forgets it if its worker dies.
LATE = {"acks_late": True, "reject_on_worker_lost": True}


def guarded_task(app: celery.Celery, task: GuardedTask, name: str, options: dict[str, Any]) -> Any:  # noqa: ANN401 - Celery has no types
    """A task of *app*."""
    for setting, value in LATE.items():
        if options.get(setting, value) is not value:
            raise Misconfigured(
                f"{setting}={options[setting]!r} loses the task {name} if its worker dies: "
                f"a guarded task needs {setting}={value}, which is what it gets without the option"
            )
    if task.is_async:
        raise Misconfigured(f"the task {name} is async, which Celery does not await")
    if options.get("bind"):
        raise Misconfigured(f"the task {name} may not be bound: its arguments are its key")
    return app.task(**{**LATE, "name": name, **options})(task.wrapped(_try_later))


def _try_later(later: TryLater) -> NoReturn:
    """Have Celery run the present task again; it has not run, so that no limit applies."""
    task: Any = celery.current_task
    try:
        again = task.retry(exc=later, countdown=later.after_s, max_retries=LATER_MAX, throw=False)
    finally:
        # Celery leaves our limit on the task, where it would lift that of `autoretry_for`, too.
        with suppress(AttributeError):
            del task.override_max_retries
    raise again
