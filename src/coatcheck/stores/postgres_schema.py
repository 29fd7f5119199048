"""The schema of the PostgreSQL store: plain SQL, versioned, safe with several nodes at once.

Everything of ours has a name that begins with `coatcheck_`, so that it can live in the
application's own database. Migrations are a list that only grows; a database that is ahead of it
was made by a newer release, and is refused.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from coatcheck.errors import Misconfigured
from coatcheck.stores.contract import Finding

# Half-full pages and no index on what completing changes: an update stays on its page and touches
# no index (a "HOT" update), which is most of what PostgreSQL can do for us.
_FIRST = """
create table {records} (
  id              bytea    primary key,
  version         bigint   not null,
  state           smallint not null,
  attempt         integer  not null,
  fingerprint     bytea    not null,
  created_ms      bigint   not null,
  lease_until_ms  bigint   not null,
  window_until_ms bigint   not null,
  expires_ms      bigint   not null,
  nonce           bigint   not null,
  label           text     not null,
  scope           text     not null,
  key             text     not null,
  progress        bytea,
  response        bytea
) with (
  fillfactor = 50,
  autovacuum_vacuum_scale_factor = 0.05,
  autovacuum_vacuum_insert_scale_factor = 0.05
);
create index coatcheck_records_expires on {records} (expires_ms);
"""
MIGRATIONS = (_FIRST,)

# Any number that nobody else locks: the ASCII codes of "coatchk".
_LOCK = 0x636F61746368


class Names:
    """What our tables are called, in the schema that was asked for or in the one found first."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self.records = self._named("coatcheck_records")
        self.versions = self._named("coatcheck_schema")

    def _named(self, table: str) -> str:
        name = sql.Identifier(self.schema, table) if self.schema else sql.Identifier(table)
        return name.as_string()


def prepare(connection: psycopg.Connection[Any], names: Names, *, create: bool) -> None:
    """Make the tables, or bring them up to date; refuse what is missing or from a newer release."""
    version = version_of(connection, names)
    if version == len(MIGRATIONS):
        return
    if version > len(MIGRATIONS):
        raise Misconfigured(
            f"{names.records}: its schema has version {version}, and this release knows "
            f"{len(MIGRATIONS)}; a newer coatcheck has been here, so update this one"
        )
    if not create:
        raise Misconfigured(f"{names.records} is missing or older than this release")
    with connection.transaction():
        # Nodes that start together do it one after the other; the later ones find it done.
        connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK,))
        if names.schema:
            schema = sql.Identifier(names.schema).as_string()
            _say(connection, f"create schema if not exists {schema}")
        _say(connection, f"create table if not exists {names.versions} (version integer)")
        made = version_of(connection, names)
        for version, migration in enumerate(MIGRATIONS[made:], made + 1):
            _say(connection, migration.format(records=names.records))
            _say(connection, f"insert into {names.versions} values ({version})")


def version_of(connection: psycopg.Connection[Any], names: Names) -> int:
    """How many migrations have been made; 0 where nothing of ours is there."""
    (found,) = connection.execute("select to_regclass(%s)", (names.versions,)).fetchone() or (None,)
    if found is None:
        return 0
    highest = f"select coalesce(max(version), 0) from {names.versions}"
    (version,) = _say(connection, highest).fetchone() or (0,)
    return int(version)


def _say(connection: psycopg.Connection[Any], text: str) -> psycopg.Cursor[Any]:
    """Once in a life, so not worth preparing; several statements cannot be."""
    return connection.execute(text.encode(), prepare=False)


def findings_of(connection: psycopg.Connection[Any]) -> list[Finding]:
    """What the server's settings mean for what is acknowledged."""
    settings = dict(
        connection.execute(
            "select name, setting from pg_settings where name = any(%s)", (list(_SETTINGS),)
        ).fetchall()
    )
    findings = [
        Finding("warning", f"{name} = {value}: {_SETTINGS[name]}")
        for name, value in settings.items()
        if name in _SETTINGS and value == "off"
    ]
    (only_reads,) = connection.execute(
        "select pg_is_in_recovery() or current_setting('transaction_read_only')::bool"
    ).fetchone() or (False,)
    if only_reads:
        findings.insert(0, Finding("error", "this server only reads: a standby, or told to be"))
    return findings or [Finding("ok", f"PostgreSQL {connection.info.server_version // 10_000}")]


_SETTINGS = {
    "fsync": "a power cut can lose or spoil everything",
    "full_page_writes": "a power cut can spoil pages",
    "synchronous_commit": "a crash forgets what was acknowledged within the last moments",
}
