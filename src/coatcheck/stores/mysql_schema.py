"""The tables of the MySQL store: making them, knowing their version, and what a doctor should know.

Beside `mysql_rows.py`, which knows what the rows mean. The database may be the application's own,
so everything of ours has a name that begins with `coatcheck_`, unless a URL names another table.

Invariant: any number of nodes may start at once, and none goes on with a schema it does not know.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from coatcheck.core.flow import Flow
from coatcheck.core.record import COMPLETED, RUNNING, Record, Swap
from coatcheck.core.scope import ID_BYTES
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores.migration import HOW
from coatcheck.stores.mysql_faults import DENIED, NO_TABLE, RAISED
from coatcheck.stores.mysql_flow import Terms, holds, reads, writes, writes_once
from coatcheck.stores.mysql_line import Address, Line
from coatcheck.stores.mysql_packets import Refusal
from coatcheck.stores.mysql_rows import Statements

logger = logging.getLogger("coatcheck")

META_TABLE = "coatcheck_meta"

# Clustered by `id`, which is found by no other way; rows come in at random places, as ids do.
# `expires_ms` is the only other index. It changes only with a new life, so completing touches
# none, and it grows at its end. Texts are blobs, because a collation would compare and convert.
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
# A list that only grows; how many of them were made is the version of the table. Each is one
# statement: MySQL commits every change of a table at once, and cannot undo it.
MIGRATIONS: tuple[str, ...] = (_FIRST,)

# Two could claim one key, so nobody can: where no key is in the way, an `insert` always wins.
NO_KEY = (
    "has no primary key, as in a restore that is not over: every claim of a key would win, so "
    "nothing is claimed there until `alter table … add primary key (id)`"
)
_SWEPT_BY = "expires"

# One row for each table of records.
_META = f"""
create table if not exists {META_TABLE} (
  name  varbinary(64) not null primary key,
  value int           not null
) engine = innodb
"""

# One for each database of the server. 40 digits, because a lock's name may have 64; and no `md5`,
# which MySQL has dropped.
_LOCK = "concat('coatcheck_', left(sha2(database(), 256), 40))"
_CLOCK = "select timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)) div 1000"

# 12 MiB: the largest response that is kept by default is 8 MiB, and 11 MiB in base 64.
_PACKET_BYTES_MIN = 12 * 1024 * 1024
# 1 s: no lease is so short that it would matter; the difference is measured and allowed for.
_CLOCK_OFF_MS_MAX = 1_000

Told: TypeAlias = tuple[Literal["ok", "warning", "error"], str]


class Prepared(NamedTuple):
    """The version that was found, and what a session of the server's takes."""

    found: int
    terms: Terms


def prepare(address: Address, table: str, *, create: bool) -> Prepared:
    """
    Make the database at *address* one that a store can use, or say why it cannot be one.

    Where *create* is False nothing is made: what is missing is an error. The connection is closed
    again, so that a server that opens a store and forks afterwards has nothing to hand down.
    """
    line = Line(address, is_opening=True)
    try:
        found = line.run(lambda _: _known_version(address, table))
        if found < len(MIGRATIONS):
            if not create:
                missing = f"there is no table {table} of coatcheck's"
                older = f"{table} has schema {found}, older than {len(MIGRATIONS)} of this release"
                raise Misconfigured(f"{address}: {older if found else missing}; {HOW}")
            found = line.run(lambda _: _migrate(address, table))
        line.run(lambda _: _refuse_unfit(address, table))
        for level, text in line.run(lambda _: findings_about(table)):
            if level != "ok":  # a store that could forget says so when it is opened
                logger.warning("%s: %s", address, text)
        return Prepared(found, line.run(_terms))
    finally:
        line.close()


def _refuse_unfit(address: Address, table: str) -> Flow[None]:
    if unfit := (yield from _unfit(table)):
        raise Misconfigured(f"{address}: {unfit}")


def _terms(terms: Terms) -> Flow[Terms]:
    yield from ()
    return terms


def version_at(address: Address, table: str) -> int:
    """The version of *table* at *address*, if this release knows it; 0 where there is none."""
    line = Line(address, is_opening=True)
    try:
        return line.run(lambda _: _known_version(address, table))
    finally:
        line.close()


