"""PostgreSQL: what only this store can do wrong, on real servers that are killed and promoted."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from itertools import count
from urllib.parse import quote
from uuid import UUID

import psycopg
import pytest
import uvloop
from laws.records import ID, NOW_MS, RETENTION_MS, claim_of, id_of
from servers import START_S_MAX, until
from servers.pgbouncer import Pgbouncer
from servers.postgres import Postgres, postgres

from coatcheck import AsyncEngine, Engine, Misconfigured, StoreUnavailable
from coatcheck.core.record import Swap, completed
from coatcheck.stores import (
    Query,
    migrate_store,
    open_async_store,
    open_store,
    postgres_link,
    postgres_schema,
)
from coatcheck.stores.looped import LoopedStore
from coatcheck.stores.postgres_rows import MARKS, kept_of

NUMBERS = count()
MANY = [id_of(number) for number in range(1, 21)]


@pytest.fixture
def url():
    return postgres().fresh_url()


@pytest.fixture
def store(url):
    with closing(open_store(url)) as store:
        yield store


@pytest.fixture
def own():
    """A server of this test's own, which it may kill."""
    server = Postgres()
    yield server
    server.remove()


@contextmanager
def session(url, **settings):
    """Somebody else on the same tables."""
    bare, _, schema = url.partition("?schema=")
    with psycopg.connect(bare, **settings) as connection:
        connection.execute(f"set search_path to {schema or 'public'}")
        connection.commit()
        yield connection


def claim(id=ID, nonce=1):
    return Swap(id, 0, claim_of(id, nonce=nonce))


def complete(record, response=b"done"):
    return Swap(record.id, record.version, completed(record, response))


# --- one statement, one round trip ---------------------------------------------------------------


@pytest.fixture
def said(monkeypatch):
    """What is said to the server from now on."""
    said = []
    send = postgres_link._send
    monkeypatch.setattr(
        postgres_link, "_send", lambda connection, say: said.append(say) or send(connection, say)
    )
    return said


def name_of(say):
    return say.statement.name.decode().removeprefix("coatcheck_")


def test_a_batch_is_one_statement_also_where_some_of_it_lost(store, said):
    """L5: the same round trip brings the record that stands."""
    store.swap([claim(id, nonce=7) for id in MANY[:5]])
    answers = store.swap([claim(id, nonce=8) for id in MANY])
    assert [answer and answer.nonce for answer in answers] == [7] * 5 + [None] * 15
    changes = store.swap([complete(claim_of(id, nonce=7)) for id in MANY[:6]])
    assert [change and change.nonce for change in changes] == [None] * 6
    late = [complete(claim_of(id, nonce=7), b"late") for id in MANY[5:7]]
    mixed = store.swap([claim(MANY[0]), claim(id_of(99)), *late])
    assert [other and other.version for other in mixed] == [
        completed(claim_of(), b"").version,
        None,
        completed(claim_of(), b"").version,
        None,
    ]
    names = [name_of(say) for say in said]
    assert names == ["claim_many", "claim_many", "change_many", "swap_many"]


def test_what_is_said_often_is_prepared(store):
    store.swap([claim()])
    with store._writer as connection:
        assert connection.prepares
        names = connection.execute("select statement from pg_prepared_statements").fetchall()
    assert any("insert into" in name for (name,) in names)


def test_a_single_swap_that_wins_is_one_plain_statement(store, said):
    assert store.swap([claim()]) == [None]
    assert store.swap([complete(claim_of())]) == [None]
    assert [name_of(say) for say in said] == ["claim_one", "change_one"]
    assert store.swap([claim()]) == [completed(claim_of(), b"done")]
    assert [name_of(say) for say in said[2:]] == ["claim_one", "read_many"]


def test_texts_that_postgresql_cannot_hold_come_back_as_they_were(store):
    """D1: alone and in company, beside those that it can."""
    texts = ["plain", "", "\0", "\ud800", "\x1bescape", "grün", "a\x1bb"]
    records = [
        claim_of(id_of(number))._replace(label=text, scope=text, key=text)
        for number, text in enumerate(texts, 1)
    ]
    alone, together = records[:3], records[3:]
    for record in alone:
        assert store.swap([Swap(record.id, 0, record)]) == [None]
    assert store.swap([Swap(record.id, 0, record) for record in together]) == [None] * 4
    assert store.get([record.id for record in records]) == records
    assert store.swap([Swap(record.id, 0, record) for record in records]) == records


def test_who_loses_against_a_claim_younger_than_its_statement_gets_that_claim(store, url):
    """L3: what the winner commits while we wait for it is in no snapshot of ours."""
    with session(url) as other, ThreadPoolExecutor(1) as threads:
        rival = claim_of(MANY[3], nonce=99)
        columns, marks = ", ".join(MARKS), ", ".join(MARKS.values())
        insert = f"insert into coatcheck_records ({columns}) values ({marks})"
        other.execute(insert, kept_of(rival, compact=False))
        asked = threads.submit(store.swap, [claim(id) for id in MANY])
        until(lambda: waiting_sessions(url))
        other.commit()
        answers = asked.result(START_S_MAX)
    assert [answer and answer.nonce for answer in answers] == [None] * 3 + [99] + [None] * 16


