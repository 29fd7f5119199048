"""The tables of the MySQL store: creating and upgrading them, and reading their version.

The database may be the application's own, so the names of our tables begin with `coatcheck_`,
unless the URL sets another one.

Invariant: any number of nodes may start at once, and none uses a schema that it does not know.
"""

from __future__ import annotations

import pymysql

from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores.migration import outdated, supported
from coatcheck.stores.mysql.connection import Connection, Server, Session
from coatcheck.stores.mysql.errors import ALREADY_EXISTS, code_of

META_TABLE = "coatcheck_meta"

# Clustered by `id`; ids are random, and so are the places where rows are inserted. `expires_ms` is
# the only other index. It changes only when a key is claimed anew, so completing changes no index,
# and it grows at its end. Texts are blobs, because a collation would compare and convert them.
_FIRST = """
create table if not exists `{}` (
  id              varbinary(16) not null,
  version         bigint        not null,
  state           tinyint       not null,
  attempt         int           not null,
  fingerprint     varbinary(16) not null,
  created_ms      bigint        not null,
  lease_until_ms  bigint        not null,
  window_until_ms bigint        not null,
  expires_ms      bigint        not null,
  nonce           bigint        not null,
  stamp           bigint        not null,
  label           mediumblob    not null,
  scope           mediumblob    not null,
  `key`           mediumblob    not null,
  progress        longblob,
  response        longblob,
  primary key (id),
  key expires (expires_ms)
) engine = innodb row_format = dynamic
"""
# A list that only grows; the version of a table is how many of them it has had. Each is a single
# statement: MySQL commits every change of a table at once and cannot roll it back.
MIGRATIONS: tuple[str, ...] = (_FIRST,)

# One row for each table of records.
_META = f"""
create table if not exists {META_TABLE} (
  name  varbinary(64) not null primary key,
  value int           not null
) engine = innodb
"""

# The name of a lock is the same for all databases of a server, so it contains a digest of ours. 40
# digits, because it may have 64 characters; not `md5`, which MySQL has dropped.
_LOCK_NAME = "concat('coatcheck_', left(sha2(database(), 256), 40))"


def prepare(connection: Connection, server: Server, table: str, *, create: bool) -> int:
    """
    Create or upgrade the tables, and return the version that was found.

    Raises `Misconfigured` if the database cannot be used, or if *create* is False and something is
    missing.
    """
    found = connection.run(lambda session: known_version(session, table))
    if found < len(MIGRATIONS):
        if not create:
            raise Misconfigured(outdated(f"{server}: {table}", found, len(MIGRATIONS)))
        found = connection.run(lambda session: _migrate(session, table))
    if problem := connection.run(lambda session: table_problem(session, table)):
        raise Misconfigured(f"{server}: {problem}")
    return found


def known_version(session: Session, table: str) -> int:
    """Return the version of *table*; raise if this release does not know it."""
    return supported(f"{session.server}: {table}", version_of(session, table), len(MIGRATIONS))


def version_of(session: Session, table: str) -> int:
    """Return the version of *table*; 0 if it does not exist or is not ours."""
    exists = (
        "select 1 from information_schema.tables"
        f" where table_schema = database() and table_name = '{META_TABLE}'"
    )
    if not session.read(exists):
        return 0
    rows = session.read(f"select value from {META_TABLE} where name = '{table}'")
    return int(rows[0][0]) if rows else 0


def _migrate(session: Session, table: str) -> int:
    """Run the missing migrations; return the version that was found under the lock."""
    # Nodes that start together migrate one after the other, and the later ones find nothing to do.
    # The lock ends with the session, which is closed soon.
    server = session.server
    ((locked,),) = session.read(f"select get_lock({_LOCK_NAME}, {server.lock_timeout_s})")
    if locked != 1:
        raise StoreUnavailable(f"{server}: another node is changing the schema; try again")
    found = known_version(session, table)
    for version, migration in enumerate(MIGRATIONS[found:], found + 1):
        _change_table(session, migration.format(table))
        # If a table of this name existed before, this fails unless it has our columns.
        session.read(f"select id, version, expires_ms, nonce, stamp from `{table}` limit 0")
        session.write(_META)
        noted = f"insert into {META_TABLE} values ('{table}', {version})"
        session.write(f"{noted} on duplicate key update value = {version}")
    return found


def _change_table(session: Session, statement: str) -> None:
    """Execute *statement*, unless a node made the change before and failed before noting it."""
    try:
        session.write(statement)
    except pymysql.MySQLError as error:
        if code_of(error) not in ALREADY_EXISTS:
            raise


def table_problem(session: Session, table: str) -> str:
    """Return why no key may be claimed in *table*; empty if it is fit for use or does not exist."""
    kind, engine = kind_of(session, table)
    if kind and (kind != "BASE TABLE" or not engine):
        return f"{table} is not a table but a view, or it is broken; name the table itself"
    if kind and index_columns(session, table, "PRIMARY") != ["id"]:
        return (
            f"{table} has no primary key (id), as during an unfinished restore: two requests could "
            f"claim the same key, so nothing is claimed; run `alter table {table} add primary key "
            "(id)`"
        )
    return ""


def kind_of(session: Session, table: str) -> tuple[str, str]:
    """Return the type of *table* and its engine, which a view has not; empty if it is missing."""
    rows = session.read(
        "select table_type, coalesce(engine, '') from information_schema.tables"
        f" where table_schema = database() and table_name = '{table}'"
    )
    return (rows[0][0], rows[0][1]) if rows else ("", "")


def index_columns(session: Session, table: str, name: str) -> list[str]:
    """Return the columns of an index in order, without those of which it has only a prefix."""
    rows = session.read(
        "select column_name from information_schema.statistics"
        f" where table_schema = database() and table_name = '{table}' and index_name = '{name}'"
        " and sub_part is null order by seq_in_index"
    )
    return [column.lower() for (column,) in rows]
