"""The outbox of a client that is killed again and again: no action is lost, none is doubled.

The client submits numbered actions and sends them in the background. Again and again it is killed
with `kill -9` and started anew. The server loses answers after the effect, resets connections,
delays, refuses for now, and sends half responses.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from coatcheck.client import RetryPolicy
from coatcheck.client.httpx2 import Client
from coatcheck.client.outbox import Done, Outbox
from coatcheck.core.policy import Policy
from tests.faults.cells import IS_ALL
from tests.support.faulty_server import IN_PROGRESS, FaultyServer, later
from tests.support.guarded_api import Api
from tests.support.lossy_relay import LossyRelay
from tests.support.servers.postgres import postgres
from tests.support.times import eventually

ROOT = Path(__file__).resolve().parents[2]
ACTIONS, KILL_EVERY = (1_000, 50) if IS_ALL else (40, 15)
CELLS = [("sqlite", "guarded", "threads"), ("postgresql", "not ours", "event loop")]
if IS_ALL:
    CELLS += [("sqlite", "not ours", "event loop"), ("postgresql", "guarded", "threads")]
LANES = 20
NETWORK_FAULTS = ["lose", "half", "reset"]
SERVER_FAULTS = [
    *(*NETWORK_FAULTS, "lose-by-reset", "500", "hang", IN_PROGRESS),
    *(later(status, 0, as_date=as_date) for status in (409, 429, 503) for as_date in (False, True)),
]

# Of the last sender: as that of the client.
RETRY = RetryPolicy(attempts_max=5, deadline="2s", timeout="500ms", backoff_base="5ms")
# An action that was being sent at several kills, and whose next call fails too, is due 16 s later,
# and after the one after that 32 s.
LAST_S_MAX = 120 if IS_ALL else 40

# Submit the actions from a number on, and print each when it is stored. They are at most ten actions
# ahead of the sender, so that a kill always finds some that are being sent.
SETTINGS = """
import asyncio
import sys
from coatcheck.client import RetryBudget, RetryPolicy
from coatcheck.client.httpx2 import AsyncClient, Client
from coatcheck.client import outbox, outbox_base
outbox_base.LEASE_MARGIN_S = 1.0
url, api, first, count, lanes = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
retry = RetryPolicy(attempts_max=5, deadline="2s", timeout="500ms", backoff_base="5ms")
settings = {"base_url": api, "retry": retry, "budget": RetryBudget(1_000_000)}
def action(n):
    given = {"json": {"n": n}, "lane": f"lane-{n % lanes}", "reference": f"action-{n}"}
    return {"method": "POST", "url": "/charges", **given}
tickets = []
"""
CLIENTS = {
    "threads": """
box = outbox.Outbox(url, client=Client(**settings), workers=8)
with box.running():
    for n in range(first, count):
        ticket = box.submit(**action(n))
        print(n, ticket.key, flush=True)
        tickets.append(ticket)
        if len(tickets) > 10:
            tickets.pop(0).result(timeout=1)
print("end", flush=True)
""",
    "event loop": """
async def main():
    async with AsyncClient(**settings) as client:
        box = outbox.AsyncOutbox(url, client=client, workers=8)
        async with box.running():
            for n in range(first, count):
                ticket = await box.submit(**action(n))
                print(n, ticket.key, flush=True)
                tickets.append(ticket)
                if len(tickets) > 10:
                    await tickets.pop(0).result(timeout=1)
    print("end", flush=True)
asyncio.run(main())
""",
}


class Shop:
    """The server, and what it has done."""

    def __init__(self, kind, stack):
        draws = random.Random(11)

        def script(faults):
            return [draws.choice(faults) if draws.random() < 0.35 else None for _ in range(9_999)]

        if kind == "guarded":
            api = stack.enter_context(Api(Policy(required=True)))
            network = stack.enter_context(LossyRelay(api.port, *script(NETWORK_FAULTS)))
            self.url, self._bodies = network.url, api.charges
        else:
            faults = [fault or "ok" for fault in script(SERVER_FAULTS)]
            server = stack.enter_context(FaultyServer(*faults))
            self.url, self._bodies = server.url, server.effects

    @property
    def numbers(self):
        return [json.loads(body)["n"] for body in list(self._bodies)]


def run_and_kill(client, url, api, first):
    """
    Run a client from action *first*; kill it when the next multiple of `KILL_EVERY` is stored.

    Returns the keys by number, and the exit code. The client may have stored a few more before the
    signal reaches it.
    """
    kill_at = (first // KILL_EVERY + 1) * KILL_EVERY
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    words = [url, api, str(first), str(ACTIONS), str(LANES)]
    keys = {}
    with subprocess.Popen(
        [sys.executable, "-c", SETTINGS + CLIENTS[client], *words],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout:
            if line == "end\n":
                break
            number, key = line.split()
            keys[int(number)] = key
            if first + len(keys) == kill_at:
                os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return keys, process.returncode


def is_all_done(outbox):
    return all(action.state == "done" for action in outbox.store.listed(with_all=True))


@pytest.mark.parametrize("kind", ["guarded", "not ours"])
def test_a_request_that_breaks_off_has_no_effect_on_the_servers_of_these_tests(kind):
    """A client sends head and body one after the other, and may be killed between the two."""
    head = (
        b"POST /charges HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: k\r\nContent-Length: 8\r\n\r\n"
    )
    with ExitStack() as stack:
        shop = Shop(kind, stack)
        place = urlsplit(shop.url)
        for sent in (head, head + b'{"n"'):
            with socket.create_connection((place.hostname, place.port)) as killed:
                killed.sendall(sent)
        client = stack.enter_context(Client(base_url=shop.url, retry=RETRY))
        assert client.post("/charges", json={"n": 1}).status_code == 201
        assert shop.numbers == [1]


@pytest.mark.timeout(900 if IS_ALL else 60)
@pytest.mark.parametrize(("database", "server", "client"), CELLS)
def test_no_action_is_lost_or_doubled_by_kills(database, server, client, tmp_path):
    """C3: each has exactly one effect, and the effects of a lane are in order."""
    url = f"sqlite:///{tmp_path}/outbox.db" if database == "sqlite" else postgres().fresh_url()
    with ExitStack() as stack:
        shop = Shop(server, stack)
        keys, kills = {}, 0
        while len(keys) < ACTIONS:
            more, code = run_and_kill(client, url, shop.url, len(keys))
            keys |= more
            assert code in (0, -signal.SIGKILL)
            kills += code != 0
        assert kills >= ACTIONS // KILL_EVERY - 1
        http = stack.enter_context(Client(base_url=shop.url, retry=RETRY))
        last = Outbox(url, client=http)
        stack.callback(last.close)
        with last.running():
            eventually(lambda: is_all_done(last), within_s=LAST_S_MAX, every_s=0.1)
        outcomes = [last.outcome(key) for key in keys.values()]
    assert {type(outcome) for outcome in outcomes} == {Done}
    assert sorted(shop.numbers) == list(range(ACTIONS))
    for lane in range(LANES):
        order = [number for number in shop.numbers if number % LANES == lane]
        assert order == sorted(order)
