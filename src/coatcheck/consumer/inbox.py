"""The inbox: claim a message, handle it, complete its record, and only then acknowledge it.

A handler is a plain function, sync or async. Async ones run on an `AsyncEngine`; sync ones run in
threads, on an `Engine` with the same store. Both say what the broker is to do as an `Action`
(`core/messages/delivery.py`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, Generic, ParamSpec, Self, TypeVar, Unpack

from coatcheck.consumer.delivery import Delivery, takes_operation
from coatcheck.consumer.event_ids import published_id
from coatcheck.consumer.message import Message
from coatcheck.consumer.tasks import GuardedTask
from coatcheck.core.callables import check_function, is_async_function
from coatcheck.core.fingerprint import fingerprint_of
from coatcheck.core.lifecycle import ClaimRequest
from coatcheck.core.messages.delivery import (
    Acknowledge,
    Action,
    DeadLetter,
    Redeliver,
    action_of_failure,
    action_of_refusal,
)
from coatcheck.core.messages.offset import PartitionOffset
from coatcheck.core.policy import Duration, Policy, PolicyOptions, changed, duration_ms, positive_ms
from coatcheck.engine import AsyncEngine, Engine
from coatcheck.engine.attempts import OUTAGES
from coatcheck.engine.functions import key_of_call, name_of, request_of_call
from coatcheck.engine.settings import policy_of
from coatcheck.errors import (
    CoatcheckError,
    Misconfigured,
    Refused,
    Resumable,
    StepInDoubt,
    Uncertain,
)
from coatcheck.keyring import KeyRing
from coatcheck.operation import Operation

logger = logging.getLogger("coatcheck")

P = ParamSpec("P")
T = TypeVar("T")

# 7 days: brokers redeliver for days after an outage, and operators replay old messages.
WINDOW = "7d"
# 10: with a backoff from 1 s to 5 minutes, about 9 minutes of attempts.
ATTEMPTS_MAX = 10
# While the store is down, or the settings are wrong, messages stay with the broker.
STORE_DOWN_S = 5.0
# 10 000: more messages than one process has failed to handle at one time.
FAILURES_MAX = 10_000


class Reject(CoatcheckError):
    """Raised by a handler that can never handle this message: it becomes a dead letter at once."""


class Inbox:
    """
    Deduplicates the messages of one consumer: an event has its effect once.

    Args:
        store: the URL of the store of the records.
        consumer: the name of this consumer. Two consumers with different names handle the same
            event once each.
        window: for how long a duplicate is recognised; longer than the broker keeps messages.
        attempts_max: after this many attempts a message becomes a dead letter; None: never.
        backoff: how long after the first failed attempt a message is delivered again; it doubles
            with each further attempt, up to *backoff_max*.
        policy: everything else; see `Policy`.
        secret, keyring, transactions: see `Engine`. *transactions* for async handlers must be
            async, and for sync handlers sync.
    """

    def __init__(
        self,
        store: str,
        *,
        consumer: str,
        window: Duration = WINDOW,
        attempts_max: int | None = ATTEMPTS_MAX,
        backoff: Duration = "1s",
        backoff_max: Duration = "5m",
        policy: Policy | str | None = None,
        secret: bytes | str = b"",
        keyring: KeyRing | None = None,
        transactions: object = None,
    ) -> None:
        given: tuple[object, object] = (store, consumer)
        if not isinstance(given[0], str):
            raise Misconfigured(
                f"an Inbox needs the URL of its store, not a {type(store).__name__}"
            )
        if not isinstance(given[1], str) or not consumer:
            raise Misconfigured("consumer= is the name of this consumer, such as 'billing'")
        self.consumer = consumer
        self.backoff_s = positive_ms("backoff", backoff) / 1_000
        self.backoff_s_max = positive_ms("backoff_max", backoff_max) / 1_000
        # A duplicate does not wait here for the first delivery: the broker delivers it again.
        settings = {"window": window, "attempts_max": attempts_max, "in_flight": "409", "wait": 0}
        self.policy = changed(policy_of(policy), settings)
        self._settings: dict[str, Any] = {
            "secret": secret,
            "keyring": keyring,
            "transactions": transactions,
        }
        self._store = store
        self._names: set[str] = set()
        self._mutex = threading.Lock()
        self._engine: Engine | None = None
        self._async_engine: AsyncEngine | None = None

    @property
    def engine(self) -> Engine:
        """The engine of sync handlers."""
        with self._mutex:
            if self._engine is None:
                self._engine = Engine(self._store, self.policy, **self._settings)
            return self._engine

    @property
    def async_engine(self) -> AsyncEngine:
        """The engine of async handlers."""
        with self._mutex:
            if self._async_engine is None:
                self._async_engine = AsyncEngine(self._store, self.policy, **self._settings)
            return self._async_engine

    def handler(
        self,
        *,
        event_id: Callable[[Message], object] = published_id,
        name: str = "",
        **changes: Unpack[PolicyOptions],
    ) -> Callable[[Callable[P, T]], Handler[P, T]]:
        """
        Make a function the handler of messages: it takes a message, and its operation if it wants.

        Args:
            event_id: returns the id of the event in a message; see `coatcheck.consumer.event_ids`.
                By default it is the id of a CloudEvent, or else the message id of the publisher.
                A message without an id becomes a dead letter.
            name: of the handler; by default the function's. Events are remembered for each name:
                keep it when you rename the function.
            changes: of the inbox's policy, such as `mode="transaction"`.
        """
        check_function("event_id", event_id)
        policy = changed(self.policy, changes)

        def decorate(function: Callable[P, T]) -> Handler[P, T]:
            own = name or name_of(function).rpartition(".")[2]
            if own in self._names:
                raise Misconfigured(
                    f"the inbox has a handler {own!r} already: give this one a name="
                )
            self._names.add(own)
            return Handler(self, function, f"{self.consumer}.{own}", event_id, policy)

        return decorate

    def task(
        self,
        app: object,
        *,
        key: Callable[..., object] | None = None,
        name: str = "",
        policy: Policy | None = None,
        **options: Any,
    ) -> Callable[[Callable[..., Any]], Any]:
        """
        Make a function a task of a task queue, which runs once for each key.

        Args:
            app: a Celery application, a Dramatiq broker, an RQ queue or a Procrastinate
                application.
            key: takes the task's arguments and returns the key; by default all arguments are the
                key.
            name: of the task; by default the function's. Runs are remembered for each name.
            policy: in place of the inbox's.
            options: of the task, as the task queue itself takes them.
        """
        guard = _task_guard(app)

        def decorate(function: Callable[..., Any]) -> Any:  # noqa: ANN401 - the queue's own task
            own = name or name_of(function)
            return guard(app, GuardedTask(self, function, own, key, policy), own, options)

        return decorate

    def check_window(self, kept: Duration, where: str) -> None:
        """Warn if *where*, such as a queue, keeps messages for longer than duplicates are known."""
        if duration_ms(kept) > self.policy.window_ms:
            logger.warning(
                "coatcheck: %s keeps messages for %s, and the inbox %r recognises duplicates for "
                "%s only: an older message would be handled again; give Inbox a longer window",
                *(where, kept, self.consumer, self.policy.window),
            )

    def close(self) -> None:
        """Close the store of sync handlers."""
        if self._engine is not None:
            self._engine.close()

    async def aclose(self) -> None:
        """Close the stores of all handlers."""
        if self._async_engine is not None:
            await self._async_engine.close()
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Handler(Generic[P, T]):
    """
    A function that handles messages; `consume` of each broker takes it.

    Calling it calls the function itself, which is for tests: nothing is claimed then.
    """

    def __init__(
        self,
        inbox: Inbox,
        function: Callable[P, T],
        label: str,
        event_id: Callable[[Message], object],
        policy: Policy,
    ) -> None:
        functools.update_wrapper(self, function)
        self.inbox = inbox
        self.label = label
        self.policy = policy
        self.is_async = is_async_function(function)
        self._function: Callable[..., Any] = function
        self._takes_operation = takes_operation(function)
        self._event_id = event_id
        # In transaction mode a failed attempt leaves no record, so failures are counted here.
        self._failures: OrderedDict[str, int] = OrderedDict()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function itself."""
        result: T = self._function(*args, **kwargs)
        return result

    async def handle(
        self,
        message: Message,
        *,
        offset: PartitionOffset | None = None,
    ) -> Action:
        """
        Handle one delivery; returns what the broker is to do with it.

        *offset* is written in the handler's transaction, after the handler. A sync handler runs in
        a thread. A caller that is cancelled waits for its end, so that the inbox is not closed
        before the record is completed.
        """
        if not self.is_async:
            return await _in_thread(self.handle_blocking, message, offset=offset)
        key = self._key_of(message)
        if isinstance(key, DeadLetter):
            return self._logged(message, key)
        engine = self.inbox.async_engine
        delivery = Delivery(self._function, message, offset, takes_operation=self._takes_operation)
        try:
            await engine.ensure_started(self.policy)
            request = self._request(engine, key, message)
            await engine.run_request(request, self.policy, delivery.call_async, None)
        except Exception as error:  # noqa: BLE001 - logged, and the broker keeps the message
            return self._not_handled(key, delivery, error)
        self._failures.pop(key, None)
        return Acknowledge(is_duplicate=delivery.operation is None)

    def handle_blocking(
        self,
        message: Message,
        *,
        offset: PartitionOffset | None = None,
    ) -> Action:
        """The same for sync code and sync handlers."""
        if self.is_async:
            raise Misconfigured(f"{self.label} is async: await its `handle`")
        key = self._key_of(message)
        if isinstance(key, DeadLetter):
            return self._logged(message, key)
        engine = self.inbox.engine
        delivery = Delivery(self._function, message, offset, takes_operation=self._takes_operation)
        try:
            engine.ensure_started(self.policy)
            request = self._request(engine, key, message)
            engine.run_request(request, self.policy, delivery.call, None)
        except Exception as error:  # noqa: BLE001 - logged, and the broker keeps the message
            return self._not_handled(key, delivery, error)
        self._failures.pop(key, None)
        return Acknowledge(is_duplicate=delivery.operation is None)

    def _key_of(self, message: Message) -> str | DeadLetter:
        """The event id in *message*; what to do with a message that has none."""
        try:
            key = key_of_call(self._event_id(message))
        except Exception as error:  # noqa: BLE001 - a message of another shape, or a mistake in it
            # A missing header is named; other texts may have what the publisher sent.
            what = f" {error}" if isinstance(error, LookupError) else ""
            kind = type(error).__name__
            return DeadLetter(f"the message has no event id: event_id= raised {kind}{what}")
        if not key:
            return DeadLetter("the message has no event id: set one, or give event_id=")
        if len(key) > self.policy.key_chars_max:
            return DeadLetter(f"the event id has more than {self.policy.key_chars_max} characters")
        return key

    def _request(self, engine: Engine | AsyncEngine, key: str, message: Message) -> ClaimRequest:
        fingerprint = fingerprint_of(
            method="",
            path="",
            query=b"",
            content_type=message.content_type.encode("utf-8", "surrogateescape"),
            body=message.body,
            ignore=self.policy.pointers,
            secret=engine.attempts.secret,
        )
        return request_of_call(engine.attempts, key, self.label, fingerprint, self.policy)

    def _not_handled(self, key: str, delivery: Delivery, error: Exception) -> Action:
        """What to do with a message for which *error* was raised, by its handler or by us."""
        message, operation = delivery.message, delivery.operation
        if error is not delivery.error:  # ours: a refusal, an outage, a failed commit
            if isinstance(error, Refused):
                return self._logged(message, action_of_refusal(error.problem), operation)
            if isinstance(error, OUTAGES):
                reason = f"the store is unavailable: {error}"
                return self._logged(message, Redeliver(STORE_DOWN_S, reason), operation)
        if operation is None:  # a mistake in the settings: nothing has run, and nothing is lost
            return self._logged(message, Redeliver(STORE_DOWN_S, str(error)), None, error)
        attempt = self._attempt_of(key, message, operation)
        action = self._action_of_failure(operation, error, attempt)
        return self._logged(message, action, operation, error)

    def _attempt_of(self, key: str, message: Message, operation: Operation) -> int:
        """The number of the attempt that has failed."""
        if self.policy.mode != "transaction":
            return operation.attempt
        failures = self._failures.pop(key, 0) + 1
        self._failures[key] = failures
        if len(self._failures) > FAILURES_MAX:
            self._failures.popitem(last=False)
        return max(failures, message.deliveries or 0)

    def _action_of_failure(self, operation: Operation, error: Exception, attempt: int) -> Action:
        if isinstance(error, Reject):
            return DeadLetter(f"the handler rejected it: {error}")
        is_in_doubt = isinstance(error, (Uncertain, StepInDoubt))
        if is_in_doubt or not (self.policy.reruns or isinstance(error, Resumable)):
            return DeadLetter(f"{operation.failure}, and its effect is not known")
        return action_of_failure(
            error,
            attempt=attempt,
            attempts_max=self.policy.attempts_max,
            backoff_s=self.inbox.backoff_s,
            backoff_s_max=self.inbox.backoff_s_max,
        )

    def _logged(
        self,
        message: Message,
        action: Action,
        operation: Operation | None = None,
        error: Exception | None = None,
    ) -> Action:
        what = "" if operation is None else f" (operation {operation.reference})"
        if isinstance(action, DeadLetter):
            logger.error(
                "coatcheck: a message from %s for %s is a dead letter%s: %s",
                *(message.source or "a queue", self.label, what, action.reason),
                exc_info=error,
            )
        elif isinstance(action, Redeliver):
            logger.log(
                logging.INFO if error is None else logging.WARNING,
                "coatcheck: a message from %s for %s is to be delivered again in %g s%s: %s",
                *(message.source or "a queue", self.label, action.after_s, what, action.reason),
                exc_info=error,
            )
        return action


# The modules for task queues, by the package of the queue's application.
TASK_QUEUES = ("celery", "dramatiq", "procrastinate", "rq")


def _task_guard(app: object) -> Callable[..., Any]:
    """The function that makes tasks of the queue that *app* belongs to."""
    packages = {kind.__module__.partition(".")[0] for kind in type(app).__mro__}
    for package in TASK_QUEUES:
        if package in packages:
            module: Any = import_module(f"coatcheck.consumer.{package}")
            guard: Callable[..., Any] = module.guarded_task
            return guard
    raise Misconfigured(
        f"a {type(app).__name__} is no application of a task queue; give a Celery application, a "
        "Dramatiq broker, an RQ queue or a Procrastinate application"
    )


async def _in_thread(function: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Call *function* in a thread; a caller that is cancelled waits for its end, too."""
    calling = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        while not calling.done():
            with suppress(asyncio.CancelledError):  # the thread cannot be cancelled
                await asyncio.wait({calling})
        raise
