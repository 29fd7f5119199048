"""One guarded ASGI request that memory could not answer, from its claim to its response.

Neither a client that hangs up nor a middleware in front that cancels stops the work: if the request
may be cancelled, it runs in a task of its own. What the application sends is kept until it is
whole, stored in the record, and then sent; a response that cannot be kept is sent as it comes.
After a 202 the handler goes on, and its response is only stored.

Invariant: a finished exchange leaves no reference cycle behind. The garbage collector would take
longer to find it than the whole exchange took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Protocol

from coatcheck.core.keep import CLIENT_ERROR, Outcome, OutcomeKind
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import ClaimRequest, Executed, Refuse, Replay
from coatcheck.core.policy import Policy
from coatcheck.core.problem import problem
from coatcheck.core.response import Headers, Response
from coatcheck.engine import AsyncEngine
from coatcheck.engine.attempts import OUTAGES
from coatcheck.engine.deferred import NOT_DEFERRED
from coatcheck.engine.outcomes import (
    OUTCOME_UNKNOWN,
    is_failure,
    logger,
    outcome_of_accepted,
    outcome_of_partial,
    outcome_of_response,
)
from coatcheck.engine.transactions import Repeat
from coatcheck.operation import Operation, enter, leave
from coatcheck.server.asgi.request import (
    App,
    BufferedReceive,
    Message,
    Receive,
    Send,
    without_short_cuts,
)
from coatcheck.server.guard import RequestGuard
from coatcheck.server.polling import preferred_wait, wait_left_s
from coatcheck.server.request import Request
from coatcheck.server.responses import (
    is_endless,
    refusal_passes,
    refused,
)
from coatcheck.server.routes import is_refused_early, raised_instead

# An event loop alone does not keep a task alive.
RUNNING_EXCHANGES: set[Exchange] = set()

# 20 s: process managers commonly kill what takes longer than 30 s to stop.
FINISH_S_MAX = 20.0

FAILED_AFTERWARDS = "coatcheck: operation %s (%s) failed after its client had stopped waiting"


class Middleware(Protocol):
    """What an exchange needs of its middleware."""

    app: App
    engine: AsyncEngine
    guard: RequestGuard


class Exchange(BufferedReceive):
    """One guarded request and its response."""

    # Slots, and no defaults in the class: nothing else is as fast.
    __slots__ = (
        *("_accepting", "_chunks", "_claim", "_claim_policy", "_client_receive", "_client_send"),
        *("_done", "_failure", "_headers", "_is_accepted", "_is_deferred", "_is_ended", "_is_over"),
        *("_is_streaming", "_is_undeferred", "_loop", "_operation", "_over", "_policy", "_request"),
        *("_size", "_status", "_wait_s", "middleware", "task"),
    )

    _operation: Operation
    _loop: asyncio.AbstractEventLoop
    # What the application has sent so far.
    _status: int
    _headers: Headers
    _size: int
    task: asyncio.Task[None] | None

    def __init__(
        self,
        middleware: Middleware,
        request: Request,
        receive: Receive,
        send: Send,
        *,
        claim: ClaimRequest,
        policy: Policy,
    ) -> None:
        self._body = request.body
        self._messages = None
        self.middleware = middleware
        self._request = request
        self._client_receive = receive
        self._client_send = send
        self._claim = claim
        self._policy = self._claim_policy = policy
        self._wait_s: int | None = None  # how long the client waits before it gets a 202
        if policy.in_flight == "202":
            self._wait_s, self._claim_policy = preferred_wait(request, policy)
        self._chunks: list[bytes] | None = None
        self._is_ended = False  # the completion is being written, or was
        self._is_over = False  # everything is sent to the client
        self._is_accepted = False  # the client got a 202
        self._is_deferred = False  # a worker finds the answer
        self._is_undeferred = False  # the handler could not defer, because of an outage
        self._is_streaming = False
        self._failure: Exception | None = None  # of the commit, in transaction mode
        self._over: asyncio.Event | None = None
        self._done: asyncio.Future[None] | None = None  # awaited in place of `task`
        # The timer of a 202, and then the task that sends it.
        self._accepting: asyncio.TimerHandle | asyncio.Task[None] | None = None
        self.task = None

    async def run_in_task(self) -> None:
        """Run in a task of its own: if the caller is cancelled, it goes on."""
        loop = asyncio.get_running_loop()
        # Awaited in the task's place, because a cancelled `await task` cancels the task.
        self._done = done = loop.create_future()
        RUNNING_EXCHANGES.add(self)  # before it begins, because it may end at once
        self.task = loop.create_task(self._run_and_pass_result(done))
        try:
            await done
        except asyncio.CancelledError:
            if self._is_streaming and self.task is not None:  # stored, so the rest may be cut off
                self.task.cancel()
            raise

    async def _run_and_pass_result(self, done: asyncio.Future[None]) -> None:
        """Run, and pass the result to the caller, if it still waits."""
        error: BaseException | None = None
        try:
            await self.run()
        except BaseException as raised:  # noqa: BLE001 - passed on to the server, or logged
            error = raised
        RUNNING_EXCHANGES.discard(self)
        self.task = None
        if error is None:
            if not done.done():
                done.set_result(None)
        elif done.done():  # the client is gone, or got a 202
            logger.error(
                FAILED_AFTERWARDS, reference_of(self._claim.id), self._claim.label, exc_info=error
            )
        elif isinstance(error, asyncio.CancelledError):
            done.cancel()
        else:
            done.set_exception(error)

    async def run(self) -> None:  # noqa: C901 - hot path: straight on purpose
        """Claim, execute, answer; again, if the database asks for it and the policy allows it."""
        middleware, asgi_scope, repeats = self.middleware, self._request.native, 0
        outer = asgi_scope.get("coatcheck.operation")
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                started = await middleware.engine.begin(
                    self._claim, self._claim_policy, None, repeats
                )
                if not isinstance(started, Operation):
                    await self._answer(started)
                    return
                self._operation = operation = started
                if self._policy.mode == "record":
                    operation.exchange = self
                operation.outer = outer
                asgi_scope["coatcheck.operation"] = operation
                if asgi_scope.get("extensions"):
                    asgi_scope["extensions"] = without_short_cuts(asgi_scope["extensions"])
                entered = enter(operation)
                try:
                    if self._wait_s is not None:
                        await self._accept_later(self._wait_s)
                    await middleware.app(asgi_scope, self.receive, self._send)
                    if self._failure is not None:  # the framework did not let it through
                        raise self._failure
                    if not self._is_ended:
                        raise RuntimeError("the application ended without a complete response")
                except BaseException as error:  # noqa: BLE001 - raised again, unless it is answered
                    repeat = await self._fail(operation, error)
                    if repeat is None:
                        return
                    repeats = repeat.repeats
                    self._chunks, self._failure, self._is_ended = None, None, False
                    self._messages = None  # the application reads the request from its beginning
                else:
                    return
                finally:
                    leave(entered)
                    operation.exchange = None  # no client waits any more, and no cycle is left
                    if self._accepting is not None:
                        await self._end_accepting(self._accepting)
        finally:
            if not isinstance(self._body, bytes):
                self._body.close()

    async def _fail(self, operation: Operation, error: BaseException) -> Repeat | None:
        """
        End an operation whose handler raised, or whose response could not be stored.

        Returns `Repeat` if the handler is to run again, None if the client has its answer; raises
        the error otherwise.
        """
        if isinstance(self._failure, Repeat):  # what comes out of a framework may be another error
            return self._failure
        if not self._is_ended:
            self._is_ended = True
            try:
                answer = await self.middleware.engine.fail(operation, error)
            except Repeat as repeat:
                return repeat
            if answer is None and self._is_undeferred and isinstance(error, OUTAGES):
                answer = self._not_deferred()
            if answer is not None:
                await self._answer(answer)
                return None
            if operation.is_in_doubt and is_failure(error):
                logger.error(
                    OUTCOME_UNKNOWN, reference_of(self._claim.id), self._claim.label, exc_info=error
                )
                unknown = problem("outcome-unknown", key=self._claim.key, id=self._claim.id)
                await self._respond(refused(unknown, self._policy))
                return None
        if self._is_accepted and self.task is None and isinstance(error, Exception):
            logger.error(
                FAILED_AFTERWARDS, reference_of(self._claim.id), self._claim.label, exc_info=error
            )
            return None
        raise error

    # --- what the application receives and sends ------------------------------------------------

    async def _after(self) -> Message:
        """The message after the body: the client counts as connected until it has its answer."""
        if not self._is_over:
            self._over = self._over or asyncio.Event()
            await self._over.wait()
        if self._is_streaming:
            return await self._client_receive()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Take what the application sends: keep it until it is whole, or pass it on."""
        if self._is_ended:
            if self._is_streaming:
                await self._client_send(message)
        elif message["type"] == "http.response.start":
            self._status = message["status"]
            ours, headers = self._policy.names_given, []
            for name, value in message.get("headers", ()):  # a comprehension is a call in 3.11
                lowered = name.lower()
                if lowered not in ours:  # a guarded service behind this one may have sent ours
                    headers.append((lowered, value))
            self._headers = headers
        elif message["type"] == "http.response.body":
            chunk = message.get("body", b"")
            if message.get("more_body", False):
                await self._gather(chunk)
            else:
                body = b"".join((*self._chunks, chunk)) if self._chunks else chunk
                response = Response(self._status, self._headers, body)
                if self._is_accepted:
                    outcome = outcome_of_accepted(response, self._policy)
                elif self._status >= CLIENT_ERROR and is_refused_early(response, self._operation):
                    outcome = Outcome(OutcomeKind.REJECT)
                else:
                    outcome = outcome_of_response(response, self._policy)
                await self._complete(response, outcome)

    async def _gather(self, chunk: bytes) -> None:
        """Keep a part of the response; if it cannot be kept, store that, and pass it on."""
        if self._chunks is None:
            self._chunks = []
            self._size = 0
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self._size > self._policy.response_bytes_max or is_endless(self._headers):
            response = Response(self._status, self._headers, b"".join(self._chunks))
            outcome = outcome_of_partial(response, self._policy)
            await self._complete(response, outcome, more_body=True)

    async def _complete(
        self, response: Response, outcome: Outcome, *, more_body: bool = False
    ) -> None:
        """Store the response, and only then send it; *more_body*: the rest is passed on."""
        self._is_ended = True
        engine, operation, send = self.middleware.engine, self._operation, self._client_send
        try:
            if self._is_deferred and response.status < HTTPStatus.BAD_REQUEST:
                engine.attempts.report(self._claim, Executed(operation.claim))
                await self._respond(self._accepted())
                return
            raised = operation.raised and raised_instead(response, outcome, operation)
            try:
                if raised is None:
                    answer = await engine.complete(operation, outcome, status=response.status)
                else:
                    answer = await self._end_raised(operation, raised)
            except Exception as error:
                is_final = not isinstance(error, Repeat) and not more_body
                if not is_final or not refusal_passes(response, error):
                    self._failure = error
                    raise
                answer = Executed(operation.claim)
            if self._is_undeferred and response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                answer = self._not_deferred()
            if not isinstance(answer, Executed):  # another attempt has taken over, or as above
                await self._answer(answer)
            elif not self._is_accepted:
                self._is_streaming = more_body
                status, headers, body = response
                if operation.claim.version:  # without a record there is nothing to refer to
                    reference = reference_of(self._claim.id).encode()
                    headers = [*headers, (self._policy.reference_name, reference)]
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": body, "more_body": more_body})
        finally:  # also if the client is gone
            self._is_over = not isinstance(self._failure, Repeat)
            if self._over is not None and self._is_over:
                self._over.set()

    async def _end_raised(
        self, operation: Operation, error: Exception
    ) -> Executed | Replay | Refuse:
        """End an operation whose handler raised *error*; its framework has answered for it."""
        answer = await self.middleware.engine.fail(operation, error)
        if answer is None and operation.is_in_doubt:
            logger.error(OUTCOME_UNKNOWN, operation.reference, operation.label, exc_info=error)
            unknown = problem("outcome-unknown", key=self._claim.key, id=self._claim.id)
            answer = Refuse(unknown)
        return Executed(operation.claim) if answer is None else answer

    # --- what the client gets -------------------------------------------------------------------

    async def _answer(self, answer: Replay | Refuse) -> None:
        """Answer without the handler."""
        guard = self.middleware.guard
        await self._respond(guard.response_of(answer, self._claim, self._policy, self._request))

    async def _respond(self, response: Response) -> None:
        """Send *response*, unless the client got a 202."""
        if not self._is_accepted:
            await respond(self._client_send, response)

    # --- long work ------------------------------------------------------------------------------

    def accept(self) -> Any:  # noqa: ANN401 - None, awaited on the event loop
        """Answer 202 now; awaited on the event loop, but not in a thread."""
        return self._from_anywhere(self._accept())

    def defer(self, lease_ms: int | None) -> Any:  # noqa: ANN401 - the token, awaited as above
        """Leave the work to the process that takes the token."""
        return self._from_anywhere(self._defer(lease_ms or self._policy.lease_ms))

    def _from_anywhere(self, coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - its result
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:  # a thread in which a framework runs blocking handlers
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        if running is self._loop:
            return coroutine
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _accept_later(self, wait_s: int) -> None:
        """Answer 202 if there is no answer when the client's time is over (`Prefer`)."""
        now_ms = self.middleware.engine.attempts.now_ms()
        left_s = wait_left_s(wait_s, self._claim.now_ms, now_ms)
        if left_s == 0:
            await self._accept()
        else:
            self._accepting = self._loop.call_later(left_s, self._time_is_over)

    def _time_is_over(self) -> None:
        self._accepting = self._loop.create_task(self._accept())

    async def _end_accepting(self, accepting: asyncio.TimerHandle | asyncio.Task[None]) -> None:
        """Cancel the timer; or wait for the 202, which a server would cut off if we ended now."""
        if isinstance(accepting, asyncio.Task):
            await accepting
        else:
            accepting.cancel()
        self._accepting = None

    async def _accept(self) -> None:
        """
        Answer 202, and go on without the client.

        Does nothing if its answer is under way, or has no record (`on_outage="execute"`): there
        would be nothing to poll for.
        """
        if self._is_ended or self._is_accepted or not self._operation.claim.version:
            return
        accepted = self._accepted()
        self._is_accepted = True
        try:
            with suppress(OSError):  # the client has hung up
                await respond(self._client_send, accepted)
        finally:
            if self._done is not None and not self._done.done():
                self._done.set_result(None)

    def _accepted(self) -> Response:
        guard, claim = self.middleware.guard, self._operation.claim
        return guard.accepted(claim, self._policy, self._request)

    async def _defer(self, lease_ms: int) -> str:
        try:
            token = await self.middleware.engine.defer(self._operation, lease_ms)
        except OUTAGES:
            self._is_undeferred = True
            raise
        self._is_deferred = True
        return token

    def _not_deferred(self) -> Refuse:
        key, id = self._claim.key, self._claim.id
        return Refuse(problem("store-unavailable", key=key, id=id, reason=NOT_DEFERRED))


async def respond(send: Send, response: Response) -> None:
    """Send *response*."""
    status, headers, body = response
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def finishing(middleware: Middleware, receive: Receive, startup: Message) -> Receive:
    """
    *receive* of a lifespan, of which *startup* was received already.

    The application may shut down when running exchanges have ended.
    """
    received = [startup]

    async def receive_when_finished() -> Message:
        message = received.pop() if received else await receive()
        if message["type"] == "lifespan.shutdown":
            await finish(middleware)
        return message

    return receive_when_finished


async def finish(middleware: Middleware) -> None:
    """Wait for the running exchanges of *middleware* on this event loop."""
    running = [e.task for e in RUNNING_EXCHANGES if e.middleware is middleware]
    here = asyncio.get_running_loop()
    left = [task for task in running if task is not None and task.get_loop() is here]
    if left:
        await asyncio.wait(left, timeout=FINISH_S_MAX)
