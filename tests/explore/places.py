"""Places in a client's flow: a tree of everything that the flow may have been sent.

Generators cannot be copied. But a flow is deterministic, so its history decides what it does next.
A place is such a history. Its next effect is computed once, by sending the whole history to a new
flow, and then cached. States share places, and a step of a client costs one lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.keep import Outcome
from coatcheck.core.lifecycle import Answer, ClaimRequest, Execute, Reconcile
from coatcheck.core.policy import Policy
from coatcheck.core.record import Record
from coatcheck.errors import StoreUnavailable

ServeFlow = Callable[..., Flow[Answer]]


class Kind(NamedTuple):
    """One kind of client; two of one kind are interchangeable."""

    policy: Policy
    fingerprint: bytes = b"F" * 16
    may_claim: bool = True


class HandlerError(Exception):
    """The handler failed."""


class Raised(NamedTuple):
    """An error that is thrown into the flow instead of a result."""

    error: type[Exception]


class Place:
    """One place in a flow; *asks* is the effect it waits for, None at its end."""

    __slots__ = ("_at", "answer", "asks", "claim", "error", "kind", "outcome", "sent", "trust")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.asks: Effect[Any] | None = None
        self.answer: Answer | None = None
        self.error: Exception | None = None
        # What the flow was sent last; the claim it has executed, and how that ended; and the claim
        # for which the reconcile function has answered.
        self.sent: Any = None
        self.claim: Record | None = None
        self.outcome: Outcome | Raised | None = None
        self.trust: Record | None = None
        self._at: dict[Any, Place] = {}

    @property
    def is_over(self) -> bool:
        """The client has its answer, or an error."""
        return self.answer is not None or self.error is not None


class Atlas:
    """All places of one client, found as they are needed."""

    def __init__(self, number: int, kind: Kind, lifecycle: ServeFlow) -> None:
        self.number = number
        self.kind = kind
        self.nonce = 1_000 + number
        self.start = Place(kind)
        self._serve = lifecycle
        self._history: dict[Place, tuple[Any, ...]] = {self.start: ()}

    def after(self, place: Place, sent: Any) -> Place:
        """The place after *place* if the flow is *sent* this; it is first sent the time."""
        known = place._at.get(sent)
        if known is None:
            known = place._at[sent] = self._find(place, sent)
        return known

    def _find(self, before: Place, sent: Any) -> Place:
        place = Place(self.kind)
        place.sent = sent
        place.claim, place.outcome, place.trust = before.claim, before.outcome, before.trust
        if isinstance(before.asks, Execute):
            place.claim, place.outcome = before.asks.claim, sent
        if isinstance(before.asks, Reconcile):
            place.trust = before.asks.claim
        history = self._history[place] = (*self._history[before], sent)
        now_ms, *events = history
        try:
            place.asks = self._replayed(now_ms, events)
        except StopIteration as done:
            place.answer = done.value
        except (HandlerError, StoreUnavailable) as error:
            place.error = error
        return place

    def _replayed(self, now_ms: int, events: list[Any]) -> Effect[Any]:
        request = ClaimRequest(b"I" * 16, self.kind.fingerprint, now_ms, self.nonce, scope="caller")
        flow = self._serve(request, self.kind.policy, may_claim=self.kind.may_claim)
        asks = next(flow)
        for event in events:
            if isinstance(event, Raised):
                asks = flow.throw(event.error("explored"))
            else:
                asks = flow.send(event)
        return asks
