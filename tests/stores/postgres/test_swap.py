"""Swaps on PostgreSQL, through psycopg in a thread and through asyncpg on event loops."""

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from uuid import UUID

import asyncpg
import psycopg
import pytest

from coatcheck import StoreUnavailable
from coatcheck.core.record import Swap, completed
from coatcheck.stores import open_store
from coatcheck.stores.postgres.connection import Connection
from coatcheck.stores.postgres.statements import PLACEHOLDERS, row_of
from tests.stores.laws.records import ID, claim_of, id_of
from tests.stores.postgres.access import session, sessions_of
from tests.stores.postgres.swaps import MANY, claim, complete, delete
from tests.support.servers import START_S_MAX, until
from tests.support.servers.pgbouncer import Pgbouncer
from tests.support.servers.postgres import postgres

NUMBERS = count()


# --- one statement, one round trip ---------------------------------------------------------------


@pytest.fixture
def executed(monkeypatch):
    """The statements that either driver executes from now on, by their names in `Statements`."""
    statements = []
    for driver in (Connection, asyncpg.Connection):
        fetch = driver.fetch
        monkeypatch.setattr(
            driver,
            "fetch",
            lambda self, statement, *values, fetch=fetch: (
                statements.append(statement) or fetch(self, statement, *values)
            ),
        )
    return statements


def names_of(executed, store):
    names = {statement: name for name, statement in store._table.statements._asdict().items()}
    return [names[statement] for statement in executed if statement in names]


def test_a_batch_is_one_statement_even_if_some_of_it_conflicts(access, executed):
    """L5: the same round trip brings the conflicting record."""
    access.swap(*(claim(id, nonce=7) for id in MANY[:5]))
    answers = access.swap(*(claim(id, nonce=8) for id in MANY))
    assert [answer and answer.nonce for answer in answers] == [7] * 5 + [None] * 15
    changes = access.swap(*(complete(claim_of(id, nonce=7)) for id in MANY[:6]))
    assert [change and change.nonce for change in changes] == [None] * 6
    late = [complete(claim_of(id, nonce=7), b"late") for id in MANY[5:7]]
    mixed = access.swap(claim(MANY[0]), claim(id_of(99)), *late)
    assert [other and other.version for other in mixed] == [
        completed(claim_of(), b"").version,
        None,
        completed(claim_of(), b"").version,
        None,
    ]
    assert access.swap(claim(MANY[0])) == [completed(claim_of(MANY[0], nonce=7), b"done")]
    assert names_of(executed, access.store) == [*["swap_many"] * 4, "claim_one"]


@pytest.mark.parametrize("ids", [MANY, MANY[3:4]], ids=["batch", "alone"])
@pytest.mark.parametrize("is_claim", [True, False])
def test_a_swap_that_loses_against_a_younger_one_gets_its_record(access, url, is_claim, ids):
    """L3: the winner commits while we wait for its lock, so our snapshot does not contain it."""
    swaps = [claim(id) if is_claim else complete(claim_of(id)) for id in ids]
    columns, marks = ", ".join(PLACEHOLDERS), ", ".join(PLACEHOLDERS.values())
    insert = f"insert into coatcheck_records ({columns}) values ({marks})"
    update = "update coatcheck_records set version = version + 5, nonce = 99 where id = %s"
    with session(url) as other, ThreadPoolExecutor(1) as threads:
        if is_claim:
            other.execute(insert, row_of(claim_of(MANY[3], nonce=99)))
        else:
            access.swap(*(claim(id) for id in ids))
            other.execute(update, (UUID(bytes=MANY[3]),))
        asked = threads.submit(access.swap, *swaps)
        until(lambda: waiting_sessions(url))
        other.commit()
        answers = asked.result(START_S_MAX)
    nonces = {swap.id: answer and answer.nonce for swap, answer in zip(swaps, answers, strict=True)}
    assert nonces == {**dict.fromkeys(ids), MANY[3]: 99}


def waiting_sessions(url):
    with session(url) as other:
        return other.execute("select 1 from pg_locks where not granted").fetchall()


def test_a_deadlock_is_retried(opened, url):
    """L5: PostgreSQL aborts one of the two, which must not look like an outage."""
    # PostgreSQL looks for a deadlock once, so long after our wait began; by then the other waits.
    sooner = f"{url}&options=-c%20deadlock_timeout%3D300ms"
    with opened(sooner) as access, session(url) as other:
        access.swap(*(claim(id) for id in MANY))
        other.execute("set deadlock_timeout = '60s'")
        other.execute(
            "update coatcheck_records set label = 'x' where id = %s", (UUID(bytes=MANY[-1]),)
        )
        with ThreadPoolExecutor(2) as threads:
            asked = threads.submit(access.swap, *(complete(claim_of(id)) for id in MANY))
            until(lambda: waiting_sessions(url))
            locked = "select id from coatcheck_records where id = %s for update"
            others = threads.submit(other.execute, locked, (UUID(bytes=MANY[0]),))
            others.result(START_S_MAX)  # ours was aborted, so the other one continued
            other.commit()
            assert asked.result(START_S_MAX) == [None] * len(MANY)


