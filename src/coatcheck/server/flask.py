"""Flask: one line guards an application, and a view's policy stands beside the view.

    app = Flask(__name__)
    Coatcheck(app, store="sqlite:///orders.db")

    @app.post("/charges")
    @idempotent(required=True, window="72h")
    def charge(): ...

The extension puts the WSGI middleware around `app.wsgi_app`. So the server, `flask run` and
`app.test_client()` all pass through it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from coatcheck.core.policy import SAFE_METHODS, Policy
from coatcheck.core.problem import Problem
from coatcheck.core.response import Response
from coatcheck.engine import Engine
from coatcheck.errors import CoatcheckError, Misconfigured, MissingExtra
from coatcheck.operation import Operation
from coatcheck.operation import current_operation as guarded_operation
from coatcheck.server.callers import Caller, client_certificate, credential, user
from coatcheck.server.cookies import Secret
from coatcheck.server.keys import NaturalKey
from coatcheck.server.request import Request
from coatcheck.server.responses import refused
from coatcheck.server.routes import (
    Mark,
    found_unguarded,
    idempotent,
    mark_of,
    note_raised,
    policy_of_mark,
    unclaimed_operation_of_request,
)
from coatcheck.server.routes import found as note_found
from coatcheck.server.starlette_routes import MATCHED_CHARS_MAX, MATCHES_MAX
from coatcheck.server.switch import VARIABLE, DisabledBy
from coatcheck.server.wsgi import IdempotencyMiddleware
from coatcheck.stores import Store

try:
    import click
    from flask import Flask, got_request_exception
    from flask import Response as FlaskResponse
    from flask import request as flask_request
    from flask.cli import AppGroup
    from werkzeug.exceptions import HTTPException, default_exceptions
    from werkzeug.local import LocalProxy
except ImportError as error:
    raise MissingExtra("flask", "Flask") from error

__all__ = ["Coatcheck", "IdempotencyMiddleware", "current_operation", "idempotent"]

logger = logging.getLogger("coatcheck")

PREFIX = "COATCHECK_"


class Coatcheck:
    """
    Guards one or several Flask applications.

    Every argument may be in `app.config` instead: `COATCHECK_STORE`, `COATCHECK_POLICY`,
    `COATCHECK_DISABLED_BY` and so on. An argument wins over the configuration.
    `app.extensions["coatcheck"]` is the middleware of an application, and has its `engine`.

    Args:
        app: the application; without it, call `init_app` later.
        store: a URL or a store; or give *engine*. With neither, records are in the file
            `coatcheck.db` in the working directory (`sqlite:///coatcheck.db`).
        policy: a `Policy`, the name of a preset, or None for the default.
        caller: whose key it is, a function of the request. Without it, the user whom Flask-Login
            has logged in is the caller; without such a user, the default identifies the caller.
        key: finds the key in the request itself, if no header brings one; see
            `coatcheck.server.keys`.
        secret: makes operation ids unguessable; the same on every node.
        engine: an `Engine` that is shared with other middlewares or functions.
        transactions: where connections for transaction mode come from, such as Flask-SQLAlchemy's
            `db.session`; see `Engine`.
        disabled_by: the kill switch; see `docs/howto/rollout.md`.
        session_cookies: names of cookies that hold a session, beside the usual ones and Flask's.
        session_secret: verifies session cookies; without it, the application's own secret key.
    """

    def __init__(
        self,
        app: Flask | None = None,
        *,
        store: str | Store | None = None,
        policy: Policy | str | None = None,
        caller: Caller | None = None,
        key: NaturalKey | None = None,
        secret: bytes | str | None = None,
        engine: Engine | None = None,
        transactions: object = None,
        disabled_by: DisabledBy | None = None,
        session_cookies: Sequence[str] | None = None,
        session_secret: Secret | None = None,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "store": store,
            "policy": policy,
            "caller": caller,
            "key": key,
            "secret": secret,
            "engine": engine,
            "transactions": transactions,
            "disabled_by": disabled_by,
            "session_cookies": session_cookies,
            "session_secret": session_secret,
        }
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Guard *app*, whose configuration and secret key are set already."""
        if "coatcheck" in app.extensions:
            raise Misconfigured(f"Coatcheck guards the application {app.name!r} already")
        settings = self._settings_of(app)
        store = settings.get("store")
        settings.setdefault("caller", functools.partial(_logged_in_user, app))
        if app.secret_key:
            keys = [app.secret_key, *(app.config.get("SECRET_KEY_FALLBACKS") or ())]
            settings.setdefault("session_secret", keys)
        own = settings.get("session_cookies", ())
        if not isinstance(own, str):  # the middleware refuses a single text
            settings["session_cookies"] = [app.config["SESSION_COOKIE_NAME"], *own]
        if hasattr(settings.get("transactions"), "registry"):  # a `scoped_session`
            settings["transactions"] = _lent_in_context(app, settings["transactions"])
        routes = functools.partial(FlaskRoutes, app=app)
        middleware = IdempotencyMiddleware(app.wsgi_app, routes=routes, **settings)
        middleware.guard.render = functools.partial(_rendered, app)
        got_request_exception.connect(_note_raised, app)
        app.extensions["coatcheck"] = middleware
        app.wsgi_app = middleware  # type: ignore[method-assign]  # as Flask documents it
        if find_spec("rich") is not None:  # of the extra `cli`; Flask brings click
            app.cli.add_command(_StoreCommands(store))

    def _settings_of(self, app: Flask) -> dict[str, Any]:
        """The arguments for the middleware of *app*."""
        names = {PREFIX + name.upper(): name for name in self._arguments}
        given = {n: value for n, value in self._arguments.items() if value is not None}
        configured = {}
        for name, value in app.config.items():
            if not name.startswith(PREFIX) or name == VARIABLE:  # which the environment has
                continue
            if name not in names:
                known = ", ".join(sorted(names))
                raise Misconfigured(f"{name} is no setting of coatcheck; these are: {known}")
            if value is not None:
                configured[names[name]] = value
        if "engine" in given:  # it has all that
            for name in ("store", "policy", "secret", "transactions"):
                configured.pop(name, None)
        return {**configured, **given}


