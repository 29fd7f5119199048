"""Starlette's routes: how the policy of a request to Starlette or FastAPI is found.

The middleware asks the application's own routes which of them matches, before the request gets
there. Starlette is not imported: only the attributes of its routes are read.

The same routes tell which operations of FastAPI's OpenAPI document are guarded (`extend_openapi`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar, Unpack

from coatcheck.core.policy import SAFE_METHODS, Policy, PolicyOptions, changed
from coatcheck.engine.settings import policy_of
from coatcheck.errors import Misconfigured
from coatcheck.server.openapi import annotate
from coatcheck.server.routes import (
    Mark,
    checked_changes,
    found_unguarded,
    idempotent,
    mark_of,
    policy_of_mark,
    set_mark,
)
from coatcheck.server.routes import (
    found as note_found,
)

R = TypeVar("R")

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
        # A mark that contradicts the middleware's policy: its route cannot be served.
        self.mistake: Misconfigured | None = None

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
        if not routes:  # another framework's application
            return (self._policy if method in self._policy.methods else None), None
        place: tuple[str, ...] = (method, asgi_scope["path"])
        if self.matter:
            place += tuple(_hosts_of(asgi_scope))
        match = self._matches.get(place)
        if match is None:
            match = self._match(asgi_scope, routes)
            if len(self._matches) >= MATCHES_MAX:
                self._matches.clear()
            if sum(map(len, place)) <= MATCHED_CHARS_MAX:
                self._matches[place] = match
        if self._has_marks:
            note_found(match.mark)
        return match.policy, match.template

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
        self._has_marks = any(_is_marked(route) for route in everything)
        self._known, self._count = routes, len(routes)
        mistakes: list[Misconfigured] = []
        for found in _guarded(routes, self._policy, mistakes):
            if found.mark is not None:
                self._register(f"{found.method} {found.template}", found.policy)
        self.mistake = mistakes[0] if mistakes else None

    def _match(self, asgi_scope: MutableMapping[str, Any], routes: Sequence[Any]) -> _Match:
        method = asgi_scope["method"].upper()
        route, template = _matching(routes, asgi_scope)
        mark, changes = _changes_of(route, method)
        policy = self._policy if mark is None else policy_of_mark(self._policy, method, changes)
        known = None if route is None else template
        return _Match(policy if method in policy.methods else None, known, mark)


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


def _guarded(
    routes: Sequence[Any], policy: Policy, mistakes: list[Misconfigured] | None = None
) -> Iterator[_Guarded]:
    """
    All that is guarded in *routes*, if *policy* is the middleware's.

    *mistakes* gets an error for each mark that contradicts the policy.
    """
    for template, route in _templates(routes):
        for method in _unsafe_methods_of(route):
            mark, changes = _changes_of(route, method)
            try:
                own = policy if mark is None else policy_of_mark(policy, method, changes)
            except Misconfigured as error:
                if mistakes is not None:
                    mistakes.append(Misconfigured(f"{method} {template}: {error}"))
                continue
            if method in own.methods:
                yield _Guarded(template, method, own, mark)


def _changes_of(route: object, method: str) -> tuple[Mark | None, Mapping[str, Any]]:
    """The mark of *route* for *method*, and its changes together with those of its router."""
    endpoint = getattr(route, "endpoint", None)
    own = getattr(endpoint, method.lower(), None) if inspect.isclass(endpoint) else None
    marks = map(mark_of, (own, endpoint))
    mark = next((mark for mark in marks if mark is not None), None)  # it may be empty
    of_router = mark_of(getattr(route, "original_route", route))
    if of_router is None:
        return mark, mark or {}
    return (of_router if mark is None else mark), {**of_router, **(mark or {})}


def _is_marked(route: object) -> bool:
    return any(_changes_of(route, method)[0] is not None for method in _unsafe_methods_of(route))


def _unsafe_methods_of(route: object) -> list[str]:
    methods = getattr(route, "methods", None)
    endpoint = getattr(route, "endpoint", None)
    if not methods and inspect.isclass(endpoint):  # a method for each method
        methods = [method for method in _UNSAFE if hasattr(endpoint, method.lower())]
    return sorted(set(methods or _UNSAFE) - SAFE_METHODS)


def idempotent_router(router: R, /, **changes: Unpack[PolicyOptions]) -> R:
    """
    Give all routes of *router* a policy: the middleware's, with *changes*; returns *router*.

    Every unsafe method of its routes is guarded. What a route's own `idempotent` says wins.

    Args:
        router: with FastAPI, an `APIRouter` or an application that has no routes yet; routers that
            it includes have their own. With Starlette, a `Router`, a `Mount` or an application with
            all its routes, also those further inside.
        changes: the fields of a policy.
    """
    mark = Mark(checked_changes(changes), reports_begin=False)
    inner: Any = getattr(router, "router", router)  # of an application
    if hasattr(inner, "route_class"):
        # FastAPI makes each route by this class, also when it includes the router in another one.
        if any(hasattr(route, "dependant") for route in inner.routes):
            raise Misconfigured("call idempotent_router before you declare routes on the router")
        inner.route_class = _marked_class(inner.route_class, mark)
        return router
    routes = list(_all_in(getattr(router, "routes", None) or ()))
    if not routes:
        raise Misconfigured(
            f"idempotent_router got a {type(router).__name__} without routes: give it a router, a "
            "Mount or an application, with its routes"
        )
    for route in routes:
        inside: Mapping[str, Any] = mark_of(route) or {}  # of a router further inside, which wins
        set_mark(route, Mark({**mark, **inside}, reports_begin=False))
    return router


def _marked_class(route_class: Any, mark: Mark) -> Any:  # noqa: ANN401 - FastAPI's
    """A *route_class* whose routes have *mark* as their default, and report that they began."""

    class GuardedRoute(route_class):  # type: ignore[misc]  # it is FastAPI's, or the application's
        def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
            marked = endpoint if mark_of(endpoint) is not None else idempotent(**mark)(endpoint)
            super().__init__(path, marked, **settings)

    set_mark(GuardedRoute, mark)
    return GuardedRoute


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


def _hosts_of(asgi_scope: MutableMapping[str, Any]) -> list[str]:
    return [value.decode("latin-1") for n, value in asgi_scope["headers"] if n == b"host"]


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
