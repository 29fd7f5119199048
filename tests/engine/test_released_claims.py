"""A claim whose request is cancelled while it is written: nothing ran, so it is released (L5)."""

import asyncio
import threading

import pytest

from coatcheck import AsyncEngine, DidNotHappen, Engine, Policy
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT, RUNNING
from coatcheck.errors import StoreUnavailable
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.stores import ThreadedStore
from tests.support.engines import Handler, Killed, WatchedStore
from tests.support.http import AsgiExchange, with_key
from tests.support.times import WAIT_S_MAX, eventually, wait_for

RETRY = Policy(wait=0)
MANUAL = Policy(wait=0, recovery="manual")


class SlowStore(WatchedStore):
    """Delays the next write, and may refuse it or interrupt its thread."""

    def __init__(self):
        super().__init__()
        self.has_come, self.may_go = threading.Event(), threading.Event()
        self.is_slow, self.refuses, self.interrupts = False, False, False

    def swap(self, swaps):
        if self.is_slow:
            self.is_slow = False
            self.has_come.set()
            assert self.may_go.wait(WAIT_S_MAX)
            if self.refuses:
                raise StoreUnavailable("not now")
        lost = super().swap(swaps)
        if self.interrupts:
            self.interrupts = False
            raise Killed
        return lost


@pytest.fixture
def store():
    return SlowStore()


async def cancelled(store, made):
    """Cancel *made* while its claim is being written."""
    store.is_slow = True
    task = asyncio.ensure_future(made)
    await asyncio.to_thread(wait_for, store.has_come)
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()


def engine_on(store, policy, clock):
    return AsyncEngine(ThreadedStore(store), policy, clock=clock, sweep_every_s=None)


async def charge():
    return "charged"


@pytest.mark.parametrize("policy", [RETRY, MANUAL], ids=lambda policy: policy.recovery)
@pytest.mark.parametrize("becomes", ["written", "written after all", "refused"])
def test_it_is_released_whatever_became_of_the_write(store, clock, policy, becomes):
    """L5: no retry waits for a lease, and nothing is in doubt."""

    async def use():
        async with engine_on(store, policy, clock) as engine:
            await engine.ensure_started()
            store.refuses = becomes == "refused"
            await cancelled(store, engine.run("k", charge, scope="s"))
            if becomes == "written after all":  # by the heartbeat
                await asyncio.to_thread(eventually, lambda: FAILED in states(store))
            store.may_go.set()
            await asyncio.to_thread(eventually, lambda: FAILED in states(store))
            assert store.record.fingerprint == b""  # also for a corrected request
            assert await engine.run("k", charge, scope="s") == "charged"
        assert store.record.state == COMPLETED

    asyncio.run(use())


def states(store):
    return [record.state for record in store.written]


def test_it_is_released_when_the_store_is_back(store, clock):
    """L5, D2."""

    async def use():
        async with engine_on(store, MANUAL, clock) as engine:
            await engine.ensure_started()
            store.is_down = True
            await cancelled(store, engine.run("k", charge, scope="s"))
            store.may_go.set()
            with pytest.raises(StoreUnavailable):
                engine.attempts.heartbeat.tick()
            store.is_down = False
            await asyncio.to_thread(eventually, lambda: FAILED in states(store))
            assert await engine.run("k", charge, scope="s") == "charged"

    asyncio.run(use())


def test_of_several_that_are_cancelled_together_the_one_that_was_written_is_released(store, clock):
    """L5: duplicates whose clients have both gone."""

    async def use():
        async with engine_on(store, MANUAL, clock) as engine:
            await engine.ensure_started()
            store.is_slow = True
            runs = [asyncio.create_task(engine.run("k", charge, scope="s")) for _ in range(3)]
            await asyncio.to_thread(wait_for, store.has_come)
            store.is_down = True  # for the heartbeat, which has to release all of them
            for task in runs:
                task.cancel()
            await asyncio.wait(runs)
            with pytest.raises(StoreUnavailable):
                engine.attempts.heartbeat.tick()
            store.is_down = False
            store.may_go.set()
            await asyncio.to_thread(eventually, lambda: not engine.attempts.heartbeat._pending)
            assert store.record.state == FAILED
            assert await engine.run("k", charge, scope="s") == "charged"

    asyncio.run(use())


