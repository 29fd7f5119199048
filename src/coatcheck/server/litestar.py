"""Litestar: one plugin guards an application, and a handler's policy is beside the handler.

    @post("/charges")
    @idempotent(required=True, window="72h")
    async def charge(data: Charge, operation: CurrentOperation) -> Receipt: ...

    app = Litestar([charge], plugins=[IdempotencyPlugin(store="sqlite:///orders.db")])

Litestar runs its middlewares after it has found the handler. The plugin appends ours to those of
the application, so that it knows the handler, and the user whom an authentication in front found.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from http import HTTPStatus
from typing import Any, NamedTuple
from uuid import UUID

from coatcheck.core.policy import SAFE_METHODS, Policy, changed
from coatcheck.engine import AsyncEngine
from coatcheck.errors import Misconfigured, MissingExtra
from coatcheck.operation import AsyncOperation, Operation, current_operation
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.asgi.exchange import finish
from coatcheck.server.asgi.request import AsgiScope, Receive, Send
from coatcheck.server.callers import SHARED, AsyncCaller, Caller, credential_text
from coatcheck.server.cookies import Secret
from coatcheck.server.keys import NaturalKey
from coatcheck.server.openapi import annotate
from coatcheck.server.request import Request
from coatcheck.server.routes import (
    Mark,
    checked_changes,
    found_unguarded,
    idempotent,
    mark_of,
    note_raised,
    policy_of_mark,
    unclaimed_operation_of_request,
)
from coatcheck.server.routes import found as note_found
from coatcheck.server.starlette_routes import MATCHES_MAX
from coatcheck.server.switch import DisabledBy
from coatcheck.stores import AsyncStore

try:
    from litestar import Litestar, route
    from litestar import Request as LitestarRequest
    from litestar.config.app import AppConfig
    from litestar.di import NamedDependency, Provide
    from litestar.exceptions import HTTPException, NotFoundException
    from litestar.openapi.config import OpenAPIConfig
    from litestar.openapi.spec import OpenAPI
    from litestar.params import FromPath, SkipValidation
    from litestar.plugins import InitPlugin
    from litestar.plugins.base import ReceiveRoutePlugin
    from litestar.routes import BaseRoute, HTTPRoute
    from litestar.types import ASGIApp
    from litestar.types.empty import Empty
except ImportError as error:
    raise MissingExtra("litestar", "Litestar") from error

__all__ = [
    "CurrentOperation",
    "CurrentSyncOperation",
    "IdempotencyPlugin",
    "OptionalOperation",
    "idempotent",
]

# The operation of the request, in an async handler: `operation: CurrentOperation`. On a request
# that is not guarded it raises `Misconfigured`, so make the key required there.
CurrentOperation = NamedDependency[SkipValidation[AsyncOperation]]

# The same for a handler that is no coroutine function.
CurrentSyncOperation = NamedDependency[SkipValidation[Operation]]

# The operation of the request, or None if it has no key: for routes whose key is optional.
OptionalOperation = NamedDependency[SkipValidation[AsyncOperation | None]]

# Where routers, controllers and handlers have defaults for the policy of their handlers.
OPT = "idempotent"
# Where a request carries the application behind our middleware, which is another for each handler.
_NEXT = "coatcheck.next"


class IdempotencyPlugin(InitPlugin, ReceiveRoutePlugin):
    """
    Guards one Litestar application: `Litestar([...], plugins=[IdempotencyPlugin(store=...)])`.

    Args:
        store: a URL or a store; or give *engine*. With neither, records are in the file
            `coatcheck.db` in the working directory (`sqlite:///coatcheck.db`).
        policy: a `Policy`, the name of a preset, or None for the default.
        caller: whose key it is, a function of the request, sync or async. Without it, the user
            whom an authentication middleware found is the caller; without such a user, the default
            identifies the caller.
        key: finds the key in the request itself, if no header brings one; see
            `coatcheck.server.keys`.
        secret: makes operation ids unguessable; the same on every node.
        engine: an `AsyncEngine` that is shared with other middlewares or functions.
        transactions: where connections for transaction mode come from; see `Engine`.
        disabled_by: the kill switch; see `docs/howto/rollout.md`.
        session_cookies: names of cookies that hold a session, beside the usual ones.
        session_secret: verifies session cookies that Starlette or Flask signs.
        dependency: the name of the parameter that gets the operation; None: there is none.
    """

    def __init__(
        self,
        *,
        store: str | AsyncStore | None = None,
        policy: Policy | str | None = None,
        caller: Caller | AsyncCaller | None = None,
        key: NaturalKey | None = None,
        secret: bytes | str = b"",
        engine: AsyncEngine | None = None,
        transactions: object = None,
        disabled_by: DisabledBy | None = None,
        session_cookies: Sequence[str] = (),
        session_secret: Secret | None = None,
        dependency: str | None = "operation",
    ) -> None:
        self._dependency = dependency
        self._has_natural_keys = key is not None
        self._is_used = False
        self.middleware = IdempotencyMiddleware(
            _pass_on,
            store=store,
            policy=policy,
            caller=caller or authenticated_user,
            key=key,
            secret=secret,
            engine=engine,
            transactions=transactions,
            disabled_by=disabled_by,
            routes=self._new_routes,
            session_cookies=session_cookies,
            session_secret=session_secret,
        )

    def _new_routes(
        self, policy: Policy, register: Callable[[str, Policy], None]
    ) -> LitestarRoutes:
        self._routes = LitestarRoutes(policy, register)
        return self._routes

    @property
    def engine(self) -> AsyncEngine:
        """The engine of the application; `middleware` is the middleware."""
        return self.middleware.engine

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Put the middleware, the dependency and the address for polling into the application."""
        if self._is_used:
            raise Misconfigured("one IdempotencyPlugin guards one application: make another one")
        self._is_used = True
        app_config.middleware.append(self._guard)
        app_config.after_exception.append(_note_raised)
        if self._dependency is not None:
            if self._dependency in app_config.dependencies:
                raise Misconfigured(
                    f"the application has a dependency {self._dependency!r} of its own: give "
                    'IdempotencyPlugin(dependency="another_name")'
                )
            provide = _provider_of(self._dependency)
            app_config.dependencies[self._dependency] = Provide(provide)
        app_config.route_handlers.append(_polling_handler(self.engine.policy))
        # The store opens before everything else; running operations end before everything else.
        app_config.lifespan.insert(0, self._started)
        app_config.lifespan.append(self._finished)
        if app_config.openapi_config is not None:
            app_config.openapi_config = self._documented(app_config.openapi_config)
        return app_config

    def receive_route(self, route: BaseRoute) -> None:
        """Read the policies of a route that was added to the application."""
        if isinstance(route, HTTPRoute):
            self._routes.add(route)

    def _guard(self, app: ASGIApp) -> ASGIApp:
        """Our middleware in front of one handler."""
        middleware = self.middleware

        async def guarded(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI
            scope[_NEXT] = app
            await middleware(scope, receive, send)

        return guarded

    @asynccontextmanager
    async def _started(self, _app: Litestar) -> AsyncIterator[None]:
        await self.middleware.start()
        yield

    @asynccontextmanager
    async def _finished(self, _app: Litestar) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await finish(self.middleware)

    def _documented(self, config: OpenAPIConfig) -> OpenAPIConfig:
        """*config*, whose document states what is guarded."""
        original, routes = config.to_openapi_schema, self._routes
        changes = {"required": False} if self._has_natural_keys else {}

        class Document(OpenAPI):
            """The document, with the operations that are guarded now."""

            def to_schema(self) -> dict[str, Any]:
                policies = routes.guarded().items()
                guarded = {place: changed(policy, changes) for place, policy in policies}
                return annotate(super().to_schema(), guarded)

        def to_openapi_schema() -> OpenAPI:
            made = original()
            return Document(**{field.name: getattr(made, field.name) for field in fields(made)})

        own: Any = copy.copy(config)  # an application's configuration may be shared
        own.to_openapi_schema = to_openapi_schema
        documented: OpenAPIConfig = own
        return documented


async def _note_raised(error: Exception, _scope: object) -> None:
    """Note what a handler raised; an `HTTPException` is the answer that it says."""
    if not isinstance(error, HTTPException):
        note_raised(error)


async def _pass_on(asgi_scope: AsgiScope, receive: Receive, send: Send) -> None:
    """Call the application behind our middleware."""
    if "coatcheck.passed" in asgi_scope:
        # A transaction is repeated. Litestar has noted a response, which was not sent, and closed
        # the files of a form: it must parse the form again.
        noted: Any = asgi_scope.get("state", {}).get("_ls_connection_state")
        if noted is not None:
            noted.response_started, noted.form = False, Empty
    asgi_scope["coatcheck.passed"] = True
    await asgi_scope[_NEXT](asgi_scope, receive, send)


def _polling_handler(policy: Policy) -> Any:  # noqa: ANN401 - Litestar's
    """The route for clients that poll; our middleware answers in front of it, if it can."""

    @route(
        policy.status_path + "{token:str}",
        http_method=["GET", "HEAD"],
        include_in_schema=False,
        status_code=HTTPStatus.OK,
    )
    async def idempotency_status(token: FromPath[str]) -> None:
        raise NotFoundException(f"no operation has the address {token}")

    return idempotency_status


# --- routes ---------------------------------------------------------------------------------


class _Match(NamedTuple):
    """What is known of a request by its handler, method and template."""

    policy: Policy | None
    template: str | None
    mark: Mark | None


class LitestarRoutes:
    """Finds the policy of the handler that Litestar has chosen for a request."""

    def __init__(self, policy: Policy, register: Callable[[str, Policy], None]) -> None:
        self._policy = policy
        self._register = register
        self._routes: list[HTTPRoute] = []
        self._matches: dict[tuple[object, str, str], _Match] = {}

    def add(self, route: HTTPRoute) -> None:
        """Read the policies of *route*; raises `Misconfigured`."""
        self._routes.append(route)
        for handler, method in _unsafe_in(route):
            match = self._match(handler, method, route.path_format)
            if match.policy is not None and match.mark is not None:
                self._register(f"{method} {route.path_format}", match.policy)

    def guarded(self) -> dict[tuple[str, str], Policy]:
        """The policies of all guarded operations, by path template and method."""
        found: dict[tuple[str, str], Policy] = {}
        for route in self._routes:
            for handler, method in _unsafe_in(route):
                policy = self._match(handler, method, route.path_format).policy
                if policy is not None and policy.mode != "observe":
                    found[route.path_format or "/", method] = policy
        return found

    def let_pass(self, _asgi_scope: MutableMapping[str, Any]) -> None:
        """Note that this request is not guarded: its method is safe."""
        found_unguarded()

    def lookup(
        self, asgi_scope: MutableMapping[str, Any], method: str
    ) -> tuple[Policy | None, str | None]:
        """The policy for this request and its route's template; None: it is not guarded."""
        place = (asgi_scope["route_handler"], method, asgi_scope.get("path_template") or "")
        match = self._matches.get(place) or self._match(*place)
        note_found(match.mark)
        return match.policy, match.template

    def _match(self, handler: Any, method: str, template: str) -> _Match:  # noqa: ANN401 - a handler
        mark, changes = _changes_of(handler)
        policy = self._policy if mark is None else policy_of_mark(self._policy, method, changes)
        match = _Match(policy if method in policy.methods else None, template or "/", mark)
        if len(self._matches) >= MATCHES_MAX:  # a mounted application takes any method
            self._matches.clear()
        self._matches[handler, method, template] = match
        return match


def _unsafe_in(route: HTTPRoute) -> list[tuple[object, str]]:
    handlers = route.route_handler_map.items()
    return [(handler, method) for method, (handler, _) in handlers if method not in SAFE_METHODS]


def _changes_of(handler: Any) -> tuple[Mark | None, Mapping[str, Any]]:  # noqa: ANN401 - a handler
    """The mark of *handler*, and its changes together with those in `opt`, which come first."""
    mark = mark_of(getattr(handler.fn, "func", handler.fn))  # of a sync function inside
    defaults = handler.opt.get(OPT)
    if defaults is None:
        return mark, mark or {}
    if not isinstance(defaults, Mapping):
        raise Misconfigured(
            f'opt["{OPT}"] is {defaults!r}; it has the fields of a policy: {{"required": True}}'
        )
    changes = {**checked_changes(defaults), **(mark or {})}
    return (Mark(changes, reports_begin=False) if mark is None else mark), changes


# --- the caller -----------------------------------------------------------------------------


def authenticated_user(request: Request) -> str | None:
    """
    The user whom an authentication middleware of Litestar found, by its id or its name.

    A refreshed token is then the same caller's. An API key is a part of the caller, too, because
    it may belong to an application whose users have numbers of their own.
    """
    user = request.native.get("user")
    name = None if user is None else _name_of(user) or _name_of(request.native.get("auth"))
    if name is None:
        return None
    keys = credential_text((header, request.fields.get(header)) for header in sorted(SHARED))
    # The class, because users of two kinds may have the same number.
    return f"authenticated {type(user).__qualname__} {name}\n{keys}"


def _name_of(user: object) -> str | None:
    """What names *user*: a text, a number, or one of the usual attributes or keys."""
    if getattr(user, "is_authenticated", True) is False:
        return None
    if isinstance(user, str | int | UUID):
        return f"{user!r}"
    for attribute in ("identity", "id", "pk", "sub", "username", "email"):
        keys = user if isinstance(user, Mapping) else {}
        value = keys.get(attribute, getattr(user, attribute, None))
        if isinstance(value, str | int | UUID):
            return f"{attribute} {value!r}"
    return None


# --- the operation --------------------------------------------------------------------------


def _provider_of(name: str) -> Callable[..., Any]:
    async def provide_operation(request: LitestarRequest[Any, Any, Any]) -> Operation | None:
        operation = current_operation() or unclaimed_operation_of_request()
        if operation is None and not _is_optional(request, name):
            raise Misconfigured(
                "this handler asks for its operation, but the request is not guarded: make the key "
                "required on this route, or annotate the parameter with OptionalOperation"
            )
        return operation

    return provide_operation


def _is_optional(request: LitestarRequest[Any, Any, Any], name: str) -> bool:
    """The handler may do without its operation; one that does not ask for it may, too."""
    asked = request.route_handler.parsed_fn_signature.parameters.get(name)
    return asked is None or asked.is_optional
