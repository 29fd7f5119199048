"""Connections to MySQL and MariaDB: forks, outages, restarts and replicas, on a server that is killed."""

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from pymysql.cursors import Cursor

from coatcheck.core.record import Swap, completed
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import Query, open_store
from tests.stores.laws.records import ID, claim_of, id_of
from tests.stores.mysql.support import (
    MANY,
    claim,
    complete,
    kill_sessions_beside,
    other_session,
    query,
    sessions_beside,
    waiting_for_locks,
)
from tests.support.servers import START_S_MAX, until


def use_in_child(store, answers):
    answers.put(store.swap([claim(), claim(id_of(2))]))
    store.close()


def test_a_store_works_in_a_forked_child_and_in_its_parent(store, url):
    """D2: each has connections of its own, and when the child logs out only its own end."""
    assert store.swap([claim()]) == [None]
    with other_session(url) as root:
        mine = sessions_beside(root)
        assert len(mine) == 1
        fork = multiprocessing.get_context("fork")
        answers = fork.Queue()
        child = fork.Process(target=use_in_child, args=(store, answers))
        child.start()
        assert answers.get(timeout=START_S_MAX) == [claim_of(), None]
        child.join(START_S_MAX)
        assert child.exitcode == 0
        until(lambda: sessions_beside(root) == mine)
        assert store.swap([claim(id_of(2)), claim(id_of(3))]) == [claim_of(id_of(2)), None]
        assert sessions_beside(root) == mine


@pytest.mark.parametrize("size", [1, 2])
def test_a_write_whose_connection_is_lost_is_ambiguous(opened, url, size):
    """L1, D2: a single one, or several that commit together."""
    records = [claim_of(id) for id in MANY[:size]]
    with (
        closing(opened(url)) as store,
        other_session(url) as other,
        other_session(url) as root,
        ThreadPoolExecutor(1) as threads,
    ):
        store.swap([Swap(r.id, 0, r) for r in records])
        query(other, "begin")
        query(other, "select * from coatcheck_records for update")
        asked = threads.submit(store.swap, [complete(record) for record in records])
        until(lambda: waiting_for_locks(root))
        kill_sessions_beside(root, other)
        with pytest.raises(StoreUnavailable) as caught:
            asked.result(START_S_MAX)
        assert caught.value.is_ambiguous
        query(other, "rollback")
        assert store.swap([complete(record) for record in records]) == [None] * size


def test_an_answer_that_the_driver_cannot_read_is_ambiguous(store, monkeypatch):
    """L1, D2: whatever the driver raises then; the connection is not used again."""
    store.swap([claim()])

    def misread(_cursor):
        raise IndexError("no such byte")

    with monkeypatch.context() as patch:
        patch.setattr(Cursor, "fetchall", misread)
        with pytest.raises(StoreUnavailable, match="no valid answer") as caught:
            store.swap([complete(claim_of())])
    assert caught.value.is_ambiguous
    assert store.swap([complete(claim_of())]) == [completed(claim_of(), b"done")]


def test_a_server_that_becomes_read_only_is_an_outage_that_the_doctor_sees(opened, own_url):
    """D2, D3: after a failover the old primary still answers, without the newest records."""
    with other_session(own_url) as root:
        query(root, "create or replace user app")
        query(root, "grant all on *.* to app")
        query(root, "revoke super, read_only admin on *.* from app")
        with closing(opened(own_url.replace("root@", "app@"))) as store:
            store.swap([claim()])
            assert store.get([ID]) == [claim_of()]
            query(root, "set global read_only = 1")
            try:
                for call in (
                    lambda: store.swap([claim(id_of(2))]),
                    lambda: store.swap([complete(claim_of()), claim(id_of(2))]),
                    lambda: store.get([ID]),
                    lambda: store.get([id_of(2)]),  # on a new connection, which is refused
                    lambda: store.find(Query()),
                ):
                    with pytest.raises(StoreUnavailable, match="the server is read-only") as caught:
                        call()
                    assert not caught.value.is_ambiguous
                ((level, message),) = store.check()
                assert level == "error"
                assert "the server is read-only; is it a replica?" in message
            finally:
                query(root, "set global read_only = 0")
            assert store.swap([complete(claim_of()), claim(id_of(2))]) == [None, None]
            assert {finding.level for finding in store.check()} == {"ok"}
        query(root, "drop user app")


def test_a_replica_is_refused_even_if_the_user_could_write_to_it(own_url):
    """D2, D3: a user with all rights could write there, and the primary would never see it."""
    with other_session(own_url) as root:
        query(root, "set global read_only = 1")
        try:
            with pytest.raises(StoreUnavailable, match="the server is read-only; is it a replica"):
                open_store(own_url)
        finally:
            query(root, "set global read_only = 0")
        assert query(root, "show tables") == ()


def test_the_clock_is_the_servers_whatever_its_time_zone(own_url):
    """T1: windows do not jump when summer begins."""
    with other_session(own_url) as root:
        query(root, "set global time_zone = '+11:00'")
        try:
            with closing(open_store(own_url)) as store:
                before = time.time_ns() // 1_000_000
                assert before - 2 <= store.now_ms() <= time.time_ns() // 1_000_000 + 2
        finally:
            query(root, "set global time_zone = 'SYSTEM'")
