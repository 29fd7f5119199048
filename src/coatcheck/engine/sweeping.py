"""Sweeping: what retention allows is taken from time to time, and archived before.

The heart says when, and does not wait for it: a sweep has a thread of its own, because an archive
is the application's and may take its time, and leases are renewed meanwhile. There is one at most.

It goes on until nothing is left, however much that is: a sweep with an end of its own falls behind
a store that takes in more. But it rests after each batch for longer than that took, so that most of
the store's time is left for claims.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from coatcheck.core.not_awaited import refuse_awaitable
from coatcheck.core.record import Record, Swap
from coatcheck.stores.contract import SWEEP_BATCH, HasStretches, Query, Store

Archive: TypeAlias = Callable[[Sequence[Record]], object]

logger = logging.getLogger("coatcheck")

# Three times as long as the batch took: at least three quarters of the time are for claims.
RESTS_PER_BATCH = 3
# But not longer than this: an archive may take hours, and the store had its rest meanwhile.
REST_S_MAX = 1.0
# How long an engine that closes waits for the batch that is being archived.
CLOSE_S_MAX = 5.0


class Sweeper:
    """Sweeps about every *every_s*, None: never; made and driven by a heart."""

    def __init__(self, store: Store, every_s: float | None, archive: Archive | None) -> None:
        self._store = store
        self._every_s = every_s
        self._archive = archive
        self._due_ms: int | None = None  # not known before the clock was looked at
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, now_ms: int) -> None:
        """Begin a sweep, if it is time and none is under way; the heart does not wait for it."""
        due_ms = self._due_ms
        if self._every_s is None or (due_ms is not None and now_ms < due_ms) or self.is_sweeping():
            return
        # Jittered from the first time on, so that many nodes do not sweep at the same moment.
        jitter = random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        self._due_ms = now_ms + round(1_000 * self._every_s * jitter)
        if due_ms is not None and not self._closed.is_set():
            thread = threading.Thread(
                target=_sweep_or_log,
                args=(weakref.ref(self), self._closed, self._store, now_ms, self._archive),
                name="coatcheck-sweep",
                daemon=True,
            )
            thread.start()
            self._thread = thread

    def is_sweeping(self) -> bool:
        """A sweep is under way."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Begin nothing more; wait a little for the batch that is under way."""
        self._closed.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S_MAX)


def _sweep_or_log(
    sweeper: weakref.ref[Sweeper],
    closed: threading.Event,
    store: Store,
    now_ms: int,
    archive: Archive | None,
) -> None:
    """The thread: it does not keep its engine alive, and ends when the engine is gone."""
    try:
        rest_between(batches(store, now_ms, archive), lambda s: closed.wait(s) or sweeper() is None)
    except Exception as error:  # noqa: BLE001 - what is left is for the next time
        logger.warning("a sweep failed and is tried again: %s", error)


def rest_between(
    swept: Iterator[int],
    rest: Callable[[float], bool],
    monotonic: Callable[[], float] = time.monotonic,
) -> None:
    """Take batch after batch; *rest* is told how long, and says whether that is enough for now."""
    began_s = monotonic()
    for _ in swept:
        if rest(min(REST_S_MAX, RESTS_PER_BATCH * (monotonic() - began_s))):
            break
        began_s = monotonic()


def sweep_all(store: Store, now_ms: int) -> Iterator[int]:
    """Take all that retention allows, for whoever can wait; how many records, bit by bit."""
    if isinstance(store, HasStretches):
        return store.sweep_all(now_ms)
    return batches(store, now_ms)


def batches(store: Store, now_ms: int, archive: Archive | None = None) -> Iterator[int]:
    """Take what retention allows, until nothing is left; how many records each batch had."""
    found = SWEEP_BATCH
    while found >= SWEEP_BATCH:
        if archive is None:
            count = found = store.sweep(now_ms, SWEEP_BATCH)
        else:
            count, found = _archive_and_delete(store, now_ms, archive)
        yield count


def _archive_and_delete(store: Store, now_ms: int, archive: Archive) -> tuple[int, int]:
    """Delete only what *archive* has taken without an error, and only if it did not change."""
    records = store.find(Query(expired_at_ms=now_ms, limit=SWEEP_BATCH)).records
    if not records:
        return 0, 0
    refuse_awaitable("archive", archive(records))  # it has taken nothing yet
    lost = store.swap([Swap(record.id, record.version, None) for record in records])
    return lost.count(None), len(records)
