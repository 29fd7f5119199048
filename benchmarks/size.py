"""Question: how many bytes does a record cost beside its response body?

Every store is filled with records as requests make them (`filling.py`) and asked what they take
(`weighing.py`). The floor is a table of ids, fingerprints, expiries and bodies in SQLite, with no
index but its primary key.
"""

from __future__ import annotations

import logging
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from benchmarks import weighing
from benchmarks.filling import BODY, TOGETHER
from benchmarks.measuring import Samples
from benchmarks.report import TIMES, Row, Table, Target
from benchmarks.weighing import Weight

# In the order of the table; who takes longest is asked first.
STORES = ("sqlite", "sqlite_otherwise", "postgres", "mariadb", "redis", "dynamodb")
LONGEST_FIRST = ("sqlite", "mariadb", "postgres", "sqlite_otherwise", "dynamodb", "redis")
# One more than processors on a small machine: MariaDB is waited for as long as it works.
AT_A_TIME = 3
# What we set out for, and where.
BYTES_MAX = 200
TO_REACH = (("SQLite", "plain"), ("PostgreSQL", "compact"))


def measure(*, quick: bool) -> Table:
    """The table of this question."""
    context = get_context("forkserver")
    context.set_forkserver_preload([weighing.__name__])  # once, and not in each of them
    with ProcessPoolExecutor(AT_A_TIME, mp_context=context) as processes:
        found = processes.map(partial(_weigh, quick=quick), LONGEST_FIRST)
        by_store = dict(zip(LONGEST_FIRST, found, strict=True))
    weights = [weight for store in STORES for weight in by_store[store]]
    (floor,) = (weight.taken for weight in weights if weight.kind == "floor")
    return Table(
        name="size",
        question="bytes for a record beside its response body",
        rows=[_row(weight, floor) for weight in weights if weight.kind != "floor"],
        notes=[
            f"beside a body of {len(BODY)} bytes; its headers count as ours",
            f"{TOGETHER} claimed and then completed together, where nothing else is said",
            "not UUIDs: 36 other characters, which do not pack",
            "PostgreSQL: when as many were swept as are left, vacuumed as autovacuum would",
            "MariaDB: data_length and index_length, when a quarter was swept and came again",
            "Redis: used_memory, and used_memory_rss, while the number of records doubles",
            "DynamoDB: names and values of the items by AWS's rules, and 100 bytes for each item",
        ],
    )


def _weigh(store: str, *, quick: bool) -> list[Weight]:
    # They are told of servers that could forget, which is how the servers are quick here.
    logging.getLogger("coatcheck").setLevel(logging.ERROR)
    found: list[Weight] = getattr(weighing, store)(quick=quick)
    return found


def _row(weight: Weight, floor: Samples) -> Row:
    # Each of the weights is worth as much as another, wherever the number of records stands.
    base = Samples((floor.median,) * len(weight.taken.values))
    is_whole = " " not in weight.kind  # and not a part of it, or the same in another way
    reach = Target(measured=weight.taken, bound="≤", limit=BYTES_MAX, unit="bytes")
    return Row(
        what=f"{weight.store}, {weight.what}, bytes",
        product=weight.taken,
        floor=floor if is_whole else None,
        ratios=[(f"{TIMES} the floor", weight.taken.over(base))] if is_whole else (),
        targets=[reach] if (weight.store, weight.kind) in TO_REACH else (),
        more={"store": weight.store, "kind": weight.kind},
    )
