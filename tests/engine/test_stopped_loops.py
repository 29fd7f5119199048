"""Work that was resumed, and what a person runs again: a stopped event loop is noticed (L5)."""

import asyncio

import pytest

from coatcheck import AsyncEngine, Policy
from coatcheck.core.deferred import DeferredToken, encode_token
from coatcheck.core.record import RUNNING, in_doubt
from coatcheck.stores.memory import AsyncMemoryStore
from tests.support.engines import WatchedStore
from tests.support.times import Clock

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