def test_the_claim_of_another_process_is_not_released(store, clock):
    """L1: a claim of the same millisecond has the same version, but another nonce."""

    async def use():
        async with engine_on(store, RETRY, clock) as engine:
            with Engine(store, RETRY, clock=clock, sweep_every_s=None) as other:

                def work():
                    store.may_go.clear()
                    asyncio.run_coroutine_threadsafe(
                        cancelled(store, engine.run("k", charge, scope="s")), loop
                    ).result(WAIT_S_MAX)
                    store.may_go.set()
                    eventually(lambda: not engine.attempts.heartbeat._pending)
                    assert store.record.state == RUNNING
                    return "mine"

                loop = asyncio.get_running_loop()
                assert await asyncio.to_thread(other.run, "k", work, scope="s") == "mine"
        assert states(store) == [RUNNING, COMPLETED]

    asyncio.run(use())


@pytest.mark.parametrize("recovery", ["retry", "reconcile"])
def test_the_attempt_before_is_still_to_be_reconciled(store, clock, recovery):
    """L6: only this attempt did nothing."""
    asked = []

    def ask(operation):
        asked.append(operation.attempt)
        return DidNotHappen()

    policy = Policy(wait=0, recovery=recovery, reconcile=ask if recovery == "reconcile" else None)
    store.may_go.set()
    with (
        Engine(store, policy, clock=clock, sweep_every_s=None, recover_every_s=None) as first,
        pytest.raises(Killed),
    ):
        first.run("k", Handler(Killed()), scope="s")
    clock.advance(61)

    async def use():
        async with engine_on(store, policy, clock) as engine:
            swap, swaps = store.swap, []

            def slow_at_the_second(given):
                swaps.append(given)
                store.is_slow = len(swaps) == 2
                return swap(given)

            await engine.ensure_started()
            store.may_go.clear()
            store.swap = slow_at_the_second
            task = asyncio.create_task(engine.run("k", charge, scope="s"))
            await asyncio.to_thread(wait_for, store.has_come)
            task.cancel()
            await asyncio.wait((task,))
            store.may_go.set()
            freed = IN_DOUBT if recovery == "reconcile" else FAILED
            await asyncio.to_thread(eventually, lambda: store.record.state == freed)
            assert store.record.fingerprint != b""
            assert asked == []
            assert await engine.run("k", charge, scope="s") == "charged"

    asyncio.run(use())
    assert asked == ([3] if recovery == "reconcile" else [])


def test_the_claim_of_an_interrupted_thread_is_released(store, clock):
    """L5: Control-C, a worker that has to end, a time-out of gevent's."""

    with Engine(store, MANUAL, clock=clock, sweep_every_s=None) as engine:
        engine.ensure_started()
        store.interrupts = True
        handler = Handler("charged")
        with pytest.raises(Killed):
            engine.run("k", handler, scope="s")
        eventually(lambda: FAILED in states(store))
        assert engine.run("k", handler, scope="s") == "charged"
        assert handler.calls == 1


def test_an_engine_that_closes_releases_before(store, clock):
    """L5."""

    async def use():
        engine = engine_on(store, MANUAL, clock)
        await engine.ensure_started()
        engine.attempts.heartbeat._thread = over = threading.Thread(target=int)  # which never ticks
        over.start()
        await cancelled(store, engine.run("k", charge, scope="s"))
        store.may_go.set()
        await engine.close()
        assert states(store)[-1] == FAILED

    asyncio.run(use())


def test_the_claim_of_a_request_that_the_server_cancels_is_released(store, clock):
    """L5, L11: no task is left to execute it."""
    ran = []

    async def app(_scope, _receive, send):
        ran.append(1)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"charged"})

    async def use():
        async with engine_on(store, MANUAL, clock) as engine:
            await engine.ensure_started()
            guard = IdempotencyMiddleware(app, engine=engine)
            store.is_slow = True
            loop = asyncio.get_running_loop()
            tasks = asyncio.all_tasks()
            request = loop.create_task(post(guard))
            await asyncio.to_thread(wait_for, store.has_come)
            for task in asyncio.all_tasks() - tasks:
                task.cancel()
            await asyncio.wait((request,))
            store.may_go.set()
            await asyncio.to_thread(eventually, lambda: FAILED in states(store))
            assert ((await post(guard)).status, ran) == (201, [1])
            assert engine.attempts.heartbeat.leases == {}

    async def post(guard):
        return await AsgiExchange("POST", "/charges", with_key("k"), b"").run(guard)

    asyncio.run(use())
