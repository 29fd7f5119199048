"""The botocore client of one table, and the threads that send the requests of a batch.

One client serves all threads. It keeps a connection for each request in flight and replaces broken
ones, so a server that comes back needs nothing from us.

Invariant: no connection and no thread crosses a fork.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from ipaddress import ip_address
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.exceptions import BotoCoreError
from botocore.loaders import Loader, create_loader
from botocore.session import Session

from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores.dynamodb.errors import note_attempt, store_errors
from coatcheck.stores.dynamodb.url import DynamoConfig
from coatcheck.stores.fork import renew_after_fork

T = TypeVar("T")
R = TypeVar("R")
Answer: TypeAlias = dict[str, Any]

# 2: a lost packet or a moment of throttling is not an outage. If it lasts longer it is one, and the
# engine retries by itself where it must.
_ATTEMPTS_MAX = 2
# Connections for callers that send from their own threads: lease renewals, reads, operators.
_EXTRA_CONNECTIONS = 8

# Not the global generator: an application may seed it.
_JITTER = random.SystemRandom()


class DynamoClient:
    """Sends requests about one table; safe to use from any thread."""

    def __init__(self, config: DynamoConfig) -> None:
        self.config = config
        self._inherited: list[object] = []
        self._botocore: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._mutex = threading.Lock()
        renew_after_fork(self)

    def _renew(self) -> None:
        """In a forked child: keep a reference to the parent's sockets, so that none is closed."""
        self._inherited += [self._botocore, self._threads]
        self._botocore = self._threads = None
        self._mutex = threading.Lock()

    def call(self, operation: str, **parameters: object) -> Answer:
        """Send one request about the table and return the answer."""
        return self.send(operation, TableName=self.config.table, **parameters)

    def send(self, operation: str, **parameters: object) -> Answer:
        """Send one request and return the answer."""
        method = getattr(self.botocore_client(), operation)
        with store_errors(str(self.config)):
            answer: Answer = method(**parameters)
        # Botocore accepts any page with the status 200, for example the login page of a proxy.
        if not answer["ResponseMetadata"].get("RequestId"):
            raise StoreUnavailable(
                f"{self.config}: got an answer that is not from DynamoDB; check the endpoint and "
                "the proxy settings",
                is_ambiguous=True,
            )
        return answer

    def send_all(self, function: Callable[[T], R], things: Sequence[T]) -> list[R | Exception]:
        """
        Call *function* for all *things* at the same time; return when all calls have ended.

        Where a call fails, its exception is in the place of its result. A single call runs in this
        thread and raises.
        """
        if len(things) <= 1:
            return [function(thing) for thing in things]

        def outcome_of(thing: T) -> R | Exception:
            try:
                return function(thing)
            except Exception as error:  # noqa: BLE001 - the outcome of this call
                return error

        try:
            return list(self._pool().map(outcome_of, things))
        except RuntimeError as error:  # closed meanwhile, or no more threads can be started
            # Ambiguous: the executor has queued some calls, and a thread that exists may run them.
            raise StoreUnavailable(f"{self.config}: {error}", is_ambiguous=True) from error

    def botocore_client(self) -> Any:  # noqa: ANN401 - botocore makes the class at run time
        """Return the low-level client; the first call creates it."""
        client = self._botocore
        if client is None:
            with self._mutex:
                self._refuse_if_closed()
                if self._botocore is None:
                    self._botocore = _create_client(self.config)
                client = self._botocore
        return client

    def _pool(self) -> ThreadPoolExecutor:
        with self._mutex:
            self._refuse_if_closed()
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.config.concurrency, "coatcheck-dynamodb")
            return self._threads

    def close(self) -> None:
        """Wait for the requests in flight, then close connections and threads."""
        with self._mutex:
            self._is_closed = True
            client, self._botocore = self._botocore, None
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        if client is not None:
            client.close()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self.config}: the store is closed")


def pause(pause_s_max: float) -> None:
    """Sleep for a random part of *pause_s_max*, so that two callers do not collide again."""
    time.sleep(_JITTER.uniform(0, pause_s_max))


def _create_client(config: DynamoConfig) -> Any:  # noqa: ANN401 - botocore makes the class at run time
    # A server that does not answer is given up after the timeout, all attempts together.
    attempt_s = config.timeout_s / _ATTEMPTS_MAX
    settings = Config(
        connect_timeout=attempt_s,
        read_timeout=attempt_s,
        retries={"total_max_attempts": _ATTEMPTS_MAX, "mode": "standard"},
        max_pool_connections=config.concurrency + _EXTRA_CONNECTIONS,
        tcp_keepalive=True,
        parameter_validation=False,  # our own code builds them, and it takes a tenth of the time
    )
    try:
        client = _session(config).create_client(
            "dynamodb", config.region, endpoint_url=config.endpoint, config=settings
        )
    except (BotoCoreError, ValueError) as error:
        raise Misconfigured(f"dynamodb: {error}") from error
    client.meta.events.register("needs-retry.dynamodb", note_attempt)
    return client


def _session(config: DynamoConfig) -> Session:
    """Return a session with credentials."""
    session = Session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    if _is_loopback(config.endpoint) and not _has_credentials():
        # A server on this machine checks none, but botocore must sign the request with some.
        session.set_credentials("local", "local")
    if session.get_credentials() is None:
        raise Misconfigured(
            "dynamodb: no AWS credentials were found; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or give this machine a role"
        )
    return session


@cache
def _loader(data_path: str | None) -> Loader:
    """Return botocore's service descriptions; reading them takes 0.1 s, so all clients share it."""
    return create_loader(data_path)


def _is_loopback(endpoint: str | None) -> bool:
    host = urlsplit(endpoint or "").hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _has_credentials() -> bool:
    """Look at the environment only: elsewhere botocore would ask the network for seconds."""
    return any(os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"))
