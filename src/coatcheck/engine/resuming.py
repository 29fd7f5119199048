"""Handing work over to a queue, and resuming it where the queue delivers it (L10).

The two ends of `core/hand_over.py`: an adapter hands a claim over for the handler of a request, and
a worker resumes it. What the work results in is the response that the request's client is served.
"""

from __future__ import annotations

import json
from typing import Any

from coatcheck.core.flow import Effect, Flow, run, run_async
from coatcheck.core.hand_over import Handed, offer, opened, resume, sealed
from coatcheck.core.policy import Policy
from coatcheck.core.problem import problem
from coatcheck.core.record import Record, Swap, mark_of
from coatcheck.core.replay import KEEP, Response, decode_response
from coatcheck.core.serve import Answer, Ending, Execute, Refuse, Replay, Ticket
from coatcheck.engine.desk import Desk, logger
from coatcheck.engine.driver import Driver
from coatcheck.engine.driver_async import AsyncDriver
from coatcheck.engine.held import Held
from coatcheck.engine.keeping import ending_of_accepted
from coatcheck.operation import Happened

# --- from a request ---------------------------------------------------------------------------


def hand_over(engine: Driver, held: Held, lease_ms: int) -> str:
    """Keep what is *held* for whoever takes it within *lease_ms*; the text that names it."""

    def perform(effect: Effect[Any]) -> Record | None:
        assert isinstance(effect, Swap)
        return engine.store.swap((effect,))[0]

    offered = run(offer(held.claim, engine.desk.now_ms() + lease_ms), perform)
    return _named(engine.desk, held, offered)


async def hand_over_async(engine: AsyncDriver, held: Held, lease_ms: int) -> str:
    """The same from an event loop."""

    async def perform(effect: Effect[Any]) -> Record | None:
        assert isinstance(effect, Swap)
        return (await engine.store.swap((effect,)))[0]

    offered = await run_async(offer(held.claim, engine.desk.now_ms() + lease_ms), perform)
    return _named(engine.desk, held, offered)


def _named(desk: Desk, held: Held, offered: Record) -> str:
    held.claim = offered
    desk.heart.let_go(held)  # from now on it is kept by whoever takes it
    return sealed(Handed(offered.id, offered.created_ms, offered.nonce), desk.secret)


# --- in a worker ------------------------------------------------------------------------------


class Work:
    """What was handed over under one text, for one delivery of it."""

    def __init__(self, desk: Desk, text: str, policy: Policy) -> None:
        handed = opened(text, desk.secret)
        if handed is None:
            reason = "this was not handed over by an engine that has the same secret"
            raise problem("key-invalid", reason=reason).error()
        self.id = handed.id
        self._desk = desk
        self._handed = handed
        self._policy = policy
        self._response: Response | None = None

    def begin(self, standing: Record) -> Flow[Answer]:
        """The flow that takes what stands, or says why it does not."""
        self.ticket = self._desk.ticket(
            self.id,
            standing.fingerprint,
            key=standing.key,
            caller=standing.scope,
            route=standing.label,
            mark=mark_of(standing.nonce),  # it is recovered as whoever handed it over would
        )
        return resume(self._handed, self.ticket, self._policy, standing)

    def ending_of(self, result: object) -> Ending:
        """What the *result* of the work means for its claim."""
        self._response = _response_of(self.ticket, result)
        if self._response is None:
            return Ending(KEEP)
        return ending_of_accepted(self._response, self._policy)

    def served(self, answer: Answer | Execute) -> Response:
        """What the client is served from now on; raises what a retry would be refused with."""
        assert not isinstance(answer, Execute)
        self._desk.tell(self.ticket, answer)
        if isinstance(answer, Refuse):
            raise answer.problem.error()
        if isinstance(answer, Replay):
            return decode_response(answer.response)
        return self._response or Response(200, (), b"")


def _response_of(ticket: Ticket, result: object) -> Response | None:
    """What a client is served of the work's *result*; None if it can be no response."""
    if isinstance(result, Happened):
        headers = [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in result.headers]
        return Response(result.status, headers, result.body)
    try:
        body = json.dumps(result, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        logger.error(
            "the work of %s resulted in a %s, which is neither JSON nor Happened(status, headers, "
            "body): it is not kept, and a retry is told so",
            *(ticket.label, type(result).__name__),
        )
        return None
    return Response(200, [(b"content-type", b"application/json")], body)