def _note_raised(_app: Flask, exception: Exception, **_: object) -> None:
    """Note what a view raised, and no error handler has handled: Flask answers 500."""
    note_raised(exception)


# --- routes ---------------------------------------------------------------------------------


class _Match(NamedTuple):
    """What is known of a request by its method, path and host."""

    policy: Policy | None
    template: str | None
    mark: Mark | None


class FlaskRoutes:
    """Finds the policy of the view that a request will reach."""

    def __init__(
        self, policy: Policy, register: Callable[[str, Policy], None], *, app: Flask
    ) -> None:
        self._policy = policy
        self._register = register
        self._app = app
        self._is_registered = False
        self._matches: dict[tuple[str, str, str], _Match] = {}

    def let_pass(self, _environ: MutableMapping[str, Any]) -> None:
        """Note that this request is not guarded: its method is safe."""
        if not self._is_registered:
            self._register_routes()
        found_unguarded()

    def lookup(
        self, environ: MutableMapping[str, Any], method: str
    ) -> tuple[Policy | None, str | None]:
        """The policy for this request and its route's template; None: it is not guarded."""
        if not self._is_registered:
            self._register_routes()
        place = (method, environ.get("PATH_INFO", ""), environ.get("HTTP_HOST", ""))
        match = self._matches.get(place)
        if match is None:
            match = self._match(environ, method, place)
        note_found(match.mark)
        return match.policy, match.template

    def _match(
        self, environ: MutableMapping[str, Any], method: str, place: tuple[str, str, str]
    ) -> _Match:
        app = self._app
        request = app.request_class(dict(environ), populate_request=False)
        try:
            with app.app_context():  # a converter of the application may need it
                adapter = app.create_url_adapter(request)
                assert adapter is not None  # it is None without a request only
                rule, _ = adapter.match(return_rule=True)
        except HTTPException:  # no such route: Flask answers. Not remembered: it may be added yet.
            return self._unmarked(method)
        mark = _mark_of_view(app.view_functions.get(rule.endpoint), method)
        match = self._unmarked(method)._replace(template=rule.rule)
        if mark is not None:
            policy = policy_of_mark(self._policy, method, mark)
            self._register(f"{method} {rule.rule}", policy)
            match = _Match(policy if method in policy.methods else None, rule.rule, mark)
        if len(self._matches) >= MATCHES_MAX:
            self._matches.clear()
        if sum(map(len, place)) <= MATCHED_CHARS_MAX:
            self._matches[place] = match
        return match

    def _unmarked(self, method: str) -> _Match:
        return _Match(self._policy if method in self._policy.methods else None, None, None)

    def _register_routes(self) -> None:
        """Have the background recover all marked routes; at the first request they are known."""
        self._is_registered = True
        for rule in list(self._app.url_map.iter_rules()):
            view = self._app.view_functions.get(rule.endpoint)
            for method in sorted((rule.methods or set()) - SAFE_METHODS):
                mark = _mark_of_view(view, method)
                if mark is not None:
                    with suppress(Misconfigured):  # raised when the route is requested
                        policy = policy_of_mark(self._policy, method, mark)
                        self._register(f"{method} {rule.rule}", policy)


