"""How many bytes does a record take in addition to its response body?

Every store is filled with records as requests create them (`sample_records.py`), and its size is
read (`record_sizes.py`). The floor is a table of ids, fingerprints, expiries and bodies in SQLite,
with only a primary key.
"""

from __future__ import annotations

import logging
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from benchmarks import record_sizes
from benchmarks.measuring import Samples
from benchmarks.record_sizes import Size
from benchmarks.report import TIMES, Row, Table, Target
from benchmarks.sample_records import BODY, TOGETHER

# In the order of the table; the slowest is measured first.
STORES = ("sqlite", "sqlite_otherwise", "postgres", "mariadb", "redis", "dynamodb")
LONGEST_FIRST = ("sqlite", "mariadb", "postgres", "sqlite_otherwise", "dynamodb", "redis")
# One more than the processors of a small machine, because MariaDB waits half of the time.
AT_A_TIME = 3
# The target, and the rows that it is for.
BYTES_MAX = 200
TARGETS = (("SQLite", "plain"), ("PostgreSQL", "compact"))


def measure(*, quick: bool) -> Table:
    """Measure, and return the table."""
    context = get_context("forkserver")
    context.set_forkserver_preload([record_sizes.__name__])  # imports once for all
    with ProcessPoolExecutor(AT_A_TIME, mp_context=context) as processes:
        found = processes.map(partial(_sizes, quick=quick), LONGEST_FIRST)
        by_store = dict(zip(LONGEST_FIRST, found, strict=True))
    sizes = [size for store in STORES for size in by_store[store]]
    (floor,) = (size.taken for size in sizes if size.kind == "floor")
    return Table(
        name="size",
        question="bytes of a record in addition to its response body",
        rows=[_row(size, floor) for size in sizes if size.kind != "floor"],
        notes=[
            f"the body has {len(BODY)} bytes; headers are part of the record",
            f"{TOGETHER} records are claimed and then completed at a time, unless the row says otherwise",
            "not UUIDs: 36 other characters, which cannot be packed",
            "PostgreSQL: after as many records were swept as are left, with vacuum",
            "MariaDB: data_length and index_length, after a quarter was swept and replaced",
            "Redis: used_memory, and used_memory_rss, while the number of records doubles",
            "DynamoDB: names and values of the items by AWS's rules, plus 100 bytes for each item",
        ],
    )


def _sizes(store: str, *, quick: bool) -> list[Size]:
    # The stores warn that these servers are not durable, which makes them fast.
    logging.getLogger("coatcheck").setLevel(logging.ERROR)
    found: list[Size] = getattr(record_sizes, store)(quick=quick)
    return found


def _row(size: Size, floor: Samples) -> Row:
    base = Samples((floor.median,) * len(size.taken.values))
    is_whole = " " not in size.kind  # not only a part of the record
    target = Target(measured=size.taken, bound="≤", limit=BYTES_MAX, unit="bytes")
    return Row(
        what=f"{size.store}, {size.what}, bytes",
        product=size.taken,
        floor=floor if is_whole else None,
        ratios=[(f"{TIMES} the floor", size.taken.over(base))] if is_whole else (),
        targets=[target] if (size.store, size.kind) in TARGETS else (),
        more={"store": size.store, "kind": size.kind},
    )
