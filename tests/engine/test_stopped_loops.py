"""Work that was resumed, and what a person runs again: a stopped event loop is noticed (L5)."""

import asyncio
import threading

import pytest

from coatcheck import AsyncEngine, Policy
from coatcheck.core.deferred import DeferredToken, encode_token
from coatcheck.core.record import RUNNING, in_doubt
from coatcheck.engine import async_engine
from coatcheck.stores.memory import AsyncMemoryStore
from tests.support.engines import ROUND_S, Killed, WatchedStore
from tests.support.times import WAIT_S_MAX, Clock, wait_for

POLICY = Policy(lease="60s")


def prepared(store, engine, clock):
    """An operation that runs, as if another process had begun it."""

    async def nothing():
        return None

    asyncio.run(engine.run("k", nothing, scope="s"))
    record = store.record
    lease_until_ms = clock() + 60_000
    return record._replace(
        state=RUNNING, lease_until_ms=lease_until_ms, version=record.version + 1, response=None
    )


@pytest.mark.parametrize("how", ["resume", "rerun"])
def test_a_stopped_event_loop_of_a_worker_is_noticed(how):
    """L5, L10: its lease runs out, and the next delivery or a person can go on."""
    store, clock = WatchedStore(), Clock()
    engine = AsyncEngine(
        *(AsyncMemoryStore(store), POLICY), clock=clock, sweep_every_s=None, recover_every_s=None
    )
    claim = prepared(store, engine, clock)
    loop = asyncio.new_event_loop()

    async def work():
        loop.call_soon(loop.stop)
        await asyncio.Event().wait()

    if how == "resume":
        store._records[claim.id] = claim
        handed = DeferredToken(claim.id, claim.created_ms, claim.nonce)
        flow = engine.run_deferred(encode_token(handed, engine.attempts.secret), work)
    else:
        store._records[claim.id] = in_doubt(claim)
        flow = engine.rerun(claim.id, work, by="ada", why="it was lost")
    task = loop.create_task(flow)
    loop.run_forever()
    assert engine.attempts.heartbeat.leases
    clock.advance(30)
    engine.attempts.heartbeat.tick()
    held = dict(engine.attempts.heartbeat.leases)
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    asyncio.run(engine.close())
    assert held == {}


@pytest.mark.parametrize("how", ["stopped", "hangs"])
def test_recovery_does_not_wait_for_ever_for_a_function_on_an_event_loop(clock, monkeypatch, how):
    """L6: the loop may stop, or the function may never end; then the other operations go on."""
    monkeypatch.setattr(async_engine, "POLL_S", 0.001)
    if how == "hangs":
        monkeypatch.setattr(async_engine, "RUN_AGAIN_S_MAX", 0.01)
    store, has_begun, loop = WatchedStore(), threading.Event(), asyncio.new_event_loop()

    async def die(_given):
        raise Killed

    async def hang(_given):
        has_begun.set()
        await asyncio.Event().wait()

    async def first() -> None:
        async with AsyncEngine(AsyncMemoryStore(store), clock=clock) as engine:
            with pytest.raises(Killed):
                await engine.register("ship", die).run("k", 7)

    asyncio.run(first())
    engine = AsyncEngine(AsyncMemoryStore(store), clock=clock, recover_every_s=60)
    engine.register("ship", hang)

    async def use() -> None:
        await engine.ensure_started()
        engine.attempts.heartbeat.tick()
        clock.advance(ROUND_S)
        engine.attempts.heartbeat.tick()
        await asyncio.to_thread(wait_for, has_begun)
        if how == "hangs":
            await asyncio.to_thread(engine.recovery._thread.join, WAIT_S_MAX)
            assert store.record.state == RUNNING
            assert store.record.id in engine.attempts.heartbeat.leases  # it goes on

    loop.run_until_complete(use())
    engine.recovery._thread.join(WAIT_S_MAX)
    assert not engine.recovery._thread.is_alive()
    asyncio.runners._cancel_all_tasks(loop)
    loop.run_until_complete(engine.close())
    loop.close()
