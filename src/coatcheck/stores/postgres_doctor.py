"""What a doctor should know about a PostgreSQL server, and about our table in it.

Beside `postgres_schema.py`, which makes the table. What can be tried is tried: a record is claimed,
ended, read and deleted, with the statements of every day, and all of it is undone. Who opens a
store does not try, so that it waits for nobody's lock.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
from psycopg import errors

from coatcheck.core.record import COMPLETED, RUNNING, Record, Swap
from coatcheck.core.scope import ID_BYTES
from coatcheck.errors import Misconfigured
from coatcheck.stores import postgres_schema
from coatcheck.stores.contract import Finding
from coatcheck.stores.migration import HOW
from coatcheck.stores.postgres_link import Connection
from coatcheck.stores.postgres_schema import NO_KEY, Names, known_version, outdated
from coatcheck.stores.postgres_talk import Talk

# 1 s: whoever only writes has let go of the table by then.
_LOCK_MS_MAX = 1_000


def findings_of(connection: Connection, names: Names) -> list[Finding]:
    """What the server's settings, and those of our table, mean for what is acknowledged."""
    settings = dict(
        connection.execute(
            "select name, setting from pg_settings where name = any(%s)", (list(_SETTINGS),)
        ).fetchall()
    )
    findings = [
        Finding("warning", f"{name} = {value}: {_SETTINGS[name]}")
        for name, value in settings.items()
        if value == "off"
    ]
    if settings["synchronous_commit"] == "local" and settings["synchronous_standby_names"]:
        findings.append(Finding("warning", _LOCAL))
    (only_reads,) = connection.execute(
        "select pg_is_in_recovery() or current_setting('transaction_read_only')::bool"
    ).fetchone() or (False,)
    if only_reads:
        findings.insert(0, Finding("error", "this server only reads: a standby, or told to be"))
    findings += _findings_of_table(connection, names)
    return findings or [Finding("ok", f"PostgreSQL {connection.info.server_version // 10_000}")]


def _findings_of_table(connection: psycopg.Connection[Any], names: Names) -> Iterator[Finding]:
    try:
        version = known_version(connection, names)
    except Misconfigured as error:
        yield Finding("error", str(error))
        return
    if version < len(postgres_schema.MIGRATIONS):
        yield Finding("error", outdated(names, version))
        return
    found = connection.execute(_TABLE, (names.records,)).fetchone()
    if found is None:
        gone = f"is gone, and {names.versions} is not: restore the one, or drop the other and {HOW}"
        yield Finding("error", f"{names.records} {gone}")
        return
    may_write, persistence, has_key, has_policies = found
    if not may_write:
        needed = "select, insert, update and delete"
        yield Finding("error", f"this role may not write to {names.records}; grant {needed}")
    if not has_key:
        yield Finding("error", f"{names.records} {NO_KEY}")
    if persistence == "u":
        yield Finding("warning", f"{names.records} is unlogged: a crash empties it")
    if has_policies:
        yield Finding("warning", f"{names.records}: {_POLICIES}")


def tried(connection: Connection, names: Names, talk: Talk) -> list[Finding]:
    """What cannot be done with a record; nobody else ever sees it."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(b"set local lock_timeout = %d" % _LOCK_MS_MAX)
            for said, attempt in _trials(talk):
                try:
                    # So that what a refusal leaves behind is undone by itself.
                    with connection.transaction():
                        why = "" if attempt(connection) else "nothing comes of it"
                except psycopg.Error as error:
                    if error.sqlstate is None or isinstance(error, errors.LockNotAvailable):
                        raise
                    why = " ".join(str(error).split())
                if why:
                    return [Finding("error", f"{names.records}: {said}: {why}")]
    except errors.LockNotAvailable:
        return [Finding("warning", f"{names.records}: somebody keeps it locked")]
    return []


def _trials(talk: Talk) -> Iterator[tuple[str, Callable[[Connection], bool]]]:
    """What is tried, and what it would mean that it fails."""
    id = secrets.token_bytes(ID_BYTES)
    claim = Record(id, 1, RUNNING, 1, b"", 1, 0, 1, 1, 1, "", "", "", None, None)
    ended = claim._replace(version=2, state=COMPLETED)

    def does(swap: Swap, connection: Connection) -> bool:
        return connection.converse(talk.write_once(swap))

    def is_seen(record: Record, connection: Connection) -> bool:
        return connection.converse(talk.get((id,))) == [record]

    yield "nothing can be claimed", partial(does, Swap(id, 0, claim))
    yield "what is claimed is not seen by who claimed it", partial(is_seen, claim)
    yield "what is claimed can never be ended", partial(does, Swap(id, 1, ended))
    yield "how it ended is not seen by a retry", partial(is_seen, ended)
    yield "nothing can be deleted, so it only grows", partial(does, Swap(id, 2, None))


# The key is what a claim names (`postgres_rows.py`): unique, at once, and for all rows.
_TABLE = """
select (select bool_and(has_table_privilege(c.oid, said))
        from unnest(array['select', 'insert', 'update', 'delete']) as said),
       c.relpersistence,
       exists (select from pg_index i join pg_attribute a on a.attrelid = c.oid
               where i.indrelid = c.oid and i.indnkeyatts = 1 and i.indkey[0] = a.attnum
                 and a.attname = 'id' and i.indisunique and i.indimmediate and i.indisvalid
                 and i.indpred is null),
       row_security_active(c.oid)
from pg_class c where c.oid = to_regclass(%s)
"""
_SETTINGS = {
    "fsync": "a power cut can lose or spoil everything",
    "full_page_writes": "a power cut can spoil pages",
    "synchronous_commit": "a crash forgets what was acknowledged within the last moments",
    "synchronous_standby_names": "",
}
_LOCAL = (
    "synchronous_commit = local: no standby is waited for, so that a failover loses what was "
    "acknowledged, whatever synchronous_standby_names says"
)
_POLICIES = (
    "row security is on for this role, and what its policies hide or refuse is an outage; they "
    "must let it select, insert, update and delete every row"
)
