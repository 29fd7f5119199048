"""The PostgreSQL store in threads: what only it can do wrong, on real servers that are killed."""

from contextlib import closing, nullcontext
from itertools import count
from uuid import UUID

import psycopg
import pytest

from coatcheck import Engine, Misconfigured, StoreUnavailable
from tests.stores.laws.records import NOW_MS, RETENTION_MS, id_of
from tests.stores.postgres.access import session, the_error
from tests.stores.postgres.swaps import MANY, claim
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


# --- processes and engines ---------------------------------------------------------------------


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
