"""Unknown errors: after which errors it is not known whether a step has had its effect.

All other errors mean that nothing has happened. Libraries for HTTP need not be installed: their
errors are recognised by the names of their classes and by the status that they carry.
"""

from __future__ import annotations

from collections.abc import Iterator

from coatcheck.core.client.send import BEFORE_THE_KEY, result_of
from coatcheck.errors import (
    ClaimLost,
    KeyBusy,
    KeyExpired,
    OutcomeUnknown,
    ResultUnavailable,
    SagaBlocked,
    StepInDoubt,
    StoreUnavailable,
    Uncertain,
)

# Those of the second line come from guarded functions and other sagas, which a step may call.
UNKNOWN_ERRORS: tuple[type[Exception], ...] = (
    *(Uncertain, TimeoutError, ConnectionError),
    *(SagaBlocked, OutcomeUnknown, ResultUnavailable, KeyBusy, KeyExpired),
    *(StoreUnavailable, StepInDoubt, ClaimLost),
)
# The same of libraries, by package and class: no answer has come, or only a part of it.
UNKNOWN_ERRORS_OF_LIBRARIES = frozenset(
    {
        ("aiohttp", "ClientConnectionError"),
        ("aiohttp", "ClientPayloadError"),
        ("botocore", "HTTPClientError"),
        ("http", "HTTPException"),
        ("httpx", "TransportError"),
        ("httpx2", "TransportError"),
        ("requests", "ChunkedEncodingError"),
        ("requests", "ConnectionError"),
        ("requests", "Timeout"),
        ("stripe", "APIConnectionError"),
        ("urllib", "URLError"),
        ("urllib3", "HTTPError"),
    }
)
# A repeated call that gets one of these says nothing about the call before: the service has not
# looked for the key, or still works on it.
_SAYS_NOTHING = BEFORE_THE_KEY | {409}


def is_outcome_unknown(
    error: Exception, kinds: tuple[type[Exception], ...], *, is_repeated: bool
) -> bool:
    """
    Whether the step that raised *error* may have had its effect, and may have not.

    *kinds* leave the outcome unknown, whatever else is known of the error. *is_repeated*: the
    outcome of an earlier call with the same key is not known.
    """
    if isinstance(error, kinds):
        return True
    result = result_of(error)
    if result is not None and result.outcome == "unknown":
        return True
    status = status_of(error)
    if status is not None:
        return status >= 500 or status == 408 or (is_repeated and status in _SAYS_NOTHING)
    names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    return not names.isdisjoint(UNKNOWN_ERRORS_OF_LIBRARIES)


def status_of(error: Exception) -> int | None:
    """The HTTP status of the response that made a library raise *error*; None if there is none."""
    for status in _statuses(error):
        if isinstance(status, int) and 100 <= status <= 599:
            return status
    return None


def _statuses(error: Exception) -> Iterator[object]:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        yield response.get("ResponseMetadata", {}).get("HTTPStatusCode")  # botocore
    yield getattr(response, "status_code", None)  # httpx, requests
    for name in ("status", "http_status", "status_code", "code"):  # aiohttp, stripe, others, urllib
        yield getattr(error, name, None)
