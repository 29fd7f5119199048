"""A primary that is killed under load, and the standby that takes its place (D1, L1).

PostgreSQL, whose clients know both servers, and MariaDB behind an address that moves.

Both engines work on it at once, the async one over its event loop's own connections. What each
execution does is noted outside of the database, so that one too many cannot hide; and in the end
an engine with an empty cache is asked for every key again.
"""

import asyncio
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import count
from typing import Any

import psycopg
import pytest

from coatcheck import AsyncEngine, Engine, OutcomeUnknown, Policy, StoreUnavailable
from coatcheck.core.record import COMPLETED, RUNNING, Record
from coatcheck.stores import Query, open_store
from coatcheck.stores.async_store import BatchedAsyncStore
from tests.support.servers import START_S_MAX, until
from tests.support.servers.mariadb import REPLICATED, Mariadb
from tests.support.servers.postgres import Postgres, sync_states
from tests.support.servers.relay import Relay

CLIENTS = 8
# What the first clients of each engine do when the primary dies: until when the order takes, and its
# policy. The others go on with orders that take no time.
UNDER_WAY = ("killed/retry", "killed/manual", "killed/hasty", "promoted/retry")
# 50 ms: a client that was refused sends its next order soon, but not at once.
PAUSE_S = 0.05
# The lease expires soon after the failover, and retries wait for that. Completions are retried for
# longer than a failover takes.
TIMES = {"lease": "4s", "wait": "10s", "patience": "10s"}
POLICIES = {
    "retry": Policy(recovery="retry", **TIMES),
    "manual": Policy(recovery="manual", **TIMES),
    # Its client gets an error when the primary is dead and the standby is not promoted yet.
    "hasty": Policy(recovery="retry", **TIMES | {"patience": 0}),
}


class Shop:
    """Takes orders for both engines, and notes every one that it takes."""

    def __init__(self) -> None:
        self.took: list[str] = []
        self.answers: dict[str, object] = {}
        self.refused: list[str] = []
        self.gates = {name: threading.Event() for name in ("at once", "killed", "promoted")}
        self.gates["at once"].set()
        self.is_closing = threading.Event()
        self._numbers = count()

    def place(self, key: str) -> dict[str, object]:
        """Take the order at once, and end as soon as may be; each answer is one of its kind."""
        self.took.append(key)
        assert self.gate_of(key).wait(START_S_MAX)
        return {"order": key, "number": next(self._numbers)}

    async def place_in_loop(self, key: str) -> dict[str, object]:
        return await asyncio.to_thread(self.place, key) if self.is_held(key) else self.place(key)

    def gate_of(self, key: str) -> threading.Event:
        return self.gates[key.split("/")[1]]

    def is_held(self, key: str) -> bool:
        return not self.gate_of(key).is_set()

    def keys(self, flavour: str, number: int):
        """What one client asks for."""
        if number < len(UNDER_WAY):
            yield f"{flavour}/{UNDER_WAY[number]}/first"
        for order in count():
            if self.is_closing.is_set():
                return
            yield f"{flavour}/at once/{('retry', 'manual')[order % 2]}/{number}-{order}"

    def answered_to(self, flavour: str) -> int:
        return sum(key.startswith(flavour) for key in list(self.answers))

    def refused_to(self, flavour: str) -> int:
        return sum(key.startswith(flavour) for key in list(self.refused))


def policy_of(key: str) -> Policy:
    return POLICIES[key.split("/")[2]]


def be_a_client(shop: Shop, engine: Engine, number: int) -> None:
    for key in shop.keys("sync", number):
        try:
            shop.answers[key] = engine.run(
                key, shop.place, key, scope="orders", policy=policy_of(key)
            )
        except StoreUnavailable:
            shop.refused.append(key)
            shop.is_closing.wait(PAUSE_S)


async def be_clients(shop: Shop, url: str) -> None:
    async with AsyncEngine(url) as engine:
        assert isinstance(engine.store, BatchedAsyncStore)
        await asyncio.gather(*(be_an_async_client(shop, engine, n) for n in range(CLIENTS)))


async def be_an_async_client(shop: Shop, engine: AsyncEngine, number: int) -> None:
    for key in shop.keys("async", number):
        try:
            shop.answers[key] = await engine.run(
                key, shop.place_in_loop, key, scope="orders", policy=policy_of(key)
            )
        except StoreUnavailable:
            shop.refused.append(key)
            await asyncio.sleep(PAUSE_S)


class PostgresPair:
    """A primary, and a standby without which it acknowledges nothing."""

    def __init__(self) -> None:
        self.primary = Postgres()
        self.standby = self.primary.standby()
        self.new_url = self.standby.url
        places = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}"
        self.url = f"postgresql://postgres@{places}/postgres?timeout=2s"

    def is_synchronous(self) -> bool:
        with psycopg.connect(self.primary.url) as connection:
            return sync_states(connection) == ["sync"]

    def kill(self) -> None:
        self.primary.kill()

    def remove(self) -> None:
        self.standby.remove()
        self.primary.remove()


