"""What an outbox stores: leases, lanes, encryption, outages; in SQLite and in PostgreSQL."""

import asyncio
import multiprocessing
import sqlite3
import threading
from contextlib import closing

import psycopg
import pytest

import coatcheck.client.httpx2
from coatcheck import KeyRing
from coatcheck.client import RetryPolicy, outbox_postgres
from coatcheck.client.outbox import AsyncOutbox, Done, Outbox, Pending, Refused
from coatcheck.client.outbox_store import open_outbox
from coatcheck.core.client.outbox import Entry, Verdict
from coatcheck.errors import Misconfigured, StoreUnavailable, Unreadable
from tests.client.conftest import rows_of, stored_bytes
from tests.support.faulty_server import FaultyServer
from tests.support.servers.postgres import Postgres, postgres
from tests.support.times import WAIT_S_MAX, eventually

RING = {"2026-10": b"o" * 32}
NEWER = {**RING, "2026-11": b"n" * 32}


@pytest.fixture
def store(url):
    opened = open_outbox(url)
    yield opened
    opened.close()


def entry(key, lane="a", body=b""):
    return Entry(0, key, key, lane, "POST", "/charges", (), body, "pending", 1_000, None, 0)


def take(store, now_ms=2_000, lease_ms=100, *, probes=False):
    return store.take(now_ms, lease_ms, probes=probes)


def end(store, taken, state, **options):
    times = {"now_ms": 2_000, "hold_until_ms": 5_000, **options}
    store.end(taken, Verdict(state, "why"), None, **times)


def test_a_process_whose_lease_has_expired_changes_nothing(store):
    """C3: it must not say that no server got what another process has sent since."""
    store.add(entry("k"))
    slow = take(store)
    quick = take(store, now_ms=3_000)
    assert (slow.calls, quick.calls, quick.first_sent_ms) == (1, 2, 2_000)
    store.put_off(slow, Verdict("pending", "refused connection", was_sent=False), 9_000)
    end(store, slow, "unknown")
    store.send_again(slow, "other", 9_000)
    assert store.get("k").state == "pending"
    again = take(store, now_ms=4_000)
    assert (again.calls, again.first_sent_ms, again.sent_key) == (3, 2_000, "k")


def test_a_definite_answer_is_stored_whichever_process_has_it(store):
    """C3: also if another one has found the action too old meanwhile."""
    store.add(entry("k"))
    slow = take(store)
    end(store, take(store, now_ms=3_000), "unknown")
    end(store, slow, "done")
    assert store.get("k").state == "done"
    end(store, slow, "unknown")
    end(store, slow, "refused")
    assert store.get("k").state == "done"


def test_two_takers_never_get_the_same_lane(store, url):
    """C3: in threads that start together, each lane once."""
    for n in range(6):
        for lane in "abcd":
            store.add(entry(f"{lane}{n}", lane))
    start, taken = threading.Barrier(8), []

    def work():
        start.wait(WAIT_S_MAX)
        taken.append(take(store, lease_ms=60_000))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.key for one in taken if one is not None) == ["a0", "b0", "c0", "d0"]


def test_an_unknown_action_holds_its_lane_for_a_limited_time(store):
    """C3: a lane is not blocked for ever."""
    for key in ("first", "second"):
        store.add(entry(key))
    end(store, take(store), "unknown")
    assert take(store, now_ms=4_999) is None
    assert take(store, now_ms=5_000).key == "second"


def test_a_body_of_every_byte_and_no_body_come_back_as_they_were(store):
    every = bytes(range(256)) * 3
    store.add(entry("k", "a", every)._replace(headers=(("X-Ä", "ö\n"),)))
    store.add(entry("empty", "b"))
    assert (take(store).body, store.get("k").headers) == (every, (("X-Ä", "ö\n"),))
    assert store.get("empty").body == b""


