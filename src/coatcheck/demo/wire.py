"""The wire: one JSON request over HTTP on loopback, as the client and the shop send it."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException, IncompleteRead
from typing import Any, NamedTuple

# 10 s: a healthy answer takes a fiftieth of a second, and a waiting one two seconds.
ANSWER_S_MAX = 10.0

# What a network does to a request: refused, reset, timed out, or broken off in the middle.
BROKEN = (OSError, HTTPException)


class Answer(NamedTuple):
    """What came back."""

    status: int
    document: dict[str, Any]
    reference: str
    is_replayed: bool
    retry_after_s: float


def connect(port: int) -> HTTPConnection:
    """A connection to a server of this machine; OSError if nobody listens."""
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S_MAX)
    connection.connect()
    return connection


def exchange(
    connection: HTTPConnection, path: str, document: dict[str, Any], key: str | None
) -> Answer:
    """POST *document*, with *key* if there is one, and wait for the whole answer."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Idempotency-Key"] = f'"{key}"'
    connection.request("POST", path, json.dumps(document), headers)
    response = connection.getresponse()
    said = response.read()
    if response.getheader("Content-Length", "") != str(len(said)):
        # Cut off among its headers, which `http.client` does not notice. It says 201 and yet is
        # no answer: a careful client tries again.
        raise IncompleteRead(said)
    is_json = "json" in response.getheader("Content-Type", "")
    return Answer(
        response.status,
        json.loads(said) if is_json else {},
        response.getheader("Idempotency-Reference", ""),
        response.getheader("Idempotent-Replayed") == "true",
        float(response.getheader("Retry-After", "0")),
    )
