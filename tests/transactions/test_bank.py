"""L9: a bank whose processes and database are killed never loses, creates or moves money twice."""

import asyncio
import json
import random
import socket
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from itertools import count
from signal import SIGKILL
from threading import Barrier, Lock

import psycopg
import pytest
from psycopg_pool import PoolTimeout

from coatcheck import AsyncEngine, Engine, Policy, StoreUnavailable
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.transactions.pool import SIZE
from tests.support.servers import START_S_MAX, until
from tests.support.servers.postgres import Postgres
from tests.transactions.bank_processes import (
    PROCESSES,
    REFUSED_STEPS,
    STEPS,
    Order,
    Pause,
    Reply,
    ServerProcess,
    Stop,
    TransferProcess,
    example,
    key_header,
)
from tests.transactions.idioms import SHOPS, Shop

NOWHERE = Stop("")


# -------------------------------------------------------------------------------- step by step


class Bank:
    """Two accounts in a database, and processes that move money from one to the other."""

    def __init__(self, shop):
        self._shop = shop
        self._processes = []
        for statement in (example.ACCOUNTS, example.TRANSFERS):
            shop.ask(statement)
        shop.ask("insert into accounts values (1, 100), (2, 100)")

    def transfer_process(self, stop=NOWHERE, amount=30):
        order = Order(self._shop.kind, self._shop.store, self._shop.place, amount=amount)
        self._processes.append(TransferProcess(order, stop))
        return self._processes[-1]

    def is_waited_in(self):
        """A transaction waits for the lock of a record that another has not committed yet."""
        return self._shop.ask(
            "select pid from pg_locks join pg_stat_activity using (pid)"
            " where not granted and locktype = 'advisory' and query ~ 'coatcheck_records'"
        )

    def books(self):
        """The balances, the transfers by their keys, and how many records there are."""
        balances = [row for (row,) in self._shop.ask("select balance from accounts order by id")]
        transfers = [key for (key,) in self._shop.ask("select idempotency_key from transfers")]
        return balances, transfers, self._shop.records()

    def close(self):
        for transfer_process in self._processes:
            transfer_process.end()


UNTOUCHED = ([100, 100], [], 0)
MOVED = ([70, 130], ["rent"], 1)
FIRST = Reply(201, is_replayed=False, left=70)
AGAIN = Reply(201, is_replayed=True, left=70)


@pytest.fixture
def bank(kind, tmp_path):
    with closing(Bank(SHOPS[kind](tmp_path))) as bank:
        yield bank


@pytest.fixture
def own():
    """A server of this test's own, which it may kill."""
    with closing(Database()) as database:
        yield database


class Database(Postgres):
    """A server that may be killed while it is at work."""

    def close(self):
        self.remove()


@pytest.mark.parametrize("kind", SHOPS)
@pytest.mark.parametrize("place", STEPS)
def test_a_transfer_killed_at_any_step_is_made_once_by_its_retry(bank, place):
    """L9: killed before the commit it leaves nothing, after it everything."""
    is_committed = place == "committed"
    killed = bank.transfer_process(Stop(place))
    assert killed.reply() is None
    assert killed.process.exitcode == -SIGKILL
    assert bank.books() == (MOVED if is_committed else UNTOUCHED)
    assert bank.transfer_process().reply() == (AGAIN if is_committed else FIRST)
    assert bank.books() == MOVED


@pytest.mark.parametrize("kind", SHOPS)
@pytest.mark.parametrize("place", REFUSED_STEPS)
def test_a_refused_transfer_killed_at_any_step_moves_nothing_and_stays_refused(bank, place):
    """L9: killed before the commit it leaves nothing at all, after it only its refusal."""
    is_committed = place == "committed"
    killed = bank.transfer_process(Stop(place), amount=101)
    assert killed.reply() is None
    assert bank.books() == ([100, 100], [], int(is_committed))
    assert bank.transfer_process(amount=101).reply() == Reply(402, is_replayed=is_committed)
    assert bank.transfer_process(amount=101).reply() == Reply(402, is_replayed=True)
    assert bank.books() == ([100, 100], [], 1)


@pytest.mark.parametrize("kind", ["postgres"])
def test_a_duplicate_in_another_process_waits_for_the_row_and_replays(bank):
    """L9."""
    pause = Pause(PROCESSES.Event(), PROCESSES.Event())
    first = bank.transfer_process(Stop("written", pause))
    assert pause.is_reached.wait(START_S_MAX)
    second = bank.transfer_process()
    until(bank.is_waited_in)
    assert bank.books() == UNTOUCHED
    pause.may_go_on.set()
    assert first.reply() == FIRST
    assert second.reply() == AGAIN
    assert bank.books() == MOVED


