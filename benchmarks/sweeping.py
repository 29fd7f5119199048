"""Are claims as fast in a table of millions of keys as in a small one, and during a sweep?

On PostgreSQL with `fsync`. Claims are made one at a time, which shows every delay, and 64 at once.
The sweep runs in a thread, as fast as it can, in batches of the usual size. Claims and the sweep
run on different processors, as on a server that is not overloaded: on a single one, any other work
would delay claims in the same way.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import NamedTuple

import psycopg

from benchmarks.comparison import AT_A_TIME
from benchmarks.measuring import ROUNDS_QUICK, Samples, interleave
from benchmarks.report import TIMES, Row, Table, Target, counted
from coatcheck import Policy
from coatcheck.core.lifecycle import ClaimRequest, first_attempt
from coatcheck.core.record import GONE, Swap
from coatcheck.stores.contract import SWEEP_BATCH
from coatcheck.stores.postgres.connection import SharedConnection
from coatcheck.stores.postgres.store import PostgresStore
from tests.support.servers.postgres import Postgres

FEW = 10_000
MANY = 5_000_000
MANY_QUICK = 300_000
ROUNDS = 5
# Single claims and batches per round and table. They stay, so 10 000 keys become about 17 000.
ALONE, BATCHES = 200, 10
# After a checkpoint, the first change of each page writes the whole page to the log. One batch for
# every 2 500 keys changes most pages of the index before the measurement.
KEYS_PER_WARMING = 2_500
# Of 16 MB each: enough to sweep a million records.
LOG_FILES = 24
LOG_FILES_QUICK = 8
# So that the sweep deletes about a million records in all slots together.
SLOT_S = 0.6
SLOT_S_QUICK = 0.1
# The loaded keys are a day older than the claims, and may be swept.
NOW_MS = 1_800_000_000_000

SETTINGS = {
    "fsync": "on",
    "shared_buffers": "512MB",  # both indexes of five million keys
    "maintenance_work_mem": "256MB",
    "min_wal_size": "1GB",
    "max_wal_size": "4GB",
    # So that loading a new table need not write the log.
    "wal_level": "minimal",
    "max_wal_senders": "0",
}


class Tables(NamedTuple):
    """A store with few keys, and one with many."""

    few: PostgresStore
    many: PostgresStore
    keys: int


@contextmanager
def set_up(*, quick: bool) -> Iterator[Tables]:
    """Start a server and fill the tables, which takes longer than the measurement."""
    many = MANY_QUICK if quick else MANY
    server = Postgres(on_disk=True, **SETTINGS)
    try:
        _make_log_files(server, LOG_FILES_QUICK if quick else LOG_FILES)
        with _store(server, "few", FEW) as few, _store(server, "many", many) as large:
            yield Tables(few, large, many)
    finally:
        server.remove()


def measure(*, quick: bool, tables: Tables) -> Table:
    """Measure, and return the table."""
    few, large, many = tables
    rounds = ROUNDS_QUICK if quick else ROUNDS
    for _ in range(many // KEYS_PER_WARMING):
        _claim_us(large, AT_A_TIME)
    found = _side_by_side({"few": few, "many": large}, rounds)
    sweep = _Sweep(large)
    slot_s = SLOT_S_QUICK if quick else SLOT_S
    slots = {
        "quiet": lambda: _slowest_us(large, slot_s),
        "swept": lambda: sweep.during(lambda: _slowest_us(large, slot_s)),
    }
    with _on_processor(0, large._writer):  # noqa: SLF001 - to know its session
        found.update(interleave(slots, rounds))
    return Table(
        name="sweeping",
        question="claims on PostgreSQL in a small and a large table, and during a sweep",
        rows=_rows(found, many),
        notes=[
            f"the sweep deleted {counted(sweep.deleted)} records in {sweep.took_s:.1f} s",
            "the two tables alternate after every claim; the indexes are in memory",
        ],
    )


def _rows(found: dict[str, Samples], many: int) -> list[Row]:
    of_few, of_quiet = f"{TIMES} with {counted(FEW)}", f"{TIMES} without"
    rows = []
    for kind, what in (("alone", "one claim"), ("together", f"{AT_A_TIME} claims at once")):
        few, large = found[f"few, {kind}"], found[f"many, {kind}"]
        slower = large.over(few)
        rows += [
            Row(what=f"{what}, {counted(FEW)} keys, µs", product=few),
            Row(
                what=f"{what}, {counted(many)} keys, µs",
                product=large,
                ratios=[(of_few, slower)],
                targets=[Target(measured=slower, bound="≤", limit=1.3, unit=of_few)],
            ),
        ]
    slower = found["swept"].over(found["quiet"])
    return [
        *rows,
        Row(what="p99 of one claim, without a sweep, µs", product=found["quiet"]),
        Row(
            what="p99 of one claim, during a sweep, µs",
            product=found["swept"],
            ratios=[(of_quiet, slower)],
        ),
    ]


# --- the tables -------------------------------------------------------------------------------


def _make_log_files(server: Postgres, files: int) -> None:
    """Create files of the log for reuse, as on a server that has run for a while."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        for _ in range(files):
            connection.execute("select txid_current(), pg_switch_wal()")
        connection.execute("checkpoint")


