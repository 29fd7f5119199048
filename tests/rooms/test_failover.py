"""A primary that is killed under load, and the standby that takes its place: PostgreSQL (D1, L1).

Both engines work on it at once, the async one over its event loop's own connections. What each
execution does is written down outside of the database, so that one too many cannot hide; and in
the end every key is asked for again by an engine that remembers nothing.
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
from servers import START_S_MAX, until
from servers.postgres import Postgres, sync_states

from coatcheck import AsyncEngine, Engine, OutcomeUnknown, Policy, StoreUnavailable
from coatcheck.core.record import COMPLETED, RUNNING, Record
from coatcheck.stores import Query, open_store
from coatcheck.stores.looped import LoopedStore

CLIENTS = 8
# What the first of them, of each engine, is about when the primary dies: until when its order takes
# and how it is guarded. The others go on and on with orders that take no time.
UNDER_WAY = ("killed/retry", "killed/manual", "killed/hasty", "promoted/retry")
# 50 ms: who was refused asks for something else soon, but not all the time.
PAUSE_S = 0.05
# The lease is over soon after the failover, and who asks again then waits for that. Who has done
# the work tries for longer than a failover takes to have it written down.
TIMES = {"lease": "4s", "wait": "10s", "patience": "10s"}
POLICIES = {
    "retry": Policy(recovery="retry", **TIMES),
    "manual": Policy(recovery="manual", **TIMES),
    # What its client is told when the primary is gone, and nobody has taken its place yet.
    "hasty": Policy(recovery="retry", **TIMES | {"patience": 0}),
}


class Shop:
    """Takes orders for both engines, and notes every one that it takes."""

    def __init__(self) -> None:
        self.took: list[str] = []
        self.told: dict[str, object] = {}
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

    def told_to(self, flavour: str) -> int:
        return sum(key.startswith(flavour) for key in list(self.told))

    def refused_to(self, flavour: str) -> int:
        return sum(key.startswith(flavour) for key in list(self.refused))


def policy_of(key: str) -> Policy:
    return POLICIES[key.split("/")[2]]


def be_a_client(shop: Shop, engine: Engine, number: int) -> None:
    for key in shop.keys("sync", number):
        try:
            shop.told[key] = engine.run(key, shop.place, key, scope="orders", policy=policy_of(key))
        except StoreUnavailable:
            shop.refused.append(key)
            shop.is_closing.wait(PAUSE_S)


async def be_clients(shop: Shop, url: str) -> None:
    async with AsyncEngine(url) as engine:
        assert isinstance(engine.store, LoopedStore), "else a thread would ask for it"
        await asyncio.gather(*(be_an_async_client(shop, engine, n) for n in range(CLIENTS)))


async def be_an_async_client(shop: Shop, engine: AsyncEngine, number: int) -> None:
    for key in shop.keys("async", number):
        try:
            shop.told[key] = await engine.run(
                key, shop.place_in_loop, key, scope="orders", policy=policy_of(key)
            )
        except StoreUnavailable:
            shop.refused.append(key)
            await asyncio.sleep(PAUSE_S)


@pytest.fixture
def pair():
    """A primary, and a standby without which it acknowledges nothing."""
    primary = Postgres()
    standby = primary.standby()
    yield primary, standby
    standby.remove()
    primary.remove()


def records_of(url: str) -> dict[str, Record]:
    """What stands, by key."""
    with closing(open_store(url)) as store:
        return {record.key: record for record in store.find(Query(limit=100_000)).records}


def test_a_failover_to_a_synchronous_standby_runs_nothing_twice(pair: tuple[Postgres, Postgres]):
    """
    D1, D3, L1, L5: whoever had an answer gets it again, and nothing runs for it.

    Who had none may have been executed. With recovery by `retry` it may then run once more, as
    after a crash; with `manual` it may not.
    """
    primary, standby = pair
    with psycopg.connect(primary.url) as connection:
        assert sync_states(connection) == ["sync"]
    url = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
    shop = Shop()
    with Engine(f"{url}?timeout=2s") as engine, ThreadPoolExecutor(CLIENTS + 1) as threads:
        clients = [threads.submit(be_a_client, shop, engine, n) for n in range(CLIENTS)]
        clients.append(threads.submit(asyncio.run, be_clients(shop, f"{url}?timeout=2s")))
        try:
            fail_over(shop, primary, standby)
        finally:
            end(shop, clients)
    assert_nothing_was_lost(shop, standby)
    assert_every_retry_is_right(shop, standby)


def fail_over(shop: Shop, primary: Postgres, standby: Postgres) -> None:
    """Kill the primary in the middle of everything, and promote its standby."""
    held = {f"{flavour}/{what}/first" for what in UNDER_WAY for flavour in ("sync", "async")}
    until(lambda: held <= set(shop.took))
    until(lambda: min(shop.told_to("sync"), shop.told_to("async")) > 100)
    primary.kill()
    until(lambda: min(shop.refused_to("sync"), shop.refused_to("async")) > 0)
    shop.gates["killed"].set()
    hasty = {key for key in held if "/killed/hasty/" in key}
    until(lambda: hasty <= set(shop.refused))
    standby.promote()
    standing = records_of(standby.url)
    for key in (key for key in held if "/promoted/" in key):
        assert (standing[key].state, standing[key].attempt) == (RUNNING, 1), key
    shop.gates["promoted"].set()
    until(lambda: held <= {*shop.told, *hasty})
    before = shop.told_to("sync"), shop.told_to("async")
    until(lambda: shop.told_to("sync") > before[0] + 20)
    until(lambda: shop.told_to("async") > before[1] + 20)


def end(shop: Shop, clients: list[Future[None]]) -> None:
    shop.is_closing.set()
    for gate in shop.gates.values():
        gate.set()
    for client in clients:
        client.result(START_S_MAX)


def assert_nothing_was_lost(shop: Shop, standby: Postgres) -> None:
    """What was acknowledged, before and after, stands on the new primary as it was."""
    standing = records_of(standby.url)
    for key in shop.told:
        assert (standing[key].state, standing[key].attempt) == (COMPLETED, 1), key


def assert_every_retry_is_right(shop: Shop, standby: Postgres) -> None:
    before = Counter(shop.took)
    assert ask_again(shop, standby, [*shop.told]) == shop.told
    later = ask_again(shop, standby, shop.refused)
    after = Counter(shop.took)
    assert {key: after[key] for key in shop.told} == dict.fromkeys(shop.told, 1)
    for key, answer in later.items():
        reruns = before[key] if policy_of(key).recovery == "retry" else 0
        if isinstance(answer, OutcomeUnknown):
            assert (policy_of(key).recovery, after[key]) == ("manual", before[key]), key
        else:
            assert answer["order"] == key
            assert 1 <= after[key] <= 1 + reruns, key
    answered = {key: a for key, a in later.items() if not isinstance(a, OutcomeUnknown)}
    assert ask_again(shop, standby, [*answered]) == answered
    assert Counter(shop.took) == after


def ask_again(shop: Shop, standby: Postgres, keys: list[str]) -> dict[str, Any]:
    """What an engine that remembers nothing answers to each of *keys*, or that nobody knows."""
    with Engine(standby.url) as engine, ThreadPoolExecutor(2 * CLIENTS) as threads:

        def ask(key: str) -> object:
            try:
                return engine.run(key, shop.place, key, scope="orders", policy=policy_of(key))
            except OutcomeUnknown as error:
                return error

        return dict(zip(keys, threads.map(ask, keys), strict=True))
