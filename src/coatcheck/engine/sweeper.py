"""Sweeping: expired records are deleted from time to time, and archived before.

The heartbeat starts a sweep and does not wait for it. A sweep has a thread of its own, because an
archive function is the application's and may block, and leases are renewed meanwhile. At most one
sweep runs per engine.

A sweep goes on until nothing is left: one with a limit would fall behind a store that takes in
more. After each batch it rests for longer than the batch took, so that most of the store's time is
left for claims.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from coatcheck.core.callables import refuse_awaitable
from coatcheck.core.record import Record, Swap
from coatcheck.engine.periodic import Schedule, start_daemon
from coatcheck.stores.contract import SWEEP_BATCH, Query, Store
from coatcheck.stores.fork import renew_after_fork
from coatcheck.telemetry import Swept, Telemetry

Archive: TypeAlias = Callable[[Sequence[Record]], object]

logger = logging.getLogger("coatcheck")

# About how often each engine sweeps; a sweep reads an index and deletes small batches.
SWEEP_EVERY_S = 60.0
# Three times as long as the batch took: at least three quarters of the time are for claims.
RESTS_PER_BATCH = 3
# But not longer than this: an archive may take hours, and the store was idle meanwhile.
REST_S_MAX = 1.0
# How long an engine that closes waits for the batch that is being archived.
CLOSE_S_MAX = 5.0


class Sweeper:
    """Sweeps about every *every_s*, None: never; the heartbeat calls `tick`."""

    def __init__(
        self,
        store: Store,
        every_s: float | None,
        archive: Archive | None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._store = store
        self._every_s = every_s
        self._archive = archive
        self._telemetry = telemetry
        self._renew()
        renew_after_fork(self)

    def _renew(self) -> None:
        """Make what belongs to one process."""
        self._schedule = Schedule(self._every_s)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def tick(self, now_ms: int) -> None:
        """Start a sweep, if it is due and none runs; the heartbeat does not wait for it."""
        if self.is_sweeping() or not self._schedule.is_due(now_ms) or self._closed.is_set():
            return
        swept = batches(self._store, now_ms, self._archive)
        args = (weakref.ref(self), self._closed, swept, self._telemetry)
        self._thread = start_daemon("coatcheck-sweep", _sweep_or_log, *args)

    def is_sweeping(self) -> bool:
        """A sweep runs."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Start nothing more; wait a little for the batch that is under way."""
        self._closed.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S_MAX)


def _sweep_or_log(
    sweeper: weakref.ref[Sweeper],
    closed: threading.Event,
    swept: Iterator[int],
    telemetry: Telemetry | None,
) -> None:
    """The thread: it does not keep its engine alive, and ends when the engine is gone."""

    def rest(seconds: float) -> bool:
        return closed.wait(seconds) or sweeper() is None

    try:
        count = rest_between(swept, rest)
    except Exception as error:  # noqa: BLE001 - the rest is for the next sweep
        logger.warning("coatcheck: a sweep failed and is repeated: %s", error)
    else:
        if telemetry is not None:
            telemetry.emit(Swept(count))


def rest_between(
    swept: Iterator[int],
    rest: Callable[[float], bool],
    monotonic: Callable[[], float] = time.monotonic,
) -> int:
    """
    Take batch after batch; how many records they were.

    *rest* waits for the seconds it is given, and returns whether to stop.
    """
    count, began_s = 0, monotonic()
    for records in swept:
        count += records
        if rest(min(REST_S_MAX, RESTS_PER_BATCH * (monotonic() - began_s))):
            break
        began_s = monotonic()
    return count


def batches(store: Store, now_ms: int, archive: Archive | None = None) -> Iterator[int]:
    """Delete what has expired until nothing is left; yields the size of each batch."""
    found = SWEEP_BATCH
    while found >= SWEEP_BATCH:
        if archive is None:
            count = found = store.sweep(now_ms, SWEEP_BATCH)
        else:
            count, found = _archive_and_delete(store, now_ms, archive)
        yield count


def _archive_and_delete(store: Store, now_ms: int, archive: Archive) -> tuple[int, int]:
    """Delete only what *archive* has accepted without an error, and only if it did not change."""
    records = store.find(Query(expired_at_ms=now_ms, limit=SWEEP_BATCH)).records
    if not records:
        return 0, 0
    refuse_awaitable("archive", archive(records))  # a coroutine has archived nothing yet
    lost = store.swap([Swap(record.id, record.version, None) for record in records])
    return lost.count(None), len(records)
