"""The file beneath the SQLite store: its schema, opening it, and what it can do to us.

Below `sqlite.py`, which knows what the rows mean. The file may be the application's own database,
so everything of ours has a name that begins with `coatcheck_`, and nothing that belongs to the
file as a whole (`user_version`, `application_id`) is touched.

Invariant: an error of SQLite's leaves as `StoreUnavailable`, or as `Misconfigured` where opening
the same file again could never work.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from coatcheck.errors import CoatcheckError, Misconfigured, StoreUnavailable
from coatcheck.stores.migration import HOW

# 3.35 (2021): the oldest we test with; `update … from` and its early bugs are behind it.
SQLITE_VERSION_MIN = (3, 35)

# Bytes for each completed record, 64 at a time, beside a response of 150: 169 in this layout (a
# million records), 197 clustered by id (`without rowid`, 200 000 records); beside one of 400: 232
# and 326. Clustered rows come and grow at random places, so that a third of every page stays empty
# and every completion writes a page of its own. Rows in order of arrival fill their pages, and
# only the index on `id`, 26 bytes of each, goes to random places.
#
# What makes a row small: integers take as many bytes as they need, and 0 and 1 take none. So the
# times are kept as distances (`age_ms` is 0 or 1 in nearly every record, `margin_ms` is 3 bytes),
# and hexadecimal text is kept as the bytes it stands for (see `sqlite_rows.py`).
#
# `expires_ms` is the only other index. It changes only with a new life, so completing touches
# none, and it grows at its end like the table.
_TABLE = """
create table coatcheck_records (
  n              integer primary key,  -- in order of arrival
  id             blob    not null,
  version        integer not null,
  state          integer not null,
  attempt        integer not null,
  fingerprint    blob    not null,
  age_ms         integer not null,     -- version - created_ms
  lease_until_ms integer not null,
  margin_ms      integer not null,     -- expires_ms - window_until_ms
  expires_ms     integer not null,
  nonce          integer not null,
  label          blob    not null,
  scope          blob    not null,
  key            blob    not null,
  progress       blob,
  response       blob
)
"""
_FIRST = (
    "create table coatcheck_meta (name text primary key, value integer) without rowid",
    _TABLE,
    "create unique index coatcheck_records_id on coatcheck_records (id)",
    "create index coatcheck_records_expires on coatcheck_records (expires_ms)",
)
# A list that only grows; how many of them were made is the version of the schema.
MIGRATIONS: tuple[tuple[str, ...], ...] = (_FIRST,)

# So many pages of the write-ahead log are gathered before they are copied into the file: 1 000, and
# up to 4 000 in a large one. There the copying takes long, because most pages of the log are pages
# of their own; at 1 000 the slowest twentieth of all batches took half as long again. In a small
# file a short log is better: it is soon written over, and to sync a log that still grows takes
# half as long again as well.
_CHECKPOINT_PAGES_MIN = 1_000
_CHECKPOINT_PAGES_MAX = 4_000
_CHECKPOINTS_PER_FILE = 16

# 8 MB for each connection: the inner pages of both indexes of some million records.
_CACHE_KIB = 8_192

# 128: every statement that `sqlite_rows.py` has, so that none is compiled twice.
_STATEMENTS_MAX = 128

# What is mounted where, on Linux.
_MOUNTS = Path("/proc/self/mounts")

# 0.25 ms between attempts to get the write lock, half a commit. SQLite's own waiting doubles up to
# 100 ms, and whoever sleeps that long beside a busy process is overtaken for seconds.
_RETRY_S = 0.000_25

# What happened, in words; whatever is not here is told in SQLite's own.
_FAULTS = {
    sqlite3.SQLITE_BUSY: "another process keeps it locked",
    sqlite3.SQLITE_LOCKED: "another connection keeps it locked",
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "it cannot be written; make the file and its directory writable",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; is its directory there, and may we write to it?",
    sqlite3.SQLITE_CORRUPT: "it is damaged; restore a backup, or try `sqlite3 FILE .recover`",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite database",
    sqlite3.SQLITE_IOERR: "the disk did not read or write it",
}
_HOPELESS = {
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
}
# After these the connection is as good as before. After these and the hopeless ones nothing was
# written; any other error of a commit may have come when the log already had it.
PASSING = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL}


def prepare(path: str, busy_timeout_s: float, *, create: bool) -> None:
    """
    Make *path* a file that a store can use, or say why it cannot be one.

    Where *create* is False nothing is made: what is missing is an error.

    Any number of processes may do this at once; the connection is closed again, so that a server
    that opens a store and forks afterwards has nothing to hand down.
    """
    if sqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
        wanted = ".".join(map(str, SQLITE_VERSION_MIN))
        raise Misconfigured(
            f"this Python has SQLite {sqlite3.sqlite_version}, but {wanted} or newer is needed; "
            "use a newer Python, or another store"
        )
    if not create and not Path(path).is_file():
        raise Misconfigured(f"there is no database at {path}; {HOW}")
    try:
        with closing(connect(path, busy_timeout_s, writes=True, mode="rwc")) as connection:
            _ensure_schema(connection, path, busy_timeout_s, create=create)
            in_turn(connection, busy_timeout_s, "pragma journal_mode = wal")
    except sqlite3.Error as error:
        raise explained(error, path, opening=True) from error


def connect(
    path: str, busy_timeout_s: float, *, writes: bool = False, mode: str = "rw"
) -> sqlite3.Connection:
    """
    A connection to *path* that waits, commits and caches as a store needs it.

    Mode "rw" does not create the file: if it is gone, its records are gone, and a fresh one would
    let every retry execute again.
    """
    connection = sqlite3.connect(
        f"file:{quote(os.fsencode(path))}?mode={mode}",
        uri=True,
        timeout=busy_timeout_s,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS_MAX,
    )
    try:
        connection.execute("pragma synchronous = full")
        connection.execute(f"pragma wal_autocheckpoint = {_checkpoint_pages(connection)}")
        connection.execute(f"pragma cache_size = -{_CACHE_KIB}")
        if writes:  # and waits by `in_turn`
            connection.execute("pragma busy_timeout = 0")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _checkpoint_pages(connection: sqlite3.Connection) -> int:
    (file_pages,) = connection.execute("pragma page_count").fetchone()
    wanted: int = file_pages // _CHECKPOINTS_PER_FILE
    return max(_CHECKPOINT_PAGES_MIN, min(wanted, _CHECKPOINT_PAGES_MAX))


def _ensure_schema(
    connection: sqlite3.Connection, path: str, busy_timeout_s: float, *, create: bool
) -> None:
    if not create and schema_version(connection) == 0:  # then nothing of it is touched
        raise Misconfigured(f"{path} holds no records of coatcheck; {HOW}")
    # Immediate: of several processes that start at once the first creates or upgrades, and the
    # others see it; and a file that cannot be written says so now, not at the first request.
    in_turn(connection, busy_timeout_s, "begin immediate")
    found = known_version(connection, path)
    if found < len(MIGRATIONS) and not create:
        raise Misconfigured(
            f"{path} has coatcheck schema {found}, older than {len(MIGRATIONS)} of this release; "
            f"{HOW}"
        )
    for version, statements in enumerate(MIGRATIONS[found:], found + 1):
        for statement in statements:
            connection.execute(statement)
        connection.execute("insert or replace into coatcheck_meta values ('schema', ?)", (version,))
    # In a new file, which has no write-ahead log yet, a commit waits for those who read.
    in_turn(connection, busy_timeout_s, "commit")


def version_at(path: str, busy_timeout_s: float) -> int:
    """The version of our tables in the file at *path*, which may not be there; nothing is made."""
    if not Path(path).is_file():
        return 0
    try:
        with closing(connect(path, busy_timeout_s)) as connection:
            return known_version(connection, path)
    except sqlite3.Error as error:
        raise explained(error, path, opening=True) from error


def known_version(connection: sqlite3.Connection, path: str) -> int:
    """The version of our tables in this file, if this release knows it."""
    found = schema_version(connection)
    if found > len(MIGRATIONS):
        raise Misconfigured(
            f"{path} has coatcheck schema {found}, but this version of coatcheck knows schemas up "
            f"to {len(MIGRATIONS)}; upgrade coatcheck, or use another file"
        )
    return found


def schema_version(connection: sqlite3.Connection) -> int:
    """The version of our tables in this file; 0 where there are none."""
    known = "select count(*) from sqlite_master where type = 'table' and name = 'coatcheck_meta'"
    if connection.execute(known).fetchone() == (0,):
        return 0
    row = connection.execute("select value from coatcheck_meta where name = 'schema'").fetchone()
    return 0 if row is None else int(row[0])


def in_turn(
    connection: sqlite3.Connection,
    busy_timeout_s: float,
    statement: str,
    parameters: Sequence[object] = (),
) -> sqlite3.Cursor:
    """Execute what needs the write lock; wait while another process has it."""
    try:
        return connection.execute(statement, parameters)
    except sqlite3.OperationalError as error:
        if code_of(error) != sqlite3.SQLITE_BUSY:
            raise
    deadline_s = time.monotonic() + busy_timeout_s
    while True:
        time.sleep(_RETRY_S)
        try:
            return connection.execute(statement, parameters)
        except sqlite3.OperationalError as error:
            if code_of(error) != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline_s:
                raise


def explained(error: sqlite3.Error, path: str, *, opening: bool = False) -> CoatcheckError:
    """What *error* means to whoever runs the store."""
    code = code_of(error)
    message = f"{path}: {_FAULTS.get(code, 'SQLite failed')} ({error})"
    if opening and code in _HOPELESS:
        return Misconfigured(message)
    return StoreUnavailable(message, is_ambiguous=code not in PASSING | _HOPELESS)


def code_of(error: BaseException) -> int:
    """What kind of error SQLite says it is; 0 where it was not SQLite."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF  # the rest says which system call it was


