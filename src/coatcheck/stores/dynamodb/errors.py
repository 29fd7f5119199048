"""What a failed request to DynamoDB means.

Invariant: every failure is a `StoreUnavailable`, and it is ambiguous exactly if DynamoDB may have
carried out one of its attempts. Botocore retries a request by itself and raises only the error of
the last attempt, so `note_attempt` watches every attempt.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ProxyConnectionError,
)
from botocore.parsers import ResponseParserError

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.dynamodb.records import Item

CONDITION_FAILED = "ConditionalCheckFailedException"
TABLE_NOT_FOUND = "ResourceNotFoundException"

_FAILURES = (BotoCoreError, ClientError, ResponseParserError)
# There was no connection, so nothing was sent.
_NOT_SENT = (EndpointConnectionError, ConnectTimeoutError, ProxyConnectionError)
_THROTTLED = {
    *("ProvisionedThroughputExceededException", "ThrottlingException", "Throttling"),
    "RequestLimitExceeded",
}


class _Attempts(threading.local):
    """Whether an attempt of this thread's current request may have written."""

    may_have_written = False


_attempts = _Attempts()


@contextmanager
def store_errors(name: str) -> Iterator[None]:
    """Raise the failure of one request as `StoreUnavailable`; *name* is the table, for people."""
    _attempts.may_have_written = False
    try:
        yield
    except _FAILURES as error:
        # An answer that cannot be parsed is still an answer: the write may have been applied.
        is_ambiguous = _attempts.may_have_written or isinstance(error, ResponseParserError)
        raise StoreUnavailable(f"{name}: {_explain(error)}", is_ambiguous=is_ambiguous) from error


def note_attempt(
    response: tuple[Any, object] | None = None,
    caught_exception: Exception | None = None,
    **_: object,
) -> None:
    """Handle botocore's event `needs-retry`, which it emits after each attempt."""
    if caught_exception is not None:
        may_have_written = not isinstance(caught_exception, _NOT_SENT)
    else:
        may_have_written = response is not None and response[0].status_code >= 500
    if may_have_written:
        _attempts.may_have_written = True


def _explain(error: Exception) -> str:
    if not isinstance(error, ClientError):
        return str(error)
    details = error.response.get("Error", {})
    code = details.get("Code", "")
    if code in _THROTTLED:
        return f"throttled ({code}); raise the table's capacity, or use on-demand billing"
    if code == TABLE_NOT_FOUND:
        return "there is no such table; check its name, region and account"
    return f"{code}: {details.get('Message', '')}"


def code_of(error: StoreUnavailable) -> str:
    """Return the AWS error code of *error*; "" if it is not from AWS."""
    cause = error.__cause__
    return cause.response.get("Error", {}).get("Code", "") if isinstance(cause, ClientError) else ""


def conflicting_item(error: StoreUnavailable) -> Item:
    """Return the item that made a condition fail; empty if there is none."""
    assert isinstance(error.__cause__, ClientError)
    item: Item = error.__cause__.response.get("Item", {})  # type: ignore[assignment]  # not in the stubs
    return item
