"""What this process executes, or still has to complete, it does not execute again (L5, D2).

Its lease may have expired, because the store was down for longer than that; but this process knows
that the executor lives, or how it ended.
"""

import asyncio
import threading

import pytest

from coatcheck import AsyncEngine, DidNotHappen, Engine, Policy
from coatcheck.core.lifecycle import ClaimRequest, MarkInDoubt, TakeOver, Wait, verdict
from coatcheck.core.record import COMPLETED, RUNNING, completed, failed, in_doubt
from coatcheck.errors import NotResolved, StoreUnavailable
from coatcheck.stores.memory import AsyncMemoryStore
from tests.support.engines import Handler, Killed, WatchedStore, held_up
from tests.support.times import WAIT_S_MAX, eventually, wait_for

RECOVERIES = [
    Policy(lease="60s", patience=0),
    Policy(lease="60s", patience=0, recovery="manual"),
    Policy(lease="60s", patience=0, recovery="reconcile", reconcile=lambda _: DidNotHappen()),
]


@pytest.fixture(params=RECOVERIES, ids=lambda policy: policy.recovery)
def engine(guards, store, clock, request):
    return guards.engine(
        store, request.param, clock=clock, sweep_every_s=None, recover_every_s=None
    )


def loses_its_store(store):
    """A handler during whose work the store goes down."""

    def work():
        store.is_down = True
        return "done"

    return Handler(work)


# --- a completion that is still to be written -------------------------------------------------


@pytest.mark.parametrize("marks", [lambda record: record, in_doubt], ids=["", "in doubt"])
def test_a_retry_after_an_outage_longer_than_the_lease_gets_the_result(
    guards, engine, store, clock, marks
):
    """L5, L6: this process knows it, also if another one has marked the operation in doubt."""
    handler = loses_its_store(store)
    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", handler, scope="s")
    clock.advance(61)
    store._records[store.record.id] = marks(store.record)
    store.is_down = False
    assert guards.run(engine, "k", handler, scope="s") == "done"
    assert handler.calls == 1
    assert store.record.state == COMPLETED
    # Later than the answer: waiters are woken with the completion, before its lease is removed.
    eventually(lambda: not engine.attempts.heartbeat.leases)


def test_a_lease_is_renewed_while_its_completion_is_pending(guards, store, clock):
    """L5: if the store accepts renewals but not the completion, other processes wait as well."""
    engine = guards.engine(store, RECOVERIES[0], clock=clock, sweep_every_s=None)
    handler = loses_its_store(store)
    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", handler, scope="s")
    swap = store.swap

    def refuses_completions(swaps):
        if any(s.record is not None and s.record.state != RUNNING for s in swaps):
            raise StoreUnavailable("not this one")
        return swap(swaps)

    store.swap = refuses_completions
    store.is_down = False
    clock.advance(30)
    with pytest.raises(StoreUnavailable):
        engine.attempts.heartbeat.tick()
    eventually(lambda: store.record.lease_until_ms == clock.now_ms + 60_000)
    del store.swap
    store.wait_for(lambda record: record is not None and record.state == COMPLETED)


def test_a_completion_is_written_although_its_event_loop_is_gone(store, clock):
    """L5: the handler that ran on it has ended."""
    engine = AsyncEngine(AsyncMemoryStore(store), RECOVERIES[0], clock=clock, sweep_every_s=None)

    async def work():
        store.is_down = True
        return "done"

    with pytest.raises(StoreUnavailable):
        asyncio.run(engine.run("k", work, scope="s"))
    clock.advance(61)
    with pytest.raises(StoreUnavailable):
        engine.attempts.heartbeat.tick()
    store.is_down = False
    store.wait_for(lambda record: record is not None and record.state == COMPLETED)
    asyncio.run(engine.close())


