"""Replay cache: completed records of this process, for replays that need no store.

Correct because what an execution returned never changes until its window is over, and `verdict`
checks the window of a cached record like that of any other. A decision of an operator may be
corrected, so it is not here. Bounded in number and in bytes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from coatcheck.core.progress import only_trace
from coatcheck.core.record import Record

# 16 MiB and 10 000 records: some minutes of retries at a thousand requests a second, and little
# beside the rest of a Python process.
CACHE_BYTES_MAX = 16 * 1024 * 1024
CACHE_RECORDS_MAX = 10_000
# A few large responses must not push out thousands of small ones.
RECORD_BYTES_MAX = 64 * 1024


class ReplayCache:
    """Least recently used records leave first."""

    def __init__(
        self, *, bytes_max: int = CACHE_BYTES_MAX, records_max: int = CACHE_RECORDS_MAX
    ) -> None:
        self._records: OrderedDict[bytes, Record] = OrderedDict()
        # Whether a record is here; on the path of every request, where a method is twice as slow.
        self.knows: Callable[[bytes], bool] = self._records.__contains__
        self._bytes = 0
        # Only for changes: if two threads miscount, the count stays wrong.
        self._mutex = threading.Lock()
        self._bytes_max = bytes_max
        self._records_max = records_max

    def __len__(self) -> int:
        return len(self._records)

    def get(self, id: bytes) -> Record | None:
        """The completed record of *id*, if it is here."""
        record = self._records.get(id)
        if record is not None:
            try:
                self._records.move_to_end(id)
            except KeyError:  # another thread has just removed it; the record is still right
                pass
        return record

    def put(self, record: Record) -> None:
        """Remember *record* without its steps, if it has a response that can be replayed."""
        if record.response is None:
            return
        size = _size_of(record)
        if size > RECORD_BYTES_MAX:
            return
        if record.progress is not None:
            record = only_trace(record)
        records = self._records
        with self._mutex:
            if record.id in records:  # of an earlier generation
                self._bytes -= _size_of(records.pop(record.id))
            records[record.id] = record
            self._bytes += size
            while self._bytes > self._bytes_max or len(records) > self._records_max:
                _, oldest = records.popitem(last=False)
                self._bytes -= _size_of(oldest)

    def forget(self, id: bytes) -> None:
        """Remove the record of *id*, if it is here."""
        with self._mutex:
            record = self._records.pop(id, None)
            if record is not None:
                self._bytes -= _size_of(record)


def _size_of(record: Record) -> int:
    """The parts whose length clients and handlers choose; the rest is bounded by the number."""
    return len(record.response or b"") + len(record.label) + len(record.key)
