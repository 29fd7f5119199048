"""Deferred work: a request leaves its work to a queue, and a worker runs it.

`defer` is for the handler, `DeferredWork` for the worker; the flows are in `core/deferred.py`. The
result of the work is the response that the client of the request gets.
"""

from __future__ import annotations

import json

from coatcheck.core.answers import Happened
from coatcheck.core.deferred import DeferredToken, decode_token, encode_token, offer, run_deferred
from coatcheck.core.flow import Flow
from coatcheck.core.keep import COMPLETE, Outcome
from coatcheck.core.lifecycle import Answer, ClaimRequest, Refuse, Replay
from coatcheck.core.policy import Policy
from coatcheck.core.problem import problem
from coatcheck.core.record import Record
from coatcheck.core.response import Response, decode_response
from coatcheck.engine.attempts import Attempts
from coatcheck.engine.functions import refuse_unstarted
from coatcheck.engine.outcomes import logger, outcome_of_accepted, response_of
from coatcheck.engine.steps import performed, written
from coatcheck.errors import StoreUnavailable
from coatcheck.operation import Operation

NOT_DEFERRED = "this request was not recorded, so that no worker would find its work"


def defer(attempts: Attempts, operation: Operation, lease_ms: int) -> Flow[str]:
    """Keep the claim of *operation* for a worker that comes within *lease_ms*; its token."""
    if not operation.claim.version:  # it runs unguarded
        raise StoreUnavailable(NOT_DEFERRED)
    flow = offer(operation.claim, attempts.now_ms() + lease_ms)
    offered: Record = yield from performed(flow, lambda effect: written(operation, effect))
    operation.advance_to(offered)
    attempts.heartbeat.stop_renewing(operation)  # the worker renews it from now on
    return encode_token(
        DeferredToken(offered.id, offered.created_ms, offered.nonce), attempts.secret
    )


class DeferredWork:
    """The work that one token names, for one delivery of it."""

    def __init__(self, attempts: Attempts, token: str, policy: Policy) -> None:
        decoded = decode_token(token, attempts.secret)
        if decoded is None:
            reason = "this token was not made by an engine with the same secret"
            raise problem("key-invalid", reason=reason).error()
        self.id = decoded.id
        self.policy = policy
        self._attempts = attempts
        self._token = decoded
        self._response: Response | None = None

    def begin(self) -> Flow[Operation | Answer]:
        """Take the work: the operation to execute, or the answer that it has already."""
        current = (yield from self._attempts.read(self.id)).record
        request: ClaimRequest = self._attempts.request_for(current)._replace(id=self.id)
        flow = run_deferred(self._token, request, self.policy, current)
        started: Operation | Answer = yield from self._attempts.begin(
            request, self.policy, flow=flow
        )
        return started

    def outcome_of(self, operation: Operation, result: object) -> Outcome:
        """What the *result* of the work means for its claim; raises if it may not end with it."""
        refuse_unstarted(result)
        is_refusal = isinstance(result, Happened) and result.status >= 400
        if operation.has_notes:
            step_problem = operation.check_steps(may_differ=is_refusal)
            if step_problem is not None:
                raise step_problem
        self._response = _response_of(operation.label, result)
        if self._response is None:
            return Outcome(COMPLETE)
        return outcome_of_accepted(self._response, self.policy)

    @property
    def status(self) -> int:
        """The status of the response that the work has returned."""
        return 200 if self._response is None else self._response.status

    def response_of(self, answer: Answer) -> Response:
        """The response that the client gets from now on; raises what a retry is refused with."""
        if isinstance(answer, Refuse):
            raise answer.cause or answer.problem.error()
        if isinstance(answer, Replay):
            return decode_response(answer.response)
        return self._response or Response(200, (), b"")


def _response_of(label: str, result: object) -> Response | None:
    """The response for the work's *result*; None if it cannot be one."""
    if isinstance(result, Happened):
        return response_of(result)
    try:
        body = json.dumps(result, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        logger.error(
            "coatcheck: the work of %s returned a value of type %s, which is neither JSON nor "
            "Happened(status, headers, body): it is not kept, and a retry gets 409 "
            "result-unavailable",
            *(label, type(result).__name__),
        )
        return None
    return Response(200, [(b"content-type", b"application/json")], body)
