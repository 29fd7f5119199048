"""Sweeping: what retention allows is taken from time to time, and archived before.

The heart says when, and does not wait for it: a sweep has a thread of its own, because an archive
is the application's and may take its time, and leases are renewed meanwhile. There is one at most.
"""

from __future__ import annotations

import logging
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from coatcheck.core.record import Record, Swap
from coatcheck.stores.contract import SWEEP_BATCH, HasStretches, Query, Store

Archive: TypeAlias = Callable[[Sequence[Record]], object]

logger = logging.getLogger("coatcheck")

# At most this many batches at once, so that a long backlog does not crowd out claims.
SWEEP_BATCHES_MAX = 20
# How long an engine that closes waits for the batch that is being archived.
CLOSE_S_MAX = 5.0


class Sweeper:
    """Sweeps about every *every_s*, None: never; made and driven by a heart."""

    def __init__(self, store: Store, every_s: float | None, archive: Archive | None) -> None:
        self._store = store
        self._every_s = every_s
        self._archive = archive
        self._due_ms: int | None = None  # not known before the clock was looked at
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def beat(self, now_ms: int) -> None:
        """Begin a sweep, if it is time and none is under way; the heart does not wait for it."""
        due_ms = self._due_ms
        if self._every_s is None or (due_ms is not None and now_ms < due_ms) or self.is_sweeping():
            return
        # Jittered from the first time on, so that many nodes do not sweep at the same moment.
        jitter = random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        self._due_ms = now_ms + round(1_000 * self._every_s * jitter)
        if due_ms is not None and not self._is_closed:
            thread = threading.Thread(
                target=_sweep_or_log,
                args=(weakref.ref(self), self._store, now_ms, self._archive),
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
        self._is_closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S_MAX)


def _sweep_or_log(
    sweeper: weakref.ref[Sweeper], store: Store, now_ms: int, archive: Archive | None
) -> None:
    """The thread: it does not keep its engine alive, and ends when the engine is gone."""

    def is_over() -> bool:
        living = sweeper()
        return living is None or living._is_closed  # noqa: SLF001 - the body of the class

    try:
        sweep(store, now_ms, archive, is_over=is_over)
    except Exception as error:  # noqa: BLE001 - what is left is for the next time
        logger.warning("a sweep failed and is tried again: %s", error)


def sweep_all(store: Store, now_ms: int) -> Iterator[int]:
    """Take all that retention allows, for whoever can wait; how many records, bit by bit."""
    if isinstance(store, HasStretches):
        yield from store.sweep_all(now_ms)
        return
    while count := sweep(store, now_ms):
        yield count


def sweep(
    store: Store,
    now_ms: int,
    archive: Archive | None = None,
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> int:
    """Take what retention allows, in small batches until *is_over*; how many records it were."""
    taken = 0
    for _ in range(SWEEP_BATCHES_MAX):
        if archive is None:
            count = found = store.sweep(now_ms, SWEEP_BATCH)
        else:
            count, found = _archive_and_delete(store, now_ms, archive)
        taken += count
        if found < SWEEP_BATCH or is_over():
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
