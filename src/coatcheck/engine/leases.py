"""Leases: one background thread per engine that renews them.

A thread, not a task: it must run while a handler blocks the event loop. At each tick it renews
every lease of which a third has passed, retries completions that could not be written, reads the
store's clock, and starts sweeps and recovery, which have threads of their own. A failure in one
task or one claim never delays the others, and no code of the application runs in this thread. A
renewal that fails is tried again at the next tick; one that finds another attempt's record marks
the claim as lost.

Starting and ending a lease is a few dictionary operations, because most operations are over before
their first renewal is due.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from coatcheck.core.flow import Effect, Flow, run
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import Claim
from coatcheck.core.record import Record, Swap, is_same_attempt, is_same_write, renewed
from coatcheck.engine.clock import StoreClock
from coatcheck.engine.lease_writes import IndividualWrites, PendingCompletions, SwapAll, Written
from coatcheck.engine.periodic import repeat, start_daemon
from coatcheck.engine.waiters import Waiters
from coatcheck.operation import RENEWALS_PER_LEASE, Lease
from coatcheck.stores.contract import Store
from coatcheck.telemetry import Lost, Renewed, Telemetry

logger = logging.getLogger("coatcheck")

# Ticks per lease: twice as many as renewals, so that none is late.
TICKS_PER_LEASE = 2 * RENEWALS_PER_LEASE
# It ticks as if for a lease of at most this length, so that the thread of a forgotten engine ends
# soon. 20 s: the default lease, so that the first operation need not wake the thread.
LEASE_MS_MAX = 20_000
# As if for this lease while a completion is to be written: twice a second.
PENDING_EVERY_MS = 3_000

_SILENT = Telemetry((), ())


class Heartbeat:
    """Renews the leases of one engine."""

    def __init__(
        self,
        store: Store,
        clock: StoreClock,
        *,
        waiters: Waiters | None = None,
        on_written: Callable[[Record], None] = lambda _record: None,
        tasks: Sequence[Callable[[int], None]] = (),
        telemetry: Telemetry = _SILENT,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.now_ms = clock.now_ms
        self.leases: dict[bytes, Lease] = {}
        self._pending = PendingCompletions(on_written)
        self._clock = clock
        self._tasks = tasks
        self._waiters = waiters or Waiters()
        self._waiting = self._waiters.waiting
        self._telemetry = telemetry
        self._monotonic = monotonic
        self._lease_ms = LEASE_MS_MAX  # the shortest that there ever was
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()

    def start_renewing(self, lease: Lease) -> None:
        """Renew *lease* from now on, for as long as the event loop it runs on is running."""
        claim = lease.claim
        before = self.leases.get(claim.id)
        self.leases[claim.id] = lease
        if before is not None and before.claim.nonce != claim.nonce:
            self._lose(before)
        if lease.lease_ms < self._lease_ms:
            self._lease_ms = lease.lease_ms
            self._wake.set()
        if self._thread is None:
            self.start()

    def stop_renewing(self, lease: Lease) -> None:
        """Stop renewing *lease*: its attempt has ended, or its executor is gone."""
        id = lease.claim.id
        # A lease whose completion is still to be written stays.
        if lease.pending is None and self.leases.get(id) is lease:
            self.leases.pop(id, None)
            if self._waiting and id in self._waiting:  # they were not woken with its completion
                self._waiters.wake_to_read(id)

    def taken_over(self, lease: Lease) -> None:
        """Another attempt has taken *lease* over: its own completion found that out."""
        if self.leases.get(lease.claim.id) is lease:  # no renewal has found it out before
            self._lose(lease)

    def schedule_completion(self, lease: Lease, completion: Swap) -> None:
        """Write the *completion* of *lease* as soon as the store is back."""
        self._pending.add(lease, completion)
        self.wake()
        if self._thread is None:
            self.start()

    def release(self, claim: Claim) -> None:
        """Release *claim*, which no process is left to execute; its write may be under way."""
        record = claim.record
        assert record is not None
        if claim.id not in self.leases:  # no other request of this process has claimed it
            self.schedule_completion(Lease(record, 0), claim)

    def wake(self) -> None:
        """Tick soon: the store may be back."""
        self._wake.set()

    def tick(self) -> None:
        """Do everything that is due. If a part fails the rest is done; raises the first failure."""
        failures: list[Exception] = []
        # What has a deadline comes first.
        for part in (self._renew_now, self._write_pending_now, self._read_clock, *self._tasks):
            try:
                part(self.now_ms())
            except Exception as error:  # noqa: BLE001 - raised when everything is done
                failures.append(error)
        if failures:
            raise failures[0]

    def _renew_now(self, now_ms: int) -> None:
        run(self.renew(now_ms), self._perform)

    def _write_pending_now(self, now_ms: int) -> None:
        run(self.write_pending(now_ms), self._perform)

    def _perform(self, effect: Effect[Any]) -> Sequence[Record | None]:
        assert isinstance(effect, SwapAll)
        return self.store.swap(effect.swaps)

    def _read_clock(self, _now_ms: int) -> None:
        self._clock.look()

    def start(self) -> None:
        """Start the thread, if it does not run; if that fails now, the next lease tries again."""
        with self._mutex:
            if self._thread is None and not self._stopped:
                pause_s = LEASE_MS_MAX / 1_000 / TICKS_PER_LEASE
                args = (weakref.ref(self), Heartbeat._tick_or_log, self._wake, pause_s)
                self._thread = start_daemon("coatcheck-heartbeat", repeat, *args)

    def _tick_or_log(self) -> float | None:
        """Tick, and return the pause until the next tick; None: stop."""
        if self._stopped:
            return None
        try:
            self.tick()
        except Exception as error:  # noqa: BLE001 - a heartbeat that stops loses every lease
            logger.warning("coatcheck: leases could not be renewed, and are tried again: %s", error)
        return self._pause_s()

    def stop(self) -> None:
        """End the thread. Leases are no longer renewed; pending completions are tried once more."""
        self._stopped = True
        self._wake.set()
        with self._mutex:  # another thread may be starting it
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        # Only now, because the thread may have been writing the same.
        with suppress(Exception):  # then they are lost with this process
            self._write_pending_now(self.now_ms())

    # --- as flows, so that the simulator runs them too ------------------------------------------

    def renew(self, now_ms: int) -> Flow[None]:
        """Renew every lease of which a third has passed."""
        due = [lease for lease in list(self.leases.values()) if lease.is_due(now_ms)]
        for lease in [lease for lease in due if lease.is_stopped()]:
            logger.error(
                "coatcheck: the event loop of operation %s has stopped; its lease expires",
                reference_of(lease.claim.id),
            )
            self.stop_renewing(lease)
            due.remove(lease)
        renewals = [
            (one, Swap(one.claim.id, one.claim.version, renewed(one.claim, now_ms + one.lease_ms)))
            for one in due
        ]
        writes = self._individual_writes()
        for lease, swap, conflict in (yield from writes.write(renewals)):
            self._renewed(lease, swap, conflict)
        writes.raise_failure()

    def _renewed(self, lease: Lease, swap: Swap, conflict: Written) -> None:
        record = swap.record
        assert record is not None
        current = conflict if isinstance(conflict, Record) else None
        if conflict is None or (current is not None and is_same_write(current, record)):
            lease.renewed(record)
            self._telemetry.happened(Renewed, record)
        elif current is not None and is_same_attempt(current, lease.claim):
            lease.advance_to(current)  # an earlier renewal whose acknowledgement was lost
        elif not lease.is_ending and self.leases.get(record.id) is lease:
            self.stop_renewing(lease)
            self._lose(lease)

    def _lose(self, lease: Lease) -> None:
        lease.lose()
        self._telemetry.happened(Lost, lease.claim)

    def write_pending(self, now_ms: int) -> Flow[None]:
        """Write the completions that could not be written before."""
        writes = self._individual_writes()
        for lease in (yield from self._pending.write(writes, now_ms)):
            self.stop_renewing(lease)
        writes.raise_failure()

    def _individual_writes(self) -> IndividualWrites:
        # Until the next tick is due: a store that is slow to fail must not make that late.
        return IndividualWrites(self._pause_s(), self._monotonic)

    def _pause_s(self) -> float:
        """How long to wait between two ticks."""
        lease_ms = min(self._lease_ms, PENDING_EVERY_MS if self._pending else LEASE_MS_MAX)
        return lease_ms / 1_000 / TICKS_PER_LEASE
