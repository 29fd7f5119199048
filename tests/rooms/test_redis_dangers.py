"""D3 while it runs: a Redis that becomes one that could forget is noticed, and nothing begins there.

Whoever has begun may still end: what was done is better written where it may be forgotten than
nowhere.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from laws.records import claim_of, id_of
from redis_scenes import WiredStore, change, claim, claims
from servers.redis import Cluster, Redis, SentinelSet, until

from coatcheck import Engine
from coatcheck.core.record import completed, renewed
from coatcheck.engine import clock
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import Batcher, open_store
from coatcheck.stores import redis as module
from coatcheck.stores.contract import Store

EVICTING = ("CONFIG SET", "maxmemory-policy", "allkeys-lru")
MENDED = ("CONFIG SET", "maxmemory-policy", "noeviction")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Every look at the clock is one at the dangers, too."""
    monkeypatch.setattr(module, "RECHECK_EVERY_MS", 0)


@pytest.fixture(params=[open_store, WiredStore], ids=["line", "wire"])
def opened(request) -> Callable[[str], Store]:
    """Opens a store that is asked from threads, or from an event loop."""
    return request.param


@pytest.fixture
def server() -> Iterator[Redis]:
    """A server of the test's own, to be spoilt."""
    server = Redis()
    yield server
    server.remove()


def look(store: Store) -> None:
    """What an engine does twice a minute: the first time it only learns the time."""
    store.now_ms()
    store.now_ms()


def refusal(store: Store, number: int = 99) -> str:
    """Why nothing may begin."""
    with pytest.raises(StoreUnavailable) as caught:
        store.swap([claim(claim_of(id_of(number)))])
    assert not caught.value.is_ambiguous
    return str(caught.value)


