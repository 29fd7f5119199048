"""Routes: a route's policy, written beside the route.

`idempotent` marks an endpoint; the middleware finds the mark by asking the application's own
routes which of them matches, as Starlette and FastAPI do, before the request gets there. So one
middleware guards everything, and each route says what is particular to it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar

from coatcheck.core.policy import SAFE_METHODS, Policy, changed
from coatcheck.engine.desk import policy_of
from coatcheck.errors import Misconfigured

P = ParamSpec("P")
T = TypeVar("T")

_MARK = "__coatcheck_policy__"
# Remembered matches; routes with parameters make many paths, so the memory is bounded.
MATCHES_MAX = 4_096
# Longer paths are no honest ones, and not worth the memory.
MATCHED_CHARS_MAX = 1_024

# The mark that a middleware went by for the present request. An endpoint that runs under another
# one than its own was not found, and must not look as if it were guarded.
_WENT_BY: ContextVar[object] = ContextVar("coatcheck.mark", default=None)
_SAFE = object()


def idempotent(
    **changes: Any,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """
    Give an endpoint a policy of its own: the middleware's, with *changes*.

    Every unsafe method of the route is guarded, whatever the middleware's `methods` say;
    `methods=()` takes the route out. Only `status_path` is the same for all routes.
    """
    if "reconcile" in changes:
        changes.setdefault("recovery", "reconcile")
    policy_of(changed(Policy(), changes))
    if "status_path" in changes:
        raise Misconfigured(
            "status_path is the middleware's, which serves it for all routes: give that one "
            f"policy=Policy(status_path={changes['status_path']!r})"
        )

    def decorate(endpoint: Callable[P, T]) -> Callable[P, T]:
        # The endpoint itself has the mark, too: where this stands above the route's own decorator,
        # that is what the framework knows.
        with suppress(AttributeError):  # a method of an object, which can have none
            setattr(endpoint, _MARK, changes)
        if isinstance(endpoint, type):  # called for each request by its framework, and not by us
            return endpoint
        guarded = _checked(endpoint, changes)
        setattr(guarded, _MARK, changes)
        return guarded

    return decorate


def _checked(endpoint: Callable[P, T], mark: Mapping[str, Any]) -> Callable[P, T]:
    """*endpoint*, refusing to run where no middleware guards it: a mark alone protects nothing."""

    def check() -> None:
        went_by = _WENT_BY.get()
        if went_by is not mark and went_by is not _SAFE:
            raise Misconfigured(
                f"{endpoint.__qualname__} is marked @idempotent, but no IdempotencyMiddleware "
                "guards it: app.add_middleware(IdempotencyMiddleware, store=...)"
            )

    @functools.wraps(endpoint)
    async def guarded_async(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the endpoint's own
        check()
        return await endpoint(*args, **kwargs)  # type: ignore[misc]  # it is a coroutine function

    @functools.wraps(endpoint)
    def guarded_sync(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the endpoint's own
        check()
        return endpoint(*args, **kwargs)

    guarded: Any = guarded_async if inspect.iscoroutinefunction(endpoint) else guarded_sync
    try:  # frameworks look for annotations written as text in the wrong module: this one
        guarded.__signature__ = inspect.signature(endpoint, eval_str=True)
    except NameError:
        pass
    checked: Callable[P, T] = guarded
    return checked


class _Match(NamedTuple):
    """What is known of a request by its method and place."""

    policy: Policy | None
    template: str | None
    mark: Mapping[str, Any] | None


class _Router(NamedTuple):
    """Whoever has routes, as far as it concerns us."""

    routes: Sequence[Any]


_NO_ROUTES: Sequence[Any] = ()
_NOBODY = _Router(_NO_ROUTES)
# Of a route that does not say which methods it takes.
_UNSAFE = ("POST", "PUT", "PATCH", "DELETE")


class Routes:
    """Which policy guards which request of one application."""

    def __init__(
        self,
        policy: Policy,
        app: object,
        know: Callable[[str, Policy], None] = lambda _label, _policy: None,
    ) -> None:
        self._policy = policy
        self._app = app
        self._know = know  # told of each route that has a policy of its own
        self._matches: dict[tuple[str, ...], _Match] = {}
        self._router: Any = _NOBODY  # whoever has the routes; not known before the first request
        self._known: Sequence[Any] | None = None  # the routes that were looked through …
        self._count = 0  # … and how many they were
        self._has_marks = False
        self._has_hosts = False

    def are_by_host(self) -> bool:
        """Some of them match the host, too."""
        return self._has_hosts

    def let_pass(self, asgi_scope: MutableMapping[str, Any]) -> None:
        """Nothing of this request is guarded, whatever its route says: its method is a safe one."""
        self._look(asgi_scope)
        if self._has_marks:
            _WENT_BY.set(_SAFE)

    def policy_for(
        self, asgi_scope: MutableMapping[str, Any], method: str
    ) -> tuple[Policy | None, str | None]:
        """The policy for this request and its route's template; None: it is not guarded."""
        routes: Sequence[Any] = self._router.routes
        if routes is not self._known or len(routes) != self._count:
            routes = self._look(asgi_scope)
        if not self._has_marks:
            return (self._policy if method in self._policy.methods else None), None
        place = (method, asgi_scope["path"], *self._hosts(asgi_scope))
        found = self._matches.get(place)
        if found is None:
            found = self._match(asgi_scope, routes)
            if len(self._matches) >= MATCHES_MAX:
                self._matches.clear()
            if sum(map(len, place)) <= MATCHED_CHARS_MAX:
                self._matches[place] = found
        _WENT_BY.set(found.mark)
        return found.policy, found.template

    def _hosts(self, asgi_scope: MutableMapping[str, Any]) -> list[str]:
        if not self._has_hosts:
            return []
        return [value.decode("latin-1") for n, value in asgi_scope["headers"] if n == b"host"]

    def _look(self, asgi_scope: MutableMapping[str, Any]) -> Sequence[Any]:
        """The application's routes; looked through, where they are others than before."""
        if self._router is _NOBODY:
            found = _router_in(self._app) or _router_in(asgi_scope.get("app"))
            self._router = found or _Router(_NO_ROUTES)
        routes: Sequence[Any] = self._router.routes
        if routes is not self._known or len(routes) != self._count:
            self._look_through(routes)
        return routes

    def _look_through(self, routes: Sequence[Any]) -> None:
        """Look for marks: at the first request, and again when routes were added."""
        self._matches.clear()
        everything = list(_all_in(routes))
        self._has_hosts = any(hasattr(route, "host_regex") for route in everything)
        self._has_marks = any(_mark_of(route) is not None for route in everything)
        self._known, self._count = routes, len(routes)
        for template, route in _templates(routes):
            mark = _mark_of(route)
            if mark is not None:
                self._tell_of(template, getattr(route, "methods", None) or _UNSAFE, mark)

    def _tell_of(self, template: str, methods: Iterable[str], mark: Mapping[str, Any]) -> None:
        for method in set(methods) - SAFE_METHODS:
            with suppress(Misconfigured):  # which the route says itself, when it is asked
                policy = self._policy_of(method, mark)
                if method in policy.methods:
                    self._know(f"{method} {template}", policy)

    def _match(self, asgi_scope: MutableMapping[str, Any], routes: Sequence[Any]) -> _Match:
        method = asgi_scope["method"].upper()
        route, template = _matching(routes, asgi_scope)
        mark = _mark_of(route)
        if mark is None:
            return _Match(self._policy if method in self._policy.methods else None, None, None)
        policy = self._policy_of(method, mark)
        return _Match(policy if method in policy.methods else None, template, mark)

    def _policy_of(self, method: str, mark: Mapping[str, Any]) -> Policy:
        changes = {"methods": {method}, **mark}
        if mark.get("recovery", "reconcile") != "reconcile":  # then nobody is asked
            changes["reconcile"] = None
        return changed(self._policy, changes)


def _router_in(app: object) -> object | None:
    """Whoever has the routes: *app*, its router, or one that middlewares have between them."""
    while app is not None:
        for found in (getattr(app, "router", None), app):
            # In other frameworks than Starlette's they may be anything that we cannot read.
            if isinstance(getattr(found, "routes", None), (list, tuple)):
                return found
        app = getattr(app, "app", None)
    return None


def _mark_of(route: object) -> Mapping[str, Any] | None:
    mark: Mapping[str, Any] | None = getattr(getattr(route, "endpoint", None), _MARK, None)
    return mark


def _flat(routes: Sequence[Any]) -> Iterator[Any]:
    """*routes* as they match: FastAPI keeps a router that was included as one of them."""
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
    """The route that will take the request, and its template; as Starlette's router finds it."""
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
