"""The line to DynamoDB: the client, its threads, and what its failures mean.

Between `dynamodb.py`, which says what to ask, and boto3; nothing else knows boto3. One low-level
client serves all threads. It keeps a connection for each request that is under way, and connects
anew where one broke, so that a server that comes back needs nothing from us.

A request that fails in passing is sent once more by botocore, and by us where somebody else's
transaction was in the way. A write that had taken effect the first time then loses against itself;
its caller gets its own record and recognises it, as after any lost acknowledgement.

Invariants: every failure is a `StoreUnavailable`, and is ambiguous exactly if one of its tries may
have been carried out; no connection and no thread crosses a fork.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ProxyConnectionError,
)
from botocore.parsers import ResponseParserError

from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores.dynamodb_items import Item
from coatcheck.stores.dynamodb_place import Place
from coatcheck.stores.fork import renew_after_fork

T = TypeVar("T")
R = TypeVar("R")

# 2: a lost packet or a moment of throttling is not an outage; longer trouble is, and an engine
# that must know tries again by itself.
TRIES_MAX = 2
# 5: botocore takes a conflict for final, but the transaction that holds the item is over in
# milliseconds.
CONFLICT_TRIES_MAX = 5
# Up to 20 ms before the second try, twice as long before each further one; at random, so that the
# same two do not meet again.
_PAUSE_S = 0.02
# For callers that send in their own threads beside ours: a heart, a reader, an operator.
_CONNECTIONS_BESIDE = 8

_FAILURES = (BotoCoreError, ClientError, ResponseParserError)
# Nothing was sent, because there was nobody to send it to.
_UNSENT = (EndpointConnectionError, ConnectTimeoutError, ProxyConnectionError)
_THROTTLED = {
    *("ProvisionedThroughputExceededException", "ThrottlingException", "Throttling"),
    "RequestLimitExceeded",
}
_LOST = "ConditionalCheckFailedException"
_CONFLICT = "TransactionConflictException"


class Line:
    """Sends requests about one table; safe from any thread."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._inherited: list[object] = []
        self._client: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._tries = _Tries()
        self._mutex = threading.Lock()
        renew_after_fork(self)

    def _renew(self) -> None:
        """In a child: the parent's sockets stay the parent's, kept so that nothing closes them."""
        self._inherited += [self._client, self._threads]
        self._client = self._threads = None
        self._mutex = threading.Lock()

    def call(self, operation: str, **parameters: object) -> dict[str, Any]:
        """One request, and its answer."""
        try:
            return self._send(operation, parameters)
        except _FAILURES as error:
            raise self._explained(error) from error

    def write(self, operation: str, **parameters: object) -> Item | None:
        """One conditional write. None: it took effect; else what stands, empty if nothing does."""
        parameters["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
        try:
            self._send(operation, parameters)
        except _FAILURES as error:
            if isinstance(error, ClientError) and code_of(error) == _LOST:
                standing: Item = error.response.get("Item", {})  # type: ignore[assignment]  # not in the stubs
                return standing
            raise self._explained(error) from error
        return None

    def _send(self, operation: str, parameters: dict[str, object]) -> dict[str, Any]:
        send = getattr(self._connected(), operation)
        self._tries.may_have_written = False
        answer = _sent_again(send, parameters)
        if not answer["ResponseMetadata"].get("RequestId"):
            # Botocore takes any page with the status 200 for a yes, also one of a proxy's.
            raise StoreUnavailable(
                f"{self._name}: something answered that is not DynamoDB", is_ambiguous=True
            )
        return answer

    def _connected(self) -> Any:  # noqa: ANN401 - a client's class is made when it is
        client = self._client
        if client is None:
            with self._mutex:
                self._refuse_if_closed()
                if self._client is None:
                    self._client = _client_of(self.place, self._tries.note)
                client = self._client
        return client

    def each(self, work: Callable[[T], R], things: Sequence[T]) -> list[R]:
        """Do *work* on all *things* at once, one alone in this thread; done when all are."""
        if len(things) <= 1:
            return [work(thing) for thing in things]
        futures: list[Future[R]] = []
        try:
            threads = self._pool()
            for thing in things:
                futures.append(threads.submit(work, thing))  # noqa: PERF401 - to cancel what is there
            wait(futures)
        except RuntimeError as error:  # closed meanwhile, or no thread can be had
            message = f"{self._name}: {error}"
            raise StoreUnavailable(message, is_ambiguous=True) from error
        finally:
            for future in futures:
                future.cancel()  # only where we were interrupted is there anything to cancel
        return self._results(futures)

    def _results(self, futures: Sequence[Future[R]]) -> list[R]:
        errors = [error for future in futures if (error := future.exception()) is not None]
        outages = [error for error in errors if isinstance(error, StoreUnavailable)]
        if outages:
            # They are told the same, whether their own write failed or took effect.
            is_ambiguous = len(outages) < len(futures) or any(o.is_ambiguous for o in outages)
            message = str(outages[0])
            raise StoreUnavailable(message, is_ambiguous=is_ambiguous) from outages[0].__cause__
        return [future.result() for future in futures]

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
            raise StoreUnavailable(f"{self._name}: the store is closed")

    @property
    def _name(self) -> str:
        return f"dynamodb table {self.place.table}"

    def _explained(self, error: Exception) -> StoreUnavailable:
        code = code_of(error)
        if code in _THROTTLED:
            sentence = f"throttled ({code}); give it more capacity, or bill it on demand"
        elif code == _CONFLICT:
            sentence = f"somebody's transaction holds the item, again and again ({error})"
        elif code == "ResourceNotFoundException":
            sentence = "there is no such table (any more) where this store looks for it"
        elif isinstance(error, ClientError):
            sentence = f"{code}: {error.response.get('Error', {}).get('Message', '')}"
        else:
            sentence = str(error)
        # An answer that cannot be read is an answer: the request was carried out, perhaps.
        is_garbled = isinstance(error, ResponseParserError)
        return StoreUnavailable(
            f"{self._name}: {sentence}", is_ambiguous=self._tries.may_have_written or is_garbled
        )


def _sent_again(
    send: Callable[..., dict[str, Any]], parameters: dict[str, object]
) -> dict[str, Any]:
    """The answer to a request, sent again where somebody's transaction was in the way."""
    pause_s = _PAUSE_S
    for tries_left in reversed(range(CONFLICT_TRIES_MAX)):
        try:
            return send(**parameters)
        except ClientError as error:
            if code_of(error) != _CONFLICT or not tries_left:
                raise
        time.sleep(random.uniform(0, pause_s))  # noqa: S311 - no secret
        pause_s *= 2
    raise AssertionError  # the last one has returned or raised


class _Tries(threading.local):
    """
    What became of the tries of this thread's request.

    The error that is raised is the last try's alone: nobody may be listening at the second, where
    the first one has done its work and its answer was lost.
    """

    may_have_written = False

    def note(
        self,
        response: tuple[Any, object] | None = None,
        caught_exception: Exception | None = None,
        **_: object,
    ) -> None:
        """Botocore asks after each try whether it has to try again; we only look."""
        if caught_exception is not None:
            self.may_have_written |= not isinstance(caught_exception, _UNSENT)
        elif response is not None:
            self.may_have_written |= response[0].status_code >= 500


def code_of(error: BaseException | None) -> str:
    """What AWS calls *error*; empty where it is not from there."""
    if not isinstance(error, ClientError):
        return ""
    return error.response.get("Error", {}).get("Code", "")


def is_too_large(error: StoreUnavailable) -> bool:
    """The item was refused for its size."""
    cause = error.__cause__
    return code_of(cause) == "ValidationException" and "Item size" in str(cause)


def _client_of(place: Place, note: Callable[..., None]) -> Any:  # noqa: ANN401 - as above
    # So that a server which says nothing is given up after the time-out, all tries together.
    try_s = place.timeout_s / TRIES_MAX
    config = Config(
        connect_timeout=try_s,
        read_timeout=try_s,
        retries={"total_max_attempts": TRIES_MAX, "mode": "standard"},
        max_pool_connections=place.concurrency + _CONNECTIONS_BESIDE,
        tcp_keepalive=True,
        parameter_validation=False,  # they are all our own, and it takes a tenth of the time
    )
    dummy = None
    if _is_loopback(place.endpoint) and not _has_credentials():
        # A stand-in on this machine checks none, but a request without any cannot be signed.
        dummy = "local"
    try:
        session = Session(dummy, dummy, region_name=place.region)
        if session.get_credentials() is None:
            raise Misconfigured(
                "dynamodb: no AWS credentials were found; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or give this machine a role"
            )
        client = session.client("dynamodb", endpoint_url=place.endpoint, config=config)
    except (BotoCoreError, ValueError) as error:
        raise Misconfigured(f"dynamodb: {error}") from error
    client.meta.events.register("needs-retry.dynamodb", note)
    return client


def _is_loopback(endpoint: str | None) -> bool:
    host = urlsplit(endpoint or "").hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _has_credentials() -> bool:
    """Looked for in the environment only: elsewhere botocore would ask the network for seconds."""
    return any(os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"))
