"""The memory store: a dictionary. For tests, and for one process that may forget when it ends.

It keeps the whole contract but durability, and it is the reference the law-suite's model is
compared with first.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

from coatcheck.core.record import GONE, Record, Swap, is_retention_over
from coatcheck.errors import Misconfigured
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query, Store, matches
from coatcheck.stores.declared import MEMORY
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.migration import Migration


class MemoryStore:
    """Records in a dictionary of this process."""

    declared = MEMORY

    def __init__(self) -> None:
        self._records: dict[bytes, Record] = {}
        self._renew()
        renew_after_fork(self)

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> MemoryStore:
        """A new one; it has no name, and no options."""
        if url.rstrip("/") != "memory:":
            raise Misconfigured("memory:// takes no name and no options: each one is a new store")
        if not create:
            raise Misconfigured("memory:// ends with its process, so there is nothing to look at")
        return cls()

    @classmethod
    def migrate(cls, url: str, *, only_look: bool = False) -> Migration:
        """Nothing is to be made."""
        del only_look
        cls.from_url(url)
        return Migration("memory", 0, 0)

    def _renew(self) -> None:
        """A child has a copy, and nobody in it holds the lock."""
        self._mutex = threading.Lock()

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if the version its caller saw still stands."""
        records = self._records
        results: list[Record | None] = []
        with self._mutex:
            for swap in swaps:
                id, record = swap.id, swap.record
                standing = records.get(id, GONE)
                if standing.version != swap.expected:
                    results.append(standing)
                    continue
                if record is None:
                    records.pop(id, None)
                else:
                    records[id] = record
                results.append(None)
        return results

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand, in the order of *ids*."""
        return [self._records.get(id) for id in ids]

    def find(self, query: Query) -> Page:
        """Records for operators, in id order."""
        with self._mutex:
            found = sorted(r for r in self._records.values() if matches(r, query))
        page = found[: query.limit]
        return Page(page, page[-1].id if len(found) > len(page) else None)

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete up to *limit* records whose retention is over."""
        # Looked through beside the lock, because there may be many; what changed meanwhile stays.
        over = (r for r in list(self._records.values()) if is_retention_over(r, now_ms))
        taken = 0
        for record in itertools.islice(over, limit):
            with self._mutex:
                if self._records.get(record.id) is record:
                    del self._records[record.id]
                    taken += 1
        return taken

    def check(self) -> Sequence[Finding]:
        """Say plainly that this store forgets."""
        return [Finding("warning", "memory:// forgets everything when the process ends")]

    def now_ms(self) -> int:
        """The clock of this machine."""
        return time.time_ns() // 1_000_000

    def close(self) -> None:
        """Nothing to let go of: whoever opens it again finds what was there."""


class AsyncMemoryStore:
    """The same dictionary for event loops: nothing to wait for, so nothing to group."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self._store = store or MemoryStore()

    @property
    def blocking(self) -> Store:
        """The same store for threads."""
        return self._store

    async def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if the version its caller saw still stands."""
        return self._store.swap(swaps)

    async def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand, in the order of *ids*."""
        return self._store.get(ids)

    async def find(self, query: Query) -> Page:
        """Records for operators, in id order."""
        return self._store.find(query)

    async def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete up to *limit* records whose retention is over."""
        return self._store.sweep(now_ms, limit)

    async def check(self) -> Sequence[Finding]:
        """Say plainly that this store forgets."""
        return self._store.check()

    async def now_ms(self) -> int:
        """The clock of this machine."""
        return self._store.now_ms()

    async def close(self) -> None:
        """Nothing to let go of."""
