"""The downstream: what handlers change outside of the system, and the ledger that counts it.

Three kinds, as they are found in the world. A plain one acts on each call. One that
fences remembers the highest fence it was shown, by an effect or by a question, and refuses lower
ones (`operation.fence`). One that deduplicates acts once for each key, and gives
the first answer again (`operation.derive`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple, TypeAlias

from coatcheck.core.record import Record

from .world import World

# One operation, from its first claim until its window is over.
Generation: TypeAlias = tuple[bytes, int]


class Effect(NamedTuple):
    """Something that happened, and cannot be taken back."""

    response: bytes
    attempt: int
    is_late: bool  # a later attempt had asked already whether it happened, and relies on the answer


def generation_of(record: Record) -> Generation:
    """The generation that *record* is part of."""
    return (record.id, record.created_ms)


class Downstream:
    """What happened, by generation."""

    def __init__(self, world: World, *, fences: bool = False, deduplicates: bool = False) -> None:
        self.effects: defaultdict[Generation, list[Effect]] = defaultdict(list)
        self._world = world
        self._fences = fences
        self._deduplicates = deduplicates
        self._fence_of: dict[bytes, int] = {}
        self._answer_to: dict[str, bytes] = {}
        self._asked_by: dict[Generation, int] = {}
        self._asked_ms: dict[Generation, float] = {}

    def charge(self, claim: Record, key: str, response: bytes, sent_ms: float) -> bytes | None:
        """Do it, for the attempt that *claim* names. The answer; None: it is refused."""
        if self._fences and not self._is_newest(claim):
            self._world.happened("downstream", "refuses an old fence", claim)
            return None
        if self._deduplicates:
            known = self._answer_to.setdefault(key, response)
            if known is not response:
                self._world.happened("downstream", "knows that key", claim)
                return known
        self.add(claim, response, sent_ms)
        return response

    def add(self, claim: Record, response: bytes, sent_ms: float | None = None) -> None:
        """It has happened; it was on its way since *sent_ms*, or not at all."""
        generation = generation_of(claim)
        is_late = self._asked_by.get(generation, 0) > claim.attempt
        if sent_ms is not None and self._asked_ms.get(generation, 0) > sent_ms:
            is_late = True
        self.effects[generation].append(Effect(response, claim.attempt, is_late))
        self._world.happened("downstream", "a late effect" if is_late else "an effect", claim)

    def ask(self, claim: Record) -> bytes | None:
        """What happened in this generation, asked by the attempt of *claim*; None: nothing."""
        generation = generation_of(claim)
        self._asked_by[generation] = max(claim.attempt, self._asked_by.get(generation, 0))
        self._asked_ms[generation] = self._world.now_ms
        if self._fences:
            self._is_newest(claim)
        return self.effects[generation][0].response if generation in self.effects else None

    def _is_newest(self, claim: Record) -> bool:
        """Remember its fence, unless a higher one was shown."""
        highest = self._fence_of.get(claim.id, 0)
        self._fence_of[claim.id] = max(highest, claim.version)
        return claim.version >= highest
