"""The ASGI adapter: any ASGI application, guarded by one line.

    app.add_middleware(IdempotencyMiddleware, store="sqlite:///orders.db")

Pure ASGI: it needs no framework, and stands right before the application. Requests that are not
guarded pass untouched. A guarded one is read whole; a retry is answered from memory if it can be,
and anything else is a visit (`asgi_visit.py`). The response leaves when its record is safe; what
the application does after its last byte (background tasks) goes on as without us.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coatcheck.core.policy import SAFE_METHODS, Policy
from coatcheck.core.problem import Problem
from coatcheck.core.replay import Response
from coatcheck.engine import AsyncEngine
from coatcheck.errors import Misconfigured
from coatcheck.server.answers import OUTAGES, refused, unrun
from coatcheck.server.asgi_client import respond
from coatcheck.server.asgi_input import App, AsgiScope, Passed, Receive, Send, read, request_of
from coatcheck.server.asgi_transaction import TransactionVisit
from coatcheck.server.asgi_visit import Visit, finishing
from coatcheck.server.body import Body
from coatcheck.server.callers import Caller
from coatcheck.server.counter import Counter, NaturalKey
from coatcheck.server.request import Request, fields_of, lines_of
from coatcheck.server.routes import Routes
from coatcheck.server.status import ASKING_METHODS, id_of
from coatcheck.stores import AsyncStore


class IdempotencyMiddleware:
    """
    Guards an ASGI application.

    Args:
        app: the application.
        store: a URL or a store; or give *engine*.
        policy: a `Policy`, the name of a preset, or None for the default.
        caller: whose key it is, a function of the request; see `coatcheck.server.callers`.
        key: takes the key from the request itself where no header brings one (K4).
        secret: makes operation ids unguessable; the same on every node.
        engine: an `AsyncEngine` that is shared with other doors.
        transactions: who lends connections for transaction mode; see `Engine`.
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
        self.engine.reconciler.know_requests(self.engine.desk.policy)
        self._routes = Routes(self.engine.desk.policy, app, self.engine.reconciler.know_route)
        self.counter = Counter(self.engine.desk, caller, key, self._routes.are_by_host)
        self._status_path = self.engine.desk.policy.status_path

    async def __call__(self, asgi_scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve one connection; only requests with unsafe methods concern us."""
        is_http = asgi_scope["type"] == "http"
        # In capitals, because some servers pass on what Django takes for PATCH.
        if is_http and (method := asgi_scope["method"].upper()) not in SAFE_METHODS:
            policy, template = self._routes.policy_for(asgi_scope, method)
            if policy is not None:
                fields = dict(asgi_scope["headers"])
                if policy.key_name in fields or policy.required or self.counter.has_natural_keys:
                    await self._guard(
                        asgi_scope, receive, send, fields=fields, policy=policy, template=template
                    )
                    return
        elif is_http and self._status_path in asgi_scope["path"]:
            await self._tell_status_or_pass(asgi_scope, receive, send)
            return
        else:
            self._routes.let_pass(asgi_scope)
            if asgi_scope["type"] == "lifespan":  # what was abandoned settles if nobody comes, too
                self.engine.reconciler.begin(asyncio.get_running_loop())
                receive = finishing(self, receive)
        await self.app(asgi_scope, receive, send)

    async def _guard(
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
        key = self.counter.key_of(values, policy)
        if isinstance(key, Problem):
            request = request_of(asgi_scope, fields, Body())
            await respond(send, self.counter.refused(request, key, policy, template))
            return
        body = await read(fields, receive, policy)
        if isinstance(body, Problem):
            request = request_of(asgi_scope, fields, Body())
            await respond(send, self.counter.refused(request, body, policy, template))
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
        """Answer from memory, or begin a visit."""
        engine, counter = self.engine, self.counter
        if key is None:
            found = counter.natural_key_of(request, policy)
            if not isinstance(found, str):
                refusal = (
                    None if found is None else counter.refused(request, found, policy, template)
                )
                await self._pass_or_refuse(request, receive, send, refusal)
                return
            key = found
        if not engine.is_started:
            refusal = await self._start(request, policy, template)
            if refusal is not None:
                await self._pass_or_refuse(request, receive, send, refusal)
                return
        ticket = (
            await asyncio.to_thread(counter.ticket, request, policy, key, template)
            if request.body.is_large  # to read it again takes its time, and others want theirs
            else counter.ticket(request, policy, key, template)
        )
        if "coatcheck.operation" in request.native and counter.is_held_by(request, ticket):
            await self._pass_or_refuse(request, receive, send, None)
            return
        desk = engine.desk
        answer = desk.recall(ticket, policy) if desk.cache.knows(ticket.id) else None
        if answer is None:
            visit = Visit if policy.mode == "record" else TransactionVisit
            await visit(self, request, receive, send, ticket=ticket, policy=policy).serve()
            return
        request.body.close()
        desk.tell(ticket, answer)
        await respond(send, counter.answered(answer, ticket, policy, request))

    async def _start(
        self, request: Request, policy: Policy, template: str | None
    ) -> Response | None:
        """Look at the store before the first request; the refusal where it is not there (D2)."""
        try:
            await self.engine.start()
        except OUTAGES as error:
            return self.counter.refused(request, unrun(error), policy, template)
        return None

    async def _pass_or_refuse(
        self,
        request: Request,
        receive: Receive,
        send: Send,
        refusal: Response | None,
    ) -> None:
        """Serve a request that is not for us to guard: as it is, or not at all."""
        try:
            if refusal is None:
                await self.app(request.native, Passed(request.body, receive).receive, send)
            else:
                await respond(send, refusal)
        finally:
            request.body.close()

    async def _tell_status_or_pass(
        self, asgi_scope: AsgiScope, receive: Receive, send: Send
    ) -> None:
        """Answer a client that asks how its operation is doing; whatever else goes on."""
        start, _, token = asgi_scope["path"].partition(self._status_path)
        # A proxy may have taken the prefix off, which some servers then do not put back.
        is_asked = start in ("", asgi_scope.get("root_path", ""))
        is_asked = is_asked and asgi_scope["method"].upper() in ASKING_METHODS
        id = id_of(token) if is_asked else None
        response = None
        if id is not None:
            request = request_of(asgi_scope, fields_of(asgi_scope["headers"]), Body())
            try:
                if not self.engine.is_started:
                    await self.engine.start()
                (record,) = await self.engine.store.get((id,))
            except OUTAGES as error:
                await respond(send, refused(unrun(error), self.engine.desk.policy))
                return
            response = self.counter.status(record, token, request)
        if response is None:
            self._routes.let_pass(asgi_scope)
            await self.app(asgi_scope, receive, send)
        else:
            await respond(send, response)