def test_a_change_that_loses_against_a_younger_change_gets_it(store, url):
    """L3."""
    store.swap([claim(id) for id in MANY])
    with session(url) as other, ThreadPoolExecutor(1) as threads:
        other.execute(
            "update coatcheck_records set version = version + 5, nonce = 99 where id = %s",
            (UUID(bytes=MANY[3]),),
        )
        asked = threads.submit(store.swap, [complete(claim_of(id)) for id in MANY])
        until(lambda: waiting_sessions(url))
        other.commit()
        answers = asked.result(START_S_MAX)
    assert [answer and answer.nonce for answer in answers] == [None] * 3 + [99] + [None] * 16


def waiting_sessions(url):
    with session(url) as other:
        return other.execute("select 1 from pg_locks where not granted").fetchall()


def test_a_deadlock_with_somebody_else_is_tried_again(url):
    """L5: PostgreSQL ends one of the two; it must not look like an outage."""
    # PostgreSQL looks once, so long after we began to wait; by then the other one waits, too.
    sooner = f"{url}&options=-c%20deadlock_timeout%3D2s"
    with closing(open_store(sooner)) as store, session(url) as other:
        store.swap([claim(id) for id in MANY])
        other.execute("set deadlock_timeout = '60s'")
        other.execute(
            "update coatcheck_records set label = 'x' where id = %s", (UUID(bytes=MANY[-1]),)
        )
        with ThreadPoolExecutor(2) as threads:
            asked = threads.submit(store.swap, [complete(claim_of(id)) for id in MANY])
            until(lambda: waiting_sessions(url))
            locked = "select id from coatcheck_records where id = %s for update"
            others = threads.submit(other.execute, locked, (UUID(bytes=MANY[0]),))
            others.result(START_S_MAX)  # ours was ended, so that the other one got on
            other.commit()
            assert asked.result(START_S_MAX) == [None] * len(MANY)


def test_rows_are_found_by_an_index_also_if_the_table_was_empty_when_that_was_decided(store, url):
    """A plan that is kept must hold when there are millions."""
    for start in range(0, 200, 20):  # after the first few, PostgreSQL keeps the plan
        ids = [id_of(number) for number in range(start, start + 20)]
        assert store.swap([claim(id) for id in ids]) == [None] * 20
        assert store.swap([complete(claim_of(id)) for id in ids]) == [None] * 20
        assert all(store.get(ids))
    for link in (store._writer, store._reader):
        with link as connection:
            connection.execute("select pg_stat_force_next_flush()")
    with session(url, autocommit=True) as other:
        read = other.execute(
            "select seq_tup_read, idx_tup_fetch >= 400 from pg_stat_user_tables"
            " where relname = 'coatcheck_records' and schemaname = current_schema()"
        ).fetchall()
    assert read == [(0, True)]


def test_completing_stays_on_its_page_and_touches_no_index(store, url):
    """D4: a "HOT" update, every one of them."""
    store.swap([claim(id) for id in MANY])
    store.swap([complete(claim_of(id), b"x" * 50) for id in MANY])
    store.close()  # a session tells its numbers when it ends, else only after ten idle seconds
    with session(url, autocommit=True) as other:
        counts = until(
            lambda: other.execute(
                "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables"
                " where relname = 'coatcheck_records' and schemaname = current_schema()"
                " and n_tup_upd > 0"
            ).fetchall()
        )
    assert counts == [(20, 20)]


def test_a_compact_store_keeps_no_text_and_nothing_that_is_usual(url):
    """Nor does it take room for it."""
    with closing(open_store(f"{url}&compact=1")) as store, session(url) as other:
        record = claim_of()._replace(label="POST /orders", scope="caller", key="key")
        assert store.swap([Swap(ID, 0, record)]) == [None]
        assert store.swap([complete(record)]) == [None]
        assert store.get([ID]) == [completed(claim_of(), b"done")]
        columns = "label, scope, key, attempt, lease_until_ms, progress"
        kept = other.execute(f"select {columns} from coatcheck_records").fetchall()
        assert kept == [(None,) * 6]


def test_an_id_that_is_no_digest_is_refused_and_its_company_is_not(store):
    with pytest.raises(ValueError, match="16"):
        store.swap([claim(), claim(b"short")])
    with pytest.raises(ValueError, match="16"):
        store.swap([claim(b"short")])
    assert store.get([ID]) == [None]


# --- the sweep ---------------------------------------------------------------------------------


def test_a_sweep_and_a_claim_do_not_wait_for_each_other(store, url):
    """T3."""
    store.swap([claim(id) for id in MANY])
    late_ms = NOW_MS + 2 * RETENTION_MS
    with session(url) as other:
        other.execute(
            "select id from coatcheck_records where id = %s for update", (UUID(bytes=MANY[0]),)
        )
        assert store.sweep(late_ms) == len(MANY) - 1  # what is held is left for the next time
        assert store.swap([claim(id_of(99))]) == [None]
    assert store.sweep(late_ms) == 2


def test_a_sweep_waits_for_no_disk_and_everybody_else_does(store):
    """T3: forgetting need not survive a crash."""
    store.swap([claim(id) for id in MANY])
    with store._keeper as connection:
        connection.execute("begin")
    assert store.sweep(NOW_MS + 2 * RETENTION_MS) == len(MANY)
    with store._keeper as connection:
        show = "show synchronous_commit"
        assert connection.execute(show).fetchone() == ("off",)
        connection.execute("commit")
        assert connection.execute(show).fetchone() == ("on",)


# --- trouble -----------------------------------------------------------------------------------


