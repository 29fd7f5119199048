"""Refusals of requests to views of the Django REST framework (DRF), in the look of the project.

A project that has an `EXCEPTION_HANDLER` of its own gives all its errors one shape. It is called
with our refusals, too, as an `APIException` whose `detail` is the problem document. DRF's default
handler is not called: the client then gets the problem document itself.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from coatcheck.core.policy import Policy
from coatcheck.core.problem import Problem
from coatcheck.core.response import Response
from coatcheck.server.django.callers import drf_view_of
from coatcheck.server.django.exchange import REQUEST, NativeRequest
from coatcheck.server.request import Request
from coatcheck.server.responses import refused

logger = logging.getLogger("coatcheck")

_DEFAULT_HANDLER = ("rest_framework.views", "exception_handler")
_OF_BODY = frozenset({b"content-type", b"content-length"})


def rendered(refusal: Problem, policy: Policy, request: Request) -> Response:
    """The response of *refusal*: by the project's handler of exceptions, or a problem document."""
    document = refused(refusal, policy)
    native: NativeRequest = request.native[REQUEST]
    found = drf_view_of(native)
    if found is None:
        return document
    try:
        made = _handled(native, *found, refusal, document)
    except Exception:
        logger.exception(
            "coatcheck: the EXCEPTION_HANDLER failed; the client gets a problem document (%s)",
            refusal.code,
        )
        return document
    return document if made is None else made


def _handled(
    native: NativeRequest,
    view: Any,  # noqa: ANN401 - of DRF
    match: Any,  # noqa: ANN401 - a `ResolverMatch`
    refusal: Problem,
    document: Response,
) -> Response | None:
    """What the project's own handler makes of *refusal*; None: it has none."""
    from rest_framework.exceptions import APIException  # noqa: PLC0415 - the view is of DRF

    handler = view.get_exception_handler()
    if (handler.__module__, handler.__name__) == _DEFAULT_HANDLER:
        return None
    error = APIException(json.loads(document.body), refusal.code)
    error.status_code = refusal.status
    error.__cause__ = refusal.error()
    view.args, view.kwargs, view.headers = match.args, match.kwargs, {}
    view.format_kwarg = None
    view.request = request = view.initialize_request(native, *match.args, **match.kwargs)
    context = {"view": view, "args": match.args, "kwargs": match.kwargs, "request": request}
    response = handler(error, context)
    if response is None:
        return None
    response = view.finalize_response(request, response, *match.args, **match.kwargs)
    response.render()
    given = [(n.lower().encode(), v.encode("latin-1")) for n, v in response.items()]
    names = {name for name, _ in given}
    # When to retry, and the reference: a client needs them, whatever the response looks like.
    added = [line for line in document.headers if line[0] not in names and line[0] not in _OF_BODY]
    return Response(response.status_code, [*given, *added], response.content)
