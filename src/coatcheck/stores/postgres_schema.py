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
from coatcheck.stores.migration import HOW
from coatcheck.stores.postgres_rows import CREATED_MS

# What a record costs beside its response, in the compact layout: 28 bytes for the row as such, 63
# for what is in it, some 50 for the index on `id` and 11 to 16 for the other one; the rest is free
# space. Wide columns come first, so that nothing is padded. What is usual or empty is null and
# takes nothing: the first attempt, the lease of what has ended, texts for people. Two of the times
# are kept as distances, and as `numeric`, which is as long as its value is.
#
# Completing changes no index, and where its page has room it touches none (a "HOT" update). 97:
# alone that is always so, for 9 of 10 of 8 at a time, and for 2 of 3 of 16. Of 64, who fill a page
# and then want as much again, it is so for 1 of 14; in half-empty pages for most of them, but a
# record would then take 130 to 200 bytes more, and the server hardly less time.
#
# The index for the sweep is by the second: rows with the same key share an entry.
_FIRST = """
create table {records} (
  version         bigint   not null,
  expires_ms      bigint   not null,
  nonce           bigint   not null,
  lease_until_ms  bigint,   -- null: 0
  attempt         integer,  -- null: 1
  state           smallint not null,
  id              uuid     primary key,
  fingerprint     uuid,     -- null: none
  age_ms          numeric,  -- version - created_ms; null: 1
  margin_ms       numeric,  -- expires_ms - window_until_ms; null: 3600000
  label           text,     -- null: empty; so are scope and key
  scope           text,
  key             text,
  progress        bytea,
  response        bytea
) with (
  fillfactor = 97,
  autovacuum_vacuum_scale_factor = 0.05,
  autovacuum_vacuum_insert_scale_factor = 0.05,
  toast.autovacuum_vacuum_scale_factor = 0.05
);
create index coatcheck_records_expires on {records} ((expires_ms / 1000));
"""
MIGRATIONS: tuple[str, ...] = (_FIRST,)

# How old records are, for the planner: it knows what is usual of a column, and nothing of what is
# made of two. Only a help, which PostgreSQL has from 14 on, so it is no migration.
_AGES = f"create statistics if not exists {{}} on ({CREATED_MS}) from {{}}"
_AGES_FROM = 140_000

# Two could claim one key, so nobody can.
NO_KEY = (
    "has no primary key, as in a restore that is not over: nothing is claimed there until "
    "`alter table … add primary key (id)`"
)

# Any number that nobody else locks: the ASCII codes of "coatchk".
_LOCK = 0x636F61746368


# What is longer is cut off without a word, so that two schemas would be one.
_NAME_BYTES_MAX = 63
# What drivers take for the place of a value, and PostgreSQL for the end of a text.
_UNSPEAKABLE = frozenset("%\0")


class Names:
    """What our tables are called, in the schema that was asked for or in the one found first."""

    def __init__(self, schema: str) -> None:
        if len(schema.encode()) > _NAME_BYTES_MAX or not _UNSPEAKABLE.isdisjoint(schema):
            raise Misconfigured(
                f"postgresql: schema={schema!r}: its name may have up to {_NAME_BYTES_MAX} bytes, "
                "and neither a percent sign nor a NUL"
            )
        self.schema = schema
        self.records = self._named("coatcheck_records")
        self.versions = self._named("coatcheck_schema")
        self.ages = self._named("coatcheck_records_created")

    def _named(self, table: str) -> str:
        name = sql.Identifier(self.schema, table) if self.schema else sql.Identifier(table)
        return name.as_string()


def prepare(connection: psycopg.Connection[Any], names: Names, *, create: bool) -> int:
    """
    Make the tables, or bring them up to date; refuse what is missing or from a newer release.

    Returns the version that was found.
    """
    found = known_version(connection, names)
    if found == len(MIGRATIONS):
        return found
    if not create:
        raise Misconfigured(outdated(names, found))
    with connection.transaction():
        # What others have done while we wait for the lock is to be seen, whatever the role's
        # default is: in a snapshot from before it, we would make their tables again.
        _say(connection, "set transaction isolation level read committed")
        # Nodes that start together do it one after the other; the later ones find it done.
        connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK,))
        if names.schema:
            _make_schema(connection, names.schema)
        _say(connection, f"create table if not exists {names.versions} (version integer)")
        found = known_version(connection, names)
        for version, migration in enumerate(MIGRATIONS[found:], found + 1):
            _say(connection, migration.format(records=names.records))
            _say(connection, f"insert into {names.versions} values ({version})")
        if connection.info.server_version >= _AGES_FROM:
            _say(connection, _AGES.format(names.ages, names.records))
    return found


def outdated(names: Names, found: int) -> str:
    """What is said of tables that are missing, or older than this release."""
    older = f"has schema {found}, older than {len(MIGRATIONS)} of this release"
    return f"{names.records} {older if found else 'is missing'}; {HOW}"


def _make_schema(connection: psycopg.Connection[Any], schema: str) -> None:
    # Looked for, because "if not exists" asks for the right to make it where it does exist.
    found = connection.execute("select from pg_namespace where nspname = %s", (schema,))
    if not found.rowcount:
        _say(connection, f"create schema if not exists {sql.Identifier(schema).as_string()}")


def known_version(connection: psycopg.Connection[Any], names: Names) -> int:
    """How many migrations have been made, if this release knows them all."""
    version = version_of(connection, names)
    if version > len(MIGRATIONS):
        raise Misconfigured(
            f"{names.records}: its schema has version {version}, and this release knows "
            f"{len(MIGRATIONS)}; a newer coatcheck has been here, so update this one"
        )
    return version


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
