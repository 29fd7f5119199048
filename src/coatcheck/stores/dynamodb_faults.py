"""Faults of DynamoDB: what a failed request means, whichever client has sent it.

Beneath `dynamodb_flow.py`, which decides what follows. Boto3 and aiobotocore raise the errors of
botocore, which both are made of, and botocore itself sends a request once more that fails in
passing; so both report here what became of each try.

Invariant: every failure is a `StoreUnavailable`, and is ambiguous exactly if one of its tries may
have been carried out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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
from coatcheck.stores.dynamodb_items import Item

LOST = "ConditionalCheckFailedException"
CONFLICT = "TransactionConflictException"
MISSING = "ResourceNotFoundException"

_FAILURES = (BotoCoreError, ClientError, ResponseParserError)
# Nothing was sent, because there was nobody to send it to.
_UNSENT = (EndpointConnectionError, ConnectTimeoutError, ProxyConnectionError)
_THROTTLED = {
    *("ProvisionedThroughputExceededException", "ThrottlingException", "Throttling"),
    "RequestLimitExceeded",
}

# Of the request that this thread, or this task, has under way. The error that is raised is the last
# try's alone: nobody may be listening at the second, where the first one has done its work and its
# answer was lost.
_may_have_written: ContextVar[bool] = ContextVar("coatcheck.dynamodb.may_have_written")


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Around one request to the table that people call *name*: what fails says what that means."""
    _may_have_written.set(False)
    try:
        yield
    except _FAILURES as error:
        # An answer that cannot be read is an answer: the request was carried out, perhaps.
        is_ambiguous = _may_have_written.get() or isinstance(error, ResponseParserError)
        message = f"{name}: {_sentence_of(error)}"
        raise StoreUnavailable(message, is_ambiguous=is_ambiguous) from error


def note(
    response: tuple[Any, object] | None = None,
    caught_exception: Exception | None = None,
    **_: object,
) -> None:
    """Botocore asks after each try whether it has to try again; we only look."""
    if caught_exception is not None:
        is_heard = not isinstance(caught_exception, _UNSENT)
    else:
        is_heard = response is not None and response[0].status_code >= 500
    if is_heard:
        _may_have_written.set(True)


def _sentence_of(error: Exception) -> str:
    if not isinstance(error, ClientError):
        return str(error)
    told = error.response.get("Error", {})
    code = told.get("Code", "")
    if code in _THROTTLED:
        return f"throttled ({code}); give it more capacity, or bill it on demand"
    if code == CONFLICT:
        return f"somebody's transaction holds the item, again and again ({error})"
    if code == MISSING:
        return "there is no such table (any more) where this store looks for it"
    return f"{code}: {told.get('Message', '')}"


def code_of(error: StoreUnavailable) -> str:
    """What AWS calls the reason of *error*; empty where it is not from there."""
    cause = error.__cause__
    return cause.response.get("Error", {}).get("Code", "") if isinstance(cause, ClientError) else ""


def standing_of(error: StoreUnavailable) -> Item:
    """What stands in the way of a write that has lost; empty if nothing does."""
    assert isinstance(error.__cause__, ClientError)
    standing: Item = error.__cause__.response.get("Item", {})  # type: ignore[assignment]  # not in the stubs
    return standing


def is_too_large(error: StoreUnavailable) -> bool:
    """The item was refused for its size."""
    return code_of(error) == "ValidationException" and "Item size" in str(error.__cause__)