def _known_version(address: Address, table: str) -> Flow[int]:
    found = yield from schema_version(table)
    if found > len(MIGRATIONS):
        raise Misconfigured(
            f"{address}: {table} has coatcheck schema {found}, but this version of coatcheck knows "
            f"schemas up to {len(MIGRATIONS)}; upgrade coatcheck, or use another table"
        )
    return found


def schema_version(table: str) -> Flow[int]:
    """The version of *table* in this database; 0 where there is none of ours."""
    known = (
        "select 1 from information_schema.tables"
        f" where table_schema = database() and table_name = '{META_TABLE}'"
    )
    if not (yield from reads(known)).rows:
        return 0
    rows = (yield from reads(f"select value from {META_TABLE} where name = '{table}'")).rows
    return int(rows[0][0]) if rows else 0


def _migrate(address: Address, table: str) -> Flow[int]:
    """Make what has not been made; the version that was found when it was our turn."""
    # Nodes that start together do it one after the other; the later ones find it done. The lock
    # goes with the connection, which is closed soon.
    locked = yield from reads(f"select get_lock({_LOCK}, {address.lock_timeout_s})")
    if locked.rows[0][0] != b"1":
        raise StoreUnavailable(f"{address}: another node is changing the schema")
    found = yield from _known_version(address, table)
    for version, migration in enumerate(MIGRATIONS[found:], found + 1):
        yield from writes_once(migration.format(table).encode())
        # If it was there already, is it ours? Whatever stands in it is not looked at.
        yield from reads(f"select id, version, expires_ms, nonce, stamp from `{table}` limit 0")
        yield from writes(_META.encode())
        noted = f"insert into {META_TABLE} values ('{table}', {version})"
        yield from writes(f"{noted} on duplicate key update value = {version}".encode())
    return found


def clock_ms() -> Flow[int]:
    """The server's clock, whatever its time zone."""
    return int((yield from reads(_CLOCK)).rows[0][0])


def findings_about(table: str) -> Flow[list[Told]]:
    """What a doctor should know about the server, and about *table* in it."""
    rows = (yield from reads("show global variables")).rows
    settings = {name.decode(): value.decode("utf-8", "replace") for name, value in rows}
    version = f"MySQL or MariaDB {settings['version']}, coatcheck schema {len(MIGRATIONS)}"
    told: list[Told] = [("ok", version), *_about_writing(settings), *_about_durability(settings)]
    told += yield from _about_table(table)
    off_ms = (yield from clock_ms()) - time.time_ns() // 1_000_000
    if abs(off_ms) > _CLOCK_OFF_MS_MAX:
        message = f"its clock is {off_ms / 1_000:+.1f} s off this machine's; run NTP on both"
        told.append(("warning", message))
    return told


def _about_writing(settings: dict[str, str]) -> Iterator[Told]:
    for name in ("read_only", "super_read_only", "innodb_read_only"):
        if settings.get(name, "OFF") not in ("OFF", "0"):
            yield "error", f"{name} is on: no record can be written; is it a replica?"
    if settings.get("log_bin") == "ON" and settings.get("binlog_format") == "STATEMENT":
        yield "error", "binlog_format = STATEMENT: no record can be written; set it to ROW"
    packet_bytes_max = int(settings["max_allowed_packet"])
    if packet_bytes_max < _PACKET_BYTES_MIN:
        message = (
            f"max_allowed_packet = {packet_bytes_max}: responses above three quarters of it are "
            f"not kept, and their retries are told so; set it to {_PACKET_BYTES_MIN} or more"
        )
        yield "warning", message


