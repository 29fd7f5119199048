"""Searches: what is asked for by people, and by the reconciler, of a table that may be large."""

import threading
from contextlib import closing, contextmanager, suppress
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

from coatcheck import StoreUnavailable
from coatcheck.core.record import Swap
from coatcheck.stores import Query, open_store
from coatcheck.stores import search_timeout as searching
from coatcheck.stores.postgres.statements import find as find_in_postgres
from tests.stores.laws.records import NOW_MS, claim_of, id_of
from tests.support.servers import until
from tests.support.servers.mariadb import PLAIN, mariadb
from tests.support.servers.postgres import postgres

ROWS = 50_000
# Too short for a search that waits, and for nothing else.
LIMIT_S = 0.3


# --- what PostgreSQL makes of it ---------------------------------------------------------------


@pytest.fixture(scope="module")
def large():
    """A table of many keys, all completed: a third of them not at the first try."""
    url = postgres().fresh_url()
    open_store(url).close()
    bare, _, schema = url.partition("?schema=")
    with psycopg.connect(bare, autocommit=True) as connection:
        connection.execute(f"set search_path to {schema}")
        connection.execute(
            "insert into coatcheck_records"
            " (version, expires_ms, nonce, state, id, age_ms, label, scope, key, response)"
            f" select {NOW_MS} + n, {NOW_MS} + n, n, 1, md5(n::text)::uuid,"
            "  case when n % 3 = 0 then n % 100 end, 'POST /orders', 'caller', md5(n::text),"
            f"  decode(repeat('ab', 100), 'hex') from generate_series(1, {ROWS}) as n"
        )
        connection.execute("analyze coatcheck_records")
        yield connection


def plan_of(connection, query):
    statement, values = find_in_postgres(query, "select id, response from coatcheck_records")
    with psycopg.RawCursor(connection) as cursor:
        cursor.execute(f"explain (format json) {statement}", values, prepare=False)
        ((found,),) = cursor.fetchall()
    return found[0]["Plan"]["Plans"][0]


@pytest.mark.parametrize(
    "query",
    [
        Query(key="nobody's"),
        Query(key=""),
        Query(label="GET /nowhere"),
        Query(label=""),
        Query(state=3),
        Query(created_before_ms=NOW_MS - 1_000),
        Query(created_before_ms=NOW_MS - 1_000, after_id=id_of(1)),
    ],
)
def test_postgresql_knows_that_what_is_looked_for_is_rare(large, query):
    """T3: so it does not go through all of a large table in the order of the ids."""
    plan = plan_of(large, query)
    assert (plan["Node Type"], plan["Plan Rows"] < 100) == ("Sort", True)


@pytest.mark.parametrize(
    "query",
    [
        Query(),
        Query(label="POST /orders"),
        Query(state=1),
        Query(created_before_ms=NOW_MS + ROWS),
        Query(id_prefix=b"\x77" * 8),
    ],
)
def test_postgresql_stops_at_the_end_of_the_page_where_it_is_full_soon(large, query):
    """T3: a page of what is frequent does not take a look at all of it."""
    plan = plan_of(large, query)
    assert (plan["Node Type"], plan["Index Name"]) == ("Index Scan", "coatcheck_records_pkey")


def test_texts_that_are_empty_are_found_as_such():
    """O1: they are stored as null."""
    with closing(open_store(postgres().fresh_url())) as store:
        empty, full = claim_of(id_of(1)), claim_of(id_of(2))._replace(label="label", key="key")
        empty = empty._replace(label="", key="")
        store.swap([Swap(record.id, 0, record) for record in (empty, full)])
        for query in (Query(key=""), Query(label=""), Query(key="", label="")):
            assert store.find(query).records == [empty]
        for query in (Query(key="key"), Query(label="label"), Query(key="key", label="label")):
            assert store.find(query).records == [full]
        assert store.find(Query(key="", label="label")).records == []


# --- how long it may take ----------------------------------------------------------------------


@contextmanager
def locked_postgres(url):
    bare, _, schema = url.partition("?")[0], *url.partition("schema=")[1:]
    with psycopg.connect(bare, autocommit=True) as watcher, psycopg.connect(bare) as other:
        other.execute(f"lock table {schema.partition('&')[0]}.coatcheck_records")
        yield lambda: watcher.execute(
            "select 1 from pg_stat_activity where query like '%%order by id limit%%'"
            " and query like %s and state = 'active' and pid <> pg_backend_pid()",
            (f"%{schema.partition('&')[0]}%",),
        ).fetchall()


SLEEPY = "create view coatcheck_records as select r.* from other_records as r where sleep(0.05) = 0"


@contextmanager
def slow_mariadb(url):
    """Who reads the records waits at each of them."""
    place = {"host": "127.0.0.1", "port": urlsplit(url).port, "user": "root", "autocommit": True}
    with closing(pymysql.connect(**place, **PLAIN, database=urlsplit(url).path[1:])) as connection:

        def ask(statement):
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return cursor.fetchall()

        ask("rename table coatcheck_records to other_records")
        ask(SLEEPY)
        yield lambda: ask(
            "select 1 from information_schema.processlist where db = database()"
            " and info like '%order by id limit%' and id <> connection_id()"
        )


SLOW = {
    "postgresql": (lambda: postgres().fresh_url(), locked_postgres),
    "mariadb": (lambda: mariadb().fresh_url(), slow_mariadb),
}


@pytest.fixture(params=SLOW)
def slow(request):
    """Opens a store in which searches take long from now on; and tells what its server searches."""
    fresh_url, slowed = SLOW[request.param]
    url = f"{fresh_url()}&timeout={round(LIMIT_S * 1_000)}ms"

    @contextmanager
    def opened():
        with closing(open_store(url)) as store:
            store.swap([Swap(id_of(n), 0, claim_of(id_of(n))) for n in range(1_000)])
            with slowed(url) as searches:
                yield store, searches

    return opened


def find(store):
    return store.find(Query())


def find_in_vain(store):
    with suppress(StoreUnavailable):
        find(store)


def test_a_search_may_take_longer_than_a_claim(slow):
    """D2, T3: the server is not taken for dead because there is much to read."""
    with slow() as (store, searches):
        searcher = threading.Thread(target=find_in_vain, args=(store,), daemon=True)
        searcher.start()
        until(searches)
        searcher.join(3 * LIMIT_S)
        assert searches()
        store.close()  # which does not wait for it
        assert searcher.is_alive()


def test_a_search_that_takes_too_long_is_ended_by_the_server(slow, monkeypatch):
    """D2, T3: who gives up leaves nothing behind there, and is told what to do."""
    monkeypatch.setattr(searching, "SEARCH_S", LIMIT_S)
    with slow() as (store, searches):
        with pytest.raises(StoreUnavailable, match=r"search took longer than 0\.3 s") as failure:
            find(store)
        assert not failure.value.is_ambiguous
        until(lambda: not searches())  # the server tells of the end before it has tidied up