@pytest.mark.parametrize("size", [20, 1])
def test_rows_are_found_by_an_index_even_if_the_plan_was_made_for_an_empty_table(opened, url, size):
    """A plan that PostgreSQL keeps must hold when there are millions of rows."""
    with opened(url) as access:
        for start in range(0, 200, size):  # after the first few, PostgreSQL keeps the plan
            ids = [id_of(number) for number in range(start, start + size)]
            assert access.swap(*(claim(id) for id in ids)) == [None] * size
            assert access.swap(*(complete(claim_of(id)) for id in ids)) == [None] * size
            assert all(access.get(*ids))
    # A session reports its statistics when it ends.
    with session(url, autocommit=True) as other:
        read = until(
            lambda: other.execute(
                "select seq_tup_read from pg_stat_user_tables where idx_tup_fetch >= 400"
                " and relname = 'coatcheck_records' and schemaname = current_schema()"
            ).fetchall()
        )
    assert read == [(0,)]


def test_completing_stays_on_its_page_and_touches_no_index(opened, url):
    """D4: every completion is a "HOT" update."""
    with opened(url) as access:
        access.swap(*(claim(id) for id in MANY))
        access.swap(*(complete(claim_of(id), b"x" * 50) for id in MANY))
    with session(url, autocommit=True) as other:
        counts = until(
            lambda: other.execute(
                "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables"
                " where relname = 'coatcheck_records' and schemaname = current_schema()"
                " and n_tup_upd > 0"
            ).fetchall()
        )
    assert counts == [(20, 20)]


def test_a_compact_store_stores_neither_scope_nor_key_nor_defaults(opened, url):
    """S2: and what is not stored takes no space."""
    with opened(f"{url}&compact=1") as access, session(url) as other:
        record = claim_of()._replace(label="POST /orders", scope="caller", key="key")
        assert access.swap(Swap(ID, 0, record)) == [None]
        assert access.swap(complete(record)) == [None]
        kept = record._replace(scope="c", key="")
        assert access.get(ID) == [completed(kept, b"done")]
        columns = "label, scope, key, attempt, lease_until_ms, progress"
        stored = other.execute(f"select {columns} from coatcheck_records").fetchall()
        assert stored == [("POST /orders", "c", *[None] * 4)]


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", [b"", b"short"])
def test_an_id_that_is_no_digest_is_refused_before_anything_is_sent(access, id):
    """D2: it is the record's fault, and no outage."""
    with pytest.raises(ValueError, match="16"):
        access.swap(claim(), claim(id))
    with pytest.raises(ValueError, match="16"):
        access.swap(claim(id))
    assert access.get(ID) == [None]


def test_a_record_that_the_server_refuses_is_no_outage(access, url):
    """D2: whether a number is too large or a constraint is violated."""
    with pytest.raises((psycopg.DataError, asyncpg.DataError)):
        access.swap(claim(nonce=1 << 63))
    with session(url) as other:
        other.execute("alter table coatcheck_records add check (nonce <> 13)")
    with pytest.raises((psycopg.IntegrityError, asyncpg.IntegrityConstraintViolationError)):
        access.swap(claim(), claim(MANY[1], nonce=13))
    assert access.swap(claim()) == [None]


def test_a_table_that_is_gone_is_an_outage_and_not_ambiguous(access, url):
    """D2."""
    with session(url) as other:
        other.execute("drop table coatcheck_records")
    with pytest.raises(StoreUnavailable, match="does not exist") as caught:
        access.swap(claim())
    assert not caught.value.is_ambiguous


def test_without_the_primary_key_no_key_is_claimed(access, url):
    """L1: as during a restore; two claims of one key would not see each other."""
    access.swap(claim())
    with session(url) as other:
        other.execute("alter table coatcheck_records drop constraint coatcheck_records_pkey")
    for swaps in ([claim(MANY[1])], [claim(id) for id in MANY[2:]]):
        with pytest.raises(StoreUnavailable, match="no primary key") as caught:
            access.swap(*swaps)
        assert not caught.value.is_ambiguous


# The server has certainly not written; the last one is answered to every retry as well.
REFUSALS = ["25006", "42501", "53100", "40P01"]