def test_a_completion_that_is_pending_when_the_engine_closes_is_reported_once(store, clock):
    """O3, L5: the heartbeat may be writing it at that moment."""
    events: list[object] = []
    engine = Engine(
        store,
        RECOVERIES[0],
        clock=clock,
        sweep_every_s=None,
        recover_every_s=None,
        listeners=[events.append],
    )
    with pytest.raises(StoreUnavailable):
        engine.run("k", loses_its_store(store), scope="s")
    is_writing, may_write, swap = threading.Event(), threading.Event(), store.swap

    def slow(swaps):
        is_writing.set()
        assert may_write.wait(WAIT_S_MAX)
        return swap(swaps)

    store.swap, store.is_down = slow, False
    engine.attempts.heartbeat.wake()
    wait_for(is_writing)
    closing = threading.Thread(target=engine.close)
    closing.start()
    eventually(lambda: engine.attempts.heartbeat._stopped)
    may_write.set()
    closing.join(WAIT_S_MAX)
    assert store.record.state == COMPLETED
    assert [type(event).__name__ for event in events].count("Completed") == 1


# --- an executor that lives -------------------------------------------------------------------


def test_an_executor_that_lives_in_this_process_is_not_taken_over(guards, engine, store, clock):
    """L5: its lease has expired because it could not be renewed, and not because it has died."""
    handler = held_up("done")
    first = guards.beside(engine, "k", handler, scope="s")
    wait_for(handler.is_running)
    store.is_down = True
    clock.advance(61)
    with pytest.raises(StoreUnavailable):
        engine.attempts.heartbeat.tick()
    store.is_down = False
    second = guards.beside(engine, "k", handler, scope="s")
    eventually(lambda: engine.attempts.waiters.count(store.record.id) == 1)
    handler.may_end.set()
    assert [first.result(), second.result()] == ["done", "done"]
    assert handler.calls == 1


def test_an_executor_that_lives_here_is_not_taken_over_after_the_clock_was_set_back(
    guards, engine, store, clock
):
    """L5: by a request that came before that, at a time at which the lease seems to be over."""
    handler = held_up("done")
    first = guards.beside(engine, "k", handler, scope="s")
    wait_for(handler.is_running)
    record = store.record
    current = engine.attempts.current(record)
    late = ClaimRequest(record.id, record.fingerprint, record.lease_until_ms + 1, nonce=7)
    assert isinstance(verdict(record, late, engine.policy, late.now_ms), (TakeOver, MarkInDoubt))
    assert isinstance(verdict(current, late, engine.policy, late.now_ms), Wait)
    handler.may_end.set()
    assert first.result() == "done"


def test_a_lost_lease_of_this_process_does_not_protect_an_attempt_that_took_over_and_died(
    guards, store, clock
):
    """L5: a retry here takes over at once, although the first attempt still runs here."""
    policy = Policy(lease="60s", in_flight="409")
    here, there = (guards.engine(store, policy, clock=clock, sweep_every_s=None) for _ in range(2))
    slow = held_up("too late")
    first = guards.beside(here, "k", slow, scope="s")
    wait_for(slow.is_running)
    clock.advance(61)
    with pytest.raises(Killed):
        guards.run(there, "k", Handler(Killed()), scope="s")
    assert (store.record.state, store.record.attempt) == (RUNNING, 2)
    assert here.attempts.heartbeat.leases[store.record.id].claim.nonce != store.record.nonce
    clock.advance(61)
    assert guards.run(here, "k", Handler("done"), scope="s") == "done"
    slow.may_end.set()
    assert first.result() == "done"
    assert store.record.attempt == 3


def test_an_ended_operation_does_not_count_as_running_while_its_lease_is_still_here(
    guards, engine, store
):
    """L2, L5: its completion is written, but its lease not removed yet, or the acknowledgement was lost."""
    handler = held_up("done")
    first = guards.beside(engine, "k", handler, scope="s")
    wait_for(handler.is_running)
    record = store.record
    for ended in (completed(record, b"done"), failed(record)):
        assert engine.attempts.heartbeat.leases[record.id].claim.nonce == ended.nonce
        assert engine.attempts.current(ended) == ended
    assert engine.attempts.current(in_doubt(record)).state == RUNNING
    handler.may_end.set()
    assert first.result() == "done"


def test_an_operator_cannot_resolve_what_is_executed_here(guards, store, clock):
    """L6: it is not abandoned, although the operator says so."""
    engine = guards.engine(store, Policy(lease="60s"), clock=clock, sweep_every_s=None)
    handler = held_up("done")
    first = guards.beside(engine, "k", handler, scope="s")
    wait_for(handler.is_running)
    clock.advance(61)
    with pytest.raises(NotResolved, match="is being executed"):
        guards.done(
            engine.resolve(store.record.id, DidNotHappen(), by="ada", why="?", abandoned=True)
        )
    handler.may_end.set()
    assert first.result() == "done"


