"""Starlette's routes: how the policy of a request to Starlette or FastAPI is found.

The middleware asks the application's own routes which of them matches, before the request gets
there. Starlette is not imported: only the attributes of its routes are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from coatcheck.core.policy import SAFE_METHODS, Policy
from coatcheck.errors import Misconfigured
from coatcheck.server.routes import (
    Mark,
    found_unguarded,
    mark_of,
    policy_of_mark,
)
from coatcheck.server.routes import (
    found as note_found,
)

# Remembered matches; routes with parameters make many paths, so the memory is bounded.
MATCHES_MAX = 4_096
# Longer paths are not remembered.
MATCHED_CHARS_MAX = 1_024


class _Match(NamedTuple):
    """What is known of a request by its method and path."""

    policy: Policy | None
    template: str | None
    mark: Mark | None


class _Router(NamedTuple):
    """An object with routes."""

    routes: Sequence[Any]


_NO_ROUTES: Sequence[Any] = ()
_UNKNOWN = _Router(_NO_ROUTES)
# The methods of a route that does not list them.
_UNSAFE = ("POST", "PUT", "PATCH", "DELETE")


class StarletteRoutes:
    """Finds the policy of each request of one application."""

    def __init__(
        self,
        policy: Policy,
        register: Callable[[str, Policy], None] = lambda _label, _policy: None,
        app: object = None,
    ) -> None:
        self._policy = policy
        self._app = app
        self._register = register
        self._matches: dict[tuple[str, ...], _Match] = {}
        self._router: Any = _UNKNOWN  # not known before the first request
        self._known: Sequence[Any] | None = None  # the routes that were searched …
        self._count = 0  # … and how many they were
        self._has_marks = False
        self.matter = False  # `guard.Hosts`: whether some routes are for a host

    def let_pass(self, asgi_scope: MutableMapping[str, Any]) -> None:
        """Note that this request is not guarded: its method is safe."""
        self._read_routes(asgi_scope)
        if self._has_marks:
            found_unguarded()

    def lookup(
        self, asgi_scope: MutableMapping[str, Any], method: str
    ) -> tuple[Policy | None, str | None]:
        """The policy for this request and its route's template; None: it is not guarded."""
        routes: Sequence[Any] = self._router.routes
        if routes is not self._known or len(routes) != self._count:
            routes = self._read_routes(asgi_scope)
        if not self._has_marks:
            return (self._policy if method in self._policy.methods else None), None
        place = (method, asgi_scope["path"], *self._hosts(asgi_scope))
        match = self._matches.get(place)
        if match is None:
            match = self._match(asgi_scope, routes)
            if len(self._matches) >= MATCHES_MAX:
                self._matches.clear()
            if sum(map(len, place)) <= MATCHED_CHARS_MAX:
                self._matches[place] = match
        note_found(match.mark)
        return match.policy, match.template

    def _hosts(self, asgi_scope: MutableMapping[str, Any]) -> list[str]:
        if not self.matter:
            return []
        return [value.decode("latin-1") for n, value in asgi_scope["headers"] if n == b"host"]

    def _read_routes(self, asgi_scope: MutableMapping[str, Any]) -> Sequence[Any]:
        """The application's routes; searched for marks if they have changed."""
        if self._router is _UNKNOWN:
            found = _router_in(self._app) or _router_in(asgi_scope.get("app"))
            self._router = found or _Router(_NO_ROUTES)
        routes: Sequence[Any] = self._router.routes
        if routes is not self._known or len(routes) != self._count:
            self._search(routes)
        return routes

    def _search(self, routes: Sequence[Any]) -> None:
        """Search for marks: at the first request, and again when routes were added."""
        self._matches.clear()
        everything = list(_all_in(routes))
        self.matter = any(hasattr(route, "host_regex") for route in everything)
        self._has_marks = any(
            mark_of(getattr(route, "endpoint", None)) is not None for route in everything
        )
        self._known, self._count = routes, len(routes)
        for template, route in _templates(routes):
            mark = mark_of(getattr(route, "endpoint", None))
            if mark is not None:
                self._register_route(template, getattr(route, "methods", None) or _UNSAFE, mark)

    def _register_route(
        self, template: str, methods: Iterable[str], mark: Mapping[str, Any]
    ) -> None:
        for method in set(methods) - SAFE_METHODS:
            with suppress(Misconfigured):  # raised when the route is requested
                policy = policy_of_mark(self._policy, method, mark)
                if method in policy.methods:
                    self._register(f"{method} {template}", policy)

    def _match(self, asgi_scope: MutableMapping[str, Any], routes: Sequence[Any]) -> _Match:
        method = asgi_scope["method"].upper()
        route, template = _matching(routes, asgi_scope)
        mark = mark_of(getattr(route, "endpoint", None))
        if mark is None:
            return _Match(self._policy if method in self._policy.methods else None, None, None)
        policy = policy_of_mark(self._policy, method, mark)
        return _Match(policy if method in policy.methods else None, template, mark)


def _router_in(app: object) -> object | None:
    """The object with the routes: *app*, its router, or one behind other middlewares."""
    while app is not None:
        for router in (getattr(app, "router", None), app):
            # In other frameworks `routes` may be anything.
            if isinstance(getattr(router, "routes", None), (list, tuple)):
                return router
        app = getattr(app, "app", None)
    return None


def _flat(routes: Sequence[Any]) -> Iterator[Any]:
    """*routes* as they match: FastAPI keeps an included router as one of its routes."""
    for route in routes:
        included = getattr(route, "effective_route_contexts", None)
        if included is None:
            yield route
        else:
            for context in included():
                yield getattr(context, "starlette_route", None) or context


def _all_in(routes: Sequence[Any]) -> Iterator[Any]:
    for route in _flat(routes):
        yield route
        yield from _all_in(getattr(route, "routes", None) or ())


def _templates(routes: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every route with its template, as `_matching` would find it."""
    for route in _flat(routes):
        below = getattr(route, "routes", None)
        if below:
            prefix = getattr(route, "path", "")
            yield from ((prefix + template, found) for template, found in _templates(below))
        else:
            yield getattr(route, "path_format", getattr(route, "path", "")), route


def _matching(routes: Sequence[Any], asgi_scope: MutableMapping[str, Any]) -> tuple[Any, str]:
    """The route that will handle the request, and its template, as Starlette's router finds it."""
    for route in _flat(routes):
        match, child = route.matches(asgi_scope)
        if match.name == "NONE":
            continue
        below = getattr(route, "routes", None)
        if below:
            found, template = _matching(below, {**asgi_scope, **child})
            return found, getattr(route, "path", "") + template
        if match.name == "FULL":
            return route, getattr(route, "path_format", getattr(route, "path", ""))
    return None, ""
