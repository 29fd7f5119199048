"""Status: where a client asks how its operation is doing, after a 202 (L3, L10).

The address is made of the operation's record and of who sent its request. Without the record,
which holds the digest of the whole request, nobody works it out, not even where there is no secret;
and for anybody else than its caller it does not exist (X3).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coatcheck.core.key import reference_of
from coatcheck.core.policy import Policy, changed
from coatcheck.core.prefer import patience_s_of
from coatcheck.core.problem import problem
from coatcheck.core.progress import NOTHING, readable_progress_of
from coatcheck.core.record import (
    COMPLETED,
    IN_DOUBT,
    RUNNING,
    STATE_NAMES,
    Record,
    is_lease_over,
    is_window_over,
)
from coatcheck.core.replay import Response
from coatcheck.core.scope import ID_BYTES, digested
from coatcheck.core.serve import Replay, Ticket, of_completed
from coatcheck.server.answers import reference_header, refused, replayed
from coatcheck.server.request import Request

# 1 s: as for a conflict; what takes much longer should report its progress.
RETRY_AFTER_S = 1

# Whoever asks otherwise, such as a browser before it does, asks the application.
ASKING_METHODS = frozenset({"GET", "HEAD"})


def patience_of(request: Request, policy: Policy) -> tuple[int | None, Policy]:
    """
    How long the client of *request* waits before it is told to ask later, in seconds.

    And *policy* for the flow of the request: if it is a duplicate, it waits as long.
    """
    if policy.mode != "record":  # nothing can be asked for before it is committed
        return None, policy
    patience_s = patience_s_of(request.header(b"prefer"))
    if not patience_s:
        return patience_s, policy
    return patience_s, changed(policy, {"in_flight": "wait", "wait": patience_s})


def patience_left_s(patience_s: int, came_ms: int, now_ms: int) -> float:
    """What is left of *patience_s* at *now_ms*, for a client that came at *came_ms*."""
    passed_s = max(0, now_ms - came_ms) / 1_000  # a clock may be set back
    return max(0.0, patience_s - passed_s)


def token_of(record: Record, who: bytes, secret: bytes) -> str:
    """
    The last part of the address of *record*, for *who* sent its request.

    The fingerprint is in it, so that it takes the whole request to make one; and the life, so that
    who knows most of a request cannot try out the rest in peace.
    """
    life = record.created_ms.to_bytes(8, "big")
    seal = digested(b"coatcheck-poll", secret, record.id + life + record.fingerprint + who)
    return (record.id + seal).hex()


def id_of(token: str) -> bytes | None:
    """The operation that *token* claims to be of; None: it is no token."""
    try:
        raw = bytes.fromhex(token)
    except ValueError:
        return None
    return raw[:ID_BYTES] if len(raw) == 2 * ID_BYTES else None


def accepted(record: Record, location: str, policy: Policy, *, prefer: bytes = b"") -> Response:
    """
    The answer while the operation runs: 202, and where to ask again.

    *prefer* is the client's `Prefer` header, if it had any say.
    """
    members = {"status": "running", "reference": reference_of(record.id), **_progress_of(record)}
    headers = [
        (b"location", location.encode("latin-1", "replace")),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
        reference_header(record.id, policy),
    ]
    if patience_s_of(prefer) is not None:
        headers.append((b"preference-applied", b"respond-async"))
    return _told(202, members, headers)


def _progress_of(record: Record) -> dict[str, object]:
    """Which attempt it is, and how far, if it has said so and that can be read (L10)."""
    report = (readable_progress_of(record) or NOTHING).report
    told = {} if report is None else {"progress": report._asdict()}
    return {"attempt": record.attempt, **told}


class Asked(NamedTuple):
    """A request for a status: where, when, and which codings its client accepts."""

    location: str
    now_ms: int
    accept_encoding: bytes


def status_of(record: Record, asked: Asked, policy: Policy) -> Response:
    """What the address answers for *record*."""
    if is_window_over(record, asked.now_ms):
        return _told(404, {"status": "gone"})
    if not is_lease_over(record, asked.now_ms):
        return accepted(record, asked.location, policy)
    if record.state == IN_DOUBT:
        return refused(problem("outcome-unknown", key=record.key, id=record.id), policy)
    if record.state == COMPLETED:
        ticket = Ticket(record.id, record.fingerprint, 0, 0, key=record.key)
        answer = of_completed(record, ticket)
        if isinstance(answer, Replay):
            return _uncached(replayed(answer, ticket, policy, asked.accept_encoding))
        return refused(answer.problem, policy)
    # Given back, or its executor died: the route's policy decides what a retry meets.
    members: dict[str, object] = {
        "status": "interrupted" if record.state == RUNNING else STATE_NAMES[record.state],
        "reference": reference_of(record.id),
        "retry": "same-key",
    }
    return _told(200, members | _progress_of(record), [reference_header(record.id, policy)])


# What a response says of how long it may be kept, and how it is asked for again; beside every
# header of that name for one kind of cache (RFC 9213).
_CACHING = frozenset(
    b"cache-control expires age pragma surrogate-control etag last-modified".split()
)


def _uncached(response: Response) -> Response:
    """
    *response* for whoever asked for it by an address.

    It was made for a POST, which no cache keeps. A GET is kept by its address alone, and would be
    given to anybody who knows that.
    """
    headers = [
        line
        for line in response.headers
        if line[0] not in _CACHING and not line[0].endswith(b"-cache-control")
    ]
    return response._replace(headers=[*headers, (b"cache-control", b"no-store")])


def _told(
    status: int, members: Mapping[str, object], headers: Sequence[tuple[bytes, bytes]] = ()
) -> Response:
    body = json.dumps(members).encode()
    told = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    return Response(status, [*told, *headers], body)