def test_a_waiter_for_an_executor_that_dies_here_reads_the_store_at_once(guards, store, clock):
    """L5: its lease has expired, so that there is nothing to wait for."""
    engine = guards.engine(store, Policy(lease="60s", wait="1h"), clock=clock, sweep_every_s=None)
    dies, handler = held_up(Killed()), Handler("done")
    first = guards.beside(engine, "k", dies, scope="s")
    wait_for(dies.is_running)
    clock.advance(61)
    second = guards.beside(engine, "k", handler, scope="s")
    eventually(lambda: engine.attempts.waiters.count(store.record.id) == 1)
    dies.may_end.set()
    assert isinstance(first.exception(WAIT_S_MAX), Killed)
    assert second.result(WAIT_S_MAX) == "done"
    assert store.record.attempt == 2


def test_the_lease_of_a_stopped_event_loop_is_no_reason_to_wait(store, clock):
    """L5: its handler can never end, although the heartbeat has not noticed yet."""
    engine = AsyncEngine(AsyncMemoryStore(store), RECOVERIES[0], clock=clock, sweep_every_s=None)
    loop = asyncio.new_event_loop()

    async def stops():
        loop.call_soon(loop.stop)
        await asyncio.Event().wait()

    async def done():
        return "done"

    task = loop.create_task(engine.run("k", stops, scope="s"))
    loop.run_forever()
    clock.advance(61)
    assert asyncio.run(engine.run("k", done, scope="s")) == "done"
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    asyncio.run(engine.close())


# --- an interrupted completion ----------------------------------------------------------------


@pytest.mark.parametrize("moment", ["in the write", "in the pause"])
def test_a_request_that_is_cancelled_while_it_completes_leaves_that_to_the_heartbeat(
    store, clock, moment
):
    """L5: the work is done, whether or not a client waits for it."""
    policy = Policy(lease="60s", patience="1h")
    is_waiting = asyncio.Event()

    class Stuck(AsyncMemoryStore):
        async def swap(self, swaps):
            if not store.is_down:
                return await super().swap(swaps)
            is_waiting.set()
            if moment == "in the write":
                await asyncio.sleep(WAIT_S_MAX)
            raise StoreUnavailable("down")

    engine = AsyncEngine(Stuck(store), policy, clock=clock, sweep_every_s=None)

    async def work():
        store.is_down = True
        return "done"

    async def again():
        return "again"

    async def use():
        task = asyncio.create_task(engine.run("k", work, scope="s"))
        await is_waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        clock.advance(61)
        store.is_down = False
        assert await engine.run("k", again, scope="s") == "done"
        await engine.close()

    asyncio.run(use())


class Interrupted(WatchedStore):
    """Is struck by Control-C, once, after the write has taken effect or before it."""

    strikes: type[BaseException] | None = None
    is_late = False

    def swap(self, swaps):
        strikes, self.strikes = self.strikes, None
        if strikes is None:
            return super().swap(swaps)
        if self.is_late:
            super().swap(swaps)
        raise strikes


@pytest.mark.parametrize("is_late", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize("strikes", [KeyboardInterrupt, SystemExit])
def test_a_thread_that_is_interrupted_while_it_completes_leaves_that_to_the_heartbeat(
    clock, strikes, is_late
):
    """L5: Control-C strikes anywhere."""
    store = Interrupted()
    engine = Engine(store, Policy(lease="60s"), clock=clock, sweep_every_s=None)

    def work():
        store.strikes, store.is_late = strikes, is_late
        return "done"

    with pytest.raises(strikes):
        engine.run("k", work, scope="s")
    clock.advance(61)
    assert engine.run("k", lambda: "again", scope="s") == "done"
    eventually(lambda: not engine.attempts.heartbeat.leases)
    assert store.record.state == COMPLETED
    engine.close()


def test_an_interrupted_claim_leaves_no_lease(clock):
    """L5: nothing has run."""
    store = Interrupted()
    engine = Engine(store, Policy(lease="60s"), clock=clock, sweep_every_s=None)
    store.strikes = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        engine.run("k", Handler(), scope="s")
    assert engine.attempts.heartbeat.leases == {}
    assert engine.run("k", Handler(), scope="s") == "done"
    engine.close()
