"""The shop of `examples/shop`, under load over HTTP, is killed in a loop: its ledger is exact.

Uvicorn serves it in two processes. One of them is killed, and another takes its place. Some kill
themselves at a named point, so that they certainly die in the middle of an operation, and the test
kills others at any moment. Clients retry until they have an answer. The ledger of the provider,
which is outside of the system, must have one payment for each order (L5, L6, L7, L9).
"""

import asyncio
import itertools
import json
import random
import sqlite3
import time
from collections import Counter, defaultdict
from contextlib import closing

import httpx
import psycopg
import pytest

from coatcheck import DidNotHappen, Engine, Happened, Operation
from coatcheck.core.record import COMPLETED, IN_DOUBT
from coatcheck.stores import Query
from tests.faults.cells import IS_ALL
from tests.faults.outcomes import RECOVERIES, STORES, is_run
from tests.faults.shop_processes import Death, Deployment
from tests.faults.test_matrix import place_of
from tests.faults.victims import WAIT_S_MAX

# The route of each recovery, and the service that is paid there.
ROUTES = {
    "retry": ("/cards", "cards"),
    "reconcile": ("/transfers", "bank"),
    "manual": ("/terminals", "terminals"),
    "transaction": ("/vouchers", None),
    "steps": ("/baskets", "bank"),
}
JSON = [("content-type", "application/json")]
# Where servers kill themselves; in transaction mode the store sees no claim.
POINTS = ("after claim", "after effect", "after complete")
POINTS_OF = {
    "transaction": ("after effect", "after effect", "before response"),
    "steps": ("after claim", "in step", "after effect", "after step", "after complete"),
}
ROUNDS = 4 if IS_ALL else 1
CLIENTS = 8
# Each third order is sent twice at the same time.
TWINS_EVERY = 3
# The longest pause until the next server is killed.
PAUSE_S_MAX = 0.2
# Refusals that ask for the same request again. On a busy machine, SQLite's file may stay locked for
# longer than a request waits for it: nothing has run then, and the client gets a 503.
AGAIN = ("in-progress", "store-unavailable")
# 50 ms until a client retries: often enough to find the operation taken over.
RETRY_PAUSE_S = 0.05
SEED = 7


def deaths_of(recovery):
    """One death at each point, and not at the first order."""
    points = POINTS_OF.get(recovery, POINTS) * ROUNDS
    return [Death(point, number % 3 + 2) for number, point in enumerate(points)]


class Customers:
    """Clients who order for as long as servers are killed, and ask until each order has an end."""

    def __init__(self, deployment, path):
        self._deployment = deployment
        self._path = path
        self._numbers = itertools.count(1)
        self._is_over = False
        self.answers = defaultdict(set)
        self.doubts = {}
        self.failures = 0

    async def run(self, deaths):
        async with self.client() as self._http, asyncio.TaskGroup() as self._tasks:
            for _ in range(CLIENTS):
                self._tasks.create_task(self._order())
            await self._kill(deaths)
            self._is_over = True

    async def ask_again(self):
        """Retry what was in doubt."""
        again, self.doubts = [*self.doubts], {}
        async with self.client() as self._http:
            await asyncio.gather(*(self._ask(number) for number in again))

    def client(self):
        """A connection for each request: one that is kept would always reach the same server."""
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self._deployment.port}",
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=WAIT_S_MAX,
        )

    async def _kill(self, deaths):
        """Kill one server while it works; the server in its place kills itself."""
        chance = random.Random(SEED)
        for death, place in zip(deaths, itertools.cycle(range(Deployment.SERVERS)), strict=False):
            await asyncio.sleep(chance.uniform(0, PAUSE_S_MAX))
            self._deployment.servers[place].kill()
            server = self._deployment.replace(place, death)
            await self._end_of(server)
            assert server.has_killed_itself
            self._deployment.replace(place)

    async def _end_of(self, server):
        deadline = time.monotonic() + WAIT_S_MAX
        while server.process.exitcode is None:
            assert time.monotonic() < deadline, f"it never came to {server.death}"
            await asyncio.sleep(0.005)

    async def _order(self):
        """Place one order after the other; retries run beside the next order."""
        while not self._is_over:
            number = next(self._numbers)
            twins = 2 if number % TWINS_EVERY == 0 else 1
            ends = await asyncio.gather(*(self._has_end(number) for _ in range(twins)))
            if not all(ends):
                self._tasks.create_task(self._ask(number))

    async def _ask(self, number):
        deadline = time.monotonic() + WAIT_S_MAX
        while not await self._has_end(number):
            assert time.monotonic() < deadline, f"order {number} never ends"
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _has_end(self, number):
        """Ask once; whether there is an answer, or the operation is in doubt."""
        headers = {"Idempotency-Key": f'"order-{number}"'}
        try:
            answer = await self._http.post(self._path, json=order_of(number), headers=headers)
        except httpx.TransportError:
            self.failures += 1
            return False
        code = "" if answer.status_code == 201 else answer.json()["code"]
        if not code:
            self.answers[number].add(answer.content)
        elif code == "outcome-unknown":
            self.doubts[number] = answer.headers["idempotency-reference"]
        else:
            assert code in AGAIN, answer.text
        return code not in AGAIN