@pytest.mark.parametrize("kind", ["postgres"])
def test_a_duplicate_goes_on_where_the_one_it_waits_for_is_killed(bank):
    """L9."""
    pause = Pause(PROCESSES.Event(), PROCESSES.Event())
    first = bank.transfer_process(Stop("completed", pause))
    assert pause.is_reached.wait(START_S_MAX)
    second = bank.transfer_process()
    until(bank.is_waited_in)
    first.process.kill()
    assert second.reply() == FIRST
    assert bank.books() == MOVED


# --------------------------------------------------------------------------- without a database


def test_a_database_killed_before_the_commit_has_moved_nothing(own):
    """L9: the client gets a 503, because the outcome is unknown; its retry finds out."""
    with closing(Bank(Shop("postgres", own.url, own.url))) as bank:
        pause = Pause(PROCESSES.Event(), PROCESSES.Event())
        first = bank.transfer_process(Stop("completed", pause))
        assert pause.is_reached.wait(START_S_MAX)
        own.kill()
        pause.may_go_on.set()
        assert first.reply() == Reply(503, is_replayed=False)
        own.restart()
        assert bank.books() == UNTOUCHED
        assert bank.transfer_process().reply() == FIRST
        assert bank.books() == MOVED


def test_connections_that_died_with_the_database_fail_no_later_operation(own):
    """L9: if one connection is dead, the pool closes all idle ones."""
    together = Barrier(SIZE, timeout=START_S_MAX)
    with Engine(own.url) as engine, ThreadPoolExecutor(SIZE) as threads:
        asked = [threads.submit(engine.transaction, str(n), together.wait) for n in range(SIZE)]
        assert sorted(one.result() for one in asked) == list(range(SIZE))
        own.kill()
        own.restart()
        assert engine.transaction("after", lambda: "as before", scope="s") == "as before"


def test_async_connections_that_died_fail_no_later_operation(own):
    """L9."""

    async def main():
        together = asyncio.Barrier(SIZE)
        async with AsyncEngine(own.url) as engine:
            asked = (engine.transaction(str(n), together.wait) for n in range(SIZE))
            assert sorted(await asyncio.gather(*asked)) == list(range(SIZE))
            own.kill()
            own.restart()
            return await engine.transaction("after", asyncio.sleep, 0, "as before")

    assert asyncio.run(main()) == "as before"


def test_a_pool_without_a_free_connection_is_asked_once(tmp_path):
    """L9: the pool has waited already."""
    asked = []

    def connect():
        asked.append(1)
        raise PoolTimeout

    place = SHOPS["postgres"](tmp_path).store
    with Engine(place, transactions=connect) as engine, pytest.raises(StoreUnavailable):
        engine.transaction("rent", lambda: None, scope="s")
    assert asked == [1]


