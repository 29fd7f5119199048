"""The memory store: a dictionary. For tests, and for a single process that may lose its records.

It keeps the whole contract except durability, and it is the shortest store: read it first.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

from coatcheck.core.record import GONE, Record, Swap, is_retention_over
from coatcheck.errors import Misconfigured
from coatcheck.stores.async_store import ThreadedStore
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query, matches, matching, page_of
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.migration import Migration
from coatcheck.stores.registry import MEMORY


class MemoryStore:
    """Records in a dictionary of this process."""

    info = MEMORY

    def __init__(self) -> None:
        self._records: dict[bytes, Record] = {}
        self._renew()
        renew_after_fork(self)

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> MemoryStore:
        """Return a new, empty store; the URL has no name and no options."""
        if url.rstrip("/") != "memory:":
            raise Misconfigured("memory:// takes no name and no options: each one is a new store")
        if not create:
            raise Misconfigured(
                "memory:// ends with its process: another process cannot look at it"
            )
        return cls()

    @classmethod
    def migrate(cls, url: str, *, only_look: bool = False) -> Migration:
        """Report that there is no schema."""
        del only_look
        cls.from_url(url)
        return Migration("memory", 0, 0)

    def _renew(self) -> None:
        """Make a new lock: a forked child has a copy of the records, perhaps of a held lock."""
        self._mutex = threading.Lock()

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one."""
        records = self._records
        results: list[Record | None] = []
        with self._mutex:
            for swap in swaps:
                id, record = swap.id, swap.record
                current = records.get(id, GONE)
                if current.version != swap.expected:
                    results.append(current)
                    continue
                if record is None:
                    records.pop(id, None)
                else:
                    records[id] = record
                results.append(None)
        return results

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Return the current records, in the order of *ids*."""
        return [self._records.get(id) for id in ids]

    def find(self, query: Query) -> Page:
        """Return records for operators."""
        with self._mutex:
            records = list(self._records.values())
        # Sorting many records would hold up all threads; only those that match are sorted.
        return page_of(matching(sorted(r for r in records if matches(r, query)), query), query)

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete up to *limit* records whose retention is over."""
        # Searched without the lock, as there may be many; records that change meanwhile stay.
        over = (r for r in list(self._records.values()) if is_retention_over(r, now_ms))
        taken = 0
        for record in itertools.islice(over, limit):
            with self._mutex:
                if self._records.get(record.id) is record:
                    del self._records[record.id]
                    taken += 1
        return taken

    def check(self) -> Sequence[Finding]:
        """Warn that this store loses its records."""
        return [Finding("warning", "memory:// loses all records when the process ends")]

    def now_ms(self) -> int:
        """Return the clock of this machine."""
        return time.time_ns() // 1_000_000

    def close(self) -> None:
        """Do nothing: there is nothing to close, and the store stays usable."""


class AsyncMemoryStore(ThreadedStore):
    """The same store for event loops. A swap or a read does not wait, so it needs no thread."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        super().__init__(store or MemoryStore())

    async def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one."""
        return self._store.swap(swaps)

    async def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Return the current records, in the order of *ids*."""
        return self._store.get(ids)

    async def close(self) -> None:
        """Do nothing; see `MemoryStore.close`."""
