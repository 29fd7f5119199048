"""Requests to an ASGI application without a server: what a benchmark in one process sends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

BODY = b'{"item": 1, "amount": 20}'


async def send(app: Any, keys: Iterator[int]) -> float:  # noqa: ANN401 - any ASGI application
    """Send a request for each of *keys*; µs of processor time for each."""
    scopes = [_scope(key) for key in keys]
    started_s = time.process_time()
    for scope in scopes:
        await app(scope, _receive, _drop)
    return (time.process_time() - started_s) / len(scopes) * 1e6


def _scope(key: int) -> dict[str, Any]:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(BODY)),
        (b"idempotency-key", b"order-%d" % key),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/orders",
        "raw_path": b"/orders",
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }


async def _receive() -> dict[str, Any]:
    return {"type": "http.request", "body": BODY, "more_body": False}


async def _drop(_message: dict[str, Any]) -> None:
    pass
