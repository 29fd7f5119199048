"""A shop under load whose workers are killed in a loop: with each recovery the ledger is exact.

The ledger is the provider's: a file that is outside of the system. What it must hold afterwards is
what `docs/recovery.md` promises for kill -9, for all orders at once (L5, L6, L7, L9).
"""

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from cells import PROCESSES, WAIT_S_MAX, Work
from test_matrix import STORES, place_of

from coatcheck import (
    AsyncEngine,
    DidNotHappen,
    Happened,
    KeyBusy,
    OutcomeUnknown,
    StoreUnavailable,
    current_operation,
)
from coatcheck.core.record import COMPLETED, IN_DOUBT
from coatcheck.stores import Query, open_store
from coatcheck.verify.outcomes import RECOVERIES

ORDERS = 600
# A transaction on SQLite has the whole file for itself, so that one order is placed at a time.
ORDERS_ONE_BY_ONE = 100
WORKERS = 3
KILLS = 8
# How long an order takes before and after its charge: where a kill may strike.
WORK_S = 0.02
SEED = 7


class Shop(Work):
    """Charges each order at the provider, under a key that is the same for every attempt."""

    def __init__(self, place, recovery, order, began=lambda: None):
        super().__init__(place, recovery, None)
        self.order = order
        self.began = began

    def ask(self, operation):
        """What the provider knows of this order."""
        lines = Path(self.place.ledger).read_text().splitlines()
        is_there = any(line.split()[0] == str(self.order) for line in lines)
        return Happened(value="done") if is_there else DidNotHappen()

    def _happen(self):
        key = current_operation().derive("charge")
        file = os.open(self.place.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, f"{self.order} {key}\n".encode())
        finally:
            os.close(file)
        return "done"

    async def handle(self, order):
        """One order; the pauses are where a kill may strike."""
        assert order == self.order
        self.began()
        await asyncio.sleep(WORK_S)
        self.happen = self._happen
        if self.recovery == "transaction":
            statement = f"insert into effects values ({order:d})"
            await current_operation().connection.execute(statement)
            done = "done"
        else:
            done = await super().handle()
        await asyncio.sleep(WORK_S)
        return done


def work(place, recovery, count, seed, line):
    """A worker: every order, in an order of its own, until each has an end; then it says so."""
    has_begun = []

    def began():
        if not has_begun:
            has_begun.append(True)
            line.send("at work")

    async def main():
        orders = list(range(count))
        random.Random(seed).shuffle(orders)
        shops = [Shop(place, recovery, order, began) for order in orders]
        async with AsyncEngine(place.url, Shop(place, recovery, 0).policy()) as engine:
            await asyncio.gather(*(settle(engine, shops[n::8]) for n in range(8)))

    asyncio.run(main())
    line.send("all done")


async def settle(engine, shops):
    """Ask for each order until there is an answer, or nobody knows."""
    for shop in shops:
        order, policy = shop.order, shop.policy()
        while True:
            try:
                result = await engine.run(
                    f"order-{order}", shop.handle, order, scope="shop", policy=policy
                )
            except OutcomeUnknown:
                assert shop.recovery == "manual"
                break
            except (KeyBusy, StoreUnavailable):
                continue
            assert result == "done"
            break


class Crew:
    """Workers, who are replaced when they are killed."""

    def __init__(self, *args):
        self._args = args
        self._seeds = itertools.count(SEED)
        self.crew = [self._hired() for _ in range(WORKERS)]

    def _hired(self):
        ours, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=work, args=(*self._args, next(self._seeds), theirs))
        process.start()
        return process, ours

    def kill_one(self, number, after_s):
        """Kill a worker so long after it has begun to work; False where all is done."""
        process, line = self.crew[number]
        assert line.poll(WAIT_S_MAX), "a worker never begins"
        if line.recv() == "all done":
            line.close()
            return False
        time.sleep(after_s)
        process.kill()
        process.join()
        self.crew[number] = self._hired()
        return True

    def wait(self):
        for process, line in self.crew:
            while not line.closed:
                assert line.poll(WAIT_S_MAX), "a worker never ends"
                if line.recv() == "all done":
                    line.close()
            process.join(WAIT_S_MAX)

    def remove(self):
        for process, _ in self.crew:
            process.kill()
            process.join()


def shops():
    """On PostgreSQL; on every store with `make test-faults`."""
    stores = STORES if os.environ.get("COATCHECK_FAULTS") == "all" else ("postgres",)
    pairs = itertools.product(stores, RECOVERIES)
    return [pair for pair in pairs if pair != ("redis", "transaction")]


@pytest.mark.parametrize(("store", "recovery"), shops())
def test_a_shop_that_is_killed_in_a_loop_keeps_an_exact_ledger(store, recovery, tmp_path):
    """L5, L6, L7, L9: three workers with eight orders at a time each."""
    place = place_of(store, tmp_path)
    place.prepare()
    Path(place.ledger).touch()
    open_store(place.url).close()
    chance = random.Random(SEED)
    is_one_by_one = (store, recovery) == ("sqlite", "transaction")
    count = ORDERS_ONE_BY_ONE if is_one_by_one else ORDERS
    crew = Crew(place, recovery, count)
    try:
        for _ in range(KILLS):
            if not crew.kill_one(chance.randrange(WORKERS), chance.uniform(0, 3 * WORK_S)):
                break
        crew.wait()
    finally:
        crew.remove()
    check(place, recovery, count)


def check(place, recovery, count):
    store = open_store(place.url)
    records = store.find(Query(limit=count)).records
    store.close()
    # Nothing is stuck: whatever did not end is in doubt, where people see it.
    assert len(records) == count
    assert {record.state for record in records} <= {COMPLETED, IN_DOUBT}
    doubts = {record.key for record in records if record.state == IN_DOUBT}
    # Else nobody was struck in the middle, and nothing is shown.
    is_struck = any(record.attempt > 1 for record in records) or doubts
    assert is_struck or recovery == "transaction"
    if recovery == "transaction":
        assert place.effects("transaction") == count
        return
    lines = [line.split() for line in Path(place.ledger).read_text().splitlines()]
    charges = Counter(int(order) for order, _ in lines)
    if recovery == "retry":  # at a provider that knows the key, the second charge is the first
        assert len({key for _, key in lines}) == len(charges) == count
    elif recovery == "manual":  # at most once, and what is not known is visible
        assert set(charges.values()) <= {1}
        assert {f"order-{n}" for n in range(count)} - {f"order-{n}" for n in charges} <= doubts
    else:
        assert charges == Counter(range(count))
    assert recovery == "manual" or not doubts
