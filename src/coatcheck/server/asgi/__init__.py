"""The ASGI middleware: any ASGI application, guarded by one line.

    app.add_middleware(IdempotencyMiddleware, store="sqlite:///orders.db")

Pure ASGI: it needs no framework, and stands right before the application. Requests that are not
guarded pass untouched. A guarded one is read whole; a retry is answered from memory if possible,
and anything else is an exchange (`asgi/exchange.py`). The response leaves when its record is safe;
background tasks run after it, as usual.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec

from coatcheck.core.callables import check_function
from coatcheck.core.policy import SAFE_METHODS, Policy
from coatcheck.core.problem import Problem
from coatcheck.core.response import Response
from coatcheck.engine import AsyncEngine
from coatcheck.engine.attempts import OUTAGES
from coatcheck.engine.runner import running_loop
from coatcheck.errors import CoatcheckError, Misconfigured, MissingExtra
from coatcheck.server.asgi.detach import may_be_cancelled
from coatcheck.server.asgi.exchange import Exchange, finishing, respond
from coatcheck.server.asgi.observe import serve_observed
from coatcheck.server.asgi.request import (
    App,
    AsgiScope,
    ForwardedReceive,
    Receive,
    Send,
    read,
    request_of,
)
from coatcheck.server.body import LargeBody, close_body
from coatcheck.server.callers import AsyncCaller, Caller
from coatcheck.server.cookies import Secret, SessionCookies
from coatcheck.server.guard import Hosts, NoHosts, RequestGuard
from coatcheck.server.keys import ContentKey, NaturalKey
from coatcheck.server.observe import Observations
from coatcheck.server.polling import POLLING_METHODS, id_of
from coatcheck.server.request import Request, fields_of
from coatcheck.server.responses import refused, store_unavailable
from coatcheck.server.routes import NewRoutes, RoutePolicies
from coatcheck.server.starlette_routes import StarletteRoutes
from coatcheck.server.switch import DisabledBy, is_process_disabled, switched
from coatcheck.stores import AsyncStore
from coatcheck.stores.url import did_you_mean

logger = logging.getLogger("coatcheck")

P = ParamSpec("P")


def _refusing_unknown_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """*init* of a middleware, for which a misspelt argument is a mistake in the settings."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                hint = did_you_mean(name, known)
                middleware: Any = args[0]
                mistake = f"IdempotencyMiddleware has no argument {name!r}{hint}"
                middleware._fail_later(Misconfigured(mistake))  # noqa: SLF001 - our own class
                return
        init(*args, **kwargs)

    return checked


