"""The outbox: what is submitted survives a kill, is sent in order, and happens once."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import coatcheck.client.aiohttp
import coatcheck.client.httpx2
from coatcheck.client import RetryPolicy
from coatcheck.client.outbox import AsyncOutbox, Done, Outbox, Pending, Refused, Unknown
from coatcheck.errors import Misconfigured
from tests.client.conftest import CLIENTS, stored_bytes
from tests.support.faulty_server import FaultyServer
from tests.support.times import WAIT_S_MAX, eventually

ROOT = Path(__file__).resolve().parents[2]
ASYNC_CLIENTS = {
    "httpx2": coatcheck.client.httpx2.AsyncClient,
    "aiohttp": coatcheck.client.aiohttp.ClientSession,
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_an_action_is_on_disk_before_submit_returns_and_is_sent_once(make, kind):
    """C3, C-06: another outbox of the same file, as after a restart, sends it with its key."""
    with FaultyServer("lose", "lose", "lose") as server:
        ticket = make(kind).submit("POST", f"{server.url}/charges", json={"amount": 5})
        assert ticket.result() == Pending()
        assert server.seen == []
        again = make(kind)
        assert again.drain() == 1
        assert ticket.result() == Pending()  # both attempts of this call were lost
        assert again.drain() == 0  # it is not due yet
        ticket.result(timeout=5)  # time passes
        assert again.drain() == 1
    outcome = ticket.result()
    assert isinstance(outcome, Done)
    assert (outcome.response.status, outcome.response.body) == (201, b'{"charge": 1}')
    assert (b"idempotent-replayed", b"true") in outcome.response.headers
    assert server.keys == [ticket.key] * 4
    assert len(server.effects) == 1
    assert {seen.headers["Content-Type"] for seen in server.seen} == {"application/json"}


@pytest.mark.parametrize("kind", ASYNC_CLIENTS)
def test_an_outbox_on_an_event_loop_sends_the_same(kind, url, time):
    """C3: the same file and the same keys."""

    async def work(api):
        async with ASYNC_CLIENTS[kind](clock=time.clock, retry=RetryPolicy(attempts_max=2)) as http:
            outbox = AsyncOutbox(url, client=http)
            async with outbox.running():
                tickets = [
                    await outbox.submit("POST", f"{api}/charges", json={"n": n}, lane="a")
                    for n in range(5)
                ]
                for ticket in tickets:
                    while isinstance(await ticket.result(timeout=1), Pending):
                        await outbox.drain()
            refused = await outbox.submit("POST", f"{api}/charges", content=b"x")
            await outbox.drain()
            return [await ticket.result() for ticket in (*tickets, refused)]

    with FaultyServer("lose", "lose", "lose") as server:
        outcomes = asyncio.run(work(server.url))
    assert [type(outcome) for outcome in outcomes] == [Done] * 6
    assert [json.loads(body) for body in server.effects[:5]] == [{"n": n} for n in range(5)]


def test_the_actions_of_a_lane_are_sent_in_their_order(make, time):
    """C3: each after the one before it has ended, also if that takes several calls."""
    with FaultyServer(*["reset"] * 9) as server:  # before the effect: others could overtake
        outbox = make(workers=4)
        tickets = [
            outbox.submit("POST", f"{server.url}/charges", json={"lane": lane, "n": n}, lane=lane)
            for n in range(6)
            for lane in ("a", "b", "c")
        ]
        while any(isinstance(ticket.result(), Pending) for ticket in tickets):
            outbox.drain()
            time.advance(1)
    done = [json.loads(body) for body in server.effects]
    assert len(done) == 18
    for lane in ("a", "b", "c"):
        assert [one["n"] for one in done if one["lane"] == lane] == list(range(6))


def test_lanes_are_sent_at_the_same_time(make):
    both = threading.Barrier(2, timeout=WAIT_S_MAX)

    def sign(method, url, body):
        both.wait()  # breaks unless two are being sent
        return {}

    with FaultyServer() as server:
        outbox = make(workers=2, sign=sign)
        tickets = [outbox.submit("POST", server.url, lane=lane) for lane in ("a", "b")]
        outbox.drain()
        assert [type(ticket.result()) for ticket in tickets] == [Done] * 2


def test_credentials_are_signed_when_sending_and_never_stored(make, url):
    tokens = iter(["old", "new"])

    def sign(method, url, body):
        return {"Authorization": f"Bearer {next(tokens)} {method} {len(body)}"}

    with FaultyServer("lose", "lose") as server:
        outbox = make(sign=sign)
        ticket = outbox.submit("POST", server.url, content=b"abc")
        outbox.drain()
        ticket.result(timeout=5)
        outbox.drain()
    seen = [one.headers["Authorization"] for one in server.seen]
    assert seen == ["Bearer old POST 3"] * 2 + ["Bearer new POST 3"]
    stored = stored_bytes(url)
    assert ticket.key.encode() in stored
    assert b"Bearer" not in stored


@pytest.mark.parametrize("kind", ASYNC_CLIENTS)
def test_on_an_event_loop_the_sign_function_may_be_async(kind, url, time):
    async def sign(method, url, body):
        await asyncio.sleep(0)
        return {"Authorization": f"Bearer {method} {len(body)}"}

    async def work(api):
        async with ASYNC_CLIENTS[kind](clock=time.clock) as client:
            outbox = AsyncOutbox(url, client=client, sign=sign)
            ticket = await outbox.submit("POST", api, content=b"abc")
            await outbox.drain()
            outbox.close()
            return await ticket.result()

    with FaultyServer() as server:
        assert isinstance(asyncio.run(work(server.url)), Done)
    assert server.seen[0].headers["Authorization"] == "Bearer POST 3"


def test_on_an_event_loop_people_decide_by_awaiting(url, time):
    """C3: the loop goes on while the database works."""

    async def work(api):
        async with coatcheck.client.httpx2.AsyncClient(clock=time.clock) as client:
            outbox = AsyncOutbox(url, client=client)
            keys = [(await outbox.submit("POST", api, json=n)).key for n in range(2)]
            await outbox.drain()
            assert [dead.key for dead in await outbox.dead_letters()] == keys
            assert await outbox.retry(keys[0], did_not_happen=True)
            assert await outbox.discard(keys[1])
            await outbox.drain()
            assert isinstance(await outbox.outcome(keys[0]), Done)
            time.advance(1)
            assert await outbox.forget(0) == 1
            with pytest.raises(Misconfigured, match="no action with this key"):
                await outbox.outcome(keys[0], timeout=1)
            outbox.close()

    with FaultyServer((422, {}, {}), (422, {}, {})) as server:
        asyncio.run(work(server.url))
    assert len(server.effects) == 1


def test_a_sign_function_that_fails_keeps_the_action(make):
    outbox = make(sign=lambda *_: 1 / 0)
    with FaultyServer() as server:
        ticket = outbox.submit("POST", server.url)
        assert outbox.drain() == 1
    assert ticket.result() == Pending()
    assert outbox.store.get(ticket.key).reason == "ZeroDivisionError: division by zero"


def test_a_refused_action_is_a_dead_letter_and_its_lane_continues(make):
    with FaultyServer((422, {}, {"code": "sold-out"})) as server:
        outbox = make()
        first = outbox.submit("POST", server.url, lane="a")
        second = outbox.submit("POST", server.url, lane="a")
        outbox.drain()
    assert isinstance(first.result(), Refused)
    assert isinstance(second.result(), Done)
    assert [(dead.key, dead.state) for dead in outbox.dead_letters()] == [(first.key, "refused")]


def test_an_unknown_action_holds_its_lane_until_an_operator_decides(make):
    unknown = (409, {}, {"code": "outcome-unknown", "retry": "never"})
    with FaultyServer(unknown, unknown) as server:
        outbox = make()
        first = outbox.submit("POST", server.url, lane="a")
        second = outbox.submit("POST", server.url, lane="a")
        outbox.drain()
        outcome = first.result()
        assert isinstance(outcome, Unknown)
        assert (outcome.reason, outcome.response.status) == ("outcome-unknown", 409)
        assert second.result() == Pending()
        assert outbox.retry(first.key)
        outbox.drain()
        assert isinstance(first.result(), Unknown)
        assert outbox.discard(first.key)
        assert not outbox.discard(first.key)
        assert not outbox.retry(first.key)
        outbox.drain()
    assert isinstance(second.result(), Done)
    assert server.keys == [first.key, first.key, second.key]
    with pytest.raises(Misconfigured, match="no action with this key"):
        first.result()


def test_an_action_older_than_the_window_of_the_server_is_unknown(make, time):
    """C-17: the server may have forgotten the key, so it is not sent again."""
    with FaultyServer("lose", "lose") as server:
        outbox = make(server_window="2h")
        ticket = outbox.submit("POST", server.url)
        new = outbox.submit("POST", "http://127.0.0.1:9/")  # nobody listens there: never sent
        outbox.drain()
        time.advance(2 * 3_600)
        outbox.drain()
        assert len(server.seen) == 2
    outcome = ticket.result()
    assert isinstance(outcome, Unknown)
    assert "before the window of the server" in outcome.reason
    assert outbox.retry(ticket.key)
    outbox.drain()
    assert isinstance(ticket.result(), Unknown)
    assert new.result() == Pending()


def test_a_clock_that_is_set_back_loses_no_action_and_sends_none_blindly(make, time):
    """C3, C-17: pauses and leases would last for a day; the age of what was sent is not known."""
    with FaultyServer() as server:
        outbox = make()
        taken = outbox.submit("POST", server.url)
        new = outbox.submit("POST", server.url)
        killed = outbox.store.take(round(time.now_s * 1_000), 90_000, probes=False)
        assert killed.key == taken.key  # by a process that is killed now
        time.advance(-86_400)
        outbox.drain()
    assert server.keys == [new.key]
    assert isinstance(new.result(), Done)
    assert isinstance(taken.result(), Unknown)
    assert "the clock was set back" in taken.result().reason


def test_a_clock_that_is_set_back_does_not_hold_a_lane_for_years(make, time):
    """C3: neither behind an unknown action, nor behind one that cannot be sent."""

    def sign(method, url, body):
        return {} if body else 1 / 0

    with FaultyServer((409, {}, {"code": "outcome-unknown", "retry": "never"})) as server:
        outbox = make(sign=sign)
        unknown, after = (outbox.submit("POST", server.url, lane="a", json=n) for n in range(2))
        unsigned = outbox.submit("POST", server.url, lane="b")
        last = outbox.submit("POST", server.url, lane="b", json=2)
        outbox.drain()
        assert [ticket.result() for ticket in (after, unsigned, last)] == [Pending()] * 3
        time.advance(-3 * 365 * 86_400)
        outbox.drain()
    assert isinstance(unknown.result(), Unknown)
    assert isinstance(unsigned.result(), Refused)
    assert [type(ticket.result()) for ticket in (after, last)] == [Done] * 2


def test_the_same_reference_is_submitted_once(make):
    with FaultyServer() as server:
        outbox = make()
        tickets = [outbox.submit("POST", server.url, reference="order-17") for _ in range(2)]
        outbox.drain()
        assert outbox.submit("POST", server.url, reference="order-17").result() == (
            tickets[0].result()
        )
        outbox.drain()
    assert tickets[0].key == tickets[1].key
    assert len(server.seen) == 1


def test_a_background_sender_sends_while_the_block_runs(make):
    with FaultyServer() as server:
        outbox = make()
        with outbox.running():
            ticket = outbox.submit("POST", server.url)
            eventually(lambda: isinstance(ticket.result(), Done))


def test_done_actions_are_forgotten_when_they_are_old(make, time):
    with FaultyServer() as server:
        outbox = make()
        ticket = outbox.submit("POST", server.url)
        outbox.drain()
    assert outbox.forget("1d") == 0
    time.advance(2 * 86_400)
    assert outbox.forget("1d") == 1
    with pytest.raises(Misconfigured):
        ticket.result()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"server_window": "30s"}, "not longer than the deadline"),
        ({"workers": 0}, "workers is 0"),
        ({"probe": asyncio.sleep}, "probe is async"),
        ({"sign": asyncio.sleep}, "sign is async"),
        ({"client": coatcheck.client.httpx2.AsyncClient()}, "is async: use an AsyncOutbox"),
        ({"client": object()}, "must be a client of coatcheck.client"),
        ({"lane_wait": "soon"}, "lane_wait"),
        ({"url": "mysql://h/d"}, "not mysql:"),
        ({"url": "postgresql://h/d?colour=red"}, "the URL of the outbox"),
        ({"url": "sqlite://"}, "the outbox is a file"),
    ],
)
def test_a_wrong_setting_of_an_outbox_stops_at_once(options, words, tmp_path):
    client = coatcheck.client.httpx2.Client()
    given = {"client": client, "url": f"sqlite:///{tmp_path}/o.db", **options}
    with pytest.raises(Misconfigured, match=words):
        Outbox(given.pop("url"), **given)


@pytest.mark.parametrize("kind", CLIENTS)
def test_an_outbox_on_an_event_loop_refuses_a_client_that_blocks(kind, tmp_path):
    """C3: it would send, and then not be able to await the answer."""
    with pytest.raises(Misconfigured, match="is not async: use an Outbox"):
        AsyncOutbox(f"sqlite:///{tmp_path}/o.db", client=CLIENTS[kind]())


@pytest.mark.parametrize(
    "options",
    [
        *({"json": {}, "content": b""}, {"key": "k", "reference": "r"}, {"key": "two words"}),
        *({"headers": {"authorization": "Bearer t"}}, {"headers": {"Cookie": "session=1"}}),
        {"json": float("nan")},
    ],
)
def test_a_wrong_action_is_refused_before_it_is_stored(options, make):
    """C3: credentials would be on disk, and NaN is no JSON."""
    outbox = make()
    with pytest.raises((Misconfigured, ValueError)):
        outbox.submit("POST", "http://h/", **options)
    assert outbox.drain() == 0


# ------------------------------------------------------------------------------ several processes

SENDER = """
import sys
from coatcheck.client import RetryPolicy
from coatcheck.client.httpx2 import Client
from coatcheck.client import outbox, outbox_base
outbox_base.LEASE_MARGIN_S = -0.8
url, api, name = sys.argv[1:]
retry = RetryPolicy(attempts_max=3, deadline="1s", timeout="300ms", backoff_base="5ms")
box = outbox.Outbox(url, client=Client(base_url=api, retry=retry), workers=3)
print("ready", flush=True)
for n in range(10):
    ticket = box.submit("POST", "/charges", json={"by": name, "n": n}, lane=f"{name}-{n % 2}")
    print(ticket.key, flush=True)
    box.drain()
