"""The line to DynamoDB for threads: a client, and the threads that ask for many things at once.

Beside `dynamodb_wire.py`, which is for event loops; both perform the flows of `dynamodb_flow.py`.
One low-level client serves all threads. It keeps a connection for each request that is under way,
and connects anew where one broke, so that a server that comes back needs nothing from us.

Invariant: no connection and no thread crosses a fork.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.session import Session

from coatcheck.core.flow import Effect, Flow, run
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores.dynamodb_faults import explained, note
from coatcheck.stores.dynamodb_flow import Answer, Ask, Flows, Pause, Tell, each_of
from coatcheck.stores.dynamodb_place import Place
from coatcheck.stores.dynamodb_session import prepared, settings_of
from coatcheck.stores.fork import renew_after_fork

logger = logging.getLogger("coatcheck")

T = TypeVar("T")
R = TypeVar("R")


class Line:
    """Sends requests about one table; safe from any thread."""

    def __init__(self, flows: Flows) -> None:
        self.place = flows.place
        self._flows = flows
        self._inherited: list[object] = []
        self._client: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._mutex = threading.Lock()
        renew_after_fork(self)

    def _renew(self) -> None:
        """In a child: the parent's sockets stay the parent's, kept so that nothing closes them."""
        self._inherited += [self._client, self._threads]
        self._client = self._threads = None
        self._mutex = threading.Lock()

    def call(self, operation: str, **parameters: object) -> Answer:
        """One request about the table, and its answer."""
        return self._run(self._flows.call(operation, **parameters))

    def each(self, flow_of: Callable[[T], Flow[R]], things: Sequence[T]) -> list[R | Exception]:
        """
        Run the flows of all *things* at once, one alone in this thread; done when all are.

        One that fails is no reason for the others to: its error is in the place of its result.
        """
        if len(things) <= 1:
            return [self._run(flow_of(thing)) for thing in things]
        futures: list[Future[R]] = []
        left: list[StoreUnavailable] = []
        try:
            try:
                threads = self._pool()
                for thing in things:
                    futures.append(threads.submit(self._run, flow_of(thing)))  # noqa: PERF401 - to cancel what is there
            except RuntimeError as error:  # closed meanwhile, or no more threads can be had
                left = [self._without_thread(error)] * (len(things) - len(futures))
            wait(futures)
        finally:
            for future in futures:
                future.cancel()  # only where we were interrupted is there anything to cancel
        return [*each_of([f.exception() or f.result() for f in futures]), *left]

    def _without_thread(self, error: RuntimeError) -> StoreUnavailable:
        """It is ambiguous, because a thread that there is may yet find it."""
        outage = StoreUnavailable(f"{self.place}: {error}", is_ambiguous=True)
        outage.__cause__ = error
        return outage

    def _run(self, flow: Flow[R]) -> R:
        return run(flow, self._perform)

    def _perform(self, effect: Effect[Any]) -> Answer | None:
        match effect:
            case Ask(operation, parameters):
                send = getattr(self._connected(), operation)
                with explained(str(self.place)):
                    answer: Answer = send(**parameters)
                return answer
            case Pause(s_max):
                time.sleep(random.uniform(0, s_max))  # noqa: S311 - no secret
            case Tell(message):
                logger.warning(message)
        return None

    def _connected(self) -> Any:  # noqa: ANN401 - a client's class is made when it is
        client = self._client
        if client is None:
            with self._mutex:
                self._refuse_if_closed()
                if self._client is None:
                    self._client = _client_of(self.place)
                client = self._client
        return client

    def _pool(self) -> ThreadPoolExecutor:
        with self._mutex:
            self._refuse_if_closed()
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.place.concurrency, "coatcheck-dynamodb")
            return self._threads

    def close(self) -> None:
        """Let what is under way finish, then let go of connections and threads."""
        with self._mutex:
            self._is_closed = True
            client, self._client = self._client, None
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        if client is not None:
            client.close()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self.place}: the store is closed")


def _client_of(place: Place) -> Any:  # noqa: ANN401 - as above
    try:
        session = prepared(Session(), place)
        if session.get_credentials() is None:
            raise Misconfigured(
                "dynamodb: no AWS credentials were found; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or give this machine a role"
            )
        client = session.create_client(
            *("dynamodb", place.region),
            endpoint_url=place.endpoint,
            config=Config(**settings_of(place)),
        )
    except (BotoCoreError, ValueError) as error:
        raise Misconfigured(f"dynamodb: {error}") from error
    client.meta.events.register("needs-retry.dynamodb", note)
    return client
