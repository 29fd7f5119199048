"""What the doctor checks on a PostgreSQL server, and on our table there.

The settings are read. Writing is tried, with the statements of every request: a record is claimed,
completed, read and deleted in a transaction that is rolled back. Opening a store only reads the
settings, so that it waits for no lock.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import psycopg
from psycopg import errors

from coatcheck.core.flow import Flow
from coatcheck.core.identity import ID_BYTES
from coatcheck.core.record import COMPLETED, RUNNING, Record, Swap
from coatcheck.errors import Misconfigured
from coatcheck.stores.contract import Finding
from coatcheck.stores.migration import HOW, outdated
from coatcheck.stores.postgres import schema as schemas
from coatcheck.stores.postgres.connection import Connection
from coatcheck.stores.postgres.errors import NO_PRIMARY_KEY, one_line
from coatcheck.stores.postgres.schema import Names, known_version
from coatcheck.stores.postgres.swap import RecordTable

# 1 s: a transaction that only writes records is over by then.
_LOCK_MS_MAX = 1_000


def check_settings(connection: Connection, names: Names) -> list[Finding]:
    """Check whether the settings of the server and of our table can lose acknowledged writes."""
    rows = connection.fetch(
        "select name, setting from pg_settings where name = any($1)", [*_SETTINGS]
    )
    settings: dict[str, str] = {row[0]: row[1] for row in rows}
    findings = [
        Finding("warning", f"{name} = {value}: {_SETTINGS[name]}")
        for name, value in settings.items()
        if value == "off"
    ]
    if settings["synchronous_commit"] == "local" and settings["synchronous_standby_names"]:
        findings.append(Finding("warning", _LOCAL))
    ((is_read_only,),) = connection.fetch(
        "select pg_is_in_recovery() or current_setting('transaction_read_only')::bool"
    )
    if is_read_only:
        findings.insert(0, Finding("error", _READ_ONLY))
    findings += _check_table(connection, names)
    return findings or [Finding("ok", f"PostgreSQL {connection.info.server_version // 10_000}")]


def _check_table(connection: Connection, names: Names) -> Iterator[Finding]:
    try:
        version = known_version(connection, names)
    except Misconfigured as error:
        yield Finding("error", str(error))
        return
    if version < len(schemas.MIGRATIONS):
        yield Finding("error", outdated(names.records, version, len(schemas.MIGRATIONS)))
        return
    found = connection.fetch(_TABLE, names.records)
    if not found:
        gone = f"is gone, but {names.versions} is not; restore it, or drop {names.versions} and"
        yield Finding("error", f"{names.records} {gone} {HOW}")
        return
    ((may_write, persistence, has_key, has_policies),) = found
    if not may_write:
        needed = "select, insert, update and delete"
        yield Finding("error", f"this role may not write to {names.records}; grant {needed}")
    if not has_key:
        yield Finding("error", f"{names.records} {NO_PRIMARY_KEY}")
    if persistence == "u":
        yield Finding("warning", f"{names.records} is unlogged: a crash empties it")
    if has_policies:
        yield Finding("warning", f"{names.records}: {_POLICIES}")


def try_writes(connection: Connection, names: Names, table: RecordTable) -> list[Finding]:
    """Try everything that is done with a record; no other session ever sees it."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(b"set local lock_timeout = %d" % _LOCK_MS_MAX)
            for meaning, attempt, wanted in _attempts(table):
                try:
                    with connection.transaction():  # a savepoint, which a refusal rolls back
                        worked = connection.run(attempt) == wanted
                        why = "" if worked else "the statement had no effect"
                except psycopg.Error as error:
                    if error.sqlstate is None or isinstance(error, errors.LockNotAvailable):
                        raise
                    why = one_line(error)
                if why:
                    return [Finding("error", f"{names.records}: {meaning}: {why}")]
    except errors.LockNotAvailable:
        locked = f"another session has locked it for more than {_LOCK_MS_MAX / 1_000:g} s"
        return [Finding("warning", f"{names.records}: {locked}, so nothing was tried")]
    return []


def _attempts(table: RecordTable) -> Iterator[tuple[str, Flow[object], object]]:
    """Yield what a failure would mean, what is tried, and its result if it works."""
    id = secrets.token_bytes(ID_BYTES)
    claim = Record(id, 1, RUNNING, 1, b"", 1, 0, 1, 1, 1, "", "", "", None, None)
    completed = claim._replace(version=2, state=COMPLETED)
    no_conflict: dict[bytes, Record] = {}
    yield "no key can be claimed", table.write([Swap(id, 0, claim)]), no_conflict
    yield "a claim cannot be read after it was written", table.get((id,)), [claim]
    yield "a claim can never be completed", table.write([Swap(id, 1, completed)]), no_conflict
    yield "a completed record cannot be read by a retry", table.get((id,)), [completed]
    delete = table.write([Swap(id, 2, None)])
    yield "records cannot be deleted, so the table only grows", delete, no_conflict


# `on conflict (id)` needs a unique index on `id` that is not deferred and has no condition.
_TABLE = """
select (select bool_and(has_table_privilege(c.oid, privilege))
        from unnest(array['select', 'insert', 'update', 'delete']) as privilege),
       c.relpersistence::text,
       exists (select from pg_index i join pg_attribute a on a.attrelid = c.oid
               where i.indrelid = c.oid and i.indnkeyatts = 1 and i.indkey[0] = a.attnum
                 and a.attname = 'id' and i.indisunique and i.indimmediate and i.indisvalid
                 and i.indpred is null),
       row_security_active(c.oid)
from pg_class c where c.oid = to_regclass($1)
"""
_SETTINGS = {
    "fsync": "a power cut can lose or corrupt everything",
    "full_page_writes": "a power cut can corrupt pages",
    "synchronous_commit": "a crash loses what was acknowledged during the last moments",
    "synchronous_standby_names": "",
}
_READ_ONLY = "this server is read-only: a standby, or default_transaction_read_only is on"
_LOCAL = (
    "synchronous_commit = local: commits do not wait for any standby, so a failover loses "
    "acknowledged writes, in spite of synchronous_standby_names"
)
_POLICIES = (
    "row security is on for this role, and a row that its policies hide or refuse is an outage; "
    "they must let it select, insert, update and delete every row"
)