def test_another_action_with_the_same_key_is_an_error_and_changes_nothing(store):
    """C3, C-03: not a silent loss."""
    store.add(entry("k", body=b"1"))
    store.add(entry("k", body=b"1"))
    with pytest.raises(Misconfigured, match="another action with this key"):
        store.add(entry("k", body=b"2"))
    assert [one.body for one in (store.get("k"),)] == [b"1"]


def test_done_actions_do_not_slow_down_the_next_take(store, url):
    """The next action is found by an index of the open ones, however many are done."""
    for n in range(300):
        store.add(entry(f"k{n}", f"lane{n}"))
        end(store, take(store), "done")
    store.add(entry("last"))
    if url.startswith("sqlite"):
        from coatcheck.client import outbox_store

        statement = store._statement(outbox_store._NEXT)
        plan = store._run(
            f"explain query plan {statement}", now_ms=1, latest_ms=9, probes=False
        ).rows
        steps = [row[3] for row in plan if "SUBQUERY" not in row[3]]
        assert all("INDEX coatcheck_outbox_" in step for step in steps), steps
    assert take(store).key == "last"


# ---------------------------------------------------------------------------------- encryption


def test_with_a_key_ring_requests_and_answers_are_stored_encrypted(make, url):
    """C3: the next process decrypts them; a rotated ring still does."""
    with FaultyServer("ok", (422, {"X-Why": "secret-why"}, b"secret-answer")) as server:
        first = make(keyring=KeyRing(RING))
        tickets = [
            first.submit("POST", server.url, content=b"secret-body", headers={"X-H": "secret-h"})
            for _ in range(2)
        ]
        again = make(keyring=KeyRing(NEWER), workers=1)
        again.drain()
    assert {seen.body for seen in server.seen} == {b"secret-body"}
    assert {seen.headers["X-H"] for seen in server.seen} == {"secret-h"}
    outcomes = [again.outcome(ticket.key) for ticket in tickets]
    assert [type(outcome) for outcome in outcomes] == [Done, Refused]
    assert outcomes[1].response.body == b"secret-answer"
    stored = stored_bytes(url)
    assert b"secret" not in stored
    assert b"2026-11" in stored


def test_an_action_that_cannot_be_decrypted_waits_and_the_others_are_sent(make, time, caplog):
    """C3: it is sent when the right keys are there, and counts as never sent."""
    with FaultyServer() as server:
        sealed = make(keyring=KeyRing(RING)).submit("POST", server.url, content=b"1")
        bare = make()
        plain = bare.submit("POST", server.url, content=b"2")
        bare.drain()
        assert isinstance(plain.result(), Done)
        assert "is not sent: the outbox is encrypted" in caplog.text
        with pytest.raises(Unreadable, match="open it with keyring="):
            bare.outcome(sealed.key)
        time.advance(100)
        right = make(keyring=KeyRing(RING))
        right.drain()
        assert isinstance(right.outcome(sealed.key), Done)


def test_a_value_that_was_copied_to_another_action_is_refused(url):
    ring = KeyRing(RING)
    store = open_outbox(url, ring)
    store.add(entry("k", body=b"1"))
    packed = next(value for value in rows_of(url)[0] if isinstance(value, bytes))
    with pytest.raises(Unreadable):
        store._unpacked("other", "request", packed)
    with pytest.raises(Unreadable):
        store._unpacked("k", "answer", packed)
    assert store._unpacked("k", "request", packed) == ([], b"1")
    store.close()


# --------------------------------------------------------------------------- outages and forks