def order_of(number):
    return {"number": number, "cents": 100 + number}


def shops():
    """On PostgreSQL; on every store with `make test-faults`."""
    pairs = itertools.product(STORES if IS_ALL else ("PostgreSQL",), RECOVERIES)
    return [(store, recovery) for store, recovery in pairs if is_run("kill", recovery, store)]


@pytest.mark.timeout(240)  # many times what all rounds take
@pytest.mark.parametrize(("store", "recovery"), shops())
def test_a_shop_that_is_killed_in_a_loop_keeps_an_exact_ledger(store, recovery, tmp_path):
    """L5, L6, L7, L9: every order is paid for once, and what is in doubt is seen and resolved."""
    place, (path, desk) = place_of(store, tmp_path), ROUTES[recovery]
    with closing(Deployment(place.url, place.ledger, recovery)) as deployment:
        customers = Customers(deployment, path)
        asyncio.run(customers.run(deaths_of(recovery)))
        attempts = check_records(place, customers, recovery)
        resolve(place, customers, desk)
        asyncio.run(customers.ask_again())
    assert not customers.doubts
    check_ledger(place, customers, recovery)
    # Otherwise no server died in the middle, and the test shows nothing. A transaction leaves no
    # trace: there, the servers that killed themselves show it.
    assert customers.failures
    assert attempts > 1 or recovery in ("manual", "transaction")


def check_records(place, customers, recovery):
    """Nothing is stuck: what did not end is visibly in doubt. Returns the most attempts."""
    with Engine(place.url) as engine:
        records = engine.store.find(Query(limit=100_000)).records
    numbers = customers.answers.keys() | customers.doubts.keys()
    assert {record.key for record in records} == {f"order-{number}" for number in numbers}
    assert {record.state for record in records} <= {COMPLETED, IN_DOUBT}
    visible = {Operation(record).reference for record in records if record.state == IN_DOUBT}
    assert visible == set(customers.doubts.values())
    assert bool(visible) == (recovery == "manual")
    return max(record.attempt for record in records)


def resolve(place, customers, desk):
    """An operator reads the roll of paper, and resolves what is in doubt."""
    receipts = {number: receipt for receipt, number, _ in paid(place, desk)} if desk else {}
    with Engine(place.url) as engine:
        for number, reference in customers.doubts.items():
            receipt = receipts.get(number)
            found = DidNotHappen()
            if receipt is not None:
                found = Happened(201, JSON, json.dumps({"receipt": receipt}).encode())
            engine.resolve(reference, found, by="ada", why="it is, or is not, on the roll")


def check_ledger(place, customers, recovery):
    """One payment for each order, and its client has its receipt."""
    _, desk = ROUTES[recovery]
    rows = paid(place, desk)
    assert Counter(number for _, number, _ in rows) == Counter(customers.answers.keys())
    assert [row for row in rows if row[2] != order_of(row[1])["cents"]] == []
    receipts = {
        number: [json.loads(one)["receipt"] for one in a] for number, a in customers.answers.items()
    }
    assert receipts == {number: [receipt] for receipt, number, _ in rows}
    if recovery == "steps":
        sent = Counter(number for _, number, _ in paid(place, "parcels"))
        assert sent == Counter(customers.answers.keys())
    if recovery == "retry":  # more was asked for than was done: the derived key has held it back
        assert asked(place, desk) > len(rows)


def paid(place, desk):
    """What was done, as (receipt, order, cents)."""
    if desk is not None:
        question = "select receipt, number, cents from done where service = ?"
        with closing(sqlite3.connect(place.ledger)) as ledger:
            return ledger.execute(question, (desk,)).fetchall()
    question = "select number, number, cents from sales"
    is_file = place.url.startswith("sqlite")
    opened = sqlite3.connect(place.path) if is_file else psycopg.connect(place.url)
    with closing(opened) as connection:
        return connection.execute(question).fetchall()


def asked(place, desk):
    with closing(sqlite3.connect(place.ledger)) as ledger:
        return ledger.execute("select count(*) from asked where service = ?", (desk,)).fetchone()[0]
