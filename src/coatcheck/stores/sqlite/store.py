"""The SQLite store: one file, durable, shared by any number of processes on one machine.

An acknowledged swap survives `kill -9` and a power cut (write-ahead log, one fsync per commit).
Three connections: one writes, one reads without waiting for it, one serves searches. SQLite lets
one process write at a time; the others retry until the busy timeout.

A batch of any size is a few statements. Every statement releases the interpreter lock and has to
get it back, which is slow beside a busy event loop. So claims are one `insert` of many rows and
changes are one `update` from many rows. The number of changed rows tells whether all swaps were
applied; only if not, the store repeats them one by one.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence

from coatcheck.core.record import GONE, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import SWEEP_BATCH, Finding, Page, Query, compact_swap, page_of
from coatcheck.stores.migration import Migration, migration_of
from coatcheck.stores.record_counts import RecordCount
from coatcheck.stores.registry import SQLITE
from coatcheck.stores.sqlite import doctor, schema, statements
from coatcheck.stores.sqlite.connection import SqliteConnection, execute_with_retry
from coatcheck.stores.sqlite.transaction import transaction_statements_for
from coatcheck.stores.sqlite.url import parse_url

# 5 s: thousands of commits of other processes. A lock that takes longer is better reported.
BUSY_TIMEOUT_S = 5.0
_REPLACED = (
    "the file was deleted or replaced while in use; restart every process that uses this store"
)


class SqliteStore:
    """
    Records in an SQLite file, which may be the application's own database.

    *busy_timeout_s* limits how long to wait while another process holds the write lock.
    """

    info = SQLITE

    # For event loops, which use this store through a thread: the swaps in one call, and the calls
    # at the same time. SQLite has one writer, so a second call would only wait for the first.
    batch_max = 256
    in_flight = 1

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        compact: bool = False,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        create: bool = True,
    ) -> None:
        # Absolute, because a server may change its directory before the first request.
        self.path = os.path.abspath(path)  # noqa: PTH100 - pathlib has no equivalent
        schema.prepare(self.path, busy_timeout_s, create=create)
        self._identity = _identity_of(self.path)
        self.is_compact = compact
        self._busy_timeout_s = busy_timeout_s
        plain = transaction_statements_for(self.path, busy_timeout_s, may_create=create)
        self.transaction_statements = plain.over(compact_swap) if compact else plain
        self._writer = SqliteConnection(self.path, busy_timeout_s, writes=True)
        self._reader = SqliteConnection(self.path, busy_timeout_s)
        self._search = SqliteConnection(self.path, busy_timeout_s)

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> SqliteStore:
        """Open `sqlite:///relative.db` or `sqlite:////absolute.db`; `url.py` has the options."""
        path, options = parse_url(url)
        return cls(path, create=create, **options)

    @classmethod
    def migrate(cls, url: str, *, only_look: bool = False) -> Migration:
        """Create the file and its tables, or migrate them."""
        path, options = parse_url(url)
        busy_timeout_s = options.get("busy_timeout_s", BUSY_TIMEOUT_S)
        found = schema.version_at(path, busy_timeout_s)
        if not only_look:
            schema.prepare(path, busy_timeout_s, create=True)
        return migration_of(path, found, len(schema.MIGRATIONS), only_look=only_look)

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if its version in the file is still the expected one."""
        if not swaps:
            return []
        if self.is_compact:
            swaps = [compact_swap(swap) for swap in swaps]
        with self._writer as connection:
            if _identity_of(self.path) != self._identity:
                # Other processes no longer see our file under this path.
                raise StoreUnavailable(f"{self.path}: {_REPLACED}")
            if len(swaps) == 1:
                return [self._swap_one(connection, swaps[0])]
            return self._swap_many(connection, swaps)

    def _swap_one(self, connection: sqlite3.Connection, swap: Swap) -> Record | None:
        """One statement if it is applied, two if it conflicts, and no transaction."""
        if self._execute(connection, *statements.write_one(swap)).rowcount == 1:
            return None
        current = statements.read(connection, (swap.id,)).get(swap.id, GONE)
        if current.version != swap.expected:
            return current
        # The versions match, yet nothing was written: the new record has another expiry, or the
        # current one appeared or disappeared between the two statements. A transaction settles it.
        return self._swap_many(connection, (swap,))[0]

    def _swap_many(
        self, connection: sqlite3.Connection, swaps: Sequence[Swap]
    ) -> Sequence[Record | None]:
        """One transaction; after an error `SqliteConnection` rolls it back."""
        self._execute(connection, "begin immediate")
        if statements.write_all(connection, swaps):
            connection.execute("commit")
            return [None] * len(swaps)
        # The rows do not tell which swaps conflict: an equal swap of another process leaves an
        # equal row, and a key that starts over is no conflict at all. So repeat them one by one.
        connection.execute("rollback")
        self._execute(connection, "begin immediate")
        conflicts = {swap.id for swap in swaps if not statements.is_applied(connection, swap)}
        current = statements.read(connection, [*conflicts])
        connection.execute("commit")
        return [current.get(swap.id, GONE) if swap.id in conflicts else None for swap in swaps]

    def _execute(
        self, connection: sqlite3.Connection, statement: str, parameters: Sequence[object] = ()
    ) -> sqlite3.Cursor:
        return execute_with_retry(connection, self._busy_timeout_s, statement, parameters)

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Return the current records in the order of *ids*; never waits for a writer."""
        with self._reader as connection:
            records = statements.read(connection, ids)
        return [records.get(id) for id in ids]

    def find(self, query: Query) -> Page:
        """Return records for operators, on a connection that delays no request."""
        with self._search as connection:
            rows = connection.execute(*statements.find(query)).fetchall()
        return page_of(map(statements.record_of, rows), query)

    def count_records(self) -> Sequence[RecordCount]:
        """Count records by state and label, in one statement that reads no response."""
        with self._search as connection:
            return [*map(statements.record_count_of, connection.execute(statements.COUNT))]

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete up to *limit* records whose retention is over; return how many."""
        with self._writer as connection:
            return self._execute(connection, statements.SWEEP, (now_ms, limit)).rowcount

    def check(self) -> Sequence[Finding]:
        """Check that records can be written, and that the file is durable and not damaged."""
        findings: list[Finding] = []
        try:
            with self._writer as connection:
                self._execute(connection, "begin immediate")
                findings += doctor.try_record(connection, self.path)
                connection.execute("rollback")
            self._search.disconnect()  # its page cache would hide damage on the disk
            with self._search as connection:
                findings += doctor.inspect_file(connection, self.path)
        except StoreUnavailable as error:
            findings.append(Finding("error", str(error)))
        except sqlite3.IntegrityError as error:  # raised by a trigger, for example
            findings.append(Finding("error", f"{self.path}: no record can be written: {error}"))
        if _identity_of(self.path) != self._identity:
            findings.append(Finding("error", f"{self.path}: {_REPLACED}"))
        return findings

    def now_ms(self) -> int:
        """Return this machine's clock."""
        return time.time_ns() // 1_000_000

    def close(self) -> None:
        """Close the connections; the last process to close moves the log into the file."""
        self._reader.close()
        self._search.close()
        self._writer.close()


def _identity_of(path: str) -> tuple[int, int] | None:
    """Return what distinguishes this file from a replacement; None if it does not exist."""
    try:
        status = os.stat(path)  # noqa: PTH116 - before every write, and Path takes three times as long
    except OSError:
        return None
    return status.st_dev, status.st_ino