def findings_about(
    connection: sqlite3.Connection, path: str
) -> Iterator[tuple[Literal["ok", "warning", "error"], str]]:
    """What a doctor should know about the file."""
    (journal_mode,) = connection.execute("pragma journal_mode").fetchone()
    (synchronous,) = connection.execute("pragma synchronous").fetchone()
    if journal_mode == "wal":
        yield "ok", f"{path}: write-ahead log, synchronous = {synchronous} (2: full)"
    else:
        yield "warning", f"{path}: journal_mode = {journal_mode}; safe, but slower than wal"
    (sound,) = connection.execute("pragma quick_check(1)").fetchone()
    if sound == "ok":
        yield "ok", f"{path}: every page is sound"
    else:
        yield "error", f"{path}: {_FAULTS[sqlite3.SQLITE_CORRUPT]} ({sound})"
    kind = _file_system_of(path)
    if kind in ("tmpfs", "ramfs"):
        yield "warning", f"{path}: is in memory ({kind}); a restart of the machine forgets it"
    elif kind.startswith(("nfs", "cifs", "smb", "9p", "fuse")):
        yield "warning", f"{path}: {kind} may not keep SQLite's locks; use a local disk"


def identity_of(path: str) -> tuple[int, int] | None:
    """What tells this file from one that is put in its place; None where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - before every write, and a Path takes three times as long
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _file_system_of(path: str) -> str:
    """The kind of file system that holds *path*; empty where the system does not say."""
    found, kind = "", ""
    with suppress(OSError), _MOUNTS.open(encoding="utf-8") as mounts:
        for line in mounts:
            _, place, its_kind, *_ = line.split()
            is_below = path == place or path.startswith(place.rstrip("/") + "/")
            if is_below and len(place) >= len(found):
                found, kind = place, its_kind
    return kind
