"""Held: a claim that this process executes, or whose end it still has to write.

As many are made as requests are executed, so there is little in it. The heart keeps it alive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from coatcheck.core.record import Record, Swap

logger = logging.getLogger("coatcheck")

# Renewed after a third: two renewals may fail before a lease is lost.
RENEWALS_PER_LEASE = 3


class Loop(Protocol):
    """An event loop, as far as it concerns us."""

    def is_running(self) -> bool:
        """It turns."""
        ...


class Held:
    """A claim that is ours, as far as is known here."""

    __slots__ = ("_on_lost", "claim", "end", "failures", "is_lost", "lease_ms", "loop")

    def __init__(self, claim: Record, lease_ms: int, loop: Loop | None = None) -> None:
        self.claim = claim
        self.lease_ms = lease_ms
        self.loop = loop  # on which it is executed, where it is on one
        self.end: Swap | None = None  # it is executed, and this could not be written yet
        self.failures = 0  # of its last writes by the heart, in a row and alone
        self.is_lost = False
        self._on_lost: list[Callable[[], object]] = []

    def is_stopped(self) -> bool:
        """Nobody executes it any more, because its event loop does not turn."""
        return self.loop is not None and self.end is None and not self.loop.is_running()

    def is_due(self, now_ms: int) -> bool:
        """A third of its lease is over."""
        left_ms = self.claim.lease_until_ms - now_ms
        return left_ms <= self.lease_ms - self.lease_ms // RENEWALS_PER_LEASE

    @property
    def has_listeners(self) -> bool:
        """Somebody is to be told when it is lost."""
        return bool(self._on_lost)

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Have *callback* called when another attempt has taken over; now, if it has already."""
        self._on_lost.append(callback)
        if self.is_lost:
            self.lose()

    def lose(self) -> None:
        """Another attempt has taken over: whoever is to be told is told, here and now."""
        self.is_lost = True
        while self._on_lost:
            try:
                # Taken before it is called, and by one thread: so each is called once.
                callback = self._on_lost.pop(0)
            except IndexError:
                break
            try:
                callback()
            except Exception:  # whoever else is to be told is told
                logger.exception("who was told of a lost claim failed")