SPOILT = {  # by the name of the danger: how it comes, and how it goes
    "eviction": (EVICTING, MENDED),
    "no-persistence": (("CONFIG SET", "appendonly", "no"), ("CONFIG SET", "appendonly", "yes")),
    "replica": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_danger_that_comes_while_it_runs_is_refused_until_it_is_gone(
    opened, server, caplog, name
):
    """D3, D2: at the next look, loudly; and nobody has to open the store again."""
    spoil, mend = SPOILT[name]
    with closing(opened(server.url)) as store:
        assert store.swap([claim(record) for record in claims(0, 3)]) == [None] * 3
        server.ask(*spoil)
        look(store)
        assert f"allow={name}" in refusal(store)
        told = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert [f"allow={name}" in record.message for record in told] == [True]
        server.ask(*mend)
        assert store.swap([claim(record) for record in claims(3, 3)]) == [None] * 3
        assert "no longer" in caplog.text


def test_a_danger_that_was_allowed_stays_allowed(opened, server, caplog):
    """D3: whoever has said that it may knows it."""
    with closing(opened(f"{server.url}?allow=eviction,no-persistence")) as store:
        server.ask(*EVICTING)
        server.ask("CONFIG", "SET", "appendonly", "no")
        look(store)
        assert store.swap([claim(claim_of())]) == [None]
        server.ask("CLIENT", "KILL", "TYPE", "normal")
        assert store.swap([claim(claim_of(id_of(7)))]) == [None]
    assert caplog.text == ""


def test_a_server_that_comes_back_with_a_danger_is_refused(opened, server):
    """D3: at the new connection, without any look; whatever it was before the restart."""
    with closing(opened(server.url)) as store:
        assert store.swap([claim(claim_of())]) == [None]
        server.stop()
        server._settings["maxmemory-policy"] = "allkeys-lru"
        server.start()
        assert "maxmemory-policy is allkeys-lru" in refusal(store)
        assert "maxmemory-policy is allkeys-lru" in refusal(store)
        server.ask(*MENDED)
        assert store.swap([claim(claim_of(id_of(8)))]) == [None]


def test_a_new_connection_to_a_replica_is_none(opened, server):
    """D3: also where it would take writes, which its master then wipes out."""
    with closing(opened(server.url)) as store:
        assert store.swap([claim(claim_of())]) == [None]
        server.ask("CONFIG", "SET", "replica-read-only", "no")
        server.ask("REPLICAOF", "127.0.0.1", "1")
        server.ask("CLIENT", "KILL", "TYPE", "normal")
        assert "is a replica of 127.0.0.1:1" in refusal(store)
        server.ask("REPLICAOF", "NO", "ONE")
        assert store.swap([claim(claim_of(id_of(8)))]) == [None]


def test_what_has_begun_may_end_though_nothing_may_begin(opened, server):
    """D3, L5: the work is done, and whoever retries it must not do it again."""
    first, second, third = claims(0, 3)
    with closing(opened(server.url)) as store:
        store.swap([claim(first), claim(second)])
        server.ask(*EVICTING)
        look(store)
        longer = renewed(first, first.lease_until_ms + 1_000)
        assert store.swap([change(first, longer)]) == [None]
        ends = [change(longer, completed(longer, b"yes")), change(second, None)]
        assert store.swap(ends) == [None, None]
        assert "allkeys-lru" in refusal(store)
        taken_over = longer._replace(version=longer.version + 5_000, attempt=2, nonce=77)
        with pytest.raises(StoreUnavailable, match="allkeys-lru"):
            store.swap([change(longer, taken_over)])
        assert store.get([first.id, second.id, third.id]) == [completed(longer, b"yes"), None, None]


def test_an_end_that_was_grouped_with_a_claim_is_written(server):
    """D3, L5: they came at the same time, and that is all they have in common."""
    first, second = claims(0, 2)
    with closing(open_store(server.url)) as store:
        store.swap([claim(first)])
        server.ask(*EVICTING)
        look(store)
        with pytest.raises(Exception, match="allkeys-lru") as caught:
            store.swap([claim(second), change(first, completed(first, b""))])
        assert not isinstance(caught.value, StoreUnavailable), "then nobody would ask for each"
        assert store.get([first.id, second.id]) == [first, None]
        batcher = Batcher(store)
        assert batcher.swap(change(first, completed(first, b""))) is None


def test_the_normal_path_asks_nothing_more(opened, server):
    """D3: neither at a claim nor at an end, however many there are."""

    def asked(*names: str) -> list[int]:
        """How often the server was asked for each, by anybody."""
        lines = server.ask("INFO", "commandstats").decode().split()
        found = dict(line.split(":calls=") for line in lines if ":calls=" in line)
        return [int(found.get(f"cmdstat_{name}", "0").split(",")[0]) for name in names]

    with closing(opened(server.url)) as store:
        store.swap([claim(claim_of())])
        store.get([claim_of().id])
        before = asked("info", "config|get", "evalsha", "set", "get", "mget")
        for record in claims(2, 20):
            assert store.swap([claim(record)]) == [None]
            assert store.swap([change(record, completed(record, b""))]) == [None]
            assert store.get([record.id]) == [completed(record, b"")]
        after = asked("info", "config|get", "evalsha", "set", "get", "mget")
    grown = [now - then for now, then in zip(after, before, strict=True)]
    assert grown[:2] == [1, 0], "the one is our own"
    assert grown[2:] == [20, 40, 0, 20], "a script for each end, and a write for both"


def test_a_look_is_taken_from_time_to_time_on_the_servers_own_clock(server, monkeypatch):
    """D3: once a minute, however often somebody asks for the time."""
    with closing(open_store(server.url)) as store:
        monkeypatch.setattr(module, "RECHECK_EVERY_MS", 60_000)
        times = iter((1_000, 60_999, 61_000, 61_001))
        monkeypatch.setattr(store, "_time_ms", lambda: next(times))
        store.swap([claim(claim_of(id_of(2)))])  # so that it has its connection
        server.ask(*EVICTING)
        store.now_ms()
        store.now_ms()
        assert store.swap([claim(claim_of())]) == [None]
        store.now_ms()
        assert "allkeys-lru" in refusal(store)


def test_an_engine_notices_by_itself_and_answers_503(server, monkeypatch):
    """D3, D2: the heart looks at the clock, and with it at the dangers."""
    monkeypatch.setattr(clock, "LOOK_EVERY_MS", 0)
    ran = []

    def spoil() -> str:
        server.ask(*EVICTING)
        engine.heart.beat()
        engine.heart.beat()
        return "done"

    with Engine(server.url) as engine:
        assert engine.run("before", spoil, scope="s") == "done"
        with pytest.raises(StoreUnavailable, match="allkeys-lru"):
            engine.run("after", ran.append, 1, scope="s")
        server.ask(*MENDED)
        assert engine.run("after", ran.append, 1, scope="s") is None
    with Engine(server.url) as another:
        assert another.run("before", spoil, scope="s") == "done", "its end was written"
    assert ran == [1]


def test_one_node_of_a_cluster_with_a_danger_is_enough():
    """D3: a claim may be on any of them."""
    cluster = Cluster()
    try:
        with closing(open_store(cluster.fresh_url())) as store:
            assert store.swap([claim(record) for record in claims(0, 50)]) == [None] * 50
            cluster.masters[1].ask(*EVICTING)
            look(store)
            assert f":{cluster.masters[1].port}" in refusal(store)
            cluster.masters[1].ask(*MENDED)
            assert store.swap([claim(record) for record in claims(50, 50)]) == [None] * 50
    finally:
        cluster.remove()


def test_a_promoted_replica_that_could_forget_is_refused():
    """D3: after a failover it is another server, with settings of its own."""
    servers = SentinelSet()
    try:
        with closing(open_store(f"{servers.url}?timeout=2s")) as store:
            assert store.swap([claim(claim_of())]) == [None]
            servers.replica.ask(*EVICTING)
            servers.master.kill()
            until(servers.replica.is_master)
            until(lambda: "allkeys-lru" in refusal(store))
            servers.replica.ask(*MENDED)
            assert store.swap([claim(claim_of(id_of(5)))]) == [None]
    finally:
        servers.remove()
