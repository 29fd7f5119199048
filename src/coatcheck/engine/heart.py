"""The heart: one thread for each engine that renews leases and keeps house.

A thread, not a task: it must beat while a handler blocks the event loop. It renews every claim
that is a third of its lease old, sweeps a little from time to time, and looks at the store's
clock. A renewal that fails is tried again at the next beat; one that finds another attempt's
record marks the claim as lost.

Holding and letting go of a claim is two dictionary operations, because most claims are over
before their first renewal is due.
"""

from __future__ import annotations

import logging
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias

from coatcheck.core.key import reference_of
from coatcheck.core.record import Record, Swap, is_same_attempt, is_same_write, renewed
from coatcheck.engine.clock import StoreClock
from coatcheck.engine.finishing import Unfinished
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import SWEEP_BATCH, Query, Store

Archive: TypeAlias = Callable[[Sequence[Record]], object]

logger = logging.getLogger("coatcheck")

# Renewed after a third: two renewals may fail before a lease is lost.
RENEWALS_PER_LEASE = 3
# Beats for each lease: twice as many as renewals, so that none comes late.
BEATS_PER_LEASE = 2 * RENEWALS_PER_LEASE
# It beats as if for this lease at least, so that an engine that is gone ends its thread soon.
LEASE_MS_MAX = 30_000
# As if for this lease while an end is to be written: twice a second.
UNFINISHED_EVERY_MS = 3_000
# At most this many batches at once, so that a long backlog does not crowd out claims.
SWEEP_BATCHES_MAX = 20


class Loop(Protocol):
    """An event loop, as far as it concerns us."""

    def is_running(self) -> bool:
        """It turns."""
        ...


