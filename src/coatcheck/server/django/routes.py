"""Routes: the policy of the view that a request will reach.

Django's own resolver finds the view, before the request gets there. The mark of `idempotent` may be
on a function, on a class, on one of its methods, or on an action of a view set of the Django REST
framework (DRF); the most particular one wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple

from django.urls import Resolver404, URLPattern, get_resolver

from coatcheck.core.policy import SAFE_METHODS, Policy
from coatcheck.errors import Misconfigured
from coatcheck.server.django.exchange import REQUEST, NativeRequest
from coatcheck.server.routes import Mark, found_unguarded, mark_of, policy_of_mark
from coatcheck.server.routes import found as note_found

# The methods of a view that does not list them.
_UNSAFE = ("DELETE", "PATCH", "POST", "PUT")


class Match(NamedTuple):
    """What is known of a request by its method and its view."""

    policy: Policy | None
    template: str | None
    mark: Mark | None


class DjangoRoutes:
    """Finds the policy of the view that a request will reach."""

    def __init__(self, policy: Policy, register: Callable[[str, Policy], None]) -> None:
        self._policy = policy
        self._register = register
        self._is_registered = False
        self._matches: dict[tuple[str, str], Match] = {}  # of marked views: there are only so many

    def let_pass(self, _native: MutableMapping[str, Any]) -> None:
        """Note that this request is not guarded: its method is safe."""
        self._register_routes()
        found_unguarded()

    def lookup(
        self, native: MutableMapping[str, Any], method: str
    ) -> tuple[Policy | None, str | None]:
        """The policy for this request and its route's template; None: it is not guarded."""
        self._register_routes()
        match = self.match(native[REQUEST], method)
        note_found(match.mark)
        return match.policy, match.template

    def match(self, request: NativeRequest, method: str) -> Match:
        """What is known of *request*."""
        found = resolved(request)
        mark = None if found is None else mark_of_view(found.func, method)
        if found is None or mark is None:
            return Match(self._policy if method in self._policy.methods else None, None, None)
        known = self._matches.get((found.route, method))
        if known is None or known.mark is not mark:
            known = self._matches[found.route, method] = self._marked(found.route, method, mark)
        return known

    def _marked(self, route: str, method: str, mark: Mark) -> Match:
        policy = policy_of_mark(self._policy, method, mark)
        template = f"/{route}"
        self._register(f"{method} {template}", policy)
        return Match(policy if method in policy.methods else None, template, mark)

    def _register_routes(self) -> None:
        """Have the background recover all marked routes; at the first request they are known."""
        if self._is_registered:
            return
        self._is_registered = True
        for template, method, mark in marked_routes():
            with suppress(Misconfigured):  # raised when the route is requested
                self._register(f"{method} {template}", policy_of_mark(self._policy, method, mark))


def resolved(request: NativeRequest) -> Any:  # noqa: ANN401 - a `ResolverMatch`
    """What Django's resolver finds for *request*; None: nothing, and Django answers 404."""
    found = request.__dict__.get("_coatcheck_resolved")
    if found is None:
        try:
            found = get_resolver(getattr(request, "urlconf", None)).resolve(request.path_info)
        except Resolver404:
            return None
        request._coatcheck_resolved = found
    return found


def mark_of_view(view: Any, method: str) -> Mark | None:  # noqa: ANN401 - a view of Django's
    """The mark of a *view* for *method*: of the method that will run, the view, or its class."""
    view_class = getattr(view, "cls", None) or getattr(view, "view_class", None)
    actions = getattr(view, "actions", None)  # of a view set: {"post": "create"}
    name = method.lower() if actions is None else actions.get(method.lower(), "")
    own = getattr(view_class, name, None) if name.isidentifier() else None
    marks = map(mark_of, (own, _function_of_api_view(own), view, view_class))
    return next((mark for mark in marks if mark is not None), None)  # it may be empty


def _function_of_api_view(handler: Any) -> object:  # noqa: ANN401 - a method, or None
    """The function under DRF's `api_view`, of which its class has only the closure."""
    code = getattr(handler, "__code__", None)
    if code is None or "func" not in code.co_freevars:
        return None
    return handler.__closure__[code.co_freevars.index("func")].cell_contents


def marked_routes() -> Iterator[tuple[str, str, Mark]]:
    """The template, method and mark of every marked route of the project."""
    for template, view in _routes(get_resolver().url_patterns, ""):
        actions = getattr(view, "actions", None)
        methods = _UNSAFE if actions is None else sorted(map(str.upper, actions))
        for method in methods:
            mark = None if method in SAFE_METHODS else mark_of_view(view, method)
            if mark is not None:
                yield f"/{template}", method, mark


def _routes(patterns: Any, prefix: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - of Django's
    """Every view with its template, as Django's resolver joins it."""
    for one in patterns:
        own = str(one.pattern)
        template = prefix + own.removeprefix("^") if prefix else own
        if isinstance(one, URLPattern):
            yield template, one.callback
        else:
            yield from _routes(one.url_patterns, template)