def _about_durability(settings: dict[str, str]) -> Iterator[Told]:
    flush = settings["innodb_flush_log_at_trx_commit"]
    forgets = {"0": "a crash of the server", "2": "a power cut"}.get(flush)
    if forgets is None:
        yield "ok", f"innodb_flush_log_at_trx_commit = {flush}: what is acknowledged is on disk"
    else:
        message = (
            f"innodb_flush_log_at_trx_commit = {flush}: {forgets} forgets the last second, whose "
            "retries then execute again; set it to 1"
        )
        yield "warning", message
    if settings.get("log_bin") == "ON" and settings.get("sync_binlog") != "1":
        message = (
            f"sync_binlog = {settings.get('sync_binlog')}: after a power cut the server undoes "
            "what is not in its binary log, or a replica never gets it; set it to 1"
        )
        yield "warning", message
    if settings.get("innodb_doublewrite", "ON") in ("OFF", "0"):
        yield "warning", "innodb_doublewrite is off: a power cut may leave torn pages"


def _about_table(table: str) -> Flow[list[Told]]:
    told: list[Told] = []
    kind, engine = yield from _kind_of(table)
    unfit = yield from _unfit(table)
    if not kind:
        told.append(("error", f"there is no table {table}: all records are gone"))
    elif unfit:
        told.append(("error", unfit))
    elif engine.lower() != "innodb":
        message = f"{table} is a table of {engine}, which has no transactions; alter it"
        told.append(("error", message))
    elif (yield from _index_of(table, _SWEPT_BY))[:1] != ["expires_ms"]:
        message = f"{table} has no index {_SWEPT_BY} (expires_ms), so nothing is swept; add it"
        told.append(("error", message))
    version = yield from schema_version(table)
    if version != len(MIGRATIONS):
        message = f"{table} has schema {version} by now, and this process knows only its own"
        told.append(("error", message))
    return told


def _unfit(table: str) -> Flow[str]:
    """Why nobody may claim in *table*; empty: it will do, or there is none."""
    kind, engine = yield from _kind_of(table)
    if kind and (kind != "BASE TABLE" or not engine):
        return f"{table} is no table, but a view, or it is broken; name the table itself"
    if kind and (yield from _index_of(table, "PRIMARY")) != ["id"]:
        return f"{table} {NO_KEY}"
    return ""


def _kind_of(table: str) -> Flow[tuple[str, str]]:
    """What *table* is, and its engine, of which a view has none; empty where there is nothing."""
    looked = yield from reads(
        "select table_type, coalesce(engine, '') from information_schema.tables"
        f" where table_schema = database() and table_name = '{table}'"
    )
    kind, engine = looked.rows[0] if looked.rows else (b"", b"")
    return kind.decode(), engine.decode()


def _index_of(table: str, name: str) -> Flow[list[str]]:
    """The columns of an index of *table*, in their order, as far as it knows the whole of them."""
    looked = yield from reads(
        "select column_name from information_schema.statistics"
        f" where table_schema = database() and table_name = '{table}' and index_name = '{name}'"
        " and sub_part is null order by seq_in_index"
    )
    return [column.decode().lower() for (column,) in looked.rows]


def findings_about_trial(statements: Statements, table: str) -> Flow[list[Told]]:
    """What cannot be done with a record, tried in a transaction that is undone."""
    id = secrets.token_bytes(ID_BYTES)
    claim = Record(id, 1, RUNNING, 1, b"", 1, 0, 1, 1, 1, "", "", "", None, None)
    ended = claim._replace(version=2, state=COMPLETED)
    attempts = {
        "insert": statements.alone(Swap(id, 0, claim), 1),
        "update": statements.alone(Swap(id, 1, ended), 1),
        "select": next(statements.read((id,))).encode(),
        "delete": statements.alone(Swap(id, 2, None), 1),
    }
    told: list[Told] = []
    yield from holds(b"begin")
    for right, statement in attempts.items():
        try:
            done = yield from holds(statement)
        except Refusal as refusal:
            if refusal.code in DENIED:
                told.append(("error", f"the user may not {right} in {table}; grant it"))
            elif refusal.code == RAISED:
                message = f"a trigger lets nobody {right} in {table}: {refusal.text}"
                told.append(("error", message))
            elif refusal.code == NO_TABLE:  # which is told already
                break
            else:
                raise
        else:
            if not done.affected and not done.rows and not told:  # else one goes with the other
                told.append(("error", f"nothing comes of {right} in {table}"))
    yield from holds(b"rollback")
    return told