@contextmanager
def _store(server: Postgres, schema: str, keys: int) -> Iterator[PostgresStore]:
    """Yield a store with *keys* operations that were completed a day ago."""
    with closing(PostgresStore(server.url, schema=schema, compact=True)) as store:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"set search_path to {schema}")
            with connection.transaction():
                for statement in _LOADING:
                    connection.execute(statement.format(keys=keys, now_ms=NOW_MS))
            for statement in ("vacuum analyze coatcheck_records", "checkpoint"):
                connection.execute(statement)
        yield store


# Loading before creating the indexes takes a third of the time.
_LOADING = (
    "truncate coatcheck_records",
    "alter table coatcheck_records drop constraint coatcheck_records_pkey",
    "drop index coatcheck_records_expires",
    """
    insert into coatcheck_records
      (id, fingerprint, version, state, expires_ms, nonce, response)
    select gen_random_uuid(), md5('')::uuid, {now_ms} - 90000000 - n * 86, 1,
      {now_ms} - n * 86, n, decode(repeat('78', 89), 'hex')
    from generate_series({keys}, 1, -1) as n
    """,
    "alter table coatcheck_records add primary key (id)",
    "create index coatcheck_records_expires on coatcheck_records ((expires_ms / 1000))",
)


# --- claims -----------------------------------------------------------------------------------


def _claims() -> Iterator[Swap]:
    source, policy = random.Random(17), Policy()
    while True:
        id, nonce = source.randbytes(16), source.getrandbits(63)
        request = ClaimRequest(id, id, NOW_MS, nonce)
        yield Swap(id, 0, first_attempt(request, policy, GONE, NOW_MS))


_CLAIMS = _claims()


def _claim_us(store: PostgresStore, count: int) -> float:
    """Return how long *count* claims at once take, µs."""
    swaps = [next(_CLAIMS) for _ in range(count)]
    start_s = time.perf_counter()
    lost = store.swap(swaps)
    took_s = time.perf_counter() - start_s
    assert not any(lost)
    return took_s * 1e6


def _side_by_side(stores: dict[str, PostgresStore], rounds: int) -> dict[str, Samples]:
    """Return the median time of a claim in each of *stores*, which alternate after every claim."""
    found: dict[str, list[float]] = {}
    for _ in range(1 + rounds):
        for kind, count, times in (("alone", 1, ALONE), ("together", AT_A_TIME, BATCHES)):
            took_us: dict[str, list[float]] = {name: [] for name in stores}
            for _ in range(times):
                for name, store in stores.items():
                    took_us[name].append(_claim_us(store, count))
            for name, values in took_us.items():
                found.setdefault(f"{name}, {kind}", []).append(statistics.median(values))
    # Not measured: the first round, which reads pages and prepares statements.
    return {name: Samples(tuple(values[1:])) for name, values in found.items()}


def _slowest_us(store: PostgresStore, wall_s: float) -> float:
    """Return the 99th percentile of single claims, one after the other, µs."""
    end_s = time.perf_counter() + wall_s
    took_us = []
    while time.perf_counter() < end_s:
        took_us.append(_claim_us(store, 1))
    return sorted(took_us)[len(took_us) * 99 // 100]


@contextmanager
def _on_processor(which: int, shared: SharedConnection) -> Iterator[None]:
    """Keep this thread, and the session of *shared*, on one processor if possible."""
    with suppress(AttributeError, OSError), shared as connection:
        chosen = {sorted(_PROCESSORS)[which]}
        os.sched_setaffinity(connection.info.backend_pid, chosen)
        os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        with suppress(AttributeError, OSError):
            os.sched_setaffinity(0, _PROCESSORS)


# Read before any pinning, because a new thread inherits the processor of its parent.
_PROCESSORS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


class _Sweep:
    """A sweep that runs during other work, and counts what it deletes."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self.deleted = 0
        self.took_s = 0.0

    def during(self, work: Callable[[], float]) -> float:
        """Do *work* while the sweep runs."""
        stopped = threading.Event()
        thread = threading.Thread(target=self._run, args=(stopped,))
        thread.start()
        try:
            return work()
        finally:
            stopped.set()
            thread.join()

    def _run(self, stopped: threading.Event) -> None:
        with _on_processor(-1, self._store._maintenance):  # noqa: SLF001 - as above
            start_s = time.perf_counter()
            while not stopped.is_set():
                deleted = self._store.sweep(NOW_MS)
                assert deleted == SWEEP_BATCH, "there is nothing left to sweep"
                self.deleted += deleted
            self.took_s += time.perf_counter() - start_s
