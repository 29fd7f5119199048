"""The ASGI adapter: any ASGI application, guarded by one line.

    app.add_middleware(IdempotencyMiddleware, store="sqlite:///orders.db")

Pure ASGI: nothing between the server and the application but this file. Requests that are not
guarded pass untouched. A guarded one is read whole, claimed, and executed in a task of its own,
so that neither a client that hangs up nor a middleware in front that cancels stops the work (L11).
The response leaves when its record is safe; what the application does after its last byte
(background tasks) goes on as without us.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from coatcheck.core.policy import SAFE_METHODS, Policy
from coatcheck.core.problem import Problem, problem
from coatcheck.core.record import Record
from coatcheck.core.replay import Response, fate_of
from coatcheck.core.serve import Answer, Ending, Execute, Executed, Ticket
from coatcheck.engine import AsyncEngine
from coatcheck.engine.desk import logger
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.operation import Operation, enter
from coatcheck.server.answers import (
    RAN_NOT,
    RAN_UNRECORDED,
    ending_of,
    is_endless,
    reference_header,
    refused,
)
from coatcheck.server.asgi_input import (
    AsgiScope,
    Message,
    Receive,
    Rewound,
    Send,
    hide_short_cuts,
    read,
    request_of,
)
from coatcheck.server.body import Body
from coatcheck.server.callers import Caller
from coatcheck.server.counter import Counter, NaturalKey
from coatcheck.server.request import Request, fields_of
from coatcheck.server.routes import Routes
from coatcheck.server.status import status_of
from coatcheck.stores import AsyncStore

App: TypeAlias = Callable[[AsgiScope, Receive, Send], Awaitable[None]]


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
    ) -> None:
        if engine is not None and (store is not None or policy is not None or secret):
            raise Misconfigured("engine= brings its own store, policy and secret; give only it")
        self.app = app
        self.engine = engine or AsyncEngine(
            store or "sqlite:///coatcheck.db", policy, secret=secret
        )
        self.counter = Counter(self.engine.desk, caller, key)
        self._routes = Routes(self.engine.desk.policy, app)
        self._status_path = self.engine.desk.policy.status_path
        self._visits: set[asyncio.Task[None]] = set()

    async def __call__(self, asgi_scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve one connection; only requests with unsafe methods concern us."""
        if asgi_scope["type"] != "http" or asgi_scope["method"] in SAFE_METHODS:
            self._routes.let_pass()
            if asgi_scope["type"] == "http" and self._status_path in asgi_scope["path"]:
                await self._tell_status(asgi_scope, receive, send)
            else:
                await self.app(asgi_scope, receive, send)
            return
        policy, template = self._routes.policy_for(asgi_scope)
        if policy is None:
            await self.app(asgi_scope, receive, send)
            return
        name = policy.key_name
        values = [value for found, value in asgi_scope["headers"] if found == name]
        key = self.counter.key_of(values, policy) if values or policy.required else None
        if key is None and not self.counter.has_natural_keys:
            await self.app(asgi_scope, receive, send)
        elif isinstance(key, Problem):
            await _send(send, refused(key, policy))
        else:
            await self._guard(asgi_scope, receive, send, policy=policy, key=key, template=template)

    async def _guard(
        self,
        asgi_scope: AsgiScope,
        receive: Receive,
        send: Send,
        *,
        policy: Policy,
        key: str | None,
        template: str | None,
    ) -> None:
        fields = fields_of(asgi_scope["headers"])
        body = await read(fields, receive, policy)
        if body is None:  # the client left before it had said everything: nothing was asked
            return
        if isinstance(body, Problem):
            await _send(send, refused(body, policy))
            return
        request = request_of(asgi_scope, fields, body)
        if key is None:
            found = self.counter.natural_key_of(request, policy)
            if found is None or isinstance(found, Problem):
                await self._pass_or_refuse(request, receive, send, found, policy)
                return
            key = found
        await self._serve(request, receive, send, policy=policy, key=key, template=template)

    async def _serve(
        self,
        request: Request,
        receive: Receive,
        send: Send,
        *,
        policy: Policy,
        key: str,
        template: str | None,
    ) -> None:
        if not self.engine.is_started:
            try:
                await self.engine.start()
            except StoreUnavailable as error:
                request.body.close()
                await _refuse_unrun(send, policy, error)
                return
        ticket = self.counter.ticket(request, policy, key, template)
        answer = self.engine.desk.recall(ticket, policy)
        if self.counter.is_held_by(request, ticket):
            await self._pass_or_refuse(request, receive, send, None, policy)
        elif answer is None:
            visit = _Visit(self, request, receive, send, ticket=ticket, policy=policy)
            await self._outlive(visit)
        else:
            request.body.close()
            self.engine.desk.tell(ticket, policy, answer)
            await _send(send, self.counter.answered(answer, ticket, policy, request))

    async def _pass_or_refuse(
        self,
        request: Request,
        receive: Receive,
        send: Send,
        found: Problem | None,
        policy: Policy,
    ) -> None:
        """Serve a request that is not for us to guard: as it is, or not at all."""
        try:
            if found is None:
                await self.app(request.native, Rewound(request.body, receive).receive, send)
            else:
                await _send(send, refused(found, policy))
        finally:
            request.body.close()

    async def _tell_status(self, asgi_scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer a client that asks how its operation is doing; whatever else goes on."""
        request = request_of(asgi_scope, fields_of(asgi_scope["headers"]), Body())
        start, _, token = asgi_scope["path"].partition(self._status_path)
        id = self.counter.polled_id(token, request) if start == request.root else None
        if id is None:
            await self.app(asgi_scope, receive, send)
            return
        policy = self.engine.desk.policy
        try:
            (record,) = await self.engine.store.get((id,))
        except StoreUnavailable as error:
            await _refuse_unrun(send, policy, error)
            return
        accepted = request.header(b"accept-encoding")
        await _send(send, status_of(record, asgi_scope["path"], policy, accepted))

    async def _outlive(self, visit: _Visit) -> None:
        """Await *visit* in a task of its own: if we are cancelled, it goes on (L11)."""
        loop = asyncio.get_running_loop()
        visit.done = loop.create_future()
        task = loop.create_task(visit.run())
        self._visits.add(task)
        visit.leave = functools.partial(self._visits.discard, task)
        try:
            await visit.done
        except asyncio.CancelledError:
            if visit.is_streaming:  # its record is settled, so it may end as without us
                task.cancel()
            raise


class _Visit:
    """One guarded request that memory could not answer."""

    done: asyncio.Future[None]
    leave: Callable[[], None]

    def __init__(
        self,
        middleware: IdempotencyMiddleware,
        request: Request,
        receive: Receive,
        send: Send,
        *,
        ticket: Ticket,
        policy: Policy,
    ) -> None:
        self._app = middleware.app
        self._engine = middleware.engine
        self._counter = middleware.counter
        self._request = request
        self._client_receive = receive
        self._client_send = send
        self._ticket = ticket
        self._policy = policy
        self._flow = middleware.engine.flow(ticket, policy)
        # What the application has said so far, and whether its claim is settled.
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._size = 0
        self._is_settled = False
        self.is_streaming = False
        self._is_over = False
        self._over: asyncio.Event | None = None

    async def run(self) -> None:
        """Serve, and tell whoever still waits for it how that ended."""
        error: BaseException | None = None
        try:
            await self._serve()
        except BaseException as raised:  # noqa: BLE001 - handed on to the server, or logged
            error = raised
        self.leave()
        self._request.body.close()
        if error is None:
            if not self.done.done():
                self.done.set_result(None)
        elif self.done.done():  # its client is gone and nobody awaits it any more
            logger.error("a request whose client had gone failed", exc_info=error)
        elif isinstance(error, asyncio.CancelledError):
            self.done.cancel()
        else:
            self.done.set_exception(error)

    async def _serve(self) -> None:
        """Claim, execute, answer."""
        try:
            step = await self._engine.advance(self._flow, self._policy, as_value=False)
        except StoreUnavailable as error:
            await _refuse_unrun(self._client_send, self._policy, error)
        else:
            if isinstance(step, Execute):
                await self._execute(step.claim)
            else:
                await self._answer(step)

    async def _execute(self, claim: Record) -> None:
        operation = Operation(claim, self._engine.desk.secret)
        asgi_scope = self._request.native
        asgi_scope["coatcheck.operation"] = operation
        hide_short_cuts(asgi_scope)
        enter(operation)
        self._held = self._engine.heart.hold(claim, self._policy.lease_ms)
        self._claim = claim
        self._rewound = Rewound(self._request.body, self._wait_for_end)
        try:
            await self._app(asgi_scope, self._rewound.receive, self._take)
            if not self._is_settled:
                raise RuntimeError("the application ended without a complete response")
        except Exception as error:
            if not self._is_settled:
                self._settled()
                self._engine.desk.tell(self._ticket, self._policy, None)
                await self._engine.advance(self._flow, self._policy, error=error)
            raise
        finally:
            self._engine.heart.let_go(self._held)

    async def _wait_for_end(self) -> Message:
        """Whether the client is still there, if the application asks: until it has its answer."""
        if not self._is_over:
            self._over = self._over or asyncio.Event()
            await self._over.wait()
        if self.is_streaming:
            return await self._client_receive()
        return {"type": "http.disconnect"}

    async def _take(self, message: Message) -> None:
        """What the application sends: kept until it is whole, or streamed if it cannot be kept."""
        if self.is_streaming:
            await self._client_send(message)
        elif self._is_settled:
            return
        elif message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = [(n.lower(), v) for n, v in message.get("headers", ())]
        elif message["type"] == "http.response.body":
            chunk = message.get("body", b"")
            self._chunks.append(chunk)
            self._size += len(chunk)
            if not message.get("more_body", False):
                response = Response(self._status, self._headers, b"".join(self._chunks))
                await self._settle(ending_of(response, self._policy), is_whole=True)
            elif self._size > self._policy.response_bytes_max or is_endless(self._headers):
                await self._let_stream()

    async def _let_stream(self) -> None:
        """The response cannot be kept: say so in the record, then let it pass as it comes."""
        response = Response(self._status, self._headers, b"")
        fate = fate_of(response, self._policy.keep, reruns=self._policy.reruns)
        await self._settle(Ending(fate, None), is_whole=False)

    async def _settle(self, ending: Ending, *, is_whole: bool) -> None:
        self._settled()
        try:
            await self._respond(ending, is_whole=is_whole)
        finally:
            self._is_over = True
            if self._over is not None:
                self._over.set()

    async def _respond(self, ending: Ending, *, is_whole: bool) -> None:
        try:
            step = await self._engine.advance(self._flow, self._policy, ending)
        except StoreUnavailable as error:
            logger.error("executed, but the store is unavailable: %s", error)
            await self._refuse(
                problem("store-unavailable", id=self._claim.id, reason=RAN_UNRECORDED)
            )
            return
        assert not isinstance(step, Execute)
        if not isinstance(step, Executed):
            await self._answer(step)
            return
        self._engine.desk.tell(self._ticket, self._policy, step)
        self.is_streaming = not is_whole
        headers = [*self._headers, reference_header(self._claim.id, self._policy)]
        response = Response(self._status, headers, b"".join(self._chunks))
        await _send(self._client_send, response, more_body=not is_whole)

    def _settled(self) -> None:
        self._is_settled = True
        self._engine.heart.let_go(self._held)

    async def _answer(self, answer: Answer) -> None:
        assert not isinstance(answer, Executed)
        self._engine.desk.tell(self._ticket, self._policy, answer)
        response = self._counter.answered(answer, self._ticket, self._policy, self._request)
        await _send(self._client_send, response)

    async def _refuse(self, refusal: Problem) -> None:
        await _send(self._client_send, refused(refusal, self._policy))


async def _send(send: Send, response: Response, *, more_body: bool = False) -> None:
    await send(
        {"type": "http.response.start", "status": response.status, "headers": response.headers}
    )
    await send({"type": "http.response.body", "body": response.body, "more_body": more_body})


async def _refuse_unrun(send: Send, policy: Policy, error: StoreUnavailable) -> None:
    """Fail closed: without the store nothing runs (D2)."""
    logger.error("refused, the store is unavailable: %s", error)
    await _send(send, refused(problem("store-unavailable", reason=RAN_NOT), policy))
