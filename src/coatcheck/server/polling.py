"""Polling: the address where a client asks for its operation after a 202.

The address is a digest of the operation's record and of its caller. It cannot be computed without
the record, which holds the digest of the whole request, not even if there is no secret; and for any
other caller it does not exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coatcheck.core.identity import ID_BYTES, digested
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import ClaimRequest, Replay, of_completed
from coatcheck.core.policy import Policy, changed
from coatcheck.core.problem import Problem, problem
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
from coatcheck.core.response import Response
from coatcheck.server.request import Request
from coatcheck.server.responses import reference_header, refused, replayed

# 1 s: as for a conflict; work that takes much longer should report its progress.
RETRY_AFTER_S = 1

# Other methods, such as a browser's OPTIONS, are for the application.
POLLING_METHODS = frozenset({"GET", "HEAD"})


# Policies for clients that wait for a time of their own, by policy and seconds: making a policy
# takes longer than serving a replay. Bounded, because clients choose the seconds.
_WAITING_POLICIES: dict[tuple[int, int], tuple[Policy, Policy]] = {}
WAITING_POLICIES_MAX = 256


def preferred_wait(request: Request, policy: Policy) -> tuple[int | None, Policy]:
    """
    How many seconds the client of *request* waits before it gets a 202 (`Prefer`); None: for ever.

    And *policy* for the claim: if the request is a duplicate, it waits as long.
    """
    if policy.mode != "record":  # nothing can be polled for before it is committed
        return None, policy
    wait_s = preferred_wait_s(request.header(b"prefer"))
    if not wait_s:
        return wait_s, policy
    known = _WAITING_POLICIES.get((id(policy), wait_s))
    if known is None or known[0] is not policy:
        if len(_WAITING_POLICIES) >= WAITING_POLICIES_MAX:
            _WAITING_POLICIES.clear()
        known = policy, changed(policy, {"in_flight": "wait", "wait": wait_s})
        _WAITING_POLICIES[id(policy), wait_s] = known
    return wait_s, known[1]


# 50 s: proxies and load balancers commonly give up after 60 s, and the 202 should arrive before.
WAIT_S_MAX = 50
# 1 000: no honest `Prefer` header is longer.
_PREFER_BYTES_MAX = 1_000

# The possessive repeats keep it linear for any input.
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_VALUE = rb'(?:[ \t]*+=[ \t]*+(%b|"(?:[^"\\]|\\.)*+"))?' % _TOKEN
_PARAMETER = rb"(?:[ \t]*+;[ \t]*+(?:%b%b)?+)*+" % (_TOKEN, _VALUE)
_PREFERENCE = re.compile(rb"[ \t]*+(?:(%b)%b%b)?[ \t]*+(?:,|\Z)" % (_TOKEN, _VALUE, _PARAMETER))


def preferred_wait_s(prefer: bytes) -> int | None:
    """
    How many seconds the header *prefer* (RFC 7240) allows before a 202; None: no 202 is wanted.

    `respond-async` asks for a 202 at once, `respond-async, wait=10` for the answer itself if it is
    there within ten seconds. A malformed header counts as none.
    """
    if len(prefer) > _PREFER_BYTES_MAX:
        return None
    preferences: dict[bytes, bytes] = {}
    at = 0
    while at < len(prefer):
        found = _PREFERENCE.match(prefer, at)
        if found is None:
            return None
        at = found.end()
        name, value = found.group(1, 2)
        if name is not None:  # the first of several with one name counts
            preferences.setdefault(name.lower(), (value or b"").strip(b'"'))
    if preferences.get(b"respond-async") != b"":
        return None
    wait = preferences.get(b"wait", b"")
    # Nine digits exceed any limit; `int` refuses thousands of digits.
    return min(int(wait.lstrip(b"0")[:9] or b"0"), WAIT_S_MAX) if wait.isdigit() else 0


def wait_left_s(wait_s: int, came_ms: int, now_ms: int) -> float:
    """What is left of *wait_s* at *now_ms*, for a client that came at *came_ms*."""
    passed_s = max(0, now_ms - came_ms) / 1_000  # a clock may be set back
    return max(0.0, wait_s - passed_s)


def token_of(record: Record, who: bytes, secret: bytes) -> str:
    """
    The last part of the address of *record*, for the caller *who* sent its request.

    It depends on the fingerprint, so that only a client that knows the whole request can compute
    it, and on when the record was created, so that guesses of a request cannot be computed ahead.
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

    *prefer* is the client's `Prefer` header, if the policy considers it.
    """
    members = {"status": "running", "reference": reference_of(record.id), **_progress_of(record)}
    headers = [
        (b"location", location.encode("latin-1", "replace")),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
        reference_header(record.id, policy),
    ]
    if preferred_wait_s(prefer) is not None:
        headers.append((b"preference-applied", b"respond-async"))
    return _json_response(202, members, headers)


def _progress_of(record: Record) -> dict[str, object]:
    """Which attempt it is, and how far, if it has reported that."""
    report = (readable_progress_of(record) or NOTHING).report
    reported = {} if report is None else {"progress": report._asdict()}
    return {"attempt": record.attempt, **reported}


class StatusRequest(NamedTuple):
    """A request for a status: where, when, and which codings its client accepts."""

    location: str
    now_ms: int
    accept_encoding: bytes | None


def status_of(record: Record, asked: StatusRequest, policy: Policy) -> Response:
    """The response of the address for *record*."""
    if is_window_over(record, asked.now_ms):
        return _json_response(404, {"status": "gone"})
    if not is_lease_over(record, asked.now_ms):
        return accepted(record, asked.location, policy)
    if record.state == IN_DOUBT:
        return refused(problem("outcome-unknown", key=record.key, id=record.id), policy)
    if record.state == COMPLETED:
        claim = ClaimRequest(record.id, record.fingerprint, 0, 0, key=record.key)
        answer = of_completed(record, claim)
        if isinstance(answer, Replay):
            made = replayed(answer, claim, policy, asked.accept_encoding)
            return _uncached(refused(made, policy) if isinstance(made, Problem) else made)
        return refused(answer.problem, policy)
    # Released, or its executor died: the route's policy decides what a retry meets.
    members: dict[str, object] = {
        "status": "interrupted" if record.state == RUNNING else STATE_NAMES[record.state],
        "reference": reference_of(record.id),
        "retry": "same-key",
    }
    members |= _progress_of(record)
    return _json_response(200, members, [reference_header(record.id, policy)])


# The headers that control how a response is cached and validated. Those for one kind of cache
# (RFC 9213, `CDN-Cache-Control`) are recognized by their end.
_CACHING = frozenset(
    b"cache-control expires age pragma surrogate-control etag last-modified".split()
)


def _uncached(response: Response) -> Response:
    """
    *response* for a GET of its address.

    It was made for a POST, which no cache stores. A GET is cached by its address alone, and would
    be served to any client that knows it.
    """
    headers = [
        line
        for line in response.headers
        if line[0] not in _CACHING and not line[0].endswith(b"-cache-control")
    ]
    return response._replace(headers=[*headers, (b"cache-control", b"no-store")])


def _json_response(
    status: int, members: Mapping[str, object], headers: Sequence[tuple[bytes, bytes]] = ()
) -> Response:
    body = json.dumps(members).encode()
    own = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    return Response(status, [*own, *headers], body)