while True:
    box.drain()
"""


def test_processes_that_are_killed_lose_nothing_and_charge_once(url):
    """C3: kill -9 at any point; whatever submit returned happens exactly once."""
    draws = random.Random(7)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    faults = [draws.choice(["lose", "half", "ok", "ok", "reset"]) for _ in range(200)]
    keys = []
    with FaultyServer(*faults) as server:

        def run_and_kill(name):
            command = [sys.executable, "-c", SENDER, url, server.url, name]
            with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as run:
                assert run.stdout.readline() == "ready\n"
                count = draws.randint(1, 10)
                keys.extend(run.stdout.readline().strip() for _ in range(count))
                os.kill(run.pid, signal.SIGKILL)
                keys.extend(line.strip() for line in run.stdout if line.endswith("\n"))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run_and_kill, "abcdef"))
        with coatcheck.client.httpx2.Client(base_url=server.url) as client:
            last = Outbox(url, client=client)

            def are_done():
                last.drain()
                return all(isinstance(last.outcome(key), Done) for key in keys)

            eventually(are_done)
    assert len(keys) >= 6
    assert set(keys) <= {seen.key for seen in server.seen}
    bodies = [json.loads(body) for body in server.effects]
    assert len(bodies) == len({(body["by"], body["n"]) for body in bodies})
    for name in "abcdef":
        for lane in (0, 1):
            order = [one["n"] for one in bodies if one["by"] == name and one["n"] % 2 == lane]
            assert order == sorted(order)


def test_a_failure_whose_text_no_database_can_store_does_not_end_the_sender(make):
    """The sender in the background would die, and nothing would be sent any more."""
    texts = ["from the operating system: \udcff", "the end\0of a line"]

    def sign(*_):
        if texts:
            raise ValueError(texts.pop())
        return {}

    with FaultyServer() as server:
        outbox = make(sign=sign)
        first = outbox.submit("POST", server.url)
        second = outbox.submit("POST", server.url)
        assert outbox.drain() == 2
        reasons = {outbox.store.get(one.key).reason for one in (first, second)}
    assert reasons == {
        r"ValueError: from the operating system: \udcff",
        r"ValueError: the end\x00of a line",
    }


def test_an_error_of_ours_does_not_end_the_sender(make, monkeypatch, caplog):
    errors = [AssertionError("a mistake")]

    with FaultyServer() as server:
        outbox = make()
        take = outbox.store.take

        def fail_once(*args, **kwargs):
            if errors:
                raise errors.pop()
            return take(*args, **kwargs)

        monkeypatch.setattr(outbox.store, "take", fail_once)
        with outbox.running():
            ticket = outbox.submit("POST", server.url)
            eventually(lambda: isinstance(ticket.result(), Done))
    assert "a mistake" in caplog.text
