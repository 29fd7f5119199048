"""Starlette's routes: how the policy of a request to Starlette or FastAPI is found.

The middleware asks the application's own routes which of them matches, before the request gets
there. Starlette is not imported: only the attributes of its routes are read.

The same routes tell which operations of FastAPI's OpenAPI document are guarded (`extend_openapi`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from coatcheck.core.policy import SAFE_METHODS, Policy, changed
from coatcheck.engine.settings import policy_of
from coatcheck.errors import Misconfigured
from coatcheck.server.openapi import annotate
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
        *,
        has_natural_keys: bool = False,
    ) -> None:
        self._policy = policy
        self._app = app
        self._has_natural_keys = has_natural_keys
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
            mounted = (getattr(route, "app", None) for route in _all_in(self._router.routes))
            for app in (*_chain(self._app), asgi_scope.get("app"), *mounted):
                extend_openapi(app, self._policy, has_natural_keys=self._has_natural_keys)
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
        for found in _guarded(routes, self._policy):
            if found.mark is not None:
                self._register(f"{found.method} {found.template}", found.policy)

    def _match(self, asgi_scope: MutableMapping[str, Any], routes: Sequence[Any]) -> _Match:
        method = asgi_scope["method"].upper()
        route, template = _matching(routes, asgi_scope)
        mark = mark_of(getattr(route, "endpoint", None))
        if mark is None:
            return _Match(self._policy if method in self._policy.methods else None, None, None)
        policy = policy_of_mark(self._policy, method, mark)
        return _Match(policy if method in policy.methods else None, template, mark)


def extend_openapi(
    app: object, policy: Policy | str | None = None, *, has_natural_keys: bool = False
) -> None:
    """
    Have the OpenAPI document of a FastAPI application state what is guarded, and by which header.

    The middleware does this when the server starts. Call it only to write the document without a
    server. *policy* is that of the middleware; *has_natural_keys*: the middleware has a `key=`
    function, so that no route requires the header.
    """
    fastapi: Any = app
    if not callable(getattr(app, "openapi", None)) or not hasattr(app, "openapi_url"):
        return  # another framework
    original = fastapi.openapi
    if hasattr(original, _EXTENDED):  # by another middleware
        return
    own = policy_of(policy)
    changes = {"required": False} if has_natural_keys else {}

    def openapi() -> dict[str, Any]:
        """The document, with the operations that are guarded now."""
        guarded: dict[tuple[str, str], Policy] = {}
        for found in _guarded(fastapi.routes, own):
            if found.policy.mode == "observe":
                continue
            place = found.template, found.method
            guarded.setdefault(place, changed(found.policy, changes))  # the first route answers
        return annotate(original(), guarded)

    setattr(openapi, _EXTENDED, True)
    # As FastAPI documents it: https://fastapi.tiangolo.com/how-to/extending-openapi/
    fastapi.openapi = openapi


_EXTENDED = "__coatcheck_openapi__"


class _Guarded(NamedTuple):
    """One method of a route that is guarded."""

    template: str
    method: str
    policy: Policy
    mark: Mark | None


def _guarded(routes: Sequence[Any], policy: Policy) -> Iterator[_Guarded]:
    """All that is guarded in *routes*, if *policy* is the middleware's."""
    for template, route in _templates(routes):
        mark = mark_of(getattr(route, "endpoint", None))
        for method in sorted(set(getattr(route, "methods", None) or _UNSAFE) - SAFE_METHODS):
            with suppress(Misconfigured):  # raised when the route is requested
                own = policy if mark is None else policy_of_mark(policy, method, mark)
                if method in own.methods:
                    yield _Guarded(template, method, own, mark)


def _router_in(app: object) -> object | None:
    """The object with the routes: *app*, its router, or one behind other middlewares."""
    for one in _chain(app):
        for router in (getattr(one, "router", None), one):
            # In other frameworks `routes` may be anything.
            if isinstance(getattr(router, "routes", None), (list, tuple)):
                return router
    return None


def _chain(app: object) -> Iterator[object]:
    """*app*, and the application in it, if it is a middleware, and so on."""
    while app is not None:
        yield app
        app = getattr(app, "app", None)


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
