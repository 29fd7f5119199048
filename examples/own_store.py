"""A complete store: an append-only log of JSON lines, shared by all processes of one machine.

Every line is a record after a change, or the id of a deleted one. The current records are what
remains after reading all lines; each process keeps them in a dictionary and reads only new lines.
A lock on the file makes a swap atomic: with it held, a process reads what others have appended,
compares versions, and appends its own lines. One fsync makes a whole batch durable.

The file only grows. A store for production would also rewrite it now and then.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import coatcheck
from coatcheck.core.record import GONE, Record, Swap, is_retention_over
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import Finding, Page, Query
from coatcheck.stores.contract import SWEEP_BATCH, matching, page_of

BYTES_FIELDS = ("id", "fingerprint", "progress", "response")


class LogStore:
    """Records in a log file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()
        self._records: dict[bytes, Record] = {}
        self._position = 0  # how much of the file has been read
        self._is_closed = False

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one."""
        with self._locked() as file:
            current = {swap.id: self._records.get(swap.id, GONE) for swap in swaps}
            conflicts = {s.id: current[s.id] for s in swaps if current[s.id].version != s.expected}
            self._append(file, [encode(swap) for swap in swaps if swap.id not in conflicts])
            return [conflicts.get(swap.id) for swap in swaps]

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Return the current records, in the order of *ids*."""
        with self._locked():
            return [self._records.get(id) for id in ids]

    def find(self, query: Query) -> Page:
        """Return records for operators."""
        with self._locked():
            records = sorted(self._records.values())
        return page_of(matching(records, query), query)

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete up to *limit* records whose retention is over."""
        with self._locked() as file:
            expired = [r.id for r in self._records.values() if is_retention_over(r, now_ms)][:limit]
            self._append(file, [encode(Swap(id, 0, None)) for id in expired])
            return len(expired)

    def check(self) -> Sequence[Finding]:
        """Return what could make this store lose records, for `coatcheck doctor`."""
        try:
            with self._locked():
                return [Finding("ok", f"{self.path} can be locked and written")]
        except StoreUnavailable as error:
            return [Finding("error", str(error))]

    def now_ms(self) -> int:
        """Return the clock: all processes are on this machine, so its own will do."""
        return time.time_ns() // 1_000_000

    def close(self) -> None:
        """Refuse further use; the file is open during calls only."""
        self._is_closed = True

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """Open and lock the file, and read what other processes have appended."""
        if self._is_closed:
            raise StoreUnavailable(f"{self.path}: the store is closed")
        try:
            # Opened for each call: the lock then also excludes other threads, and a forked child
            # shares no open file with its parent.
            with self.path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                try:
                    self._catch_up(file)
                    yield file
                finally:
                    # By name, because a child that was forked meanwhile has the file open, too.
                    fcntl.flock(file, fcntl.LOCK_UN)
        except OSError as error:
            raise StoreUnavailable(f"{self.path}: {error}") from error

    def _catch_up(self, file: BinaryIO) -> None:
        """Apply the lines that were appended since the last call."""
        if os.fstat(file.fileno()).st_size < self._position:
            raise StoreUnavailable(f"{self.path} was deleted or truncated; restart this process")
        file.seek(self._position)
        new = file.read()
        complete, end, torn = new.rpartition(b"\n")
        if torn:  # a process was killed while it wrote this line, so it acknowledged nothing
            file.truncate(self._position + len(complete) + len(end))
        for line in complete.splitlines():
            swap = decode(line)
            if swap.record is None:
                self._records.pop(swap.id, None)
            else:
                self._records[swap.id] = swap.record
        self._position += len(complete) + len(end)

    def _append(self, file: BinaryIO, lines: Sequence[bytes]) -> None:
        """Write *lines* durably, then apply them like those of any other process."""
        if not lines:
            return
        try:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:  # some lines may be in the file, and may survive a crash
            raise StoreUnavailable(f"{self.path}: {error}", is_ambiguous=True) from error
        self._catch_up(file)


def encode(swap: Swap) -> bytes:
    """Return the line for a swap that is applied."""
    fields = {"id": swap.id} if swap.record is None else swap.record._asdict()
    texts = {n: v.hex() if isinstance(v, bytes) else v for n, v in fields.items()}
    return json.dumps(texts).encode() + b"\n"


def decode(line: bytes) -> Swap:
    """Return the swap that *line* was made of; the expected version is not kept."""
    fields = json.loads(line)
    for name in BYTES_FIELDS:
        if fields.get(name) is not None:
            fields[name] = bytes.fromhex(fields[name])
    return Swap(fields["id"], 0, Record(**fields) if "version" in fields else None)


if __name__ == "__main__":
    with coatcheck.Engine(LogStore("keys.log")) as engine:
        for _ in range(2):
            print(engine.run("order-42", lambda: print("placed") or "order 42", scope="orders"))
