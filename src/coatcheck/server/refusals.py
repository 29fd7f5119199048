"""Refusals by `caller=`: the response for a request whose caller was not accepted.

The middleware stands outside of the code that turns a framework's exceptions into responses. So it
does that itself for those that a `caller=` function raises. They are recognized by their
attributes, because no framework is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from coatcheck.core.policy import Policy
from coatcheck.core.problem import problem
from coatcheck.core.response import NO_CONTENT, Response
from coatcheck.errors import Misconfigured
from coatcheck.server.callers import Refused
from coatcheck.server.responses import refused

# Those of the body, which is another one.
_OF_BODY = frozenset({b"content-type", b"content-length"})


def response_of_refusal(error: Exception, policy: Policy) -> Response | None:
    """The response that *error* means; None: it is an error of the application."""
    try:
        if isinstance(error, Refused):
            return _of_refused(error, error.detail, policy)
        if callable(getattr(error, "get_response", None)) and hasattr(error, "code"):
            return _of_werkzeug(error, policy)
        if all(hasattr(error, name) for name in ("status_code", "detail", "headers")):
            return _of_starlette(error, policy)
    except (Misconfigured, TypeError, ValueError, RecursionError):  # it cannot be sent
        return None
    return None


def _of_starlette(error: Any, policy: Policy) -> Response:  # noqa: ANN401 - known by its attributes
    """For `HTTPException` of Starlette, FastAPI and Litestar."""
    headers = error.headers or {}
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    refusal = Refused(error.status_code, headers=_texts(pairs))
    return _of_refused(refusal, error.detail, policy)


def _of_werkzeug(error: Any, policy: Policy) -> Response:  # noqa: ANN401 - known by its attributes
    """For `HTTPException` of Werkzeug and Flask, which makes its response itself."""
    made = error.get_response()
    refusal = Refused(made.status_code, headers=_texts(made.headers), body=made.get_data())
    return _of_refused(refusal, refusal.detail, policy)


def _texts(pairs: Iterable[tuple[object, object]]) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in pairs]


def _of_refused(refusal: Refused, detail: object, policy: Policy) -> Response:
    """The response of *refusal*; *detail* may be any JSON value."""
    own = [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in refusal.headers]
    if refusal.status in NO_CONTENT:
        return Response(refusal.status, [line for line in own if line[0] not in _OF_BODY], b"")
    if refusal.body is not None:
        headers = [line for line in own if line[0] != b"content-length"]
        if all(name != b"content-type" for name, _ in headers):  # WSGI requires one
            headers.append((b"content-type", b"text/plain; charset=utf-8"))
        headers.append((b"content-length", str(len(refusal.body)).encode()))
        return Response(refusal.status, headers, refusal.body)
    said = detail if isinstance(detail, str) else json.loads(json.dumps(detail, default=str))
    document = replace(problem("caller-refused", status=refusal.status), detail=said)
    response = refused(document, policy)
    rest = [line for line in own if line[0] not in _OF_BODY]
    return response._replace(headers=[*response.headers, *rest])
