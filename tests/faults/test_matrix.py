"""Every fault at every point under every recovery, on real stores: what the docs promise (L5, L6).

A sample by default, with every pair of values; all of it with `make test-faults`.
"""

import asyncio
import itertools
import os
import queue
import signal
import sqlite3
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path

import psycopg
import pytest

from coatcheck.stores.async_store import ThreadBackend
from tests.faults.cells import Cell, Place, all_cells, cells, sample
from tests.faults.outcomes import CODE, FAULTS, RECOVERIES, STORES, Outcome
from tests.faults.victims import PROCESSES, WAIT_S_MAX, Injector, Work, engine_of, retry, suffer
from tests.support.servers.postgres import Postgres
from tests.support.servers.redis import Redis

# How long a frozen store does not answer; on SQLite, how long another process locks its file.
FROZEN_S = 1.0

_NUMBERS = itertools.count()


@cache
def server_of(store):
    """
    A server of these tests' own, which they kill and freeze.

    With "everysec" Redis acknowledges before it writes whenever its last fsync takes long, and
    what it has not written dies with it.
    """
    return Postgres() if store == "PostgreSQL" else Redis(appendfsync="always")


def place_of(store, directory):
    """A fresh store."""
    if store == "SQLite":
        url = f"sqlite:///{directory}/keys.db?busy_timeout=1s"
    elif store == "Redis":
        url = server_of(store).fresh_url()
    else:
        schema = f"faults_{next(_NUMBERS)}"
        with psycopg.connect(server_of(store).url) as connection:
            connection.execute(f"create schema {schema}")
        url = f"{server_of(store).url}?options=-c%20search_path%3D{schema}"
    return Place(url, f"{directory}/ledger")


# ------------------------------------------------------------------------------------- one cell


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_every_cell_ends_as_the_table_says(cell, tmp_path):
    """L5, L6, L7, L9, D2."""
    place = place_of(cell.store, tmp_path)
    place.prepare()
    ours, theirs = PROCESSES.Pipe()
    victim = PROCESSES.Process(target=suffer, args=(cell, place, theirs))
    victim.start()
    try:
        if cell.fault.startswith("store"):
            assert ours.poll(WAIT_S_MAX)
            strike_store(cell, place, ours)
        if cell.fault == "freeze":
            wait_until_stopped(victim.pid)
            retry(cell, place)
            os.kill(victim.pid, signal.SIGCONT)
        if cell.retry == "meanwhile":
            retry_meanwhile(cell, place, ours)
        victim.join(WAIT_S_MAX)
        assert victim.exitcode is not None, "the process never ends"
        assert victim.exitcode == (-signal.SIGKILL if cell.fault == "kill" else 0)
    finally:
        victim.kill()
        victim.join()
    end = retry(cell, place)
    assert Outcome(place.effects(cell.recovery), end) == cell.outcome


def strike_store(cell, place, line):
    """Freeze or kill the store, now that the victim has reached the point."""
    if cell.store == "SQLite":
        with closing(sqlite3.connect(place.path)) as connection:
            connection.execute("begin immediate")
            line.send("go on")
            time.sleep(FROZEN_S)
        return
    server = server_of(cell.store)
    if cell.fault == "store killed":
        server.kill()
        line.send("go on")
        server.restart()
        return
    frozen = family_of(server.process.pid)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    line.send("go on")
    time.sleep(FROZEN_S)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)


def family_of(pid):
    """A process and its children, as PostgreSQL has one for each connection."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *itertools.chain.from_iterable(family_of(int(child)) for child in children)]


def wait_until_stopped(pid):
    deadline = time.monotonic() + WAIT_S_MAX
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] != "T":
        assert time.monotonic() < deadline, "it never reached its point"
        time.sleep(0.01)


def retry_meanwhile(cell, place, line):
    """Retry while the store is back and the victim stays in its handler."""
    words: queue.Queue[str] = queue.Queue()
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(retry, cell, place, words.put)
        asked.add_done_callback(lambda _: words.put("over"))
        met = words.get(timeout=WAIT_S_MAX)
        line.send("go on")
        assert asked.result(WAIT_S_MAX) == "answer"
    # A transaction dies with its database, and the retry need not wait for it.
    is_undone = (cell.fault, cell.recovery) == ("store killed", "transaction")
    assert met == ("over" if is_undone else "KeyBusy")


# ------------------------------------------------------------------------------------ the sample


def met(cells, *fields):
    return Counter(tuple(getattr(cell, field) for field in fields) for cell in cells)


@pytest.mark.parametrize("fields", [*itertools.combinations(Cell._fields, 2)], ids="-".join)
def test_the_sample_has_every_pair_of_values(fields):
    """L5, L6: every fault with every recovery, every point, every store, and so on."""
    assert set(met(sample(all_cells()), *fields)) == set(met(all_cells(), *fields))


def test_the_sample_is_small_and_spread_evenly():
    """V2: so that it can run with all other tests."""
    taken = sample(all_cells())
    assert 40 <= len(taken) <= 50
    for field, names in {"store": STORES, "code": CODE}.items():
        shares = [met(taken, field)[(name,)] / len(taken) for name in names]
        assert min(shares) > 0.7 / len(names)


@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_only_impossible_combinations_are_not_in_the_matrix(fault, recovery):
    """L5: as documented."""
    found = {(c.store, c.code) for c in all_cells() if (c.fault, c.recovery) == (fault, recovery)}
    stores, code = set(STORES), set(CODE)
    if fault == "store killed" or (fault, recovery) == ("store frozen", "transaction"):
        stores.remove("SQLite")
    if recovery == "transaction":
        stores.remove("Redis")
    if fault in ("cancellation", "client gone"):
        code.remove("sync")
    assert found == set(itertools.product(stores, code))


@pytest.mark.parametrize("store", ["PostgreSQL", "Redis"])
@pytest.mark.parametrize("fault", ["exception", "kill"])
def test_async_victims_use_the_native_backend_of_their_store(fault, store, tmp_path):
    """D2: the faults strike the code that runs in production."""
    cell = Cell(fault, "before response", "retry", store, "async", "afterwards")
    place = place_of(store, tmp_path)

    async def main():
        async with engine_of(Work(cell, place, Injector(cell, None))) as engine:
            assert await engine.run("k", Work(cell, place).handle) == "done"
            (state,) = engine.store._loops.values()
            return type(state.batcher._backend)

    assert asyncio.run(main()) is not ThreadBackend
