"""The heart: one thread for each engine that renews leases and keeps house.

A thread, not a task: it must beat while a handler blocks the event loop. It renews every claim
that is a third of its lease old, writes the ends that could not be written, looks at the store's
clock, and begins chores such as sweeping, which have threads of their own. Each of these may fail,
and each claim for itself: none of it keeps the others from their renewals, and nothing of the
application's runs in this thread. A renewal that fails is tried again at the next beat; one that
finds another attempt's record marks the claim as lost.

Holding and letting go of a claim is a few dictionary operations, because most claims are over
before their first renewal is due.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from coatcheck.core.key import reference_of
from coatcheck.core.record import Record, Swap, is_same_attempt, is_same_write, renewed
from coatcheck.core.serve import Claim
from coatcheck.engine.apart import Apart, Outcome
from coatcheck.engine.clock import StoreClock
from coatcheck.engine.finishing import Unfinished
from coatcheck.engine.held import RENEWALS_PER_LEASE, Held, Loop
from coatcheck.engine.sweeping import Archive, Sweeper
from coatcheck.engine.waiting import Line
from coatcheck.stores.contract import Store

logger = logging.getLogger("coatcheck")

# Beats for each lease: twice as many as renewals, so that none comes late.
BEATS_PER_LEASE = 2 * RENEWALS_PER_LEASE
# It beats as if for this lease at least, so that an engine that is gone ends its thread soon.
LEASE_MS_MAX = 30_000
# As if for this lease while an end is to be written: twice a second.
UNFINISHED_EVERY_MS = 3_000


class Heart:
    """Renews what is held; made and driven by an engine."""

    def __init__(
        self,
        store: Store,
        clock: StoreClock,
        *,
        sweep_every_s: float | None = None,
        archive: Archive | None = None,
        line: Line | None = None,
        tell: Callable[[Record], None] = lambda _record: None,
        chores: Sequence[Callable[[int], None]] = (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.now_ms = clock.now_ms
        self.sweeper = Sweeper(store, sweep_every_s, archive)
        self.held: dict[bytes, Held] = {}
        self._unfinished = Unfinished(tell)
        self._clock = clock
        self._chores = chores
        self._line = line or Line()
        self._waiting = self._line.waiting
        self._monotonic = monotonic
        self._lease_ms = LEASE_MS_MAX  # the shortest that was ever held
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()

    def hold(self, claim: Record, lease_ms: int, loop: Loop | None = None) -> Held:
        """Keep *claim* alive from now on, for as long as the event *loop* it is on is running."""
        before = self.held.get(claim.id)
        held = self.held[claim.id] = Held(claim, lease_ms, loop)
        if before is not None and before.claim.nonce != claim.nonce:
            self._lose(before)
        if lease_ms < self._lease_ms:
            self._lease_ms = lease_ms
            self._wake.set()
        if self._thread is None:
            self._start()
        return held

    def let_go(self, held: Held) -> None:
        """Stop renewing: the attempt has ended, or its executor is gone."""
        id = held.claim.id
        # What is still to be written stays, until it is.
        if held.end is None and self.held.get(id) is held:
            self.held.pop(id, None)
            if self._waiting and id in self._waiting:  # for an end that it was not told of
                self._line.nudge(id, is_promised=False)

    def finish(self, held: Held, end: Swap) -> None:
        """Write the *end* of what is *held* as soon as the store is back."""
        self._unfinished.add(held, end)
        self.wake()
        if self._thread is None:
            self._start()

    def give_back(self, claim: Claim) -> None:
        """Nobody is left to execute what *claim* was to get hold of; it may be on its way still."""
        record = claim.record
        assert record is not None
        if claim.id not in self.held:  # else somebody here has it, and it never was ours
            self.finish(Held(record, 0), claim)

    def wake(self) -> None:
        """Beat soon: the store may be back."""
        self._wake.set()

    def start(self) -> None:
        """Beat, even if nothing is ever held."""
        if self._thread is None:
            self._start()

    def beat(self) -> None:
        """One beat. Whatever fails in it, the rest is done; raises the first failure."""
        failures: list[Exception] = []
        # What has a deadline comes first.
        for part in (self._renew, self._finish, self._look, *self._chores, self.sweeper.beat):
            try:
                part(self.now_ms())
            except Exception as error:  # noqa: BLE001 - raised when all is done
                failures.append(error)
        if failures:
            raise failures[0]

    def _look(self, _now_ms: int) -> None:
        self._clock.look()

    def stop(self) -> None:
        """End the threads; claims still held are no longer renewed, what can be ended is."""
        self._stopped = True
        with suppress(Exception):  # then it is lost with us
            self._finish(self.now_ms())
        self._wake.set()
        with self._mutex:  # else it may be there already, and not yet begun
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.sweeper.close()

    def _renew(self, now_ms: int) -> None:
        due = [held for held in list(self.held.values()) if held.is_due(now_ms)]
        for held in [held for held in due if held.is_stopped()]:
            logger.error(
                "the event loop of %s has stopped: its lease is left to run out",
                reference_of(held.claim.id),
            )
            self.let_go(held)
            due.remove(held)
        asks = [
            (h, Swap(h.claim.id, h.claim.version, renewed(h.claim, now_ms + h.lease_ms)))
            for h in due
        ]
        apart = self._apart()
        for held, swap, lost in apart.write(asks):
            self._renewed(held, swap, lost)
        apart.raise_failure()

    def _renewed(self, held: Held, swap: Swap, lost: Outcome) -> None:
        record = swap.record
        assert record is not None
        standing = lost if isinstance(lost, Record) else None
        if lost is None or (standing is not None and is_same_write(standing, record)):
            held.claim = record
        elif standing is not None and is_same_attempt(standing, held.claim):
            held.claim = standing  # an earlier renewal whose answer was lost
        elif held.end is None and self.held.get(record.id) is held:
            self.let_go(held)
            self._lose(held)

    def _lose(self, held: Held) -> None:
        """Another attempt has taken over; whoever is to be told may take its time, and fail."""
        held.is_lost = True
        if held.has_listeners:
            try:
                threading.Thread(target=held.lose, name="coatcheck-lost", daemon=True).start()
            except RuntimeError:  # no room for it, or the interpreter is ending
                logger.exception("nobody could be told of a lost claim")

    def _finish(self, now_ms: int) -> None:
        apart = self._apart()
        for held in self._unfinished.write(apart, now_ms):
            self.let_go(held)
        apart.raise_failure()

    def _apart(self) -> Apart:
        # Until the next beat is due: a store that takes long to fail must not make that late.
        return Apart(self.store, self._pause_s(), self._monotonic)

    def _pause_s(self) -> float:
        """How long to wait between two beats."""
        lease_ms = min(self._lease_ms, UNFINISHED_EVERY_MS if self._unfinished else LEASE_MS_MAX)
        return lease_ms / 1_000 / BEATS_PER_LEASE

    def _start(self) -> None:
        """Begin to beat; where there is no room for another thread now, whoever is next tries."""
        with self._mutex:
            if self._thread is None and not self._stopped:
                thread = threading.Thread(
                    target=_beat_until_gone,
                    args=(weakref.ref(self), self._wake),
                    name="coatcheck-heart",
                    daemon=True,
                )
                try:
                    thread.start()
                except RuntimeError:
                    logger.exception("no lease is renewed, because no thread can be started")
                else:
                    self._thread = thread


def _beat_until_gone(heart: weakref.ref[Heart], wake: threading.Event) -> None:
    """The thread: it does not keep its engine alive, and ends when the engine is gone."""
    pause_s = LEASE_MS_MAX / 1_000 / BEATS_PER_LEASE
    while True:
        wake.wait(pause_s)
        wake.clear()
        living = heart()
        if living is None or living._stopped:  # noqa: SLF001 - the body of the class
            return
        try:
            living.beat()
        except Exception as error:  # noqa: BLE001 - a heart that stops loses every lease
            logger.warning("a beat failed and is tried again: %s", error)
        pause_s = living._pause_s()  # noqa: SLF001 - as above
        del living
