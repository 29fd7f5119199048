"""Responses: what a client gets if it is not the handler's own response.

ASGI and WSGI send the same bytes, because both take them from here.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from http import HTTPStatus

from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import ClaimRequest, Replay
from coatcheck.core.policy import Policy
from coatcheck.core.problem import Problem, problem
from coatcheck.core.response import (
    NO_CONTENT,
    Headers,
    Response,
    decode_response,
    for_client,
)
from coatcheck.engine.attempts import NOT_RUN
from coatcheck.errors import Unreadable

logger = logging.getLogger("coatcheck")

# 1 024 replays of 2 KiB: what is retried is mostly recent and small.
REMEMBERED_BYTES_MAX = 2_048
REMEMBERED_MAX = 1_024


def refusal_passes(response: Response, error: Exception) -> bool:
    """
    *response* is the handler's own refusal, so that the failed commit changes nothing for it.

    A handler may have rolled back by itself before it refused, or a deadlock did. The client gets
    the refusal, which is not kept: a retry runs again.
    """
    if response.status < HTTPStatus.BAD_REQUEST:
        return False
    logger.warning(
        "coatcheck: the response %d was not kept, because its transaction failed: %s; a retry "
        "runs again",
        response.status,
        error,
    )
    return True


def store_unavailable(error: Exception) -> Problem:
    """The refusal when the store could not be opened: without it nothing runs."""
    logger.error("coatcheck: a request gets 503, because the store is unavailable: %s", error)
    return problem("store-unavailable", reason=NOT_RUN)


def refused(refusal: Problem, policy: Policy) -> Response:
    """The answer on the wire for a refusal."""
    body = refusal.document(policy.docs_url)
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
    if refusal.reference is not None:
        headers.append((policy.reference_name, refusal.reference.encode()))
    return Response(refusal.status, headers, body)


def replayed(
    replay: Replay, claim: ClaimRequest, policy: Policy, accept_encoding: bytes | None
) -> Response | Problem:
    """The answer on the wire for a replay; the refusal if this client cannot get it."""
    names, blob = (policy.replayed_name, policy.reference_name), replay.response
    is_short = len(blob) + len(accept_encoding or b"") <= REMEMBERED_BYTES_MAX
    make = _remembered if is_short else _replayed
    reason = "its response is kept in a content coding that this request does not accept"
    try:
        response = make(blob, replay.record.id, accept_encoding, names)
    except Unreadable as error:  # its bytes are damaged, but the record is completed
        response, reason = None, str(error)
    if response is None:
        return problem("result-unavailable", key=claim.key, id=claim.id, reason=reason)
    status, headers, body = response
    return Response(status, list(headers), body)  # a middleware in front may add to its headers


def _replayed(
    blob: bytes, id: bytes, accept_encoding: bytes | None, names: tuple[bytes, bytes]
) -> Response | None:
    """The replay of *blob*; None if this client does not accept its coding."""
    response = for_client(decode_response(blob), accept_encoding)
    if response is None:
        return None
    headers = list(response.headers)
    if response.status not in NO_CONTENT:
        headers.append((b"content-length", str(len(response.body)).encode()))
    headers.append((names[0], b"true"))
    headers.append((names[1], reference_of(id).encode()))
    return Response(response.status, tuple(headers), response.body)


# A client that retries once often retries again.
_remembered = lru_cache(maxsize=REMEMBERED_MAX)(_replayed)


def reference_header(id: bytes, policy: Policy) -> tuple[bytes, bytes]:
    """The header with the reference of the operation."""
    return policy.reference_name, reference_of(id).encode()


def header_of(headers: Headers, name: bytes) -> bytes:
    """The first value of *name* in *headers*."""
    return next((value for found, value in headers if found == name), b"")


def has_length(response: Response) -> bool:
    """The client knows where *response* ends: it has no content, or a length."""
    return response.status in NO_CONTENT or bool(header_of(response.headers, b"content-length"))


def is_endless(headers: Headers) -> bool:
    """Server-sent events: a response that is never whole, so it is passed on as it comes."""
    return header_of(headers, b"content-type").lower().startswith(b"text/event-stream")