def test_an_answer_that_has_left_is_not_followed_by_another(tmp_path):
    """L9: Starlette answers an error first and raises it then; around it, that is too late."""
    sent = []

    class Collided(Exception):
        sqlite_errorcode = 517  # a snapshot that is too old

    async def app(asgi_scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body"})
        raise Collided

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        sent.append(message["type"])

    async def do():
        policy = Policy(mode="transaction", transaction_retries=3)
        async with AsyncEngine(f"sqlite:///{tmp_path}/bank.db", policy) as engine:
            headers = [(b"idempotency-key", b'"rent"')]
            request = {"type": "http", "method": "POST", "path": "/", "headers": headers}
            with pytest.raises(Collided):
                await IdempotencyMiddleware(app, engine=engine)(request, receive, send)

    asyncio.run(do())
    assert sent == ["http.response.start", "http.response.body"]


# ---------------------------------------------------------------------------------- under load

TRANSFERS = 1_000
ACCOUNTS = 8
BALANCE = 100_000
# Each transfer is sent by so many clients at once; so many are at work at the same time.
TWINS = 2
CLIENTS = 24
SERVERS = 3
SERVERS_KILLED = 12
DATABASE_KILLED = 2


class Deployment:
    """A bank with several servers and a database, all of which may be killed."""

    def __init__(self):
        # Deadlocks are detected after 50 ms, not after a second.
        self.database = Database(deadlock_timeout="50ms")
        self._servers = []
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._listening.getsockname()[1]
        example.open_accounts(self.database.url, *[BALANCE] * ACCOUNTS)
        for number in range(SERVERS):
            server = ServerProcess(self.database.url, self._listening, has_pool=bool(number % 2))
            self._servers.append(server)

    def kill_server(self):
        server = random.choice(self._servers)
        server.kill()
        server.start()

    def kill_database(self, is_noticed):
        """Kill the database and a server, and restart both when clients have noticed."""
        server = random.choice(self._servers)
        self.database.kill()
        server.kill()
        until(is_noticed)
        self.database.restart()
        server.start()

    def ask(self, statement):
        with psycopg.connect(self.database.url) as connection:
            return connection.execute(statement).fetchall()

    def close(self):
        for server in self._servers:
            server.kill()
        self._listening.close()
        self.database.remove()


class Clients:
    """Clients that retry until they get an answer; after some answers, something is killed."""

    def __init__(self, deployment):
        self.answers = defaultdict(set)
        self.failures = 0
        self._deployment = deployment
        self._transfers = iter([order for order in orders() for _ in range(TWINS)])
        deeds = [self._kill_database] * DATABASE_KILLED + [deployment.kill_server] * SERVERS_KILLED
        moments = random.sample(range(1, TRANSFERS * TWINS - CLIENTS), len(deeds))
        self._deeds = dict(zip(moments, deeds, strict=True))
        self._finals = count(1)
        self._mutex = Lock()

    def run(self):
        """Run until every transfer has an answer and every kill has happened."""
        with ThreadPoolExecutor(CLIENTS) as clients, ThreadPoolExecutor(1) as killer:
            done = [clients.submit(self._be_client, killer) for _ in range(CLIENTS)]
            killed = [deed for client in done for deed in client.result()]
            for deed in killed:
                deed.result()
        assert len(killed) == len(self._deeds)

    def _kill_database(self):
        """Kill the database, until every client has seen an error."""
        noticed = self.failures + CLIENTS
        self._deployment.kill_database(is_noticed=lambda: self.failures >= noticed)

    def _be_client(self, killer):
        killed = []
        with closing(
            HTTPConnection("127.0.0.1", self._deployment.port, timeout=START_S_MAX)
        ) as http:
            while (transfer := self._next()) is not None:
                answer = self._send_until_final(http, *transfer)
                with self._mutex:
                    self.answers[transfer[0]].add(answer)
                deed = self._deeds.get(next(self._finals))
                if deed is not None:
                    killed.append(killer.submit(deed))
        return killed

    def _next(self):
        with self._mutex:
            return next(self._transfers, None)

    def _send_until_final(self, http, key, body):
        deadline = time.monotonic() + START_S_MAX
        headers = {**key_header(key), "Content-Type": "application/json"}
        while True:
            assert time.monotonic() < deadline
            try:
                http.request("POST", "/transfers", json.dumps(body), headers)
                response = http.getresponse()
                answer = response.read()
            except (HTTPException, OSError):
                http.close()
            else:
                if response.status < 500 and response.status != 409:
                    return response.status, answer
            with self._mutex:
                self.failures += 1
            time.sleep(0.02)


def orders():
    """Which transfers are made, by their keys."""
    for number in range(TRANSFERS):
        source, target = random.sample(range(1, ACCOUNTS + 1), 2)
        body = {"source": source, "target": target, "amount": random.randint(1, 100)}
        yield f"transfer-{number}", body


def test_a_thousand_transfers_survive_whatever_is_killed():
    """L9: servers and the database at random moments, while two clients send every transfer."""
    with closing(Deployment()) as deployment:
        clients_ = Clients(deployment)
        clients_.run()
        balances = dict(deployment.ask("select id, balance from accounts"))
        transfers = deployment.ask("select * from transfers")
    assert sum(balances.values()) == ACCOUNTS * BALANCE
    assert Counter(key for key, *_ in transfers) == dict.fromkeys(clients_.answers, 1)
    assert len(transfers) == TRANSFERS
    by_book = Counter(dict.fromkeys(balances, BALANCE))
    for _, source, target, amount in transfers:
        by_book[source] -= amount
        by_book[target] += amount
    assert balances == by_book
    answers = list(clients_.answers.values())
    assert [found for found in answers if len(found) > 1] == []
    assert {status for ((status, _),) in answers} == {201}