def test_a_server_that_was_restarted_is_found_again(own):
    """D2: down is said so, and nothing of ours has to be restarted."""
    with closing(open_store(own.url)) as store:
        assert store.swap([claim()]) == [None]
        own.stop()
        with pytest.raises(StoreUnavailable):
            store.swap([complete(claim_of())])
        with pytest.raises(StoreUnavailable):
            store.get([ID])
        assert store.check()[0].level == "error"
        own.start()
        assert store.get([ID]) == [claim_of()]
        assert store.swap([complete(claim_of())]) == [None]


def test_a_restart_that_nobody_has_noticed_fails_no_read(own):
    """D2: the server is there again, so a duplicate that looks at its record is not refused."""
    with closing(open_store(own.url)) as store:
        store.swap([claim()])
        store.get([ID])
        own.stop()
        own.start()
        assert store.get([ID]) == [claim_of()]


def test_what_was_acknowledged_is_there_after_kill_9(own):
    """D1: and a claim that fails meanwhile is told so, and may be tried again."""
    acknowledged, failed = [], []

    def write(numbers):
        for number in numbers:
            try:
                store.swap([claim(id_of(number))])
                acknowledged.append(number)
            except StoreUnavailable:
                failed.append(number)

    with closing(open_store(own.url)) as store, ThreadPoolExecutor(4) as threads:
        writing = [threads.submit(write, range(n, 4_000, 4)) for n in range(4)]
        until(lambda: len(acknowledged) > 50)
        own.kill()
        until(lambda: len(failed) > 10)
        for one in writing:
            one.result(START_S_MAX)
        assert failed
        own.start()
        standing = store.get([id_of(number) for number in acknowledged])
        assert standing == [claim_of(id_of(number)) for number in acknowledged]
        for number in failed[:20]:  # whether it was written or not, trying again settles it
            (lost,) = store.swap([claim(id_of(number))])
            assert lost is None or lost == claim_of(id_of(number))


def test_nobody_waits_longer_than_was_said(url):
    """D2: a server that does not answer is like none, and the write may have been made."""
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
        (lost,) = store.swap([complete(claim_of())])
        assert lost is None or lost == completed(claim_of(), b"done")


def test_a_search_does_not_wait_for_a_server_that_was_frozen_before(url):
    """D2: only what the server has begun may take long."""
    with closing(open_store(f"{url}&timeout=300ms")) as store:
        store.find(Query())
        with store._finder as connection:
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


def test_a_table_that_is_gone_is_an_outage_and_not_a_crash(store, url):
    """D2."""
    with session(url) as other:
        other.execute("drop table coatcheck_records")
    with pytest.raises(StoreUnavailable, match="does not exist") as caught:
        store.swap([claim()])
    assert not caught.value.is_ambiguous


def delete(id):
    return Swap(id, claim_of(id).version, None)


# What a server says that has certainly not written; the last one, each time that it is asked again.
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
def test_a_refusal_after_something_was_written_is_a_doubt(store, url, code):
    """L1, D2: the claim of the same batch is there, and who made it is told to look."""
    store.swap([claim(MANY[0])])
    refuse_to_delete(url, code)
    with pytest.raises(StoreUnavailable) as caught:
        store.swap([claim(MANY[1]), delete(MANY[0])])
    assert caught.value.is_ambiguous
    assert store.get(MANY[:2]) == [claim_of(MANY[0]), claim_of(MANY[1])]
    with pytest.raises(StoreUnavailable) as caught:
        store.swap([delete(MANY[0])])
    assert not caught.value.is_ambiguous


def test_a_server_that_only_reads_is_refused(own):
    """D3: a claim on a standby would be a claim on nothing."""
    with closing(open_store(own.url)) as store:
        with psycopg.connect(own.url, autocommit=True) as other:
            other.execute("alter system set default_transaction_read_only = on")
            other.execute("select pg_reload_conf()")
        with pytest.raises(StoreUnavailable):
            until(lambda: store.swap([claim(id_of(next(NUMBERS)))]) == [])
        assert store.check()[0].level == "error"


def test_a_server_that_could_forget_is_warned_of_when_it_is_opened(url, caplog):
    """D3: the tests' own server has `fsync` off."""
    with closing(open_store(url)) as store:
        assert "fsync = off" in caplog.text
        assert "fsync = off" in store.check()[0].message