class Held:
    """A claim that this process executes."""

    __slots__ = ("_on_lost", "claim", "is_lost", "lease_ms", "loop")

    def __init__(self, claim: Record, lease_ms: int, loop: Loop | None = None) -> None:
        self.claim = claim
        self.lease_ms = lease_ms
        self.loop = loop  # on which it is executed, where it is on one
        self.is_lost = False
        self._on_lost: tuple[Callable[[], object], ...] = ()

    def is_stopped(self) -> bool:
        """Nobody executes it any more, because its event loop does not turn."""
        return self.loop is not None and not self.loop.is_running()

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Have *callback* called when another attempt has taken over; now, if it has already."""
        self._on_lost = (*self._on_lost, callback)
        if self.is_lost:
            callback()

    def lose(self) -> None:
        """Another attempt has taken over."""
        if self.is_lost:
            return
        self.is_lost = True
        for callback in self._on_lost:
            try:
                callback()
            except Exception:  # whoever else is to be told is told
                logger.exception("who was told of a lost claim failed")

    def is_due(self, now_ms: int) -> bool:
        """A third of its lease is over."""
        left_ms = self.claim.lease_until_ms - now_ms
        return left_ms <= self.lease_ms - self.lease_ms // RENEWALS_PER_LEASE


class Heart:
    """Renews what is held; made and driven by an engine."""

    def __init__(
        self,
        store: Store,
        clock: StoreClock,
        *,
        sweep_every_s: float | None = None,
        archive: Archive | None = None,
        tell: Callable[[Record], None] = lambda _record: None,
        chores: Sequence[Callable[[int], None]] = (),
    ) -> None:
        self.store = store
        self._unfinished = Unfinished(store, tell)
        self.now_ms = clock.now_ms
        self._clock = clock
        self._chores = chores
        self.held: dict[bytes, Held] = {}
        self._archive = archive
        self._sweep_every_s = sweep_every_s
        self._sweep_ms: int | None = None  # not known before the clock was looked at
        self._lease_ms = LEASE_MS_MAX  # the shortest that was ever held
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()

    def hold(self, claim: Record, lease_ms: int, loop: Loop | None = None) -> Held:
        """Keep *claim* alive from now on, for as long as the event *loop* it is on is running."""
        held = self.held[claim.id] = Held(claim, lease_ms, loop)
        if lease_ms < self._lease_ms:
            self._lease_ms = lease_ms
            self._wake.set()
        if self._thread is None:
            self._start()
        return held

    def let_go(self, held: Held) -> None:
        """Stop renewing: the attempt has ended, or its executor is gone."""
        if self.held.get(held.claim.id) is held:
            self.held.pop(held.claim.id, None)

    def finish(self, swap: Swap) -> None:
        """Write the end of an execution as soon as the store is back."""
        self._unfinished.add(swap)
        self._wake.set()
        if self._thread is None:
            self._start()

    def start(self) -> None:
        """Beat, even if nothing is ever held."""
        if self._thread is None:
            self._start()

    def beat(self) -> None:
        """One beat: look at the clock, end and renew what is due, and sweep if it is time."""
        if self._unfinished:
            self._unfinished.write()
        self._clock.look()
        now_ms = self.now_ms()
        due = [held for held in list(self.held.values()) if held.is_due(now_ms)]
        for held in [held for held in due if held.is_stopped()]:
            logger.error(
                "the event loop of %s has stopped: its lease is left to run out",
                reference_of(held.claim.id),
            )
            self.let_go(held)
            due.remove(held)
        if due:
            self._renew(due, now_ms)
        for chore in self._chores:
            chore(now_ms)
        if self._is_time_to_sweep(now_ms):
            sweep(self.store, now_ms, self._archive)

    def _is_time_to_sweep(self, now_ms: int) -> bool:
        sweep_ms = self._sweep_ms
        if self._sweep_every_s is None or (sweep_ms is not None and now_ms < sweep_ms):
            return False
        # Jittered from the first time on, so that many nodes do not sweep at the same moment.
        jitter = random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        self._sweep_ms = now_ms + round(1_000 * self._sweep_every_s * jitter)
        return sweep_ms is not None

    def stop(self) -> None:
        """End the thread; claims still held are no longer renewed, what can be ended is."""
        self._stopped = True
        with suppress(StoreUnavailable):
            self._unfinished.write()
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _renew(self, due: list[Held], now_ms: int) -> None:
        swaps = [
            Swap(h.claim.id, h.claim.version, renewed(h.claim, now_ms + h.lease_ms)) for h in due
        ]
        for held, swap, lost in zip(due, swaps, self.store.swap(swaps), strict=True):
            assert swap.record is not None
            if lost is None or is_same_write(lost, swap.record):
                held.claim = swap.record
            elif is_same_attempt(lost, held.claim):  # an earlier renewal whose answer was lost
                held.claim = lost
            elif self.held.get(held.claim.id) is held:
                self.let_go(held)
                held.lose()

    def _start(self) -> None:
        with self._mutex:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(
                    target=_beat_until_gone,
                    args=(weakref.ref(self), self._wake),
                    name="coatcheck-heart",
                    daemon=True,
                )
                self._thread.start()


def _beat_until_gone(heart: weakref.ref[Heart], wake: threading.Event) -> None:
    """The thread: it does not keep its engine alive, and ends when the engine is gone."""
    lease_ms = LEASE_MS_MAX
    while True:
        wake.wait(lease_ms / 1_000 / BEATS_PER_LEASE)
        wake.clear()
        living = heart()
        if living is None or living._stopped:  # noqa: SLF001 - the body of the class
            return
        try:
            living.beat()
        except Exception as error:  # noqa: BLE001 - a heart that stops loses every lease
            logger.warning("a beat failed and is tried again: %s", error)
        lease_ms = living._lease_ms if not living._unfinished else UNFINISHED_EVERY_MS  # noqa: SLF001 - as above
        del living


def sweep(store: Store, now_ms: int, archive: Archive | None = None) -> int:
    """Take what retention allows, in small batches; how many records it were."""
    taken = 0
    for _ in range(SWEEP_BATCHES_MAX):
        if archive is None:
            count = found = store.sweep(now_ms, SWEEP_BATCH)
        else:
            count, found = _archive_and_delete(store, now_ms, archive)
        taken += count
        if found < SWEEP_BATCH:
            break
    return taken


def _archive_and_delete(store: Store, now_ms: int, archive: Archive) -> tuple[int, int]:
    """Delete only what *archive* has taken without an error, and only if it did not change."""
    records = store.find(Query(expired_at_ms=now_ms, limit=SWEEP_BATCH)).records
    if not records:
        return 0, 0
    archive(records)
    lost = store.swap([Swap(record.id, record.version, None) for record in records])
    return lost.count(None), len(records)
