"""The schema of the PostgreSQL store: plain SQL, versioned, safe with several nodes at once.

All names begin with `coatcheck_`, so that the tables can be in the application's own database. The
list of migrations only grows. A database that has more of them was made by a newer release, and is
refused.
"""

from __future__ import annotations

from psycopg import sql

from coatcheck.errors import Misconfigured
from coatcheck.stores.migration import outdated, supported
from coatcheck.stores.postgres.connection import Connection
from coatcheck.stores.postgres.statements import CREATED_MS

# What a record takes beside its response and its texts: 36 bytes for the row header, 63 for the
# values, about 50 for the index on `id` and 11 to 16 for the other index; the rest is free space.
# Wide columns come first, so that nothing is padded. Default values are stored as NULL and take
# nothing. Two of the times are stored as differences, and as `numeric`, as long as its value.
#
# Completing changes no indexed column, and where the page has room it touches no index (a "HOT"
# update). A fillfactor of 97 leaves room for every completion one at a time, and for 2 of 3 with 16
# at a time. Half-empty pages would take 130 to 200 bytes more per record and save hardly any time.
#
# The index for the sweep has a resolution of a second: rows with the same value share an entry.
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

# Tells the planner how old records are: by itself it has statistics of columns, and none of an
# expression of two. It is an optimisation that needs PostgreSQL 14, hence no migration.
_AGE_STATISTICS = f"create statistics if not exists {{}} on ({CREATED_MS}) from {{}}"
_AGE_STATISTICS_SINCE = 140_000

# The advisory lock of a migration. Any number will do that no other application uses: these are
# the ASCII codes of "coatch".
_LOCK = 0x636F61746368

# PostgreSQL silently truncates longer names, so two schemas could become one.
_NAME_BYTES_MAX = 63
# Drivers of applications take a percent sign for a placeholder; PostgreSQL accepts no NUL.
_FORBIDDEN = frozenset("%\0")


class Names:
    """The quoted names of our tables, in the given schema or in the first of the search path."""

    def __init__(self, schema: str) -> None:
        if len(schema.encode()) > _NAME_BYTES_MAX or not _FORBIDDEN.isdisjoint(schema):
            raise Misconfigured(
                f"postgresql: schema={schema!r} is no usable name; it may have up to "
                f"{_NAME_BYTES_MAX} bytes, and neither a percent sign nor a NUL"
            )
        self.schema = schema
        self.records = self._quoted("coatcheck_records")
        self.versions = self._quoted("coatcheck_schema")
        self.events = self._quoted("coatcheck_events")
        self.offsets = self._quoted("coatcheck_offsets")
        self.age_statistics = self._quoted("coatcheck_records_created")

    def _quoted(self, table: str) -> str:
        name = sql.Identifier(self.schema, table) if self.schema else sql.Identifier(table)
        return name.as_string()


def migrate(connection: Connection, names: Names, *, create: bool) -> int:
    """
    Create the tables, or upgrade them; refuse missing ones without *create*, and newer ones.

    Returns the version that was found.
    """
    found = known_version(connection, names)
    if found == len(MIGRATIONS):
        return found
    if not create:
        raise Misconfigured(outdated(names.records, found, len(MIGRATIONS)))
    with connection.transaction():
        # Whatever the role's default: a snapshot from before the lock would not see the tables that
        # another node created while we waited for it.
        _execute(connection, "set transaction isolation level read committed")
        # Nodes that start together migrate one after the other; the later ones find it done.
        connection.execute("select pg_advisory_xact_lock($1)", (_LOCK,))
        if names.schema:
            _create_schema(connection, names.schema)
        _execute(connection, f"create table if not exists {names.versions} (version integer)")
        found = known_version(connection, names)
        for version, migration in enumerate(MIGRATIONS[found:], found + 1):
            _execute(connection, migration.format(records=names.records))
            _execute(connection, f"insert into {names.versions} values ({version})")
        if connection.info.server_version >= _AGE_STATISTICS_SINCE:
            _execute(connection, _AGE_STATISTICS.format(names.age_statistics, names.records))
    return found


def _create_schema(connection: Connection, schema: str) -> None:
    # "if not exists" alone would need the right to create a schema even if it exists.
    if not connection.fetch("select 1 from pg_namespace where nspname = $1", schema):
        name = sql.Identifier(schema).as_string()
        _execute(connection, f"create schema if not exists {name}")


def known_version(connection: Connection, names: Names) -> int:
    """
    Return how many migrations were applied; 0 if our tables do not exist.

    Raises `Misconfigured` if this release does not know them all.
    """
    ((table,),) = connection.fetch("select to_regclass($1)::text", names.versions)
    if table is None:
        return 0
    ((version,),) = connection.fetch(f"select coalesce(max(version), 0) from {names.versions}")
    return supported(names.records, int(version), len(MIGRATIONS))


def _execute(connection: Connection, statements: str) -> None:
    connection.execute(statements.encode(), prepare=False)
