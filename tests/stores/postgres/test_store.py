"""The PostgreSQL store in threads: what only it can do wrong, on real servers that are killed."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from itertools import count
from uuid import UUID

import psycopg
import pytest

from coatcheck import Engine, Misconfigured, StoreUnavailable
from coatcheck.core.record import completed
from coatcheck.stores import Query, open_store
from tests.stores.laws.records import ID, NOW_MS, RETENTION_MS, claim_of, id_of
from tests.stores.postgres.access import session, the_error
from tests.stores.postgres.swaps import MANY, claim, complete
from tests.support.servers.postgres import postgres

NUMBERS = count()


# --- the sweep ---------------------------------------------------------------------------------


def test_a_sweep_and_a_claim_do_not_wait_for_each_other(store, url):
    """T3."""
    store.swap([claim(id) for id in MANY])
    late_ms = NOW_MS + 2 * RETENTION_MS
    with session(url) as other:
        other.execute(
            "select id from coatcheck_records where id = %s for update", (UUID(bytes=MANY[0]),)
        )
        assert store.sweep(late_ms) == len(MANY) - 1  # a locked row is left for the next sweep
        assert store.swap([claim(id_of(99))]) == [None]
    assert store.sweep(late_ms) == 2


def test_only_a_sweep_commits_without_waiting_for_the_disk(store):
    """T3: a deletion need not survive a crash."""
    store.swap([claim(id) for id in MANY])
    with store._maintenance as connection:
        connection.execute("begin")
    assert store.sweep(NOW_MS + 2 * RETENTION_MS) == len(MANY)
    with store._maintenance as connection:
        show = "show synchronous_commit"
        assert connection.execute(show).fetchone() == ("off",)
        connection.execute("commit")
        assert connection.execute(show).fetchone() == ("on",)


# --- outages -------------------------------------------------------------------------------------


def test_a_restart_that_was_not_noticed_fails_no_read(own):
    """D2: the server is back, so a retry that reads its record gets it."""
    with closing(open_store(own.url)) as store:
        store.swap([claim()])
        store.get([ID])
        own.stop()
        own.start()
        assert store.get([ID]) == [claim_of()]


def test_no_call_waits_longer_than_the_timeout(url):
    """D2: no answer is an outage, and the write is ambiguous."""
    with closing(open_store(f"{url}&timeout=300ms")) as store, session(url) as other:
        store.swap([claim()])
        other.execute(
            "select id from coatcheck_records where id = %s for update", (UUID(bytes=ID),)
        )
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="does not answer") as caught:
            store.swap([complete(claim_of())])
        assert caught.value.is_ambiguous
        assert time.monotonic() - began < 5
        other.rollback()
        (conflict,) = store.swap([complete(claim_of())])
        assert conflict is None or conflict == completed(claim_of(), b"done")


def test_a_search_does_not_wait_for_a_server_that_was_frozen_before(url):
    """D2: the longer limit applies only to a search that the server has begun."""
    with closing(open_store(f"{url}&timeout=300ms")) as store:
        store.find(Query())
        with store._searcher as connection:
            pid = connection.info.backend_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="does not answer"):
                store.find(Query())
            assert time.monotonic() - began < 5
        finally:
            os.kill(pid, signal.SIGCONT)
        assert store.find(Query()).records == []


# --- processes and engines ---------------------------------------------------------------------


def test_an_engine_runs_each_key_once_however_many_callers_there_are(url):
    """L1."""
    ran = []
    mutex = threading.Lock()

    def place(number):
        with mutex:
            ran.append(number)
        return {"order": number}

    engines = [Engine(url), Engine(url)]
    try:
        with ThreadPoolExecutor(16) as threads:
            answers = list(
                threads.map(
                    lambda n: engines[n % 2].run(f"order-{n // 8}", place, n // 8), range(400)
                )
            )
    finally:
        for engine in engines:
            engine.close()
    assert answers == [{"order": n // 8} for n in range(400)]
    assert sorted(ran) == list(range(50))


def test_no_claim_succeeds_without_the_primary_key(access, url):
    """L1: in a thread and on an event loop."""
    drop_key(url)
    for swaps in ([claim()], [claim(id) for id in MANY]):
        with pytest.raises(StoreUnavailable, match="no primary key") as caught:
            access.swap(*swaps)
        assert not caught.value.is_ambiguous


def drop_key(url):
    with session(url) as other:
        other.execute("alter table coatcheck_records drop constraint coatcheck_records_pkey")


@pytest.mark.parametrize("rest", ["", "&compact=1"])
@pytest.mark.parametrize("is_used", [False, True])
def test_an_engine_claims_nothing_without_the_primary_key(url, rest, is_used):
    """L1: as during a restore; two claims of one key would not see each other."""
    runs = []
    with closing(Engine(url + rest)) as first, closing(Engine(url + rest)) as second:
        for engine in (first, second):
            engine.ensure_started()
        if is_used:  # the statements are prepared and planned
            for number in range(10):
                for way in (first.run, first.transaction):
                    way(f"{way.__name__}-{number}", lambda: None, scope="orders")
        drop_key(url)
        for engine in (first, second):
            with pytest.raises(StoreUnavailable, match="no primary key"):
                engine.run("order-1", runs.append, 1, scope="orders")
            with pytest.raises(StoreUnavailable, match="no unique or exclusion constraint"):
                engine.transaction("order-2", runs.append, 1, scope="orders")
        assert not runs
        assert "no primary key" in the_error(first.store)
        with session(url) as other:
            other.execute("alter table coatcheck_records add primary key (id)")
        assert first.run("order-1", runs.append, 1, scope="orders") is None
        assert second.run("order-1", runs.append, 1, scope="orders") is None
        assert first.transaction("order-2", runs.append, 2, scope="orders") is None
        assert runs == [1, 2]
        assert [finding.level for finding in first.store.check() if finding.level == "error"] == []


@pytest.mark.parametrize("rest", ["", "?compact=1"])
def test_a_database_that_is_not_in_utf8_names_what_it_cannot_store(rest):
    """K1, D2: the other keys are not affected."""
    name = f"latin_{next(NUMBERS)}"
    with psycopg.connect(postgres().url, autocommit=True) as connection:
        options = "encoding 'LATIN1' lc_collate 'C' lc_ctype 'C' template template0"
        connection.execute(f"create database {name} {options}")
    with closing(Engine(f"{postgres().url.rpartition('/')[0]}/{name}{rest}")) as engine:
        assert engine.run("größe", lambda: 1, scope="orders") == 1
        with nullcontext() if rest else pytest.raises(Misconfigured, match="UTF8"):
            assert engine.run("\N{EURO SIGN}", lambda: 2, scope="orders") == 2
