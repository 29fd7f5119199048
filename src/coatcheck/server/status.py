"""Status: where a client asks how its operation is doing, after a 202 (L3, L10).

The address names the operation and the caller it was given to, sealed with the deployment's
secret: it cannot be guessed, and for anybody else it does not exist (X3).
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coatcheck.core.key import reference_of
from coatcheck.core.policy import Policy, changed
from coatcheck.core.prefer import patience_s_of
from coatcheck.core.problem import problem
from coatcheck.core.progress import progress_of
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
from coatcheck.core.serve import Replay, Ticket
from coatcheck.server.answers import reference_header, refused, replayed
from coatcheck.server.request import Request

# 1 s: as for a conflict; what takes much longer should report its progress.
RETRY_AFTER_S = 1


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


def token_of(id: bytes, caller: str, secret: bytes) -> str:
    """The last part of the address of *id*, for *caller* alone."""
    return (id + _seal(id, caller, secret)).hex()


def id_of(token: str, caller: str, secret: bytes) -> bytes | None:
    """The operation that *token* names; None unless it was made for *caller*."""
    try:
        raw = bytes.fromhex(token)
    except ValueError:
        return None
    id, seal = raw[:ID_BYTES], raw[ID_BYTES:]
    return id if hmac.compare_digest(seal, _seal(id, caller, secret)) else None


def _seal(id: bytes, caller: str, secret: bytes) -> bytes:
    return digested(b"coatcheck-poll", secret, id + caller.encode())


def accepted(
    id: bytes, location: str, policy: Policy, *, claim: Record | None = None, prefer: bytes = b""
) -> Response:
    """
    The answer while the operation runs: 202, and where to ask again.

    Args:
        claim: its record, where that is at hand.
        prefer: the client's `Prefer` header, if it had any say.
    """
    members: dict[str, object] = {"status": "running", "reference": reference_of(id)}
    headers = [
        (b"location", location.encode("latin-1", "replace")),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
        reference_header(id, policy),
    ]
    if patience_s_of(prefer) is not None:
        headers.append((b"preference-applied", b"respond-async"))
    return _told(202, members if claim is None else members | _progress_of(claim), headers)


def _progress_of(record: Record) -> dict[str, object]:
    """Which attempt it is, and how far, if it has said so (L10)."""
    report = progress_of(record).report
    told = {} if report is None else {"progress": report._asdict()}
    return {"attempt": record.attempt, **told}


class Asked(NamedTuple):
    """A request for a status: where, when, and which codings its client accepts."""

    location: str
    now_ms: int
    accept_encoding: bytes


def status_of(record: Record | None, asked: Asked, policy: Policy) -> Response:
    """What the address answers for *record*."""
    if record is None or is_window_over(record, asked.now_ms):
        return _told(404, {"status": "gone"})
    if not is_lease_over(record, asked.now_ms):
        return accepted(record.id, asked.location, policy, claim=record)
    if record.state == IN_DOUBT:
        return refused(problem("outcome-unknown", key=record.key, id=record.id), policy)
    if record.state == COMPLETED and record.response is not None:
        ticket = Ticket(record.id, record.fingerprint, 0, 0, key=record.key)
        return replayed(Replay(record, record.response), ticket, policy, asked.accept_encoding)
    if record.state == COMPLETED:
        reason = "its response was not kept"
        return refused(
            problem("result-unavailable", key=record.key, id=record.id, reason=reason), policy
        )
    # Given back, or its executor died: the route's policy decides what a retry meets.
    members: dict[str, object] = {
        "status": "interrupted" if record.state == RUNNING else STATE_NAMES[record.state],
        "reference": reference_of(record.id),
        "retry": "same-key",
    }
    return _told(200, members | _progress_of(record), [reference_header(record.id, policy)])


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
