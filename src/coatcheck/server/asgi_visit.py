"""A visit: one guarded ASGI request that memory could not answer, from its claim to its answer.

Neither a client that hangs up nor a middleware in front that cancels stops the work (L11): where
somebody may cancel, it runs in a task of its own. What the application sends is kept until it is
whole, settled in the record, and then sent; what cannot be kept is settled as such, and streams.
Who was told to ask later (202) gets nothing more here: what follows is for the record alone (L10).

Invariant: a finished visit leaves no circle of references behind. The collector that would have
to find it costs more than the whole visit.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus

from coatcheck.core.policy import Policy
from coatcheck.core.problem import Problem, problem
from coatcheck.core.record import Record
from coatcheck.core.replay import Headers, Response
from coatcheck.core.serve import Answer, Ending, Execute, Executed, Refuse, Replay, Ticket
from coatcheck.engine.desk import ending_of_error, judged, logger
from coatcheck.engine.functions import is_failure
from coatcheck.engine.keeping import ending_of, ending_of_accepted, ending_of_part
from coatcheck.errors import ClaimLost
from coatcheck.operation import Operation, enter, leave
from coatcheck.server.answers import (
    OUTAGES,
    RAN_UNRECORDED,
    is_endless,
    reference_header,
    refused,
    unrun,
)
from coatcheck.server.asgi_client import ClientSide, Guard
from coatcheck.server.asgi_front import may_be_cancelled
from coatcheck.server.asgi_input import Message, Receive, Send, hide_short_cuts
from coatcheck.server.request import Request
from coatcheck.server.status import patience_left_s

# In this process, because an event loop alone does not keep a task alive.
UNDER_WAY: set[Visit] = set()

# 20 s: who starts and stops processes commonly ends those that take longer than 30 for it.
FINISH_S_MAX = 20.0

FAILED_ALONE = "a request that nobody waited for any more failed"


class Visit(ClientSide):
    """One guarded request: claim, execute, answer."""

    # Slots, and no defaults in the class: the interpreter is quick at nothing else.
    __slots__ = (
        *("_chunks", "_claim", "_client_receive", "_flow", "_headers", "_is_over", "_is_streaming"),
        *("_operation", "_over", "_size", "_status", "_ticket", "task"),
    )

    _claim: Record
    _operation: Operation
    # What the application has said so far.
    _status: int
    _headers: Headers
    _size: int
    task: asyncio.Task[None] | None

    def __init__(
        self,
        guard: Guard,
        request: Request,
        receive: Receive,
        send: Send,
        *,
        ticket: Ticket,
        policy: Policy,
    ) -> None:
        super().__init__(guard, request, send, policy)
        self._client_receive = receive
        self._ticket = ticket
        self._flow = guard.engine.flow(ticket, self._patient)
        self._chunks: list[bytes] | None = None
        self._is_streaming = False
        # Whether all that we have to say to the client is said.
        self._is_over = False
        self._over: asyncio.Event | None = None

    async def serve(self) -> None:
        """Claim, execute, answer; whatever becomes of whoever awaits this (L11)."""
        if may_be_cancelled():
            await self._outlive()
            return
        try:
            await self._serve()
        except Exception as error:
            if not self._is_accepted:
                raise
            logger.error(FAILED_ALONE, exc_info=error)
        finally:
            if self._request.body.whole is None:
                self._request.body.close()

    async def _outlive(self) -> None:
        """Serve in a task of its own: if whoever awaits this is cancelled, it goes on."""
        loop = asyncio.get_running_loop()
        # Awaited in the task's place, because cancelling who awaits a task cancels the task.
        self._done = done = loop.create_future()
        UNDER_WAY.add(self)  # before it begins, because it may end at once
        self.task = loop.create_task(self._run(done))
        try:
            await done
        except asyncio.CancelledError:
            if self._is_streaming and self.task is not None:  # settled, so it may end as without us
                self.task.cancel()
            raise

    async def _run(self, done: asyncio.Future[None]) -> None:
        """Serve, and tell whoever still waits for it how that ended."""
        error: BaseException | None = None
        try:
            await self._serve()
        except BaseException as raised:  # noqa: BLE001 - handed on to the server, or logged
            error = raised
        UNDER_WAY.discard(self)
        self.task = None
        self._request.body.close()
        if error is None:
            if not done.done():
                done.set_result(None)
        elif done.done():  # its client is gone, or was told to ask later
            logger.error(FAILED_ALONE, exc_info=error)
        elif isinstance(error, asyncio.CancelledError):
            done.cancel()
        else:
            done.set_exception(error)

    async def _serve(self) -> None:
        """Claim; then execute, or give the answer that stands."""
        engine, policy = self.guard.engine, self._policy
        try:
            step = await engine.advance(self._flow, policy, as_value=False)
        except OUTAGES as error:
            await self._refuse(unrun(error, self._ticket.id))
            return
        if not isinstance(step, Execute):
            await self._answer(step)
            return
        self._claim = claim = step.claim
        self._loop = loop = asyncio.get_running_loop()
        self._held = held = engine.desk.heart.hold(claim, policy.lease_ms, loop)
        self._operation = operation = engine.operation(held)
        operation.client = self
        asgi_scope = self._request.native
        asgi_scope["coatcheck.operation"] = operation
        hide_short_cuts(asgi_scope)
        entered = enter(operation)
        try:
            if self._patience_s is not None:
                came_ms, now_ms = self._ticket.now_ms, engine.desk.now_ms()
                await self._be_patient(patience_left_s(self._patience_s, came_ms, now_ms))
            await self.guard.app(asgi_scope, self.receive, self._take)
            if not self._is_settled:
                raise RuntimeError("the application ended without a complete response")
        except (Exception, asyncio.CancelledError) as error:
            if not is_failure(error) or not await self._fail(error):
                raise
        finally:
            leave(entered)
            operation.client = None  # nobody waits any more, and no circle is left
            self._stop_waiting()
            if not self._is_settled:  # else whoever settled it has let go of it, or will
                engine.desk.heart.let_go(self._held)

    async def _fail(self, error: BaseException) -> bool:
        """
        Give the claim back, if the application raised before it had answered.

        True: the client is told something else than the error: that nobody knows what happened,
        or, where another attempt has taken over, what that one answered.
        """
        if self._is_settled:
            return False
        self._is_settled = True
        engine, operation = self.guard.engine, self._operation
        standing: Answer | Execute | None = None
        try:
            with suppress(*OUTAGES):  # the application's own error matters more
                ending = ending_of_error(operation, error, self._policy)
                standing = await engine.advance(self._flow, self._policy, ending)
        finally:
            engine.desk.heart.let_go(self._held)
        if isinstance(error, ClaimLost) and isinstance(standing, (Replay, Refuse)):
            await self._answer(standing)
            return True
        engine.desk.tell(self._ticket, None)
        if not operation.is_in_doubt:
            return False
        logger.error("an operation is in doubt", exc_info=error)
        await self._respond(refused(self._unknown(), self._policy))
        return True

    def _unknown(self) -> Problem:
        return problem("outcome-unknown", key=self._ticket.key, id=self._claim.id)

    async def _refuse(self, refusal: Problem) -> None:
        self.guard.engine.desk.tell(self._ticket, Refuse(refusal))
        await self._respond(refused(refusal, self._policy))

    async def _after(self) -> Message:
        """Whether the client is still there, if the application asks: until it has its answer."""
        if not self._is_over:
            self._over = self._over or asyncio.Event()
            await self._over.wait()
        if self._is_streaming:
            return await self._client_receive()
        return {"type": "http.disconnect"}

    async def _take(self, message: Message) -> None:
        """What the application sends: kept until it is whole, or streamed if it cannot be kept."""
        if self._is_settled:
            if self._is_streaming:
                await self._client_send(message)
        elif message["type"] == "http.response.start":
            self._status = message["status"]
            ours, headers = self._policy.names_given, []
            for name, value in message.get("headers", ()):  # else a call, before Python 3.12
                lowered = name.lower()
                if lowered not in ours:  # then it is of a guarded service behind this one
                    headers.append((lowered, value))
            self._headers = headers
        elif message["type"] == "http.response.body":
            chunk = message.get("body", b"")
            if message.get("more_body", False):
                await self._gather(chunk)
            else:
                body = b"".join((*self._chunks, chunk)) if self._chunks else chunk
                response = Response(self._status, self._headers, body)
                ending = ending_of_accepted if self._is_accepted else ending_of
                await self._settle(response, ending(response, self._policy))

    async def _gather(self, chunk: bytes) -> None:
        """Keep a part of the response; where it cannot be kept, say so and let it stream."""
        if self._chunks is None:
            self._chunks = []
            self._size = 0
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self._size > self._policy.response_bytes_max or is_endless(self._headers):
            response = Response(self._status, self._headers, b"".join(self._chunks))
            await self._settle(response, ending_of_part(response, self._policy), more_body=True)

    async def _settle(self, response: Response, ending: Ending, *, more_body: bool = False) -> None:
        """End the claim as *ending* says, and only then answer with *response*."""
        self._is_settled = True
        engine, policy = self.guard.engine, self._policy
        try:
            if self._is_handed_over and response.status < HTTPStatus.BAD_REQUEST:
                engine.desk.tell(self._ticket, Executed(self._claim))
                await self._respond(self._accepted())
                return
            operation = self._operation
            if operation.has_more_to_say:
                ending = judged(operation, ending, status=response.status)
            try:
                step = await engine.advance(self._flow, policy, ending)
            finally:  # not before: who waits here need not look for its end
                engine.desk.heart.let_go(self._held)
            if operation.has_more_to_say and operation.is_in_doubt:  # whatever was made of it
                await self._refuse(self._unknown())
            elif isinstance(step, Executed):
                engine.desk.tell(self._ticket, step)
                await self._give(response, more_body=more_body)
            else:
                assert not isinstance(step, Execute)
                await self._answer(step)
        except OUTAGES as error:
            logger.error("executed, but the store is unavailable: %s", error)
            if policy.unrecorded == "answer" and not self._operation.is_in_doubt:
                engine.desk.tell(self._ticket, Executed(self._claim))
                await self._give(response, more_body=more_body)  # and the heart writes it down
            else:
                reason = RAN_UNRECORDED
                await self._refuse(problem("store-unavailable", id=self._claim.id, reason=reason))
        finally:  # all is said: whoever asks whether the client is still there may know
            self._is_over = True
            if self._over is not None:
                self._over.set()

    async def _give(self, response: Response, *, more_body: bool = False) -> None:
        """Give the client what the application said, unless it was told to ask later."""
        if self._is_accepted:
            return
        self._is_streaming = more_body
        status, headers, body = response
        headers = [*headers, reference_header(self._claim.id, self._policy)]
        send = self._client_send
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": more_body})

    async def _answer(self, answer: Answer) -> None:
        assert not isinstance(answer, Executed)
        self.guard.engine.desk.tell(self._ticket, answer)
        response = self.guard.counter.answered(answer, self._ticket, self._policy, self._request)
        await self._respond(response)


def finishing(guard: Guard, receive: Receive) -> Receive:
    """*receive* of a lifespan: the application may close down when what is under way has ended."""

    async def receive_when_finished() -> Message:
        message = await receive()
        if message["type"] == "lifespan.shutdown":
            tasks = [visit.task for visit in UNDER_WAY if visit.guard is guard]
            here = asyncio.get_running_loop()
            left = [task for task in tasks if task is not None and task.get_loop() is here]
            if left:
                await asyncio.wait(left, timeout=FINISH_S_MAX)
        return message

    return receive_when_finished