class IdempotencyMiddleware:
    """
    Guards an ASGI application.

    Args:
        app: the application.
        store: a URL or a store; or give *engine*. With neither, records are in the file
            `coatcheck.db` in the working directory (`sqlite:///coatcheck.db`).
        policy: a `Policy`, the name of a preset, or None for the default.
        caller: whose key it is, a function of the request, sync or async; see
            `coatcheck.server.callers`.
        key: finds the key in the request itself, if no header brings one; see
            `coatcheck.server.keys`.
        secret: makes operation ids unguessable; the same on every node.
        engine: an `AsyncEngine` that is shared with other middlewares or functions.
        transactions: where connections for transaction mode come from; see `Engine`.
        disabled_by: the kill switch: the path of a file with the labels of routes to let pass, or a
            function of a label; see `docs/howto/rollout.md`.
        routes: makes the `RoutePolicies` that find the policy of each request; without it the
            routes of Starlette and FastAPI are read.
        session_cookies: names of cookies that hold a session, beside the usual ones; `*` is any
            text.
        session_secret: of session cookies that Starlette or Flask signs, or a list of secrets.
            Then a session that was only signed anew is the same.
    """

    @_refusing_unknown_arguments
    def __init__(
        self,
        app: App,
        *,
        store: str | AsyncStore | None = None,
        policy: Policy | str | None = None,
        caller: Caller | AsyncCaller | None = None,
        key: NaturalKey | None = None,
        secret: bytes | str = b"",
        engine: AsyncEngine | None = None,
        transactions: object = None,
        disabled_by: DisabledBy | None = None,
        routes: NewRoutes | None = None,
        session_cookies: Sequence[str] = (),
        session_secret: Secret | None = None,
    ) -> None:
        self.app = app
        self._mistake: CoatcheckError | None = None
        try:
            self.engine = _engine_of(engine, store, policy, secret, transactions)
            self.engine.recovery.register_requests(self.engine.policy)
            register = self.engine.recovery.register_route
            hosts: Hosts = NoHosts()
            self._starlette: StarletteRoutes | None = None
            if routes is None:
                self._starlette = hosts = StarletteRoutes(
                    self.engine.policy, register, app, has_natural_keys=key is not None
                )
                self._routes: RoutePolicies = self._starlette
            else:
                check_function("routes", routes)
                self._routes = routes(self.engine.policy, register)
            self._is_disabled = is_process_disabled()
            self._routes = switched(
                *(self._routes, disabled_by, self.engine.attempts),
                is_process_disabled=self._is_disabled,
            )
            cookies = SessionCookies(session_cookies, session_secret)
            self.guard = RequestGuard(self.engine, caller, key, hosts, cookies)
            store_in_threads = self.engine.store.blocking
            self.observations = Observations(self.engine.attempts, store_in_threads, self.guard)
            self._status_path = self.engine.policy.status_path
        except (Misconfigured, MissingExtra) as mistake:
            self._fail_later(mistake)

    def _fail_later(self, mistake: CoatcheckError) -> None:
        """
        Raise *mistake*; on an event loop, have the lifespan report it.

        Starlette makes its middlewares when the server sends the first message. A server takes an
        error then for an application without a lifespan, and starts all the same.
        """
        if running_loop() is None:
            raise mistake
        self._mistake = mistake

    async def __call__(  # noqa: C901 - hot path: straight on purpose
        self, asgi_scope: AsgiScope, receive: Receive, send: Send
    ) -> None:
        """Serve one connection; only requests with unsafe methods are guarded."""
        if self._mistake is not None:
            await self._refuse_to_start(asgi_scope, receive, send)
            return
        # In capitals, because some servers pass on what Django takes for PATCH.
        method = asgi_scope["method"].upper() if asgi_scope["type"] == "http" else "GET"
        if method in SAFE_METHODS:
            await self._safe(asgi_scope, receive, send)
            return
        policy, template = self._routes.lookup(asgi_scope, method)
        if policy is not None and policy.mode == "observe":
            await serve_observed(self, asgi_scope, receive, send, (policy, template))
            return
        headers = asgi_scope["headers"]
        key_values = []
        if policy is not None:
            for name, value in headers:
                if name == policy.key_name:
                    key_values.append(value)
        guard = self.guard
        if policy is None or not (key_values or policy.required or guard.has_natural_keys):
            await self.app(asgi_scope, receive, send)
            return

        # Read the key and the whole body.
        fields = dict(headers)
        if len(fields) != len(headers):  # a name was sent in several lines
            fields = fields_of(headers)
        request = request_of(asgi_scope, fields, b"")
        key: Problem | str | None = guard.key_of(key_values, policy)
        if not isinstance(key, Problem):
            body = await read(fields, receive, policy)
            if body is None:  # the client left before it had sent everything
                return
            if isinstance(body, Problem):
                key = body
            else:
                request.body = body
                if key is None:
                    key = await self._natural_key_of(request, policy)
                if isinstance(key, str) and not self.engine.is_started:
                    key = await self._start(policy) or key
        if not isinstance(key, str):
            refusal = None if key is None else guard.refused(request, key, policy, template)
            await self._pass_or_refuse(request, receive, send, refusal)
            return

        if guard.caller is not None:
            refused_by_caller = await self._identify(request, policy, template)
            if refused_by_caller is not None:
                await self._pass_or_refuse(request, receive, send, refused_by_caller)
                return
        if isinstance(key, ContentKey):
            policy, key = await self._of_content(key, request, policy, template)
            if not isinstance(key, str):
                refusal = None if key is None else guard.refused(request, key, policy, template)
                await self._pass_or_refuse(request, receive, send, refusal)
                return

        # A retry is answered from memory if possible.
        claim = (
            await asyncio.to_thread(guard.claim_request, request, policy, key, template)
            if isinstance(request.body, LargeBody)  # reading it again would block the loop
            else guard.claim_request(request, policy, key, template)
        )
        if "coatcheck.operation" in asgi_scope and guard.is_nested(request, claim):
            await self._pass_or_refuse(request, receive, send, None)
            return
        attempts = self.engine.attempts
        is_known = attempts.replay_cache.knows(claim.id)
        known = attempts.find_replay(claim, policy) if is_known else None
        if known is not None:
            response = guard.response_of(known, claim, policy, request)
            if isinstance(request.body, LargeBody):
                request.body.close()
            await respond(send, response)
            return

        exchange = Exchange(self, request, receive, send, claim=claim, policy=policy)
        await (exchange.run_in_task() if may_be_cancelled() else exchange.run())

    async def _safe(self, asgi_scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Pass on what is not guarded: safe methods, websockets, the lifespan."""
        if asgi_scope["type"] == "http" and self._status_path in asgi_scope["path"]:
            await self._poll_or_pass(asgi_scope, receive, send)
            return
        if asgi_scope["type"] == "lifespan":
            await self._lifespan(asgi_scope, receive, send)
            return
        self._routes.let_pass(asgi_scope)
        await self.app(asgi_scope, receive, send)

    async def _lifespan(self, asgi_scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Open the store before the application starts; a mistake stops the server."""
        self._routes.let_pass(asgi_scope)  # reads the routes, whose policies the recovery needs
        if self._is_disabled:  # then nothing needs the store
            await self.app(asgi_scope, receive, send)
            return
        startup = await receive()
        try:
            if self._starlette is not None and self._starlette.mistake is not None:
                raise self._starlette.mistake
            await self.start()
        except (Misconfigured, MissingExtra) as mistake:
            self._mistake = mistake
            await _fail_startup(send, mistake)
        await self.app(asgi_scope, finishing(self, receive, startup), send)

    async def start(self) -> None:
        """
        Open the store; raises if the settings are wrong.

        For frameworks that do not pass their lifespan through their middlewares.
        """
        if self._mistake is not None:
            raise self._mistake
        if self._is_disabled:  # then nothing needs the store
            return
        try:
            await self.engine.ensure_started()
        except OUTAGES as error:
            logger.error(  # noqa: TRY400 - its trace says nothing more
                "coatcheck: the server starts without its store, which is unavailable: %s",
                error,
            )
            self.engine.recovery.start(asyncio.get_running_loop())

    async def _refuse_to_start(self, asgi_scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Report the mistake in the settings, and serve nothing."""
        assert self._mistake is not None
        if asgi_scope["type"] != "lifespan":
            raise self._mistake
        await receive()
        await _fail_startup(send, self._mistake)

    async def _start(self, policy: Policy) -> Problem | None:
        """Read the store's clock before the first request; the refusal if that fails."""
        try:
            await self.engine.ensure_started(policy)
        except OUTAGES as error:
            return store_unavailable(error)
        return None

    async def _natural_key_of(self, request: Request, policy: Policy) -> Problem | str | None:
        """The key in the request itself; a large body is read in a thread, as for `caller=`."""
        if isinstance(request.body, LargeBody):
            return await asyncio.to_thread(self.guard.natural_key_of, request, policy)
        return self.guard.natural_key_of(request, policy)

    async def _identify(
        self, request: Request, policy: Policy, template: str | None = None
    ) -> Response | None:
        """Call `caller=`; the response if it refuses the request."""
        guard = self.guard
        try:
            if guard.caller_is_quick and isinstance(request.body, bytes):
                guard.identify(request)
            else:
                await guard.identify_on_loop(request)
        except Exception as error:
            response = self.guard.refused_by_caller(error, request, policy, template)
            if response is None:
                close_body(request.body)
                raise
            return response
        return None

    async def _of_content(
        self, key: ContentKey, request: Request, policy: Policy, template: str | None
    ) -> tuple[Policy, str | Problem | None]:
        """The policy of a key that is made of the content, and the key."""
        policy = key.policy_of(policy)
        if isinstance(request.body, LargeBody):  # reading it would block the loop
            of_content = self.guard.key_of_content
            return policy, await asyncio.to_thread(of_content, request, policy, template)
        return policy, self.guard.key_of_content(request, policy, template)

    async def _pass_or_refuse(
        self,
        request: Request,
        receive: Receive,
        send: Send,
        refusal: Response | None,
    ) -> None:
        """Serve a request that is not guarded: pass it on, or refuse it."""
        try:
            if refusal is None:
                await self.app(
                    request.native, ForwardedReceive(request.body, receive).receive, send
                )
            else:
                await respond(send, refusal)
        finally:
            close_body(request.body)

    async def _poll_or_pass(self, asgi_scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer a client that polls for its operation; pass other requests on."""
        self._routes.let_pass(asgi_scope)  # first: routes for hosts are part of who the caller is
        start, _, token = asgi_scope["path"].partition(self._status_path)
        # A proxy may have taken the prefix off, which some servers then do not put back.
        is_asked = start in ("", asgi_scope.get("root_path", ""))
        is_asked = is_asked and asgi_scope["method"].upper() in POLLING_METHODS
        id = id_of(token) if is_asked else None
        response = None
        if id is not None:
            request = request_of(asgi_scope, fields_of(asgi_scope["headers"]), b"")
            if self._is_disabled:
                await respond(send, self.guard.not_polled(request))
                return
            if self.guard.caller is not None:
                response = await self._identify(request, self.engine.policy)
                if response is not None:
                    await respond(send, response)
                    return
            try:
                await self.engine.ensure_started()
                (record,) = await self.engine.store.get((id,))
            except OUTAGES as error:
                await respond(send, refused(store_unavailable(error), self.engine.policy))
                return
            response = self.guard.status(record, token, request)
        if response is None:
            await self.app(asgi_scope, receive, send)
        else:
            await respond(send, response)


def _engine_of(
    engine: AsyncEngine | None,
    store: str | AsyncStore | None,
    policy: Policy | str | None,
    secret: bytes | str,
    transactions: object,
) -> AsyncEngine:
    """The engine that was given, or a new one with the other settings."""
    given = (store, policy, secret or None, transactions)
    if engine is not None and any(one is not None for one in given):
        raise Misconfigured("engine= brings its own store, policy and secret; give only it")
    if not isinstance(engine, AsyncEngine | None):
        # Not its value: a URL may have a password in it.
        raise Misconfigured(
            f"engine is a {type(engine).__name__}; it must be an AsyncEngine, and store= takes URLs"
        )
    if engine is not None:
        return engine
    url = "sqlite:///coatcheck.db" if store is None else store
    return AsyncEngine(url, policy, secret=secret, transactions=transactions)


async def _fail_startup(send: Send, mistake: CoatcheckError) -> NoReturn:
    """Have the server exit with an error that names the mistake; raises it for test clients."""
    await send({"type": "lifespan.startup.failed", "message": f"coatcheck: {mistake}"})
    raise mistake
