"""A visit in transaction mode: what the handler writes and its record commit at once (L9).

The response leaves only after the commit. Where that fails, it never leaves: the client is told
to ask again (503), or the error goes to the framework like any other of the handler's (500).
"""

from __future__ import annotations

from coatcheck.core.policy import Policy
from coatcheck.core.problem import problem
from coatcheck.core.replay import Response
from coatcheck.core.serve import Ending, Execute, Executed, Ticket
from coatcheck.engine.desk import logger
from coatcheck.operation import Operation, enter, leave
from coatcheck.server.answers import (
    COMMIT_UNKNOWN,
    OUTAGES,
    is_told_anyway,
    unrun,
)
from coatcheck.server.asgi_client import Guard
from coatcheck.server.asgi_input import Receive, Send, hide_short_cuts
from coatcheck.server.asgi_visit import Visit
from coatcheck.server.request import Request


class TransactionVisit(Visit):
    """One guarded request: begin and claim, execute, complete and commit, answer."""

    __slots__ = ("_failure", "_retries_left", "_within")

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
        super().__init__(guard, request, receive, send, ticket=ticket, policy=policy)
        self._within = guard.engine.within()
        self._retries_left = policy.transaction_retries
        self._failure: Exception | None = None  # of the commit

    async def _serve(self) -> None:
        """Claim and execute, or give the answer that stands; again, where the policy allows it."""
        while True:
            try:
                await self._serve_once()
            except Exception as error:
                failure = self._failure or error  # what comes out of a framework may be another
                # Over: a framework inside of us has answered, and says afterwards what it was.
                if self._is_over or not self._is_again(failure):
                    raise
                self._retries_left -= 1
                self._begin_anew()
            else:
                return
            finally:
                await self._within.abandon()

    def _is_again(self, error: Exception) -> bool:
        """After *error* it is begun anew, and nobody has to hear of this time."""
        return bool(self._retries_left) and self._within.has_collided(error)

    def _begin_anew(self) -> None:
        engine = self.guard.engine
        self._flow, self._within = engine.flow(self._ticket, self._policy), engine.within()
        self._chunks, self._failure, self._is_settled = None, None, False
        self._messages = None  # the request is read from its beginning

    async def _serve_once(self) -> None:
        engine, policy = self.guard.engine, self._policy
        try:
            step = await engine.advance(self._flow, policy, as_value=False, within=self._within)
        except OUTAGES as error:
            await self._refuse(unrun(error, self._ticket.id))
            return
        if not isinstance(step, Execute):
            await self._answer(step)
            return
        self._claim = step.claim
        operation = Operation(step.claim, engine.desk.secret, self._within)
        asgi_scope = self._request.native
        asgi_scope["coatcheck.operation"] = operation
        hide_short_cuts(asgi_scope)
        entered = enter(operation)
        try:
            await self.guard.app(asgi_scope, self.receive, self._take)
            if self._failure is not None:  # it was kept from us on its way out
                raise self._failure
            if not self._is_settled:
                raise RuntimeError("the application ended without a complete response")
        except Exception as error:
            await self._fail(error)
            raise
        finally:
            leave(entered)

    async def _fail(self, error: BaseException) -> bool:
        """Undo all of it, if the application raised before it had answered."""
        assert isinstance(error, Exception)  # all else undoes it by itself
        if not self._is_settled:
            self._is_settled = True
            engine = self.guard.engine
            if not self._is_again(error):
                engine.desk.tell(self._ticket, None)
            await engine.advance(self._flow, self._policy, error=error, within=self._within)
        return False

    async def _settle(self, response: Response, ending: Ending, *, more_body: bool = False) -> None:
        """Commit, or undo, as *ending* says, and only then answer with *response*."""
        self._is_settled = True
        engine, policy = self.guard.engine, self._policy
        try:
            step = await engine.advance(self._flow, policy, ending, within=self._within)
        except OUTAGES as error:
            logger.error("executed, but whether it is committed is not known: %s", error)
            reason = COMMIT_UNKNOWN
            await self._refuse(problem("store-unavailable", id=self._claim.id, reason=reason))
        except Exception as error:
            is_again = self._is_again(error)
            if not is_again:
                engine.desk.tell(self._ticket, None)
            if is_again or more_body or not is_told_anyway(response, error):
                self._failure = error
                raise
            await self._give(response)
        else:
            assert isinstance(step, Executed)  # nobody can supersede what a transaction holds
            engine.desk.tell(self._ticket, step)
            await self._give(response, more_body=more_body)
        self._is_over = True
        if self._over is not None:
            self._over.set()