def test_an_outbox_that_cannot_be_used_says_so(tmp_path):
    (tmp_path / "outbox.db").write_bytes(b"no database, but long enough to be taken for one" * 9)
    with pytest.raises(StoreUnavailable, match=r"outbox.db cannot be used: file is not a database"):
        open_outbox(f"sqlite:///{tmp_path}/outbox.db")
    with pytest.raises(StoreUnavailable, match="PostgreSQL cannot be used"):
        open_outbox("postgresql://postgres@127.0.0.1:1/postgres")


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "event loop"])
def test_a_background_sender_survives_a_restart_of_the_database(is_async, caplog):
    """C3: an outage delays actions; it does not end the sender."""
    database = Postgres()
    client_options = {"retry": RetryPolicy(attempts_max=2)}

    def in_threads(api):
        with coatcheck.client.httpx2.Client(**client_options) as client:
            outbox = Outbox(database.url, client=client)
            with outbox.running():
                database.kill()
                eventually(lambda: "sends nothing for now" in caplog.text)
                database.restart()
                ticket = outbox.submit("POST", api)
                eventually(lambda: isinstance(ticket.result(), Done))
            outbox.close()

    async def on_a_loop(api):
        async with coatcheck.client.httpx2.AsyncClient(**client_options) as client:
            outbox = AsyncOutbox(database.url, client=client)
            async with outbox.running():
                await asyncio.to_thread(database.kill)
                await asyncio.to_thread(eventually, lambda: "sends nothing for now" in caplog.text)
                await asyncio.to_thread(database.restart)
                ticket = await outbox.submit("POST", api)
                assert isinstance(await ticket.result(timeout=WAIT_S_MAX), Done)
            outbox.close()

    with FaultyServer() as server:
        if is_async:
            asyncio.run(on_a_loop(server.url))
        else:
            in_threads(server.url)
    assert len(server.effects) == 1
    database.remove()


def test_connections_that_broke_while_they_were_idle_are_replaced():
    """C3: a restart of the database, or a firewall, does not fail the next action."""
    url = postgres().fresh_url()
    with closing(open_outbox(url)) as store, psycopg.connect(postgres().url) as admin:
        store.add(entry("k"))
        ended = admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'coatcheck outbox'"
        )
        assert (True,) in ended.fetchall()
        store.add(entry("l"))
        assert [one.key for one in store.listed(with_all=True)] == ["k", "l"]


def test_a_process_that_is_stopped_while_it_submits_does_not_block_the_lane(monkeypatch):
    """C3: the other gets an error within a limited time, and no other lane waits."""
    monkeypatch.setattr(outbox_postgres, "_LOCK_S", 1)
    store = open_outbox(postgres().fresh_url())
    with store._database.transaction() as execute:
        store._database.lock_lane(execute, "a")
        store.add(entry("other", "b"))
        with pytest.raises(StoreUnavailable, match="lock timeout"):
            store.add(entry("k", "a"))
    store.add(entry("k", "a"))
    assert store.state_of("k") == "pending"
    store.close()


