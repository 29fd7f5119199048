"""The size of a record in each store, in addition to its response body.

One function for each store fills it with records as requests create them, and reads its size,
including indexes, free space and what a sweep leaves behind. The files are in memory, because the
speed of a disk does not matter here.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import psycopg
import pymysql

from benchmarks.measuring import Samples
from benchmarks.powertools import STAND_IN
from benchmarks.report import counted
from benchmarks.sample_records import BODY, TOGETHER, KeyOf, fill, flows_of, sweep, text_of, uuid_of
from benchmarks.sqlite_floors import OneByOne
from coatcheck.stores import open_store
from coatcheck.stores.sqlite.store import SqliteStore
from tests.support.servers import MEMORY, until
from tests.support.servers.dynamodb import Dynamodb
from tests.support.servers.mariadb import Mariadb
from tests.support.servers.postgres import Postgres
from tests.support.servers.redis import Redis

FEWER_TOGETHER = 16
# Vacuum after a twentieth of the rows has changed, as autovacuum does.
PORTIONS = 20
# After a quarter of the rows was replaced, InnoDB's pages are as full as after all of them were.
PORTIONS_CHURNED = 5
# How many old rows InnoDB may have left; it purges them in the background.
PURGED = 100
# Redis doubles its hash table, so the share of one key varies between two sizes.
STEPS = 8
# DynamoDB bills 100 extra bytes for each item.
ITEM_BYTES = 100


class Size(NamedTuple):
    """The size of a record; *kind* is for programs, *what* for people."""

    store: str
    kind: str
    what: str
    taken: Samples


def _beside_body(taken: float, records: int) -> float:
    return taken / records - len(BODY)


def _kind(*, compact: bool) -> tuple[str, str]:
    return ("compact", "compact=1") if compact else ("plain", "keys are UUIDs")


# --- SQLite -----------------------------------------------------------------------------------


def sqlite(*, quick: bool) -> list[Size]:
    """Measure the file while it grows."""
    records = 25_000 if quick else 1_000_000
    with _directory() as at:
        taken = Samples((_file(at, records),))
    return [Size("SQLite", "plain", f"{counted(records)} records, keys are UUIDs", taken)]


def sqlite_otherwise(*, quick: bool) -> list[Size]:
    """Measure other kinds of records, and the floor."""
    records = 5_000 if quick else 50_000
    with _directory() as at:
        few = _file(at, records, together=FEWER_TOGETHER)
        sizes = [
            ("fewer", f"{counted(records)} records, {FEWER_TOGETHER} together", few),
            (
                "text",
                f"{counted(records)} records, keys are not UUIDs",
                _file(at, records, text_of),
            ),
            ("compact", f"{counted(records)} records, compact=1", _file(at, records, compact=True)),
            ("floor", "a table of five columns", _floor(at / "floor.db", records)),
        ]
    return [Size("SQLite", kind, what, Samples((taken,))) for kind, what, taken in sizes]


@contextmanager
def _directory() -> Iterator[Path]:
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="coatcheck-size-", dir=memory) as directory:
        yield Path(directory)


_numbers = itertools.count()


def _file(
    at: Path,
    records: int,
    key_of: KeyOf = uuid_of,
    *,
    together: int = TOGETHER,
    compact: bool = False,
) -> float:
    path = at / f"{next(_numbers)}.db"
    with closing(SqliteStore(path, compact=compact)) as store:
        fill(store, records, flows_of(key_of), together)
    return _beside_body(path.stat().st_size, records)


def _floor(path: Path, records: int) -> float:
    table = OneByOne(path)
    table.begin()
    for number in range(records):
        id = hashlib.blake2b(b"%d" % number, digest_size=16).digest()
        table.insert(id, id)
        table.update(id, BODY)
    table.commit()
    table.close()
    return _beside_body(path.stat().st_size, records)


# --- PostgreSQL -------------------------------------------------------------------------------


def postgres(*, quick: bool) -> list[Size]:
    """Measure the table and its indexes, after as many records were swept as are left."""
    records = 15_000 if quick else 50_000
    server = Postgres(autovacuum="off", shared_buffers="128MB")
    sizes: list[Size] = []
    try:
        for compact in (False, True):
            kind, how = _kind(compact=compact)
            whole, indexes = _postgres(server, records, compact=compact)
            what = f"{counted(records)} records, {how}"
            taken = Samples((_beside_body(whole, records),))
            sizes.append(Size("PostgreSQL", kind, what, taken))
            indexes_only = Samples((indexes / records,))
            sizes.append(Size("PostgreSQL", f"{kind} indexes", f"{what}, indexes", indexes_only))
    finally:
        server.remove()
    return sizes


def _postgres(server: Postgres, records: int, *, compact: bool) -> tuple[int, int]:
    url = server.fresh_url()
    with (
        closing(open_store(f"{url}&compact={compact:d}")) as store,
        psycopg.connect(server.url, autocommit=True) as connection,
    ):
        connection.execute(f"set search_path to {url.rpartition('=')[2]}")
        flows, portion = flows_of(), records // PORTIONS
        for number in range(1, 2 * PORTIONS + 1):
            fill(store, portion, flows)
            sweep(store, (number - PORTIONS) * portion)
            connection.execute("vacuum coatcheck_records")
        statement = "select {}('coatcheck_records')"
        (whole,) = connection.execute(statement.format("pg_total_relation_size")).fetchone() or (0,)
        (indexes,) = connection.execute(statement.format("pg_indexes_size")).fetchone() or (0,)
    return int(whole), int(indexes)


# --- MariaDB ----------------------------------------------------------------------------------


def mariadb(*, quick: bool) -> list[Size]:
    """Measure the table while records arrive and are swept."""
    # 100 000: InnoDB keeps up to an eighth of a table free, which is more of a small one.
    records = 10_000 if quick else 100_000
    server = Mariadb(**{"innodb-buffer-pool-size": "256M"})
    sizes: list[Size] = []
    try:
        for compact in (False, True):
            kind, how = _kind(compact=compact)
            taken = Samples((_beside_body(_mariadb(server, records, compact=compact), records),))
            what = f"{counted(records)} records, {how}"
            sizes.append(Size("MariaDB", kind, what, taken))
    finally:
        server.remove()
    return sizes


def _mariadb(server: Mariadb, records: int, *, compact: bool) -> int:
    url = server.fresh_url()
    database = url.rpartition("/")[2].partition("?")[0]
    with (
        closing(open_store(f"{url}&compact={compact:d}")) as store,
        pymysql.connect(
            host="127.0.0.1", port=server.port, user="root", database=database, autocommit=True
        ) as connection,
    ):
        cursor = connection.cursor()

        def read_number(statement: str) -> int:
            cursor.execute(statement)
            (found,) = cursor.fetchone() or (0,)
            return int(found)

        flows, portion = flows_of(), records // PORTIONS
        fill(store, records, flows)
        for number in range(1, PORTIONS_CHURNED + 1):
            fill(store, portion, flows)
            sweep(store, number * portion)
            until(lambda: read_number(_TO_PURGE) < PURGED)
        cursor.execute("analyze table coatcheck_records")
        cursor.fetchall()
        return read_number(_TAKEN)


_TO_PURGE = """
select count from information_schema.innodb_metrics where name = 'trx_rseg_history_len'
"""
_TAKEN = """
select data_length + index_length from information_schema.tables
where table_schema = database() and table_name = 'coatcheck_records'
"""


# --- Redis ------------------------------------------------------------------------------------


def redis(*, quick: bool) -> list[Size]:
    """Measure the memory while the number of records doubles."""
    records = 1 << (13 if quick else 16)
    sizes: list[Size] = []
    for compact in (False, True):
        kind, how = _kind(compact=compact)
        what = f"up to {counted(records)} records, {how}"
        taken, resident = _redis(records, compact=compact)
        sizes += [
            Size("Redis", kind, f"{what}, memory", taken),
            Size("Redis", f"{kind} resident", f"{what}, resident", resident),
        ]
    return sizes


def _redis(records: int, *, compact: bool) -> tuple[Samples, Samples]:
    """Return `used_memory` and `used_memory_rss` per record."""
    server, flows = Redis(), flows_of()
    found: list[tuple[float, float]] = []
    try:
        with closing(open_store(f"{server.url}?compact={compact:d}")) as store:
            fill(store, TOGETHER, flows)  # connects, and loads the script
            used_before, resident_before = _memory(server)
            fill(store, records // 2, flows)
            for done in range(records // 2, records, records // 2 // STEPS):
                used, resident = _memory(server)
                found.append(
                    (
                        _beside_body(used - used_before, done),
                        _beside_body(resident - resident_before, done),
                    )
                )
                fill(store, records // 2 // STEPS, flows)
    finally:
        server.remove()
    used_all, resident_all = zip(*found, strict=True)
    return Samples(used_all), Samples(resident_all)


def _memory(server: Redis) -> tuple[int, int]:
    lines = (line.partition(":") for line in server.ask("INFO", "memory").decode().splitlines())
    facts = {name: value for name, _, value in lines}
    return int(facts["used_memory"]), int(facts["used_memory_rss"])


# --- DynamoDB ---------------------------------------------------------------------------------


def dynamodb(*, quick: bool) -> list[Size]:
    """Compute what AWS bills for the items, by its published rules."""
    records = TOGETHER if quick else 4 * TOGETHER
    server = Dynamodb()
    sizes: list[Size] = []
    try:
        for compact in (False, True):
            kind, how = _kind(compact=compact)
            items = _items(server, records, compact=compact)
            assert len(items) == records
            taken = statistics.mean(_billed_bytes(item) for item in items) - len(BODY)
            what = f"{counted(records)} items, {how}, as billed"
            sizes.append(Size("DynamoDB", kind, what, Samples((taken,))))
    finally:
        server.remove()
    return sizes


def _items(server: Dynamodb, records: int, *, compact: bool) -> list[dict[str, Any]]:
    url = server.fresh_url()
    with closing(open_store(f"{url}&compact={compact:d}")) as store:
        fill(store, records, flows_of())
    endpoint = f"http://127.0.0.1:{server.port}"
    client: Any = boto3.client("dynamodb", endpoint_url=endpoint, **STAND_IN)
    with closing(client):
        table = url.partition("//")[2].partition("?")[0]
        items: list[dict[str, Any]] = client.scan(TableName=table)["Items"]
    return items


def _billed_bytes(item: dict[str, Any]) -> int:
    """Return the bytes of names and values; a number takes a byte for two digits, and one more."""
    return ITEM_BYTES + sum(
        len(name.encode()) + _value_bytes(kind, value)
        for name, attribute in item.items()
        for kind, value in attribute.items()
    )


def _value_bytes(kind: str, value: Any) -> int:  # noqa: ANN401 - as in the driver
    match kind:
        case "N":
            return (len(value.strip("-0")) + 1) // 2 + 1 + value.startswith("-")
        case "B":
            return len(value)
        case "S":
            return len(value.encode())
        case _:
            raise AssertionError(f"unknown kind of attribute: {kind}")
