"""The WSGI middleware: any WSGI application, guarded by one line.

    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, store="sqlite:///orders.db")

Requests that are not guarded pass untouched. A guarded one is read to the end of its body and not
a byte further, claimed, and executed in the server's own thread. The response leaves when its
record is safe. PEP 3333 is kept in full: `write()`, generators, late and repeated
`start_response`, `close()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from coatcheck.core.callables import check_function
from coatcheck.core.policy import SAFE_METHODS, Policy
from coatcheck.core.problem import Problem
from coatcheck.core.response import Response
from coatcheck.engine import Engine
from coatcheck.engine.attempts import OUTAGES
from coatcheck.errors import Misconfigured
from coatcheck.operation import current_operation, enter
from coatcheck.server.body import close_body
from coatcheck.server.callers import Caller
from coatcheck.server.cookies import Secret, SessionCookies
from coatcheck.server.guard import RequestGuard
from coatcheck.server.keys import ContentKey, NaturalKey
from coatcheck.server.observe import Observations
from coatcheck.server.polling import POLLING_METHODS, id_of
from coatcheck.server.request import Request
from coatcheck.server.responses import store_unavailable
from coatcheck.server.routes import NewRoutes, OnePolicy
from coatcheck.server.switch import DisabledBy, is_process_disabled, switched
from coatcheck.server.wsgi.exchange import App, Exchange, ResponseBody, StartResponse, respond
from coatcheck.server.wsgi.observe import serve_observed
from coatcheck.server.wsgi.request import Environ, bytes_of, drain, give, read, request_of, rewound
from coatcheck.stores import Store


class IdempotencyMiddleware:
    """
    Guards a WSGI application.

    Args:
        app: the application.
        store: a URL or a store; or give *engine*. With neither, records are in the file
            `coatcheck.db` in the working directory (`sqlite:///coatcheck.db`).
        policy: a `Policy`, the name of a preset, or None for the default.
        caller: whose key it is, a function of the request; see `coatcheck.server.callers`.
        key: finds the key in the request itself, if no header brings one; see
            `coatcheck.server.keys`.
        secret: makes operation ids unguessable; the same on every node.
        engine: an `Engine` that is shared with other middlewares or functions.
        transactions: where connections for transaction mode come from; see `Engine`.
        disabled_by: the kill switch: the path of a file with the labels of routes to let pass, or a
            function of a label; see `docs/howto/rollout.md`.
        routes: makes the `RoutePolicies` that find the policy of each request; without it the
            middleware's own policy guards every request.
        session_cookies: names of cookies that hold a session, beside the usual ones; `*` is any
            text.
        session_secret: of session cookies that Starlette or Flask signs, or a list of secrets.
            Then a session that was only signed anew is the same.
    """

    def __init__(
        self,
        app: App,
        *,
        store: str | Store | None = None,
        policy: Policy | str | None = None,
        caller: Caller | None = None,
        key: NaturalKey | None = None,
        secret: bytes | str = b"",
        engine: Engine | None = None,
        transactions: object = None,
        disabled_by: DisabledBy | None = None,
        routes: NewRoutes | None = None,
        session_cookies: Sequence[str] = (),
        session_secret: Secret | None = None,
    ) -> None:
        given = (store, policy, secret or None, transactions)
        if engine is not None and any(one is not None for one in given):
            raise Misconfigured("engine= brings its own store, policy and secret; give only it")
        if not isinstance(engine, Engine | None):
            # Its type, not its value: a URL may have a password in it.
            raise Misconfigured(
                f"engine is a {type(engine).__name__}; it must be an Engine, and store= takes URLs"
            )
        self.app = app
        url = "sqlite:///coatcheck.db" if store is None else store
        self.engine = engine or Engine(url, policy, secret=secret, transactions=transactions)
        self._is_disabled = is_process_disabled()
        if not self._is_disabled:
            self.engine.check_store()
        self.engine.recovery.register_requests(self.engine.policy)
        cookies = SessionCookies(session_cookies, session_secret)
        self.guard = RequestGuard(self.engine, caller, key, FlaskHosts(app), cookies)
        new_routes = OnePolicy if routes is None else routes
        check_function("routes", new_routes)
        self._routes = switched(
            new_routes(self.engine.policy, self.engine.recovery.register_route),
            *(disabled_by, self.engine.attempts),
            is_process_disabled=self._is_disabled,
        )
        self.observations = Observations(self.engine.attempts, self.engine.store, self.guard)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request; only those with unsafe methods are guarded."""
        method = environ["REQUEST_METHOD"].upper()  # as Django and Flask read it
        if method in SAFE_METHODS:
            is_poll = self.engine.policy.status_path in environ.get("PATH_INFO", "")
            if is_poll and method in POLLING_METHODS:
                return self._poll_or_pass(environ, start_response)
            self._routes.let_pass(environ)
            return self.app(environ, start_response)
        policy, template = self._routes.lookup(environ, method)
        if policy is None:
            return self.app(environ, start_response)
        if policy.mode == "observe":
            return serve_observed(self, environ, start_response, (policy, template))
        value = environ.get(policy.key_environ)
        key = self.guard.key_of(() if value is None else (bytes_of(value),), policy)
        if key is None and not self.guard.has_natural_keys:
            return self.app(environ, start_response)
        if isinstance(key, Problem):
            drain(environ)
            request = request_of(environ, b"")
            return respond(start_response, self.guard.refused(request, key, policy, template))
        return self._guarded(environ, start_response, policy, key, template)

    def _guarded(
        self,
        environ: Environ,
        start_response: StartResponse,
        policy: Policy,
        key: str | None,
        template: str | None,
    ) -> Iterable[bytes]:
        body = read(environ, policy)
        if isinstance(body, Problem):
            request = request_of(environ, b"")
            return respond(start_response, self.guard.refused(request, body, policy, template))
        give(environ, body)
        returned: Iterable[bytes] = ()
        try:
            request = request_of(environ, body)
            returned = self._serve(request, start_response, policy, key, template)
        finally:
            if not isinstance(returned, ResponseBody):  # which closes the body at its own end
                close_body(body)
        return returned

    def _serve(
        self,
        request: Request,
        start_response: StartResponse,
        policy: Policy,
        key: str | None,
        template: str | None,
    ) -> Iterable[bytes]:
        guard = self.guard
        if key is None:
            found = guard.natural_key_of(request, policy)
            if not isinstance(found, str):
                return self._pass_or_refuse(request, start_response, found, policy, template)
            key = found
        try:
            self.engine.ensure_started(policy)
        except OUTAGES as error:
            refusal = store_unavailable(error)
            return respond(start_response, guard.refused(request, refusal, policy, template))
        if guard.caller is not None:
            response = self._identify(request, policy, template)
            if response is not None:
                return respond(start_response, response)
        if isinstance(key, ContentKey):
            policy = key.policy_of(policy)
            made = guard.key_of_content(request, policy, template)
            if not isinstance(made, str):
                return self._pass_or_refuse(request, start_response, made, policy, template)
            key = made
        claim = guard.claim_request(request, policy, key, template)
        if "coatcheck.operation" in request.native and guard.is_nested(request, claim):
            return self._pass(request, start_response)
        exchange = Exchange(self, request, start_response, claim=claim, policy=policy)
        before = current_operation()  # of a guarded function that calls us in its own thread
        try:
            return exchange.serve()
        finally:
            enter(before)

    def _identify(
        self, request: Request, policy: Policy, template: str | None = None
    ) -> Response | None:
        """Call `caller=`; the response if it refuses the request."""
        try:
            self.guard.identify(request)
        except Exception as error:
            response = self.guard.refused_by_caller(error, request, policy, template)
            if response is None:
                raise
            return response
        return None

    def _pass_or_refuse(
        self,
        request: Request,
        start_response: StartResponse,
        refusal: Problem | None,
        policy: Policy,
        template: str | None,
    ) -> Iterable[bytes]:
        """Serve a request that has no key: pass it on, or refuse it."""
        if refusal is None:
            return self._pass(request, start_response)
        return respond(start_response, self.guard.refused(request, refusal, policy, template))

    def _pass(self, request: Request, start_response: StartResponse) -> Iterable[bytes]:
        """Pass on a request that is not guarded after all."""
        returned = self.app(rewound(request), start_response)
        return ResponseBody(b"", returned, returned, request.body)

    def _poll_or_pass(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a client that polls for its operation; pass other requests on."""
        policy = self.engine.policy
        start, _, token = environ["PATH_INFO"].partition(policy.status_path)
        id = None if start else id_of(token)
        response = None
        if id is not None:
            request = request_of(environ, b"")
            if self._is_disabled:
                return respond(start_response, self.guard.not_polled(request))
            if self.guard.caller is not None:
                response = self._identify(request, policy)
                if response is not None:
                    return respond(start_response, response)
            try:
                self.engine.ensure_started()
                (record,) = self.engine.store.get((id,))
            except OUTAGES as error:
                refusal = store_unavailable(error)
                return respond(start_response, self.guard.render(refusal, policy, request))
            response = self.guard.status(record, token, request)
        if response is None:
            self._routes.let_pass(environ)
            return self.app(environ, start_response)
        return respond(start_response, response)


class FlaskHosts:
    """Whether a Flask application has routes for hosts; of others that is not known."""

    def __init__(self, app: App) -> None:
        inner: Any = app
        while hasattr(inner, "app"):  # other middlewares, such as `ProxyFix`
            inner = inner.app
        self._owner: object = getattr(inner, "__self__", inner)  # whose `wsgi_app` it is

    @property
    def matter(self) -> bool:
        """Some routes are for a host or a subdomain."""
        owner = self._owner
        is_by_host = getattr(getattr(owner, "url_map", None), "host_matching", False)
        return is_by_host is True or getattr(owner, "subdomain_matching", False) is True