def test_an_outbox_stays_where_it_was_opened(tmp_path, monkeypatch):
    """C3: a service may change its directory after that."""
    monkeypatch.chdir(tmp_path)
    store = open_outbox("sqlite:///outbox.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.add(entry("k"))
    assert open_outbox(f"sqlite:///{tmp_path}/outbox.db").state_of("k") == "pending"


def test_a_file_of_another_application_is_no_outbox_and_stays_as_it_is(tmp_path):
    """The command line is given the wrong file; an application makes its outbox where it wants."""
    path = tmp_path / "orders.db"
    with closing(sqlite3.connect(path)) as orders:
        orders.execute("create table orders (id)")
    with pytest.raises(Misconfigured, match="there is no outbox in"):
        open_outbox(f"sqlite:///{path}", must_exist=True)
    with closing(sqlite3.connect(path)) as orders:
        assert orders.execute("select name from sqlite_master").fetchall() == [("orders",)]


def test_readers_of_a_file_do_not_wait_for_a_writer(tmp_path):
    store = open_outbox(f"sqlite:///{tmp_path}/outbox.db")
    store.add(entry("k"))
    with store._database.transaction():
        assert store.state_of("k") == "pending"


def add_in_child(store):
    store.add(entry("child", "b"))


def test_a_forked_process_uses_connections_of_its_own(store):
    store.add(entry("parent"))
    child = multiprocessing.get_context("fork").Process(target=add_in_child, args=(store,))
    child.start()
    child.join(WAIT_S_MAX)
    assert child.exitcode == 0
    assert {one.key for one in store.listed(with_all=True)} == {"parent", "child"}


# -------------------------------------------------------------------------- lanes that go on


def test_an_action_that_cannot_be_sent_does_not_block_its_lane_for_ever(make, time):
    """C3: it is refused, with the reason, after `lane_wait`; until then it is tried."""
    with FaultyServer() as server:
        outbox = make(lane_wait="1h")
        poison = outbox.submit("POST", "gopher://nowhere", lane="a")
        later = outbox.submit("POST", server.url, lane="a")
        outbox.drain()
        assert (poison.result(), later.result()) == (Pending(), Pending())
        time.advance(3_600)
        outbox.drain()
    outcome = poison.result()
    assert (type(outcome), outcome.response) == (Refused, None)
    assert "it could not be sent: UnsupportedProtocol" in outcome.reason
    assert isinstance(later.result(), Done)


def test_a_server_that_is_not_there_for_a_week_refuses_and_the_action_can_be_retried(make, time):
    """C3: nothing can have happened, so nothing is unknown."""
    with FaultyServer() as server:
        outbox = make(lane_wait="1h", sign=lambda *_: {} if server.script else 1 / 0)
        ticket = outbox.submit("POST", server.url)
        outbox.drain()
        time.advance(3_600)
        outbox.drain()
        outcome = ticket.result()
        assert (type(outcome), outcome.response) == (Refused, None)
        assert outcome.reason == "it could not be sent: ZeroDivisionError: division by zero"
        server.script.append("ok")
        assert outbox.retry(ticket.key)
        outbox.drain()
        assert isinstance(ticket.result(), Done)


def test_a_pending_action_is_discarded_on_request_but_not_while_it_is_sent(make):
    seen = []

    def sign(*_):
        seen.append(outbox.discard(ticket.key))
        return {}

    with FaultyServer(*["reset"] * 9) as server:
        outbox = make(sign=sign)
        ticket = outbox.submit("POST", server.url)
        outbox.drain()
        assert (seen, ticket.result()) == ([False], Pending())
        assert outbox.discard(ticket.key)
        with pytest.raises(Misconfigured):
            ticket.result()


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "event loop"])
def test_a_slow_action_does_not_delay_the_other_lanes(is_async, url):
    """C3: the background sender takes new actions while old ones are being sent."""
    slow, tickets = threading.Event(), []

    def sign(method, address, body):
        if body == b"slow":
            assert slow.wait(WAIT_S_MAX)
        return {}

    async def on_a_loop(api):
        async with coatcheck.client.httpx2.AsyncClient() as client:
            outbox = AsyncOutbox(url, client=client, sign=sign, workers=2)
            async with outbox.running():
                tickets.append(await outbox.submit("POST", api, content=b"slow"))
                for _ in range(3):
                    ticket = await outbox.submit("POST", api)
                    assert isinstance(await ticket.result(timeout=WAIT_S_MAX), Done)
                assert await tickets[0].result() == Pending()
                slow.set()
            assert isinstance(await tickets[0].result(), Done)
            outbox.close()

    def in_threads(api):
        with coatcheck.client.httpx2.Client() as client:
            outbox = Outbox(url, client=client, sign=sign, workers=2)
            with outbox.running():
                tickets.append(outbox.submit("POST", api, content=b"slow"))
                for _ in range(3):
                    ticket = outbox.submit("POST", api)
                    assert isinstance(ticket.result(timeout=WAIT_S_MAX), Done)
                assert tickets[0].result() == Pending()
                slow.set()
            assert isinstance(tickets[0].result(), Done)
            outbox.close()

    with FaultyServer() as server:
        if is_async:
            asyncio.run(on_a_loop(server.url))
        else:
            in_threads(server.url)
