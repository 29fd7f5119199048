"""Tasks: what the guards of all task queues share.

A task queue runs a task again after a crash, and a caller may enqueue it twice. A guarded task runs
once for its key; another run gets the stored result. What is still in progress elsewhere is tried
again later, with the queue's own way of doing that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coatcheck.core.callables import check_function, is_async_function
from coatcheck.core.fingerprint import fingerprint_of_call
from coatcheck.core.policy import Policy
from coatcheck.engine.attempts import OUTAGES
from coatcheck.engine.settings import policy_of
from coatcheck.errors import CoatcheckError, KeyBusy

if TYPE_CHECKING:  # the inbox finds the queue's module by its application
    from coatcheck.consumer.inbox import Inbox

# While the store is down, tasks stay in their queue.
STORE_DOWN_S = 5


class TryLater(CoatcheckError):
    """The task has not run now: another worker runs it, or the store is unavailable."""

    def __init__(self, reason: str, after_s: int) -> None:
        super().__init__(reason)
        self.after_s = after_s

    def __reduce__(self) -> tuple[type[TryLater], tuple[str, int]]:
        return TryLater, (str(self), self.after_s)


class GuardedTask:
    """
    A function that runs once for each key.

    Without *key*, all arguments are the key.
    """

    def __init__(
        self,
        inbox: Inbox,
        function: Callable[..., Any],
        name: str,
        key: Callable[..., object] | None,
        policy: Policy | None,
    ) -> None:
        if key is not None:
            check_function("key", key)
        self.function = function
        self.is_async = is_async_function(function)
        self.label = f"{inbox.consumer}.{name}"
        self._inbox = inbox
        self._key = key
        self._policy = inbox.policy if policy is None else policy_of(policy)

    def wrapped(self, on_later: Callable[[TryLater], object]) -> Callable[..., Any]:
        """
        The function for the task queue: it runs once for each key, or returns the stored result.

        *on_later* is called if it has not run now: it raises, or returns, what has the queue run
        the task again.
        """
        return self._wrapped_async(on_later) if self.is_async else self._wrapped(on_later)

    def _wrapped(self, on_later: Callable[[TryLater], object]) -> Callable[..., Any]:
        @functools.wraps(self.function)
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's result
            engine, key = self._inbox.engine, self._key_of(args, kwargs)
            # A partial, so that the task may have arguments called "scope" or "policy".
            call = functools.partial(self.function, *args, **kwargs)
            try:
                return engine.run(key, call, scope=self.label, policy=self._policy)
            except (KeyBusy, *OUTAGES) as error:
                return on_later(_later(error))

        return run

    def _wrapped_async(self, on_later: Callable[[TryLater], object]) -> Callable[..., Any]:
        @functools.wraps(self.function)
        async def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's result
            engine, key = self._inbox.async_engine, self._key_of(args, kwargs)
            call = functools.partial(self.function, *args, **kwargs)
            try:
                return await engine.run(key, call, scope=self.label, policy=self._policy)
            except (KeyBusy, *OUTAGES) as error:
                return on_later(_later(error))

        return run

    def _key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - checked by the engine
        if self._key is None:
            return fingerprint_of_call(args, kwargs).hex()
        return self._key(*args, **kwargs)


def _later(error: CoatcheckError) -> TryLater:
    after_s = error.problem.retry_after_s if isinstance(error, KeyBusy) else STORE_DOWN_S
    return TryLater(str(error), after_s or 1)
