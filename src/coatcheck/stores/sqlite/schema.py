"""The schema of the SQLite store: creating it, migrating it, reading its version.

The file may be the application's own database. So all our names begin with `coatcheck_`, and the
settings of the whole file (`user_version`, `application_id`, and its journal mode if it has tables
of the application) stay unchanged.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from coatcheck.errors import Misconfigured
from coatcheck.stores.migration import HOW, outdated, supported
from coatcheck.stores.sqlite.connection import connect, execute_with_retry
from coatcheck.stores.sqlite.errors import to_store_error

# 3.35 (2021): the oldest version we test with; it has `update … from` without its early bugs.
SQLITE_VERSION_MIN = (3, 35)

# Rows are stored in order of arrival, not clustered by id (`without rowid`): clustered rows are
# inserted and grow at random places, so a third of every page stays empty and every completion
# writes a page of its own. SQLite stores integers in as few bytes as they need, and 0 and 1 in
# none, so times are stored as differences. `expires_ms` changes only when a key starts over after
# its window, so completing a record touches no index.
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
# If there is one, the file is the application's own, which decides about its journal mode.
_FOREIGN_TABLE = r"""
select 1 from sqlite_master where type = 'table'
  and name not like 'coatcheck\_%' escape '\' and name not like 'sqlite\_%' escape '\'
"""
# Only append: the schema version is the number of migrations that were applied.
MIGRATIONS: tuple[tuple[str, ...], ...] = (_FIRST,)


def prepare(path: str, busy_timeout_s: float, *, create: bool) -> None:
    """
    Create or migrate the tables in *path*; without *create*, raise if anything is missing.

    Any number of processes may do this at the same time. The connection is closed again, so a
    server that opens a store and forks afterwards passes no connection on.
    """
    if sqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
        oldest = ".".join(map(str, SQLITE_VERSION_MIN))
        raise Misconfigured(
            f"this Python has SQLite {sqlite3.sqlite_version}, but coatcheck needs {oldest} or "
            "newer; use a newer Python, or another store"
        )
    if not create and not Path(path).is_file():
        raise Misconfigured(f"there is no database at {path}; check the path, or {HOW}")
    try:
        with closing(connect(path, busy_timeout_s, writes=True, mode="rwc")) as connection:
            _migrate(connection, path, busy_timeout_s, create=create)
            if connection.execute(_FOREIGN_TABLE).fetchone() is None:
                execute_with_retry(connection, busy_timeout_s, "pragma journal_mode = wal")
    except sqlite3.Error as error:
        raise to_store_error(error, path, opening=True) from error


def _migrate(
    connection: sqlite3.Connection, path: str, busy_timeout_s: float, *, create: bool
) -> None:
    found = supported(path, _version_in(connection), len(MIGRATIONS))
    if found < len(MIGRATIONS) and not create:  # checked before anything is locked
        raise Misconfigured(outdated(f"{path}: coatcheck_records", found, len(MIGRATIONS)))
    # Immediate: of several processes that start at once, the first one migrates and the others see
    # the result. It also makes a read-only file fail now instead of at the first request.
    execute_with_retry(connection, busy_timeout_s, "begin immediate")
    found = supported(path, _version_in(connection), len(MIGRATIONS))
    for version, statements in enumerate(MIGRATIONS[found:], found + 1):
        for statement in statements:
            connection.execute(statement)
        connection.execute("insert or replace into coatcheck_meta values ('schema', ?)", (version,))
    # A new file has no write-ahead log yet, so this commit has to wait for readers.
    execute_with_retry(connection, busy_timeout_s, "commit")


def version_at(path: str, busy_timeout_s: float) -> int:
    """Return the schema version in the file at *path*, 0 if there is none; change nothing."""
    if not Path(path).is_file():
        return 0
    try:
        with closing(connect(path, busy_timeout_s)) as connection:
            return supported(path, _version_in(connection), len(MIGRATIONS))
    except sqlite3.Error as error:
        raise to_store_error(error, path, opening=True) from error


def _version_in(connection: sqlite3.Connection) -> int:
    exists = "select count(*) from sqlite_master where type = 'table' and name = 'coatcheck_meta'"
    if connection.execute(exists).fetchone() == (0,):
        return 0
    row = connection.execute("select value from coatcheck_meta where name = 'schema'").fetchone()
    return 0 if row is None else int(row[0])