def _mark_of_view(view: object, method: str) -> Mark | None:
    """The mark of a view for *method*: of a `MethodView`'s method, the view, or its class."""
    view_class = getattr(view, "view_class", None)
    own = getattr(view_class, method.lower(), None) if method.isalpha() else None
    marks = map(mark_of, (own, view, view_class))
    return next((mark for mark in marks if mark is not None), None)  # it may be empty


# --- the caller -----------------------------------------------------------------------------


def _logged_in_user(app: Flask, request: Request) -> str | None:
    """
    The user whom Flask-Login has noted in the session or in its "remember me" cookie.

    Flask verifies the session, so that a forged one has no user. Credentials in the request are a
    part of the caller, too, as they are by default.
    """
    if b"cookie" not in request.fields:
        return None
    native = app.request_class(dict(request.native), populate_request=False)
    session = app.session_interface.open_session(app, native)
    id = None if session is None else session.get("_user_id")
    if id is None and app.secret_key and hasattr(app, "login_manager"):
        id = _remembered_user(app, native.cookies)
    if id is None:
        return None
    others = (user(request), credential(request), client_certificate(request))
    return "\n".join([f"logged in {id!r}", *(other for other in others if other)])


def _remembered_user(app: Flask, cookies: Any) -> str | None:  # noqa: ANN401 - Werkzeug's
    """
    The user in Flask-Login's "remember me" cookie.

    A user who comes with this cookie only gets a session with the response. So the next request
    has the user in the session, and must be the same caller's.
    """
    # The application uses it; it has no types.
    from flask_login import decode_cookie  # type: ignore[import-untyped] # noqa: PLC0415

    cookie = cookies.get(app.config.get("REMEMBER_COOKIE_NAME", "remember_token"))
    try:
        id: str | None = decode_cookie(cookie, key=app.secret_key) if cookie else None
    except (TypeError, ValueError):  # the signature is no ASCII text
        return None
    return id


# --- refusals -------------------------------------------------------------------------------


def _rendered(app: Flask, refusal: Problem, policy: Policy, request: Request) -> Response:
    """
    The response of *refusal*: by an error handler of the application, or a problem document.

    A handler must be for this status, or for our exceptions. One for `HTTPException` or `Exception`
    is not called, because it may turn every refusal into a 500.
    """
    document = refused(refusal, policy)
    if not any(app.error_handler_spec.values()):
        return document
    try:
        with app.request_context(dict(request.native)):
            made = _handled(app, refusal, document)
    except Exception:
        logger.exception(
            "coatcheck: an error handler failed; the client gets a problem document (%s)",
            refusal.code,
        )
        return document
    return document if made is None else made