class MariadbPair:
    """The same with semi-synchronous replication; the replica refuses writes."""

    def __init__(self) -> None:
        self.primary = Mariadb(**REPLICATED, **{"server-id": "1"})
        self.standby = self.primary.replica()
        self.relay = Relay(self.primary.port)
        database = self.primary.fresh_url().rpartition("/")[2]
        self.url = f"mysql://root@127.0.0.1:{self.relay.port}/{database}&timeout=2s"
        self.new_url = f"{self.standby.url}/{database}"

    def is_synchronous(self) -> bool:
        return self.primary.status("Rpl_semi_sync_master_status") == "ON"

    def kill(self) -> None:
        """The address moves before the replica is promoted, as careless operators do it."""
        self.primary.kill()
        self.relay.point_at(self.standby.port)

    def remove(self) -> None:
        self.relay.close()
        self.standby.remove()
        self.primary.remove()


@pytest.fixture(params=[PostgresPair, MariadbPair], ids=["postgres", "mariadb"])
def pair(request):
    pair = request.param()
    yield pair
    pair.remove()


def records_of(url: str) -> dict[str, Record]:
    """All records, by key."""
    with closing(open_store(url)) as store:
        return {record.key: record for record in store.find(Query(limit=100_000)).records}


def test_a_failover_to_a_synchronous_standby_runs_nothing_twice(pair):
    """
    D1, D3, L1, L5: a client that had an answer gets it again, and nothing runs for it.

    A request without an answer may have run. With recovery by `retry` it may run once more, as
    after a crash; with `manual` it may not.
    """
    assert pair.is_synchronous()
    shop = Shop()
    with Engine(pair.url) as engine, ThreadPoolExecutor(CLIENTS + 1) as threads:
        clients = [threads.submit(be_a_client, shop, engine, n) for n in range(CLIENTS)]
        clients.append(threads.submit(asyncio.run, be_clients(shop, pair.url)))
        try:
            fail_over(shop, pair)
        finally:
            end(shop, clients)
    assert_nothing_was_lost(shop, pair.new_url)
    assert_every_retry_is_right(shop, pair.new_url)


def fail_over(shop: Shop, pair) -> None:
    """Kill the primary in the middle of everything, and promote its standby."""
    held = {f"{flavour}/{what}/first" for what in UNDER_WAY for flavour in ("sync", "async")}
    until(lambda: held <= set(shop.took))
    until(lambda: min(shop.answered_to("sync"), shop.answered_to("async")) > 100)
    assert pair.is_synchronous()
    pair.kill()
    until(lambda: min(shop.refused_to("sync"), shop.refused_to("async")) > 0)
    shop.gates["killed"].set()
    hasty = {key for key in held if "/killed/hasty/" in key}
    until(lambda: hasty <= set(shop.refused))
    pair.standby.promote()
    records = records_of(pair.new_url)
    for key in (key for key in held if "/promoted/" in key):
        assert (records[key].state, records[key].attempt) == (RUNNING, 1), key
    shop.gates["promoted"].set()
    until(lambda: held <= {*shop.answers, *hasty})
    before = shop.answered_to("sync"), shop.answered_to("async")
    until(lambda: shop.answered_to("sync") > before[0] + 20)
    until(lambda: shop.answered_to("async") > before[1] + 20)


def end(shop: Shop, clients: list[Future[None]]) -> None:
    shop.is_closing.set()
    for gate in shop.gates.values():
        gate.set()
    for client in clients:
        client.result(START_S_MAX)


def assert_nothing_was_lost(shop: Shop, url: str) -> None:
    """What was acknowledged, before and after, is on the new primary as it was."""
    records = records_of(url)
    for key in shop.answers:
        assert (records[key].state, records[key].attempt) == (COMPLETED, 1), key


def assert_every_retry_is_right(shop: Shop, url: str) -> None:
    before = Counter(shop.took)
    assert ask_again(shop, url, [*shop.answers]) == shop.answers
    later = ask_again(shop, url, shop.refused)
    after = Counter(shop.took)
    assert {key: after[key] for key in shop.answers} == dict.fromkeys(shop.answers, 1)
    for key, answer in later.items():
        reruns = before[key] if policy_of(key).recovery == "retry" else 0
        if isinstance(answer, OutcomeUnknown):
            assert (policy_of(key).recovery, after[key]) == ("manual", before[key]), key
        else:
            assert answer["order"] == key
            assert 1 <= after[key] <= 1 + reruns, key
    answered = {key: a for key, a in later.items() if not isinstance(a, OutcomeUnknown)}
    assert ask_again(shop, url, [*answered]) == answered
    assert Counter(shop.took) == after


def ask_again(shop: Shop, url: str, keys: list[str]) -> dict[str, Any]:
    """What an engine with an empty cache answers to each of *keys*, or its `OutcomeUnknown`."""
    with Engine(url) as engine, ThreadPoolExecutor(2 * CLIENTS) as threads:

        def ask(key: str) -> object:
            try:
                return engine.run(key, shop.place, key, scope="orders", policy=policy_of(key))
            except OutcomeUnknown as error:
                return error

        return dict(zip(keys, threads.map(ask, keys), strict=True))
