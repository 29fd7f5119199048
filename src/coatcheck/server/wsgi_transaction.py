"""A visit in transaction mode: what the handler writes and its record commit at once (L9).

The response leaves only after the commit. Where that fails, it never leaves: the client is told
to ask again (503), or the error goes to the server like any other of the handler's (500).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coatcheck.core.policy import Policy
from coatcheck.core.problem import problem
from coatcheck.core.record import Record
from coatcheck.core.replay import Response
from coatcheck.core.serve import Ending, Execute, Executed, Ticket
from coatcheck.engine.desk import logger
from coatcheck.operation import Operation, enter
from coatcheck.server.answers import COMMIT_UNKNOWN, OUTAGES, is_told_anyway, unrun
from coatcheck.server.request import Request
from coatcheck.server.wsgi_input import rewound
from coatcheck.server.wsgi_visit import Guard, StartResponse, Visit, close


class TransactionVisit(Visit):
    """One guarded request: begin and claim, execute, complete and commit, answer."""

    def __init__(
        self,
        guard: Guard,
        request: Request,
        start_response: StartResponse,
        *,
        ticket: Ticket,
        policy: Policy,
    ) -> None:
        super().__init__(guard, request, start_response, ticket=ticket, policy=policy)
        self._within = guard.engine.within()
        self._retries_left = policy.transaction_retries

    def serve(self) -> Iterable[bytes]:
        """Claim and execute, or give the answer that stands; again, where the policy allows it."""
        while True:
            try:
                return self._serve_once()
            except Exception as error:
                if not self._is_again(error):
                    raise
                self._retries_left -= 1
                self._begin_anew()
            finally:
                self._within.abandon()

    def _is_again(self, error: Exception) -> bool:
        """After *error* it is begun anew, and nobody has to hear of this time."""
        return bool(self._retries_left) and self._within.has_collided(error)

    def _begin_anew(self) -> None:
        engine = self._engine
        self._flow, self._within = engine.flow(self._ticket, self._policy), engine.within()
        self._status_line, self._size = "", 0
        self._chunks.clear()

    def _serve_once(self) -> Iterable[bytes]:
        engine, policy = self._engine, self._policy
        try:
            step = engine.advance(self._flow, policy, as_value=False, within=self._within)
        except OUTAGES as error:
            return self._refuse(unrun(error, self._ticket.id))
        return self._execute(step.claim) if isinstance(step, Execute) else self.answer(step)

    def _execute(self, claim: Record) -> Iterable[bytes]:
        operation = Operation(claim, self._engine.desk.secret, self._within)
        environ = rewound(self._request)
        environ["coatcheck.operation"] = operation
        enter(operation)
        said: Iterable[bytes] = ()
        try:
            said = self._app(environ, self._start)
            chunks = iter(said)
            rest = None if self._gather(chunks) else chunks
            response, ending = self._ending(is_whole=rest is None)
        except BaseException as error:
            self._fail(error, said)
            raise
        return self._settle(claim, response, ending, said=said, rest=rest)

    def _fail(self, error: BaseException, said: Iterable[bytes]) -> None:
        """Close what the application has begun to say, and undo all of it."""
        try:
            close(said)
        finally:
            if isinstance(error, Exception):
                if not self._is_again(error):
                    self._engine.desk.tell(self._ticket, None)
                self._engine.advance(self._flow, self._policy, error=error, within=self._within)

    def _settle(
        self,
        claim: Record,
        response: Response,
        ending: Ending,
        *,
        said: Iterable[bytes],
        rest: Iterator[bytes] | None,
    ) -> Iterable[bytes]:
        try:
            step = self._engine.advance(self._flow, self._policy, ending, within=self._within)
        except OUTAGES as error:
            logger.error("executed, but whether it is committed is not known: %s", error)
            close(said)
            return self._refuse(problem("store-unavailable", id=claim.id, reason=COMMIT_UNKNOWN))
        except Exception as error:
            is_again = self._is_again(error)
            if not is_again:
                self._engine.desk.tell(self._ticket, None)
            if is_again or rest is not None or not is_told_anyway(response, error):
                close(said)
                raise
        else:
            assert isinstance(step, Executed)  # nobody can supersede what a transaction holds
            self._engine.desk.tell(self._ticket, step)
        return self._give(claim, response, said, rest)