def _handled(app: Flask, refusal: Problem, document: Response) -> Response | None:
    """What an error handler makes of *refusal*, in the context of its request."""
    error, scopes = refusal.error(), (*flask_request.blueprints, None)
    specs = [app.error_handler_spec[scope] for scope in scopes if scope in app.error_handler_spec]
    for_status = (next(iter(spec.get(refusal.status, {}).values()), None) for spec in specs)
    handler = next(filter(None, for_status), None)
    if handler is not None:
        error = _http_exception(refusal, document)
    else:
        ours = [kind for kind in type(error).__mro__ if issubclass(kind, CoatcheckError)]
        for_type = (spec.get(None, {}).get(kind) for kind in ours for spec in specs)
        handler = next(filter(None, for_type), None)
    if handler is None:
        return None
    made = app.make_response(app.ensure_sync(handler)(error))
    given = [(n.lower().encode(), v.encode("latin-1")) for n, v in made.headers.to_wsgi_list()]
    names = {name for name, _ in given}
    # When to retry, and the reference: a client needs them, whatever the response looks like.
    added = [line for line in document.headers if line[0] not in names and line[0] not in _OF_BODY]
    return Response(made.status_code, [*given, *added], made.get_data())


_OF_BODY = frozenset({b"content-type", b"content-length"})


def _http_exception(refusal: Problem, document: Response) -> Any:  # noqa: ANN401 - Werkzeug's
    """*refusal* as Flask's handlers for a status know errors; its cause is our own exception."""
    headers = [(name.decode(), value.decode("latin-1")) for name, value in document.headers]
    response = FlaskResponse(document.body, document.status, headers)
    kind = default_exceptions.get(refusal.status, HTTPException)
    exception = kind(refusal.detail, response)
    exception.__cause__ = refusal.error()
    return exception


# --- transactions ---------------------------------------------------------------------------


def _lent_in_context(app: Flask, scoped: object) -> Callable[[], Any]:
    """
    Return a function that lends the session of *scoped* inside an application context.

    Flask-SQLAlchemy has one session for each application context, and removes it at the end of
    the context. So the context begins before our claim, Flask uses it for the request, and it
    ends after our commit.
    """

    @contextmanager
    def lend() -> Iterator[object]:
        with app.app_context():
            yield scoped

    return lend


# --- the operation --------------------------------------------------------------------------


def _operation() -> Operation | None:
    return guarded_operation() or unclaimed_operation_of_request()


def _required_operation() -> Operation:
    operation = _operation()
    if operation is None:  # a RuntimeError, so that Werkzeug counts the proxy as false
        raise RuntimeError(
            "current_operation: the request is not guarded; if it has no key, write "
            "@idempotent(required=True) on this route, or test `if current_operation:`"
        )
    return operation


if TYPE_CHECKING:

    class _CurrentOperation(Operation):
        """The operation, as type checkers see the proxy."""

        def __call__(self) -> Operation | None: ...

else:

    class _CurrentOperation(LocalProxy):
        """A proxy like Flask's own; called, it returns the operation, or None."""

        __slots__ = ()

        def __call__(self) -> Operation | None:
            return _operation()


# The operation of the present request, like Flask's `request`: `current_operation.reference`. It is
# false if the request is not guarded. Like `coatcheck.current_operation` it may be called.
current_operation = _CurrentOperation(cast("Any", _required_operation))


# --- commands -------------------------------------------------------------------------------


class _StoreCommands(AppGroup):
    """`flask coatcheck …`: the commands for operators, on the store of the application."""

    def __init__(self, store: object) -> None:
        super().__init__("coatcheck", help="Show, resolve and clean up idempotent operations.")
        self._store = "sqlite:///coatcheck.db" if store is None else store

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        del ctx
        return [name for name in _store_commands() if name != "demo"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; its default store is the application's."""
        if isinstance(self._store, str):
            ctx.default_map = {cmd_name: {"url": self._store}}
        return _store_commands().get(cmd_name) if cmd_name != "demo" else None

    def invoke(self, ctx: click.Context) -> None:
        """Run a command, and exit with its code."""
        if not isinstance(self._store, str):
            raise click.UsageError(
                "the store of this application is no URL: use `coatcheck … --store URL`"
            )
        try:
            code = super().invoke(ctx)
        except CoatcheckError as error:
            raise click.UsageError(str(error)) from error
        ctx.exit(code or 0)


def _store_commands() -> MutableMapping[str, click.Command]:
    from coatcheck.cli import commands  # noqa: PLC0415 - only when a command runs

    return commands.commands
