"""Optimistic actions: shown at once, taken back after a definite no, also after a restart."""

import asyncio

import pytest

from coatcheck.client import RetryPolicy
from coatcheck.client.httpx2 import AsyncClient, Client
from coatcheck.client.optimistic import AsyncOptimisticQueue, OptimisticQueue
from coatcheck.client.outbox import AsyncOutbox, Outbox
from coatcheck.errors import Misconfigured
from tests.support.faulty_server import FaultyServer

NO = (422, {}, {"code": "sold-out"})
UNKNOWN = (409, {}, {"code": "outcome-unknown", "retry": "never"})


class App:
    """An application that holds a basket in memory, and what was done to it."""

    def __init__(self, url, server, clock):
        retry = RetryPolicy(attempts_max=1)
        self.client = Client(base_url=server.url, retry=retry, clock=clock)
        self.outbox = Outbox(url, client=self.client)
        self.queue = OptimisticQueue(self.outbox)
        self.basket, self.steps = [], []
        self.queue.register("put", apply=self.put, revert=self.take, confirm=self.confirm)

    def put(self, item):
        self.steps.append(f"+{item}")
        self.basket.append(item)

    def take(self, item):
        self.steps.append(f"-{item}")
        assert self.basket.pop() == item  # exactly what it was when it was put in

    def confirm(self, item, done):
        self.steps.append(f"={item} {done.response.status}")

    def submit(self, item, lane="basket", **options):
        return self.queue.submit("put", "POST", "/items", json=item, lane=lane, **options)

    def work(self):
        self.outbox.drain()
        self.queue.settle()


@pytest.fixture
def app(url, time):
    """Makes an application with the same outbox, as after a restart."""
    opened = []

    def make(server):
        opened.append(App(url, server, time.clock))
        return opened[-1]

    yield make
    for app in opened:
        app.client.close()
        app.outbox.close()


def test_what_follows_a_refused_action_is_reverted_first_and_applied_again(app):
    """C4: in order; what the server did is confirmed, and stays."""
    with FaultyServer("ok", NO) as server:
        shop = app(server)
        for item in "abcd":
            shop.submit(item)
        assert (shop.basket, server.seen) == ([*"abcd"], [])
        shop.work()
        assert shop.basket == [*"acd"]
        assert " ".join(shop.steps) == "+a +b +c +d =a 201 -d -c -b +c +d =c 201 =d 201"
        assert [(one.state, one.reason) for one in shop.outbox.dead_letters()] == [
            ("refused", "sold-out")
        ]
        shop.steps.clear()
        shop.queue.settle()
        assert shop.steps == []


def test_a_restart_applies_what_is_open_and_its_refusal_reverts_it(app):
    """C4: the functions are found by name; a lost answer is sent for with the same key."""
    with FaultyServer("lose", "ok", NO) as server:
        first = app(server)
        keys = [first.submit(item, lane=None).key for item in "ab"]
        first.outbox._workers = 1
        first.work()  # the answer to "a" is lost, "b" is done
        assert first.basket == [*"ab"]
        again = app(server)
        again.queue.settle()
        assert again.basket == ["a"]  # the application reads "b" from the server
        assert again.outbox.retry(keys[0]) is False  # it is pending
        again.submit("c", lane=None)
        again.work()
        assert again.basket == ["a"]
        assert again.steps == ["+a", "+c", "-c"]
        assert server.keys[:2] == keys
        third = app(server)
        third.queue.settle()
        assert third.basket == ["a"]


def test_an_unknown_action_stays_applied_until_a_person_decides(app):
    """C4: it may have happened; `discard` takes it back, `retry` sends it again."""
    with FaultyServer(UNKNOWN, NO, "ok") as server:
        shop = app(server)
        ticket = shop.submit("a")
        shop.work()
        assert shop.basket == ["a"]
        assert shop.outbox.discard(ticket.key)
        shop.queue.settle()
        assert shop.basket == []
        ticket = shop.submit("b")
        shop.work()
        assert shop.basket == []
        assert shop.outbox.retry(ticket.key)
        shop.queue.settle()
        assert shop.basket == ["b"]
        shop.work()
        assert shop.steps == ["+a", "-a", "+b", "-b", "+b", "=b 201"]


def test_the_same_reference_is_applied_once_and_wrong_input_changes_nothing(app):
    """C4: also when the action has ended; an action that cannot be stored is taken back."""
    with FaultyServer() as server:
        shop = app(server)
        for _ in range(2):
            shop.submit("a", reference="order-17")
        assert shop.basket == ["a"]
        shop.work()
        shop.submit("a", reference="order-17")
        shop.work()
        assert (shop.basket, len(server.seen)) == (["a"], 1)
        with pytest.raises(TypeError):
            shop.submit({1, 2})
        with pytest.raises(Misconfigured, match="no optimistic action named 'pat'"):
            shop.queue.submit("pat", "POST", "/items", json=1)
        with pytest.raises(Misconfigured, match="two optimistic actions named 'put'"):
            shop.queue.register("put", apply=print, revert=print)
        assert shop.basket == ["a"]
        shop.submit("b")
        bare = OptimisticQueue(shop.outbox)
        with pytest.raises(Misconfigured, match=r"register put before settle\(\)"):
            bare.settle()


def test_a_done_action_is_not_forgotten_before_it_is_settled(app, time):
    """C4: a forgotten action would look like a discarded one, and be reverted."""
    with FaultyServer() as server:
        shop = app(server)
        shop.submit("a")
        shop.outbox.drain()
        time.advance(1)
        assert shop.outbox.forget(0) == 0
        shop.queue.settle()
        assert (shop.basket, shop.steps[-1]) == (["a"], "=a 201")
        time.advance(1)
        assert shop.outbox.forget(0) == 1
        shop.queue.settle()
        assert shop.basket == ["a"]


def test_a_queue_on_an_event_loop_does_the_same(url):
    """C4: also while it settles, no action is reverted that is just being stored."""
    basket, steps = [], []

    def put(item):
        basket.append(item)

    def take(item):
        steps.append(f"-{item}")
        basket.remove(item)

    async def work(api):
        async with AsyncClient(base_url=api, retry=RetryPolicy(attempts_max=1)) as client:
            outbox = AsyncOutbox(url, client=client, workers=1)
            queue = AsyncOptimisticQueue(outbox)
            queue.register(
                "put", apply=put, revert=take, confirm=lambda i, d: steps.append(f"={i}")
            )
            submits = [
                queue.submit("put", "POST", "/items", json=item, lane="basket") for item in "abc"
            ]
            await asyncio.gather(*submits, *(queue.settle() for _ in range(3)))
            assert sorted(basket) == [*"abc"]
            assert steps == []
            await outbox.drain()
            await queue.settle()
            with pytest.raises(Misconfigured, match="register it first"):
                await queue.submit("pat", "POST", "/items", json=1)
            with pytest.raises(TypeError):
                await queue.submit("put", "POST", "/items", json={1})
            discarded = await queue.submit("put", "POST", "/items", json="d")
            await outbox.discard(discarded.key)
            await queue.settle()
            outbox.close()

    with FaultyServer("ok", NO, "ok") as server:
        asyncio.run(work(server.url))
    assert len(server.effects) == 2
    assert len(basket) == 2
    assert steps[-1] == "-d"
    assert sorted(step[0] for step in steps) == ["-", "-", "-", "-", "=", "="]
