"""Optimistic actions: shown at once, taken back after a definite no, also after a restart."""

import pytest

from coatcheck.client import RetryPolicy
from coatcheck.client.httpx2 import Client
from coatcheck.client.optimistic import OptimisticQueue
from coatcheck.client.outbox import Outbox
from coatcheck.errors import Misconfigured
from tests.support.faulty_server import FaultyServer

NO = (422, {}, {"code": "sold-out"})
UNKNOWN = (409, {}, {"code": "outcome-unknown", "retry": "never"})


class App:
    """An application that holds a basket in memory, and what was done to it."""

    def __init__(self, path, server):
        self.client = Client(base_url=server.url, retry=RetryPolicy(attempts_max=1))
        self.outbox = Outbox(f"sqlite:///{path}/outbox.db", client=self.client)
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
def app(tmp_path):
    """Makes an application on the same file, as after a restart."""
    opened = []

    def make(server):
        opened.append(App(tmp_path, server))
        return opened[-1]

    yield make
    for app in opened:
        app.client.close()


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
        assert [dead.reason or dead.state for dead in shop.outbox.dead_letters()] == ["refused"]
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
