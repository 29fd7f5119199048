"""What `coatcheck doctor` checks about an SQLite file: it tries a record, and inspects the file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from coatcheck.core.identity import ID_BYTES
from coatcheck.core.record import COMPLETED, RUNNING, Record, Swap
from coatcheck.stores.contract import Finding
from coatcheck.stores.sqlite import statements
from coatcheck.stores.sqlite.errors import damage

# The mounted file systems, on Linux.
_MOUNTS = Path("/proc/self/mounts")


def try_record(connection: sqlite3.Connection, path: str) -> Iterator[Finding]:
    """
    Claim, complete, read and delete a record, and sweep; yield what does not work.

    The caller has begun a transaction, and rolls it back.
    """
    id = os.urandom(ID_BYTES)
    claim = Record(id, 1, RUNNING, 1, b"", 1, 0, 1, 1, 1, "", "", "", None, None)
    completed = claim._replace(version=2, state=COMPLETED)
    for swap, failure in (
        (Swap(id, 0, claim), "a claim cannot be written"),
        (Swap(id, 1, completed), "a claim cannot be completed"),
    ):
        if not statements.is_applied(connection, swap):
            yield Finding("error", f"{path}: {failure}")
            return
    if statements.read(connection, (id,)) != {id: completed}:
        yield Finding("error", f"{path}: a completed record cannot be read back")
        return
    connection.execute(statements.SWEEP, (0, 1))
    if not statements.is_applied(connection, Swap(id, 2, None)):
        yield Finding("error", f"{path}: a record cannot be deleted")


def inspect_file(connection: sqlite3.Connection, path: str) -> Iterator[Finding]:
    """Yield how durable the file is, whether it is damaged, and where it is stored."""
    (journal_mode,) = connection.execute("pragma journal_mode").fetchone()
    (synchronous,) = connection.execute("pragma synchronous").fetchone()
    if journal_mode == "wal":
        yield Finding("ok", f"{path}: write-ahead log, synchronous = {synchronous} (2: full)")
    else:
        message = f"{path}: journal_mode = {journal_mode}; safe, but slower than wal"
        yield Finding("warning", message)
    (result,) = connection.execute("pragma quick_check(1)").fetchone()
    if result == "ok":
        yield Finding("ok", f"{path}: the integrity check found no damage")
    else:
        yield Finding("error", f"{path}: {damage(result)}")
    kind = _file_system_of(path)
    if kind in ("tmpfs", "ramfs"):
        message = f"{path}: is on {kind}, in memory; all records are lost when the machine restarts"
        yield Finding("warning", message)
    elif kind.startswith(("nfs", "cifs", "smb", "9p", "fuse")):
        message = f"{path}: is on {kind}, which may not support SQLite's locks; use a local disk"
        yield Finding("warning", message)


def _file_system_of(path: str) -> str:
    """Return the type of the file system that holds *path*; "" where the system does not tell."""
    longest, kind = "", ""
    with suppress(OSError), _MOUNTS.open(encoding="utf-8") as mounts:
        for line in mounts:
            _, mount_point, its_kind, *_ = line.split()
            is_below = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
            if is_below and len(mount_point) >= len(longest):
                longest, kind = mount_point, its_kind
    return kind