def test_it_works_behind_pgbouncer_in_transaction_mode(url):
    """
    D1: a client's next statement may meet another session.

    What was prepared there under the same name is somebody else's statement, so nothing may be.
    """
    bouncer = Pgbouncer(postgres(), sessions=2)
    schema = url.partition("?")[2]
    stores = [open_store(f"{bouncer.url}?{schema}") for _ in range(4)]
    try:
        for store in stores:
            store.now_ms()
            store.swap([claim(id_of(next(NUMBERS) + 100_000))])
            with store._writer as connection:
                assert not connection.prepares
        with ThreadPoolExecutor(4) as threads:
            ids = [id_of(number) for number in range(200)]
            answers = list(
                threads.map(lambda n: stores[n % 4].swap([claim(ids[n // 2])]), range(400))
            )
            assert [a for (a,) in answers].count(None) == 200
            batches = [[claim(id_of(1_000 * n + k)) for k in range(30)] for n in range(1, 9)]
            for batch, store in zip(batches, stores * 2, strict=True):
                assert store.swap(batch) == [None] * 30
                assert all(store.get([swap.id for swap in batch]))
    finally:
        for store in stores:
            store.close()
        bouncer.remove()


def test_a_statement_that_the_server_has_forgotten_is_prepared_again(store):
    """D2: or no longer fits its table; a new connection knows better."""
    store.swap([claim()])
    with store._writer as connection:
        connection.execute(b"deallocate all")
    with pytest.raises(StoreUnavailable, match="does not exist"):
        store.swap([claim(MANY[1])])
    assert store.swap([claim(MANY[1])]) == [None]


# --- event loops -------------------------------------------------------------------------------


class Loop:
    """A store on an event loop of its own, which runs while it is asked for something."""

    def __init__(self, url, new_loop=asyncio.new_event_loop):
        self.store = open_async_store(url)
        self.runner = asyncio.Runner(loop_factory=new_loop)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.runner.run(self.store.close())
        self.runner.close()

    def swap(self, *swaps):
        return list(self.runner.run(self._swap(swaps)))

    async def _swap(self, swaps):
        async with asyncio.timeout(START_S_MAX):
            return await self.store.swap(swaps)

    def swap_apart(self, swaps):
        """Each a call of its own, all at once; what became of them."""

        async def calls():
            asked = [self.store.swap([swap]) for swap in swaps]
            async with asyncio.timeout(START_S_MAX):
                return await asyncio.gather(*asked, return_exceptions=True)

        return self.runner.run(calls())

    def get(self, *ids):
        return list(self.runner.run(self.store.get(ids)))

    @property
    def connections(self):
        (way,) = self.store._ways.values()
        return [line._connection for line in (*way._wire._writers, way._wire._reader)]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def new_loop(request):
    return request.param


@pytest.fixture
def loop(url, new_loop):
    with Loop(url, new_loop) as loop:
        yield loop


def test_an_event_loop_reaches_the_server_without_a_thread(loop, said):
    """L1, L5: grouped, on two connections, and each group is one statement."""
    assert isinstance(loop.store, LoopedStore)
    assert loop.swap_apart([claim(id) for id in MANY]) == [[None]] * len(MANY)
    assert loop.swap(claim(nonce=2), claim(id_of(99))) == [claim_of(), None]
    assert loop.get(*MANY) == [claim_of(id) for id in MANY]
    writers = [connection for connection in loop.connections[:2] if connection]
    assert len(said) < len(MANY) / 2
    assert all(connection.prepares for connection in writers)
    assert loop.store._threaded._queue._thread is None


def test_a_batch_larger_than_a_socket_takes_at_once_arrives(loop):
    """L1: what does not fit is sent when there is room."""
    large = [completed(claim_of(id), bytes(1_000_000)) for id in MANY]
    assert loop.swap(*(Swap(record.id, 0, record) for record in large)) == [None] * len(MANY)
    assert loop.get(*MANY) == large


def test_a_connection_that_the_server_ends_while_nobody_waits_is_replaced(loop, url):
    """D2: nobody notices."""
    loop.swap(claim())
    pids = [connection.info.backend_pid for connection in loop.connections if connection]
    with session(url, autocommit=True) as other:
        for pid in pids:
            other.execute("select pg_terminate_backend(%s)", (pid,))
    until(lambda: loop.runner.run(asyncio.sleep(0)) or not any(loop.connections))
    assert loop.swap(complete(claim_of())) == [None]


def test_a_loop_finds_a_server_that_was_restarted(own):
    """D2: down is said so, and nothing of ours has to be restarted."""
    with Loop(own.url) as loop:
        assert loop.swap(claim()) == [None]
        own.stop()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                loop.swap(complete(claim_of()))
        with pytest.raises(StoreUnavailable):
            loop.get(ID)
        own.start()
        assert loop.get(ID) == [claim_of()]
        assert loop.swap(complete(claim_of())) == [None]


def test_what_a_loop_was_told_is_there_after_kill_9(own):
    """D1: and who fails meanwhile is told so, and may try again."""
    acknowledged, failed = [], []

    async def write(store, numbers):
        for number in numbers:
            try:
                await store.swap([claim(id_of(number))])
                acknowledged.append(number)
            except StoreUnavailable:
                failed.append(number)

    async def writers(store):
        async with asyncio.timeout(START_S_MAX):
            await asyncio.gather(*(write(store, range(n, 4_000, 32)) for n in range(32)))

    with Loop(own.url) as loop, ThreadPoolExecutor(1) as threads:
        writing = threads.submit(loop.runner.run, writers(loop.store))
        until(lambda: len(acknowledged) > 50)
        own.kill()
        writing.result(START_S_MAX)
        assert failed
        own.start()
        standing = loop.get(*(id_of(number) for number in acknowledged))
        assert standing == [claim_of(id_of(number)) for number in acknowledged]
        for number in failed[:20]:
            (lost,) = loop.swap(claim(id_of(number)))
            assert lost is None or lost == claim_of(id_of(number))


def test_a_loop_that_was_held_up_does_not_take_its_own_absence_for_the_servers(url, new_loop):
    """D2: a handler that blocks the loop for longer than the server may take is no outage."""

    async def hold_up(store):
        asked = store.swap([claim(MANY[1])])
        threading.Event().wait(1)
        return await asked

    with Loop(f"{url}&timeout=300ms", new_loop) as loop:
        loop.swap(claim())
        assert list(loop.runner.run(hold_up(loop.store))) == [None]


def test_a_loop_waits_for_a_frozen_server_as_long_as_was_said(url, new_loop):
    """D2: and the write may have been made; the loop itself goes on."""
    with Loop(f"{url}&timeout=300ms", new_loop) as loop:
        loop.swap(claim())
        frozen = [connection.info.backend_pid for connection in loop.connections if connection]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="does not answer") as caught:
                loop.swap(complete(claim_of()))
            assert caught.value.is_ambiguous
            # Some loops count whole milliseconds.
            assert 0.299 <= time.monotonic() - began < 5
            # On a new connection, whatever has become of the old one.
            (lost,) = loop.swap(complete(claim_of()))
            assert lost is None or lost == completed(claim_of(), b"done")
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)


def test_a_loop_tries_again_after_a_deadlock(url):
    """L5: PostgreSQL ends one of the two; it must not look like an outage."""
    sooner = f"{url}&options=-c%20deadlock_timeout%3D2s"
    with Loop(sooner) as loop, session(url) as other, ThreadPoolExecutor(2) as threads:
        loop.swap(*(claim(id) for id in MANY))
        other.execute("set deadlock_timeout = '60s'")
        other.execute(
            "update coatcheck_records set label = 'x' where id = %s", (UUID(bytes=MANY[-1]),)
        )
        asked = threads.submit(loop.swap, *(complete(claim_of(id)) for id in MANY))
        until(lambda: waiting_sessions(url))
        locked = "select id from coatcheck_records where id = %s for update"
        others = threads.submit(other.execute, locked, (UUID(bytes=MANY[0]),))
        others.result(START_S_MAX)
        other.commit()
        assert asked.result(START_S_MAX) == [None] * len(MANY)


def test_a_bad_record_of_a_loop_fails_alone(loop):
    """D2: whether we or the server find it bad."""
    empty = claim(b"")
    answers = loop.swap_apart([claim(), claim(b"short"), empty, claim(MANY[1])])
    assert answers[0] == answers[3] == [None]
    assert isinstance(answers[1], ValueError)
    assert isinstance(answers[2], psycopg.IntegrityError)


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_after_a_loop_has_written_something_is_a_doubt(loop, url, code):
    """L1, D2: the claim of the same batch is there, and who made it is told to look."""
    loop.swap(claim(MANY[0]))
    refuse_to_delete(url, code)
    with pytest.raises(StoreUnavailable) as caught:
        loop.swap(claim(MANY[1]), delete(MANY[0]))
    assert caught.value.is_ambiguous
    assert (loop.connections[0] is None) == (code == "25006")  # one that only reads is left
    assert loop.get(*MANY[:2]) == [claim_of(MANY[0]), claim_of(MANY[1])]
    with pytest.raises(StoreUnavailable) as caught:
        loop.swap(delete(MANY[0]))
    assert not caught.value.is_ambiguous


def test_a_loop_drops_a_server_that_only_reads(own):
    """D3: a claim on a standby would be a claim on nothing."""
    with Loop(own.url) as loop:
        loop.swap(claim())
        with psycopg.connect(own.url, autocommit=True) as other:
            other.execute("alter system set default_transaction_read_only = on")
            other.execute("select pg_reload_conf()")
        with pytest.raises(StoreUnavailable) as caught:
            until(lambda: loop.swap(claim(id_of(next(NUMBERS)))) == [])
        assert not caught.value.is_ambiguous
        assert loop.connections[0] is None


def test_a_loop_works_behind_pgbouncer_in_transaction_mode(url):
    """D1: nothing is prepared there."""
    bouncer = Pgbouncer(postgres(), sessions=2)
    try:
        with Loop(f"{bouncer.url}?{url.partition('?')[2]}") as loop:
            ids = [id_of(number) for number in range(200)]
            answers = loop.swap_apart([claim(id) for id in ids] * 2)
            assert [a for (a,) in answers].count(None) == 200
            assert loop.get(*ids) == [claim_of(id) for id in ids]
            assert not any(connection.prepares for connection in loop.connections if connection)
    finally:
        bouncer.remove()


def test_who_waits_when_a_loop_closes_without_patience_is_told(url, new_loop):
    """D2: also who has not been sent yet, on a loop that lives on."""

    async def impatient(store):
        asked = [store.swap([complete(claim_of(id))]) for id in MANY]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await store.close()
        async with asyncio.timeout(START_S_MAX):
            return await asyncio.gather(*asked, return_exceptions=True)

    with Loop(url, new_loop) as loop, session(url) as other:
        loop.swap(*(claim(id) for id in MANY))
        other.execute("select 1 from coatcheck_records for update")
        errors = loop.runner.run(impatient(loop.store))
        assert {type(error) for error in errors} == {StoreUnavailable}
        assert errors[0].is_ambiguous
        assert not errors[-1].is_ambiguous


def test_a_loop_that_ends_leaves_no_connection_behind(url):
    """D4: also where nobody has closed the store."""
    store = open_async_store(f"{url}&application_name=left_behind")

    async def use():
        assert list(await store.swap([claim(id_of(next(NUMBERS)))])) == [None]

    with session(url, autocommit=True) as other:
        ours = "select count(*) from pg_stat_activity where application_name = 'left_behind'"
        (before,) = other.execute(ours).fetchone()
        for _ in range(3):
            asyncio.run(use())
        until(lambda: other.execute(ours).fetchone() == (before,))
        asyncio.run(store.close())
        until(lambda: other.execute(ours).fetchone() == (0,))


FORKED = """
import asyncio, os, sys
from coatcheck import AsyncEngine

engine = AsyncEngine(sys.argv[1])

async def place():
    return os.getpid()

def use(key):
    return asyncio.run(engine.run(key, place))

kept = asyncio.new_event_loop()
assert kept.run_until_complete(engine.run("before", place)) == os.getpid()
child = os.fork()
if child == 0:
    assert use("child") == os.getpid()
    assert use("before") == os.getppid()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert kept.run_until_complete(engine.run("parent", place)) == os.getpid()
assert kept.run_until_complete(engine.run("child", place)) == child
kept.run_until_complete(engine.close())
kept.close()
"""


def test_a_forked_child_leaves_the_connections_of_its_parents_loop_alone(url):
    """L1, D4: both work on."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, url]
    done = subprocess.run(command, timeout=START_S_MAX, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_an_async_engine_survives_a_server_that_is_killed_and_one_that_is_frozen(own):
    """L1, D1, D2: whoever was refused asks again, and every key has run once or is in doubt."""
    ran = []

    async def place(number):
        ran.append(number)
        return {"order": number}

    async def ask(engine, number):
        try:
            return await engine.run(f"order-{number}", place, number)
        except StoreUnavailable:
            return None

    async def scene():
        async with AsyncEngine(f"{own.url}?timeout=500ms") as engine:
            first = await asyncio.gather(*(ask(engine, number) for number in range(50)))
            assert first == [{"order": number} for number in range(50)]
            pids = await asyncio.to_thread(backends)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            frozen = await asyncio.gather(*(ask(engine, number) for number in range(50, 60)))
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            own.kill()
            killed = await asyncio.gather(*(ask(engine, number) for number in range(60, 70)))
            await asyncio.to_thread(own.start)
            assert killed == [None] * 10
            again = await asyncio.gather(*(ask(engine, number) for number in range(50)))
            assert again == first
            fresh = await asyncio.gather(*(ask(engine, number) for number in range(70, 90)))
            assert fresh == [{"order": number} for number in range(70, 90)]
            return frozen

    def backends():
        with psycopg.connect(own.url) as other:
            named = "select pid from pg_stat_activity where application_name = 'coatcheck'"
            return [pid for (pid,) in other.execute(named).fetchall()]

    frozen = asyncio.run(scene())
    assert [answer for answer in frozen if answer] == [
        {"order": number} for number, answer in enumerate(frozen, 50) if answer
    ]
    assert len(set(ran)) == len(ran)


# --- the schema --------------------------------------------------------------------------------


def open_at_once(url, start, results):
    start.wait()
    try:
        open_store(url).close()
        results.put("opened")
    except Exception as error:  # noqa: BLE001 - told to the test
        results.put(repr(error))


def test_nodes_that_start_together_make_the_schema_once(url):
    """D4."""
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(4), spawn.Queue()
    nodes = [spawn.Process(target=open_at_once, args=(url, start, results)) for _ in range(4)]
    for node in nodes:
        node.start()
    assert [results.get(timeout=START_S_MAX) for _ in nodes] == ["opened"] * 4
    for node in nodes:
        node.join()


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_who_has_waited_for_another_node_sees_what_it_made(url, level):
    """D4: also where the role's transactions see nothing that is younger than they are."""
    options = "-c default_transaction_isolation=" + level.replace(" ", "\\ ")
    with (
        psycopg.connect(postgres().url, autocommit=True) as other,
        ThreadPoolExecutor(3) as threads,
    ):
        lock = (postgres_schema._LOCK,)
        other.execute("select pg_advisory_lock(%s)", lock)
        nodes = [threads.submit(open_store, f"{url}&options={quote(options)}") for _ in range(3)]
        waiting = "select from pg_locks where locktype = 'advisory' and not granted"
        until(lambda: other.execute(waiting).rowcount == 3)
        other.execute("select pg_advisory_unlock(%s)", lock)
        for node in nodes:
            node.result(START_S_MAX).close()


def drop_key(url):
    with session(url) as other:
        other.execute("alter table coatcheck_records drop constraint coatcheck_records_pkey")


@pytest.mark.parametrize("rest", ["", "&compact=1"])
@pytest.mark.parametrize("is_used", [False, True])
def test_without_the_key_of_the_table_nobody_claims(url, rest, is_used):
    """L1: as in a restore that is not over; the one could not be seen by the other."""
    runs = []
    with closing(Engine(url + rest)) as first, closing(Engine(url + rest)) as second:
        if is_used:  # its statements are prepared, and planned
            for number in range(10):
                for way in (first.run, first.transaction):
                    way(f"{way.__name__}-{number}", lambda: None, scope="orders")
        drop_key(url)
        for engine in (first, second):
            with pytest.raises(StoreUnavailable, match="no primary key"):
                engine.run("order-1", runs.append, 1, scope="orders")
            with pytest.raises(StoreUnavailable, match="no unique or exclusion constraint"):
                engine.transaction("order-2", runs.append, 1, scope="orders")
            with pytest.raises(StoreUnavailable, match="no primary key") as caught:
                engine.store.swap([claim(id) for id in MANY])
            assert not caught.value.is_ambiguous
        assert not runs
        assert "no primary key" in the_error(first.store)
        with session(url) as other:
            other.execute("alter table coatcheck_records add primary key (id)")
        assert first.run("order-1", runs.append, 1, scope="orders") is None
        assert second.run("order-1", runs.append, 1, scope="orders") is None
        assert first.transaction("order-2", runs.append, 2, scope="orders") is None
        assert runs == [1, 2]
        assert [finding.level for finding in first.store.check() if finding.level == "error"] == []


def test_without_the_key_of_the_table_nobody_claims_from_a_loop(url):
    """L1: the same over an event loop's own connections."""

    async def story():
        async with AsyncEngine(url) as engine:
            assert isinstance(engine.store, LoopedStore)
            drop_key(url)
            with pytest.raises(StoreUnavailable, match="no primary key"):
                await engine.run("order-1", lambda: None, scope="orders")

    asyncio.run(story())


def the_error(store):
    """The one thing that the doctor calls an error."""
    (told,) = [finding.message for finding in store.check() if finding.level == "error"]
    return told


@pytest.mark.parametrize(
    ("hurt", "said"),
    [
        ("drop table coatcheck_records", "is gone"),
        ("drop table coatcheck_records, coatcheck_schema", "is missing; run `coatcheck migrate"),
        ("delete from coatcheck_schema", "is missing"),
        ("insert into coatcheck_schema values (99)", "newer coatcheck"),
    ],
)
def test_the_doctor_looks_for_the_table_and_who_made_it(store, url, hurt, said):
    """D4, O1: what was there when the store was opened may be gone, or changed."""
    with session(url) as other:
        other.execute(hurt)
    assert said in the_error(store)


def test_a_schema_of_a_newer_release_is_refused(store, url):
    """D4: what it means is not known here."""
    with session(url) as other:
        other.execute("insert into coatcheck_schema values (99)")
    with pytest.raises(Misconfigured, match="newer coatcheck"):
        open_store(url)


def test_who_only_looks_makes_nothing(url):
    with pytest.raises(Misconfigured, match="missing"):
        open_store(url, create=False)
    with session(url) as other:
        found = other.execute("select to_regclass('coatcheck_schema')").fetchone()
    assert found == (None,)


def test_two_schemas_know_nothing_of_each_other(store):
    with closing(open_store(postgres().fresh_url())) as other:
        store.swap([claim()])
        assert other.get([ID]) == [None]
        assert other.find(Query()).records == []


@pytest.mark.parametrize("schema", ["a%b", "a%sb", "a\0b", "x" * 64, "ü" * 32])
@pytest.mark.parametrize("use", [open_store, migrate_store])
def test_a_schema_whose_name_cannot_be_kept_is_refused(schema, use):
    """D4: drivers take a percent sign for a value, and PostgreSQL cuts off what is too long."""
    with pytest.raises(Misconfigured, match="schema"):
        use(f"{postgres().url}?schema={quote(schema)}")


@pytest.mark.parametrize("schema", ["Shop", "a\"b'c\\d", "a{b}.c", "x" * 63, "ü" * 31])
def test_a_schema_may_have_any_other_name(schema):
    """D4."""
    with closing(Engine(f"{postgres().url}?schema={quote(schema)}")) as engine:
        assert engine.run("key", lambda: 1, scope="orders") == 1
        assert engine.transaction("key", lambda: 2, scope="payments") == 2
        assert len(engine.store.find(Query()).records) == 2
        assert engine.store.sweep(engine.store.now_ms() + 100 * RETENTION_MS) == 2


def test_a_standby_never_answers_whatever_the_url_says(own):
    """D3: it may not know yet what was acknowledged."""
    open_store(own.url).close()
    standby = own.standby()
    there = f"127.0.0.1:{standby.port}"
    try:
        for wish in ("any", "prefer-standby", "standby"):
            alone, both = (
                f"postgresql://postgres@{hosts}/postgres?target_session_attrs={wish}"
                for hosts in (there, f"{there},127.0.0.1:{own.port}")
            )
            with pytest.raises(StoreUnavailable, match="read-only"):
                open_store(alone, create=False)
            with closing(open_store(both, create=False)) as store:
                store.find(Query())
                with store._finder as connection:
                    assert connection.info.port == own.port
    finally:
        standby.remove()


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("?timeout=soon", "timeout"),
        ("?colour=red", "colour"),
        ("?sslmode=perhaps", "sslmode"),
    ],
)
def test_an_option_that_nobody_knows_is_refused(rest, said):
    with pytest.raises((Misconfigured, StoreUnavailable), match=said):
        open_store(postgres().url + rest)


def test_a_url_without_a_host_is_what_libpq_makes_of_it():
    """D1: as for a socket of this machine, `postgresql:///shop`."""
    port = postgres().port
    url = f"postgresql:///postgres?host=127.0.0.1&port={port}&user=postgres&schema=hostless"
    open_store(url).close()


def test_a_schema_that_is_there_need_not_be_made_by_who_uses_it(url):
    """D4: an operator has made it, and granted the right to make tables in it, and no more."""
    bare, _, schema = url.partition("?schema=")
    role = f"maker_{schema}"
    with psycopg.connect(bare, autocommit=True) as connection:
        connection.execute(f"create schema {schema}")
        connection.execute(f"create role {role} login")
        connection.execute(f"grant usage, create on schema {schema} to {role}")
    open_store(url.replace("postgres@", f"{role}@")).close()


@pytest.mark.parametrize("rest", ["", "?compact=1"])
def test_a_database_that_is_not_in_utf8_says_what_it_cannot_hold(rest):
    """K1, D2: and nobody else's key suffers from it."""
    name = f"latin_{next(NUMBERS)}"
    with psycopg.connect(postgres().url, autocommit=True) as connection:
        made = "encoding 'LATIN1' lc_collate 'C' lc_ctype 'C' template template0"
        connection.execute(f"create database {name} {made}")
    with closing(Engine(f"{postgres().url.rpartition('/')[0]}/{name}{rest}")) as engine:
        assert engine.run("größe", lambda: 1, scope="orders") == 1
        with nullcontext() if rest else pytest.raises(Misconfigured, match="UTF8"):
            assert engine.run("\N{EURO SIGN}", lambda: 2, scope="orders") == 2


def test_the_doctor_says_that_nothing_can_be_written_or_kept(url):
    """D3, O1: a role that may only read, and a table that a crash empties."""
    bare, _, schema = url.partition("?schema=")
    role = f"reader_{schema}"
    open_store(url).close()
    with psycopg.connect(bare, autocommit=True) as connection:
        connection.execute(f"create role {role} login")
        connection.execute(f"grant usage on schema {schema} to {role}")
        connection.execute(f"grant select on all tables in schema {schema} to {role}")
        connection.execute(f"alter table {schema}.coatcheck_records set unlogged")
    with closing(open_store(url.replace("postgres@", f"{role}@"), create=False)) as store:
        told = {finding.level: finding.message for finding in store.check()}
    assert "may not write" in told["error"]
    assert "unlogged" in told["warning"]


@contextmanager
def as_guest(url):
    """A role that has all rights to our tables, and owns none; and who may change what it meets."""
    schema = url.partition("?schema=")[2]
    role = f"guest_{schema}"
    open_store(url).close()
    with session(url, autocommit=True) as owner:
        owner.execute(f"create role {role} login; grant usage on schema {schema} to {role}")
        owner.execute(f"grant select, insert, update, delete on coatcheck_records to {role}")
        owner.execute(f"grant select on coatcheck_schema to {role}")
        with closing(open_store(url.replace("postgres@", f"{role}@"), create=False)) as store:
            yield store, owner


@pytest.mark.parametrize(
    ("allowed", "said"),
    [
        ((), "nothing can be claimed: new row violates row-level security"),
        (("insert",), "nothing can be claimed: new row violates row-level security"),
        (("insert", "select"), "can never be ended: nothing comes of it"),
        (("insert", "select", "update"), "nothing can be deleted"),
    ],
)
def test_the_doctor_tries_what_row_security_lets_a_role_do(url, allowed, said):
    """O1, D2: a right that is granted may still be good for nothing."""
    with as_guest(url) as (store, owner):
        owner.execute("alter table coatcheck_records enable row level security")
        for right in allowed:
            rows = "with check (true)" if right == "insert" else "using (true)"
            owner.execute(f"create policy may_{right} on coatcheck_records for {right} {rows}")
        assert said in the_error(store)
        assert any("row security is on" in finding.message for finding in store.check())


def test_the_doctor_tries_what_triggers_make_of_a_record(url):
    """O1, D2: one that drops what is written, and one that refuses it."""
    with as_guest(url) as (store, owner):
        for body, said in (("return null", "nothing comes"), ("raise 'not today'", "not today")):
            owner.execute(
                f"create or replace function meddle() returns trigger language plpgsql as"
                f" $$ begin {body}; end $$"
            )
            owner.execute(
                "create or replace trigger meddling before update on coatcheck_records"
                " for each row execute function meddle()"
            )
            assert f"can never be ended: {said}" in the_error(store)


def test_the_doctor_leaves_nothing_behind_and_waits_for_nobody(url):
    """O1: what it tries is undone; a table that somebody holds is told, and not waited for."""
    with as_guest(url) as (store, owner):
        assert {finding.level for finding in store.check()} == {"warning"}  # of `fsync`
        assert owner.execute("select count(*) from coatcheck_records").fetchone() == (0,)
        with session(url) as other:
            other.execute("lock table coatcheck_records")
            assert any("keeps it locked" in finding.message for finding in store.check())
        assert store.swap([claim()]) == [None]


@pytest.mark.parametrize(
    ("level", "standbys", "is_told"),
    [("local", "", False), ("local", "'*'", True), ("off", "", True), ("on", "'*'", False)],
)
def test_the_doctor_says_that_a_failover_would_lose_something(own, level, standbys, is_told):
    """D3: a standby that nobody waits for is no safe place."""
    with psycopg.connect(own.url, autocommit=True) as connection:
        open_store(own.url).close()
        connection.execute(f"alter role postgres set synchronous_commit = {level}")
        connection.execute(f"alter system set synchronous_standby_names = {standbys or 'default'}")
        connection.execute("select pg_reload_conf()")
        told = f"synchronous_commit = {level}"

        def is_said():
            with closing(open_store(own.url)) as store:
                found = store.check()
            return any(told in finding.message for finding in found)

        until(lambda: is_said() == is_told)


def test_a_server_that_is_not_there_is_an_outage():
    """D2."""
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1"):
        open_store("postgresql://postgres@127.0.0.1:1/postgres")


# --- processes and engines ---------------------------------------------------------------------


def test_a_forked_child_has_connections_of_its_own(store):
    """D4: it neither uses nor ends those of its parent."""
    assert store.swap([claim()]) == [None]
    child = os.fork()
    if child == 0:
        try:
            is_done = store.get([ID]) == [claim_of()] and store.swap([claim(MANY[1])]) == [None]
            os._exit(0 if is_done else 1)
        except BaseException:  # noqa: BLE001 - the parent is told by the status
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.swap([complete(claim_of())]) == [None]
    assert store.get([MANY[1]]) == [claim_of(MANY[1])]


def test_an_engine_runs_each_key_once_however_many_ask(url):
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
