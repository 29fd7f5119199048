"""D3 while the store runs: a server that could lose records is noticed, and claims are refused.

Operations that are running can still complete: a result on an unsafe server is better than none.
"""

import logging
from contextlib import closing

import pytest

from coatcheck import Engine
from coatcheck.core.record import completed, renewed
from coatcheck.engine import clock
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import Batcher, open_store
from coatcheck.stores.contract import Store
from coatcheck.stores.redis import store as module
from tests.stores.laws.records import claim_of, id_of
from tests.stores.redis.scenes import change, claim, claims
from tests.support.servers.redis import Cluster, SentinelSet, until

EVICTING = ("CONFIG SET", "maxmemory-policy", "allkeys-lru")
REPAIRED = ("CONFIG SET", "maxmemory-policy", "noeviction")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Each reading of the clock checks for risks, too."""
    monkeypatch.setattr(module, "RECHECK_EVERY_MS", 0)


def recheck(store: Store) -> None:
    """Read the clock as an engine does from time to time; the first reading checks nothing."""
    store.now_ms()
    store.now_ms()


def refusal(store: Store, number: int = 99) -> str:
    """Return why claims are refused."""
    with pytest.raises(StoreUnavailable) as caught:
        store.swap([claim(claim_of(id_of(number)))])
    assert not caught.value.is_ambiguous
    return str(caught.value)


RISKS = {  # by name: how the risk appears, and how it is repaired
    "eviction": (EVICTING, REPAIRED),
    "no-persistence": (("CONFIG SET", "appendonly", "no"), ("CONFIG SET", "appendonly", "yes")),
    "replica": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
}


@pytest.mark.parametrize("name", RISKS)
def test_claims_are_refused_from_when_a_risk_appears_until_it_is_repaired(
    opened, server, caplog, name
):
    """D3, D2: at the next check, with a log line; the store need not be opened again."""
    appear, repair = RISKS[name]
    with closing(opened(server.url)) as store:
        assert store.swap([claim(record) for record in claims(0, 3)]) == [None] * 3
        server.ask(*appear)
        recheck(store)
        assert f"allow={name}" in refusal(store)
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert [f"allow={name}" in record.message for record in errors] == [True]
        server.ask(*repair)
        assert store.swap([claim(record) for record in claims(3, 3)]) == [None] * 3
        assert "is safe again" in caplog.text


def test_a_risk_that_the_url_allows_stays_allowed(opened, server, caplog):
    """D3: without a log line."""
    with closing(opened(f"{server.url}?allow=eviction,no-persistence")) as store:
        server.ask(*EVICTING)
        server.ask("CONFIG", "SET", "appendonly", "no")
        recheck(store)
        assert store.swap([claim(claim_of())]) == [None]
        server.ask("CLIENT", "KILL", "TYPE", "normal")
        assert store.swap([claim(claim_of(id_of(7)))]) == [None]
    assert caplog.text == ""


def test_a_server_that_restarts_with_a_risk_is_refused(opened, server):
    """D3: the new connection checks it, whatever the server was before."""
    with closing(opened(server.url)) as store:
        assert store.swap([claim(claim_of())]) == [None]
        server.stop()
        server._settings["maxmemory-policy"] = "allkeys-lru"
        server.start()
        assert "maxmemory-policy is allkeys-lru" in refusal(store)
        assert "maxmemory-policy is allkeys-lru" in refusal(store)
        server.ask(*REPAIRED)
        assert store.swap([claim(claim_of(id_of(8)))]) == [None]


def test_a_new_connection_to_a_replica_is_refused(opened, server):
    """D3: also if the replica accepts writes, which its master then overwrites."""
    with closing(opened(server.url)) as store:
        assert store.swap([claim(claim_of())]) == [None]
        server.ask("CONFIG", "SET", "replica-read-only", "no")
        server.ask("REPLICAOF", "127.0.0.1", "1")
        server.ask("CLIENT", "KILL", "TYPE", "normal")
        assert "is a replica of 127.0.0.1:1" in refusal(store)
        server.ask("REPLICAOF", "NO", "ONE")
        assert store.swap([claim(claim_of(id_of(8)))]) == [None]


def test_running_operations_can_complete_while_claims_are_refused(opened, server):
    """D3, L5: the work is done, and a retry must not do it again."""
    first, second, third = claims(0, 3)
    with closing(opened(server.url)) as store:
        store.swap([claim(first), claim(second)])
        server.ask(*EVICTING)
        recheck(store)
        longer = renewed(first, first.lease_until_ms + 1_000)
        assert store.swap([change(first, longer)]) == [None]
        ends = [change(longer, completed(longer, b"yes")), change(second, None)]
        assert store.swap(ends) == [None, None]
        assert "allkeys-lru" in refusal(store)
        taken_over = longer._replace(version=longer.version + 5_000, attempt=2, nonce=77)
        with pytest.raises(StoreUnavailable, match="allkeys-lru"):
            store.swap([change(longer, taken_over)])
        assert store.get([first.id, second.id, third.id]) == [completed(longer, b"yes"), None, None]


def test_a_completion_in_a_batch_with_a_refused_claim_is_written(server):
    """D3, L5: the batcher sends each member alone."""
    first, second = claims(0, 2)
    with closing(open_store(server.url)) as store:
        store.swap([claim(first)])
        server.ask(*EVICTING)
        recheck(store)
        with pytest.raises(Exception, match="allkeys-lru") as caught:
            store.swap([claim(second), change(first, completed(first, b""))])
        assert not isinstance(caught.value, StoreUnavailable), (
            "else the batcher would not send each alone"
        )
        assert store.get([first.id, second.id]) == [first, None]
        batcher = Batcher(store)
        assert batcher.swap(change(first, completed(first, b""))) is None


def test_requests_send_no_command_for_the_safety_check(opened, server):
    """D3: neither claims nor completions, however many there are."""

    def asked(*names: str) -> list[int]:
        """Return how often the server has run each command."""
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
    assert grown[:2] == [1, 0], "the one is this test's"
    assert grown[2:] == [40, 40, 20, 20], "a script for each write; a claim's script reads, too"


def test_the_server_is_checked_once_a_minute_of_its_own_clock(server, monkeypatch):
    """D3: however often the clock is read."""
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


def test_an_engine_notices_a_risk_by_itself_and_answers_503(server, monkeypatch):
    """D3, D2: its background thread reads the clock, and thereby checks for risks."""
    monkeypatch.setattr(clock, "LOOK_EVERY_MS", 0)
    ran = []

    def spoil() -> str:
        server.ask(*EVICTING)
        engine.attempts.heartbeat.tick()
        engine.attempts.heartbeat.tick()
        return "done"

    with Engine(server.url) as engine:
        assert engine.run("before", spoil, scope="s") == "done"
        with pytest.raises(StoreUnavailable, match="allkeys-lru"):
            engine.run("after", ran.append, 1, scope="s")
        server.ask(*REPAIRED)
        assert engine.run("after", ran.append, 1, scope="s") is None
    with Engine(server.url) as another:
        assert another.run("before", spoil, scope="s") == "done", "its completion was written"
    assert ran == [1]


def test_one_node_of_a_cluster_with_a_risk_is_enough_to_refuse_claims():
    """D3: a claim may be on any of them."""
    cluster = Cluster()
    try:
        with closing(open_store(cluster.fresh_url())) as store:
            assert store.swap([claim(record) for record in claims(0, 50)]) == [None] * 50
            cluster.masters[1].ask(*EVICTING)
            recheck(store)
            assert f":{cluster.masters[1].port}" in refusal(store)
            cluster.masters[1].ask(*REPAIRED)
            assert store.swap([claim(record) for record in claims(50, 50)]) == [None] * 50
    finally:
        cluster.remove()


def test_a_promoted_replica_that_could_lose_records_is_refused():
    """D3: after a failover it is another server, with settings of its own."""
    servers = SentinelSet()
    try:
        with closing(open_store(f"{servers.url}?timeout=2s")) as store:
            assert store.swap([claim(claim_of())]) == [None]
            servers.replica.ask(*EVICTING)
            servers.master.kill()
            until(servers.replica.is_master)
            until(lambda: "allkeys-lru" in refusal(store))
            servers.replica.ask(*REPAIRED)
            assert store.swap([claim(claim_of(id_of(5)))]) == [None]
    finally:
        servers.remove()