def refuse_to_delete(url, code):
    """From now on the server refuses to delete records, with *code*."""
    with session(url) as other:
        other.execute(
            "create function refuse() returns trigger language plpgsql as "
            f"$$begin raise 'not this one' using errcode = '{code}'; end$$"
        )
        other.execute(
            "create trigger refuse before delete on coatcheck_records "
            "for each row execute function refuse()"
        )


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_after_something_was_written_is_ambiguous(opened, url, code):
    """L1, D2: the claim of the same batch is stored, so its caller must look."""
    name = f"refused_{next(NUMBERS)}"
    with opened(f"{url}&application_name={name}") as access:
        access.swap(claim(MANY[0]))
        access.get(MANY[0])
        before = sessions_of(url, name)
        refuse_to_delete(url, code)
        with pytest.raises(StoreUnavailable) as caught:
            access.swap(claim(MANY[1]), delete(MANY[0]))
        assert caught.value.is_ambiguous
        if code == "25006":  # the connection to a read-only server is closed
            until(lambda: sessions_of(url, name) < before)
        else:
            assert sessions_of(url, name) == before
        assert access.get(*MANY[:2]) == [claim_of(MANY[0]), claim_of(MANY[1])]
        with pytest.raises(StoreUnavailable) as caught:
            access.swap(delete(MANY[0]))
        assert not caught.value.is_ambiguous


def test_repeated_deadlocks_are_an_outage_that_says_so(access, url):
    """D2."""
    access.swap(claim())
    refuse_to_delete(url, "40001")
    with pytest.raises(StoreUnavailable, match="10 deadlocks or serialization failures"):
        access.swap(delete(ID))


# --- servers that restart, are read-only or are behind a pooler ----------------------------------


def test_a_read_only_server_is_refused(opened, own):
    """D3: a claim on a standby would be lost."""
    with opened(own.url) as access:
        access.swap(claim())
        with psycopg.connect(own.url, autocommit=True) as other:
            other.execute("alter system set default_transaction_read_only = on")
            other.execute("select pg_reload_conf()")
        with pytest.raises(StoreUnavailable) as caught:
            until(lambda: access.swap(claim(id_of(next(NUMBERS) + 1_000))) == [])
        assert not caught.value.is_ambiguous
        with pytest.raises(StoreUnavailable, match="read-only"):  # no new connection either
            access.swap(claim(MANY[1]))
        assert access.store.check()[0].level == "error"


@pytest.mark.parametrize("wish", ["any", "prefer-standby", "standby"])
def test_a_standby_is_never_used_whatever_the_url_says(opened, own, wish):
    """D3: it may lack what was acknowledged."""
    open_store(own.url).close()
    standby = own.standby()
    there = f"127.0.0.1:{standby.port}"
    alone, both = (
        f"postgresql://postgres@{hosts}/postgres?target_session_attrs={wish}"
        for hosts in (there, f"{there},127.0.0.1:{own.port}")
    )
    try:
        with pytest.raises(StoreUnavailable, match="read-only"):
            open_store(alone, create=False)
        with opened(both) as access:
            access.swap(claim())
            assert not sessions_of(standby.url, "coatcheck")
    finally:
        standby.remove()


def test_it_works_behind_pgbouncer_in_transaction_mode(opened, url):
    """
    D1: the next statement of a client may reach another session.

    There the name of a prepared statement may belong to another client, so nothing is prepared.
    """
    bouncer = Pgbouncer(postgres(), sessions=2)
    stores = [opened(f"{bouncer.url}?{url.partition('?')[2]}") for _ in range(4)]
    try:
        ids = [id_of(number) for number in range(200)]
        with ThreadPoolExecutor(4) as threads:
            mine = [[claim(id) for id in ids] for _ in stores]
            asked = [
                threads.submit(lambda s, swaps: [s.swap(swap)[0] for swap in swaps], store, swaps)
                for store, swaps in zip(stores, mine, strict=True)
            ]
            answers = [answer for one in asked for answer in one.result(START_S_MAX)]
        assert answers.count(None) == 200
        batches = [[claim(id_of(1_000 * n + k)) for k in range(30)] for n in range(1, 9)]
        for batch, store in zip(batches, stores * 2, strict=True):
            assert store.swap(*batch) == [None] * 30
            assert all(store.get(*(swap.id for swap in batch)))
        with psycopg.connect(bouncer.url, prepare_threshold=None) as other:
            assert other.execute("select name from pg_prepared_statements").fetchall() == []
    finally:
        for store in stores:
            store.__exit__()
        bouncer.remove()


def test_statements_are_prepared_where_there_is_no_pooler(access):
    """The planning of a batch takes the server as long as its execution."""
    access.swap(claim())
    prepared = "select 1 from pg_prepared_statements where statement like '%with given as %'"
    assert access.fetch_on_writer(prepared)


def test_a_prepared_statement_that_the_server_has_lost_is_prepared_again(access):
    """D2: on a new connection."""
    access.swap(claim())
    access.execute_on_writer("do $$ begin execute 'deallocate all'; end $$")
    with pytest.raises(StoreUnavailable, match="does not exist"):
        access.swap(claim(MANY[1]))
    assert access.swap(claim(MANY[1])) == [None]
