"""Every fault at every point under every recovery, on real stores: what the docs promise (L5, L6).

A sample by default; all of it with `make test-faults`.
"""

import itertools
import os
import signal
import sqlite3
import time
from contextlib import closing
from functools import cache
from pathlib import Path

import psycopg
import pytest
from cells import Cell, Place, outcome
from servers.postgres import Postgres
from servers.redis import Redis

from coatcheck.verify.crash import POINTS
from coatcheck.verify.outcomes import FAULTS, RECOVERIES, outcome_of

STORES = ("sqlite", "postgres", "redis")
# One in this many, another one for each store.
SAMPLE = 1 if os.environ.get("COATCHECK_FAULTS") == "all" else 11
# How long a store that is frozen does not answer; SQLite, how long somebody else has its file.
FROZEN_S = 1.0

_NUMBERS = itertools.count()


def exists(store, fault, point, recovery):
    """
    SQLite is no server that could be killed, and Redis no place for an application's rows.

    A transaction on SQLite holds the file itself, so that nobody else can keep it from it.
    """
    if outcome_of(fault, point, recovery) is None:
        return False
    if store == "sqlite" and fault.startswith("store"):
        return fault == "store frozen" and recovery != "transaction"
    return store != "redis" or recovery != "transaction"


def cells():
    product = itertools.product(STORES, FAULTS, POINTS, RECOVERIES)
    return [Cell(*cell) for cell in product if exists(*cell)][::SAMPLE]


@cache
def server_of(store):
    """A server of these tests' own, which they kill and freeze."""
    return Postgres() if store == "postgres" else Redis()


def place_of(store, directory):
    """A fresh store."""
    if store == "sqlite":
        url = f"sqlite:///{directory}/keys.db?busy_timeout=1s"
    elif store == "redis":
        url = server_of(store).fresh_url()
    else:
        schema = f"faults_{next(_NUMBERS)}"
        with psycopg.connect(server_of(store).url) as connection:
            connection.execute(f"create schema {schema}")
        url = f"{server_of(store).url}?options=-c%20search_path%3D{schema}"
    return Place(url, f"{directory}/ledger")


def troubled(cell, place):
    """What happens to the store of *cell* when its process has reached the point."""

    def trouble(line):
        if cell.store == "sqlite":
            with closing(sqlite3.connect(place.path)) as connection:
                connection.execute("begin immediate")
                line.send("go on")
                time.sleep(FROZEN_S)
            return
        server = server_of(cell.store)
        if cell.fault == "store killed":
            server.kill()
            line.send("go on")
            server.start()
            return
        frozen = family_of(server.process.pid)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        line.send("go on")
        time.sleep(FROZEN_S)
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)

    return trouble


def family_of(pid):
    """A process and its children, as PostgreSQL has one for each connection."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *itertools.chain.from_iterable(family_of(int(child)) for child in children)]


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_every_cell_ends_as_the_table_says(cell, tmp_path):
    """L5, L6, L7, L9, D2."""
    place = place_of(cell.store, tmp_path)
    found = outcome(cell, place, troubled(cell, place))
    assert found == outcome_of(cell.fault, cell.point, cell.recovery)
