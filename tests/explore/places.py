"""Where a client's flow stands: a tree of everything it can have been told.

Generators cannot be copied, but a flow is deterministic: where it stands follows from what it was
told. So a place is a history, and what the flow does there is found out once, by telling a fresh
flow all of it, and then remembered. States share places, and stepping a client costs a look-up.
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
    """The flow is told an error instead of a result."""

    error: type[Exception]


class Place:
    """One point of one client's flow; *asks* is the effect it waits for, None at its end."""

    __slots__ = ("_at", "answer", "asks", "claim", "error", "kind", "outcome", "told", "trust")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.asks: Effect[Any] | None = None
        self.answer: Answer | None = None
        self.error: Exception | None = None
        # What the flow was told last, and so far: the claim it executed, how that ended, and
        # the claim for which a reconciler said "it did not happen".
        self.told: Any = None
        self.claim: Record | None = None
        self.outcome: Outcome | Raised | None = None
        self.trust: Record | None = None
        self._at: dict[Any, Place] = {}

    @property
    def is_savepoint_gone(self) -> bool:
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

    def after(self, place: Place, told: Any) -> Place:
        """Where the client stands when it is told *told* at *place*; first of all, the time."""
        known = place._at.get(told)
        if known is None:
            known = place._at[told] = self._find(place, told)
        return known

    def _find(self, before: Place, told: Any) -> Place:
        place = Place(self.kind)
        place.told = told
        place.claim, place.outcome, place.trust = before.claim, before.outcome, before.trust
        if isinstance(before.asks, Execute):
            place.claim, place.outcome = before.asks.claim, told
        if isinstance(before.asks, Reconcile):
            place.trust = before.asks.claim
        history = self._history[place] = (*self._history[before], told)
        now_ms, *events = history
        try:
            place.asks = self._replayed(now_ms, events)
        except StopIteration as done:
            place.answer = done.value
        except (HandlerError, StoreUnavailable) as error:
            place.error = error
        return place

    def _replayed(self, now_ms: int, events: list[Any]) -> Effect[Any]:
        request = ClaimRequest(b"I" * 16, self.kind.fingerprint, now_ms, self.nonce)
        flow = self._serve(request, self.kind.policy, may_claim=self.kind.may_claim)
        asks = next(flow)
        for event in events:
            if isinstance(event, Raised):
                asks = flow.throw(event.error("explored"))
            else:
                asks = flow.send(event)
        return asks
