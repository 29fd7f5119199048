"""The ASGI middleware: any ASGI application, guarded by one line.

    app.add_middleware(IdempotencyMiddleware, store="sqlite:///orders.db")

Pure ASGI: it needs no framework, and stands right before the application. Requests that are not
guarded pass untouched. A guarded one is read whole; a retry is answered from memory if possible,
and anything else is an exchange (`asgi_exchange.py`). The response leaves when its record is safe;
background tasks run after it, as usual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coatcheck.core.policy import SAFE_METHODS, Policy
from coatcheck.core.problem import Problem
from coatcheck.core.response import Response
from coatcheck.engine import AsyncEngine
from coatcheck.engine.attempts import OUTAGES
from coatcheck.errors import Misconfigured
from coatcheck.server.asgi_exchange import Exchange, finishing, respond
from coatcheck.server.asgi_request import (
    App,
    AsgiScope,
    ForwardedReceive,
    Receive,
    Send,
    read,
    request_of,
)
from coatcheck.server.body import Body
from coatcheck.server.callers import Caller
from coatcheck.server.guard import NaturalKey, RequestGuard
from coatcheck.server.polling import POLLING_METHODS, id_of
from coatcheck.server.request import Request, fields_of, lines_of
from coatcheck.server.responses import refused, store_unavailable
from coatcheck.server.routes import NewRoutes, RoutePolicies
from coatcheck.server.starlette_routes import StarletteRoutes
from coatcheck.stores import AsyncStore


class IdempotencyMiddleware:
    """
    Guards an ASGI application.

    Args:
        app: the application.
        store: a URL or a store; or give *engine*.
        policy: a `Policy`, the name of a preset, or None for the default.
        caller: whose key it is, a function of the request; see `coatcheck.server.callers`.
        key: finds the key in the request itself, if no header brings one.
        secret: makes operation ids unguessable; the same on every node.
        engine: an `AsyncEngine` that is shared with other middlewares or functions.
        transactions: where connections for transaction mode come from; see `Engine`.
        routes: makes the `RoutePolicies` that find the policy of each request; without it the
            routes of Starlette and FastAPI are read.
    """

    def __init__(
        self,
        app: App,
        *,
        store: str | AsyncStore | None = None,
        policy: Policy | str | None = None,
        caller: Caller | None = None,
        key: NaturalKey | None = None,
        secret: bytes | str = b"",
        engine: AsyncEngine | None = None,
        transactions: object = None,
        routes: NewRoutes | None = None,
    ) -> None:
        given = (store, policy, secret or None, transactions)
        if engine is not None and any(one is not None for one in given):
            raise Misconfigured("engine= brings its own store, policy and secret; give only it")
        if not isinstance(engine, AsyncEngine | None):
            # Not what it is: a URL may have a password in it.
            raise Misconfigured(
                f"engine is a {type(engine).__name__}; it is an AsyncEngine, and store= takes URLs"
            )
        self.app = app
        self.engine = engine or AsyncEngine(
            store or "sqlite:///coatcheck.db", policy, secret=secret, transactions=transactions
        )
        self.engine.recovery.register_requests(self.engine.policy)
        register = self.engine.recovery.register_route
        if routes is None:
            starlette = StarletteRoutes(self.engine.policy, register, app)
            self._routes: RoutePolicies = starlette
            is_by_host = starlette.are_by_host
        else:
            self._routes = routes(self.engine.policy, register)
            is_by_host = lambda: False  # noqa: E731 - only Starlette's routes say so
        self.guard = RequestGuard(self.engine, caller, key, is_by_host)
        self._status_path = self.engine.policy.status_path

    async def __call__(self, asgi_scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve one connection; only requests with unsafe methods concern us."""
        is_http = asgi_scope["type"] == "http"
        # In capitals, because some servers pass on what Django takes for PATCH.
        if is_http and (method := asgi_scope["method"].upper()) not in SAFE_METHODS:
            policy, template = self._routes.lookup(asgi_scope, method)
            if policy is not None:
                fields = dict(asgi_scope["headers"])
                if policy.key_name in fields or policy.required or self.guard.has_natural_keys:
                    await self._guarded(
                        asgi_scope, receive, send, fields=fields, policy=policy, template=template
                    )
                    return
        elif is_http and self._status_path in asgi_scope["path"]:
            await self._poll_or_pass(asgi_scope, receive, send)
            return
        else:
            self._routes.let_pass(asgi_scope)
            if asgi_scope["type"] == "lifespan":  # recover also if no request ever comes
                self.engine.recovery.start(asyncio.get_running_loop())
                receive = finishing(self, receive)
        await self.app(asgi_scope, receive, send)

    async def _guarded(
        self,
        asgi_scope: AsgiScope,
        receive: Receive,
        send: Send,
        *,
        fields: dict[bytes, bytes],
        policy: Policy,
        template: str | None,
    ) -> None:
        """Take the key and the whole body."""
        headers = asgi_scope["headers"]
        values: Sequence[bytes] = (fields[policy.key_name],) if policy.key_name in fields else ()
        if len(fields) != len(headers):  # a name was sent in several lines
            values, fields = lines_of(policy.key_name, headers), fields_of(headers)
        key = self.guard.key_of(values, policy)
        if isinstance(key, Problem):
            request = request_of(asgi_scope, fields, Body())
            await respond(send, self.guard.refused(request, key, policy, template))
            return
        body = await read(fields, receive, policy)
        if isinstance(body, Problem):
            request = request_of(asgi_scope, fields, Body())
            await respond(send, self.guard.refused(request, body, policy, template))
        elif body is not None:  # else the client left before it had said everything
            request = request_of(asgi_scope, fields, body)
            await self._serve(request, receive, send, policy=policy, key=key, template=template)

    async def _serve(
        self,
        request: Request,
        receive: Receive,
        send: Send,
        *,
        policy: Policy,
        key: str | None,
        template: str | None,
    ) -> None:
        """Answer from memory, or start an exchange."""
        engine, guard = self.engine, self.guard
        if key is None:
            found = guard.natural_key_of(request, policy)
            if not isinstance(found, str):
                refusal = None if found is None else guard.refused(request, found, policy, template)
                await self._pass_or_refuse(request, receive, send, refusal)
                return
            key = found
        if not engine.is_started:
            refusal = await self._start(request, policy, template)
            if refusal is not None:
                await self._pass_or_refuse(request, receive, send, refusal)
                return
        claim = (
            await asyncio.to_thread(guard.claim_request, request, policy, key, template)
            if request.body.is_large  # reading it again takes long, and would block the loop
            else guard.claim_request(request, policy, key, template)
        )
        if "coatcheck.operation" in request.native and guard.is_nested(request, claim):
            await self._pass_or_refuse(request, receive, send, None)
            return
        attempts = engine.attempts
        known = (
            attempts.find_replay(claim, policy) if attempts.replay_cache.knows(claim.id) else None
        )
        if known is None:
            await Exchange(self, request, receive, send, claim=claim, policy=policy).serve()
            return
        request.body.close()
        attempts.report(claim, known)
        await respond(send, guard.response_of(known, claim, policy, request))

    async def _start(
        self, request: Request, policy: Policy, template: str | None
    ) -> Response | None:
        """Read the store's clock before the first request; the refusal if that fails."""
        try:
            await self.engine.ensure_started()
        except OUTAGES as error:
            return self.guard.refused(request, store_unavailable(error), policy, template)
        return None

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
            request.body.close()

    async def _poll_or_pass(self, asgi_scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer a client that polls for its operation; pass other requests on."""
        start, _, token = asgi_scope["path"].partition(self._status_path)
        # A proxy may have taken the prefix off, which some servers then do not put back.
        is_asked = start in ("", asgi_scope.get("root_path", ""))
        is_asked = is_asked and asgi_scope["method"].upper() in POLLING_METHODS
        id = id_of(token) if is_asked else None
        response = None
        if id is not None:
            request = request_of(asgi_scope, fields_of(asgi_scope["headers"]), Body())
            try:
                await self.engine.ensure_started()
                (record,) = await self.engine.store.get((id,))
            except OUTAGES as error:
                await respond(send, refused(store_unavailable(error), self.engine.policy))
                return
            response = self.guard.status(record, token, request)
        if response is None:
            self._routes.let_pass(asgi_scope)
            await self.app(asgi_scope, receive, send)
        else:
            await respond(send, response)
