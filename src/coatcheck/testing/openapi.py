"""A contract check: the OpenAPI document names the header with the key at every unsafe route."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from coatcheck.core.policy import Policy
from coatcheck.errors import Misconfigured
from coatcheck.server.openapi import is_header, resolved
from coatcheck.testing.apps import AsgiSender, Request, interface_of, run_anywhere

# PUT and DELETE are not: HTTP defines them as idempotent.
UNSAFE = Policy().methods
# A path that applications do not have.
NO_ROUTE = "/coatcheck-looks-for-the-openapi-document"


def assert_every_unsafe_route_takes_a_key(
    openapi: object,
    *,
    exceptions: Collection[str] = (),
    methods: Collection[str] = UNSAFE,
    key_header: str = "Idempotency-Key",
) -> None:
    """
    Fail unless every unsafe route of an API takes a key, by its OpenAPI document.

    Args:
        openapi: the document as a mapping; or an application of FastAPI or Litestar, which makes
            it.
        exceptions: routes that need no key: "POST /login", or the `operationId` of one. A name
            that no route has is a mistake, too.
        methods: which are unsafe; without it those that a policy guards, POST and PATCH.
        key_header: the header with the key.
    """
    __tracebackhide__ = True
    document = document_of(openapi)
    left = set(exceptions)
    missing = []
    found = 0
    for route, operation, parameters in _unsafe(document, {m.lower() for m in methods}):
        found += 1
        names = {route, str(operation.get("operationId", route))}
        if names & left or names & set(exceptions):
            left -= names
        elif not any(is_header(parameter, key_header) for parameter in parameters):
            missing.append(route)
    if left:
        raise AssertionError(f"no unsafe route has the name: {', '.join(sorted(left))}")
    if missing:
        raise AssertionError(
            f"{len(missing)} of {found} unsafe routes take no {key_header}: {', '.join(missing)}"
        )
    if not found:
        raise AssertionError("the document has no unsafe route, so nothing was checked")


def document_of(openapi: object) -> Mapping[str, Any]:
    """The document itself, or that of an application."""
    if isinstance(openapi, Mapping):
        document: Any = openapi
    elif callable(getattr(openapi, "openapi", None)):
        document = _served_by(openapi) or openapi.openapi()  # type: ignore[attr-defined]  # as checked
    elif hasattr(getattr(openapi, "openapi_schema", None), "to_schema"):
        document = openapi.openapi_schema.to_schema()  # type: ignore[attr-defined]  # as checked
    else:
        raise Misconfigured(
            f"{type(openapi).__name__} has no OpenAPI document that is known here: give the "
            "document itself, as a mapping"
        )
    if not isinstance(document, Mapping) or not isinstance(document.get("paths", {}), Mapping):
        raise Misconfigured("this is no OpenAPI document: it has no paths")
    return document


def _served_by(app: Any) -> Any:  # noqa: ANN401 - JSON
    """The document that *app* serves, with what middlewares have added; None: it serves none."""
    if interface_of(app, None) != "asgi":
        return None
    path = getattr(app, "openapi_url", None)
    # Also without a path: the first request is when middlewares are made.
    answer = run_anywhere(AsgiSender(app, {}).send(Request("GET", path or NO_ROUTE)))
    return json.loads(answer.body) if path and answer.status == 200 else None


def _unsafe(
    document: Mapping[str, Any], methods: Collection[str]
) -> Iterator[tuple[str, Mapping[str, Any], list[Mapping[str, Any]]]]:
    """The name, the operation and the parameters of each unsafe route."""
    for path, item in document.get("paths", {}).items():
        for method, operation in item.items():
            if method in methods:
                given = [*item.get("parameters", ()), *operation.get("parameters", ())]
                parameters = [resolved(document, parameter) for parameter in given]
                yield f"{method.upper()} {path}", operation, parameters
