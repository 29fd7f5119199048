"""What this process executes, or has to write down, it does not execute again (L5, D2).

Its lease may be over, because the store was away for longer than that; but here is somebody who
knows better.
"""

import asyncio

import pytest
from engines import WAIT_S_MAX, Clock, Handler, WatchedStore, eventually, held_up, wait_for
from laws.http.api import ADAPTERS, Workers
from laws.http.shop import Gate, Shop, says

from coatcheck import AsyncEngine, DidNotHappen, Engine, Policy
from coatcheck.core.record import COMPLETED, IN_DOUBT, RUNNING, completed, failed, in_doubt
from coatcheck.core.serve import Park, TakeOver, Ticket, Wait, verdict
from coatcheck.errors import KeyBusy, NotResolved, OutcomeUnknown, StoreUnavailable
from coatcheck.stores.memory import AsyncMemoryStore

RECOVERIES = [
    Policy(lease="60s", patience=0),
    Policy(lease="60s", patience=0, recovery="manual"),
    Policy(lease="60s", patience=0, recovery="reconcile", reconcile=lambda _: DidNotHappen()),
]


@pytest.fixture
def store():
    return WatchedStore()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=RECOVERIES, ids=lambda policy: policy.recovery)
def engine(guards, store, clock, request):
    return guards.engine(
        store, request.param, clock=clock, sweep_every_s=None, recover_every_s=None
    )


def loses_its_store(store):
    """A handler during whose work the store goes away."""

    def work():
        store.is_down = True
        return "done"

    return Handler(work)


# --- an end that is still to be written -------------------------------------------------------


def test_a_retry_after_an_outage_longer_than_the_lease_gets_the_answer(
    guards, engine, store, clock
):
    """L5: the engine knows it, and has only not been able to write it down."""
    handler = loses_its_store(store)
    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", handler, scope="s")
    clock.pass_s(61)
    store.is_down = False
    assert guards.run(engine, "k", handler, scope="s") == "done"
    assert handler.calls == 1
    assert store.record.state == COMPLETED
    eventually(lambda: not engine.heart.held)  # the heart may have been the one to write it


def test_so_does_one_that_finds_it_parked_by_somebody_else(guards, engine, store, clock):
    """L6: who saw the lease run out does not know; who executed does."""
    handler = loses_its_store(store)
    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", handler, scope="s")
    clock.pass_s(61)
    store._records[store.record.id] = in_doubt(store.record)
    store.is_down = False
    assert guards.run(engine, "k", handler, scope="s") == "done"
    assert handler.calls == 1


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_over_http_nothing_runs_twice_either(adapter, store, clock):
    """L5, D2: 503, and then the answer."""
    workers = Workers()
    shop = Shop()
    settings = {"policy": RECOVERIES[0], "sweep_every_s": None}
    api = ADAPTERS[adapter](store, shop, clock, workers, settings=settings, middleware={})
    gate = shop.answers["/orders"] = Gate(says(201, b"done"))
    first = api.start_post()
    gate.wait_until_entered()
    store.is_down = True
    gate.open()
    assert first.result(WAIT_S_MAX).status == 503
    clock.pass_s(61)
    store.is_down = False
    again = api.post()
    assert (again.status, again.body, again.is_replay) == (201, b"done", True)
    assert api.effects() == 1
    api.close()
    workers.close()


def test_what_is_still_to_be_written_is_renewed_meanwhile(guards, store, clock):
    """L5: where the store takes a renewal and not the end, other processes wait as well."""
    engine = guards.engine(store, RECOVERIES[0], clock=clock, sweep_every_s=None)
    handler = loses_its_store(store)
    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", handler, scope="s")
    swap = store.swap

    def refuses_ends(swaps):
        if any(s.record is not None and s.record.state != RUNNING for s in swaps):
            raise StoreUnavailable("not this one")
        return swap(swaps)

    store.swap = refuses_ends
    store.is_down = False
    clock.pass_s(30)
    with pytest.raises(StoreUnavailable):
        engine.heart.beat()
    eventually(lambda: store.record.lease_until_ms == clock.now_ms + 60_000)
    del store.swap
    store.wait_for(lambda record: record is not None and record.state == COMPLETED)


def test_an_end_is_written_although_its_event_loop_is_gone(store, clock):
    """L5: what was executed on it is over."""
    engine = AsyncEngine(AsyncMemoryStore(store), RECOVERIES[0], clock=clock, sweep_every_s=None)

    async def work():
        store.is_down = True
        return "done"

    with pytest.raises(StoreUnavailable):
        asyncio.run(engine.run("k", work, scope="s"))
    clock.pass_s(61)
    with pytest.raises(StoreUnavailable):
        engine.heart.beat()
    store.is_down = False
    store.wait_for(lambda record: record is not None and record.state == COMPLETED)
    asyncio.run(engine.close())


# --- an executor that lives -------------------------------------------------------------------


def test_nobody_takes_over_from_who_is_alive_in_this_process(guards, engine, store, clock):
    """L5: its lease is over because it could not be renewed, and not because it has died."""
    handler = held_up("done")
    first = guards.beside(engine, "k", handler, scope="s")
    wait_for(handler.is_running)
    store.is_down = True
    clock.pass_s(61)
    with pytest.raises(StoreUnavailable):
        engine.heart.beat()
    store.is_down = False
    second = guards.beside(engine, "k", handler, scope="s")
    eventually(lambda: engine.desk.line.length(store.record.id) == 1)
    handler.may_end.set()
    assert [first.result(), second.result()] == ["done", "done"]
    assert handler.calls == 1


def test_a_clock_that_is_set_back_makes_nobody_take_over_either(guards, engine, store, clock):
    """L5: a request that came before it was, with a time at which the lease seems to be over."""
    handler = held_up("done")
    first = guards.beside(engine, "k", handler, scope="s")
    wait_for(handler.is_running)
    record = store.record
    standing = engine.desk.standing(record)
    late = Ticket(record.id, record.fingerprint, record.lease_until_ms + 1, nonce=7)
    assert isinstance(verdict(record, late, engine.desk.policy, late.now_ms), (TakeOver, Park))
    assert isinstance(verdict(standing, late, engine.desk.policy, late.now_ms), Wait)
    handler.may_end.set()
    assert first.result() == "done"


class Killed(BaseException):
    """What no handler can catch: the process ends here."""


def test_a_claim_that_is_held_here_does_not_protect_who_took_over_and_died(guards, store, clock):
    """L5: what is held is another attempt, which has lost; a retry here takes over, and at once."""
    policy = Policy(lease="60s", in_flight="409")
    here, there = (guards.engine(store, policy, clock=clock, sweep_every_s=None) for _ in range(2))
    slow = held_up("too late")
    first = guards.beside(here, "k", slow, scope="s")
    wait_for(slow.is_running)
    clock.pass_s(61)
    with pytest.raises(Killed):
        guards.run(there, "k", Handler(Killed()), scope="s")
    assert (store.record.state, store.record.attempt) == (RUNNING, 2)
    assert here.heart.held[store.record.id].claim.nonce != store.record.nonce
    clock.pass_s(61)
    assert guards.run(here, "k", Handler("done"), scope="s") == "done"
    slow.may_end.set()
    assert first.result() == "done"
    assert store.record.attempt == 3


def test_what_has_ended_is_not_said_to_run_though_it_is_still_held_here(guards, engine, store):
    """L2, L5: its end was written, and whoever wrote it has not let go yet, or has not heard."""
    handler = held_up("done")
    first = guards.beside(engine, "k", handler, scope="s")
    wait_for(handler.is_running)
    record = store.record
    for ended in (completed(record, b"done"), failed(record)):
        assert engine.heart.held[record.id].claim.nonce == ended.nonce
        assert engine.desk.standing(ended) == ended
    assert engine.desk.standing(in_doubt(record)).state == RUNNING
    handler.may_end.set()
    assert first.result() == "done"


def test_who_does_not_wait_is_told_that_it_runs(guards, store, clock):
    """L3, L5."""
    engine = guards.engine(store, Policy(lease="60s", wait=0), clock=clock, sweep_every_s=None)
    handler = held_up("done")
    first = guards.beside(engine, "k", handler, scope="s")
    wait_for(handler.is_running)
    clock.pass_s(61)
    with pytest.raises(KeyBusy):
        guards.run(engine, "k", handler, scope="s")
    handler.may_end.set()
    assert first.result() == "done"
    assert handler.calls == 1


def test_nobody_decides_about_what_is_executed_here(guards, store, clock):
    """L6: who says that it is abandoned is wrong."""
    engine = guards.engine(store, Policy(lease="60s"), clock=clock, sweep_every_s=None)
    handler = held_up("done")
    first = guards.beside(engine, "k", handler, scope="s")
    wait_for(handler.is_running)
    clock.pass_s(61)
    with pytest.raises(NotResolved, match="is being executed"):
        guards.done(
            engine.resolve(store.record.id, DidNotHappen(), by="ada", why="?", abandoned=True)
        )
    handler.may_end.set()
    assert first.result() == "done"


class Died(BaseException):
    """What no engine catches."""


def test_who_waits_for_an_executor_that_dies_here_looks_at_once(guards, store, clock):
    """L5: its lease is over, so that nothing is to be waited for."""
    engine = guards.engine(store, Policy(lease="60s", wait="1h"), clock=clock, sweep_every_s=None)
    dies, handler = held_up(Died()), Handler("done")
    first = guards.beside(engine, "k", dies, scope="s")
    wait_for(dies.is_running)
    clock.pass_s(61)
    second = guards.beside(engine, "k", handler, scope="s")
    eventually(lambda: engine.desk.line.length(store.record.id) == 1)
    dies.may_end.set()
    assert isinstance(first.exception(WAIT_S_MAX), Died)
    assert second.result(WAIT_S_MAX) == "done"
    assert store.record.attempt == 2


def test_the_lease_of_a_stopped_event_loop_is_no_reason_to_wait(store, clock):
    """L5: nobody executes there any more, although nobody has noticed yet."""
    engine = AsyncEngine(AsyncMemoryStore(store), RECOVERIES[0], clock=clock, sweep_every_s=None)
    loop = asyncio.new_event_loop()

    async def stops():
        loop.call_soon(loop.stop)
        await asyncio.Event().wait()

    async def done():
        return "done"

    task = loop.create_task(engine.run("k", stops, scope="s"))
    loop.run_forever()
    clock.pass_s(61)
    assert asyncio.run(engine.run("k", done, scope="s")) == "done"
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    asyncio.run(engine.close())


# --- an end that is interrupted ---------------------------------------------------------------


@pytest.mark.parametrize("moment", ["in the write", "in the pause"])
def test_who_is_cancelled_while_its_end_is_written_leaves_it_to_the_heart(store, clock, moment):
    """L5: the work is done, whoever waits for it or not."""
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
        clock.pass_s(61)
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
def test_so_does_a_thread_that_is_interrupted(clock, strikes, is_late):
    """L5: Control-C strikes anywhere."""
    store = Interrupted()
    engine = Engine(store, Policy(lease="60s"), clock=clock, sweep_every_s=None)

    def work():
        store.strikes, store.is_late = strikes, is_late
        return "done"

    with pytest.raises(strikes):
        engine.run("k", work, scope="s")
    clock.pass_s(61)
    assert engine.run("k", lambda: "again", scope="s") == "done"
    eventually(lambda: not engine.heart.held)
    assert store.record.state == COMPLETED
    engine.close()


def test_a_claim_that_is_interrupted_leaves_nothing_to_the_heart(clock):
    """L5: nothing has run."""
    store = Interrupted()
    engine = Engine(store, Policy(lease="60s"), clock=clock, sweep_every_s=None)
    store.strikes = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        engine.run("k", Handler(), scope="s")
    assert engine.heart.held == {}
    assert engine.run("k", Handler(), scope="s") == "done"
    engine.close()


def test_what_is_parked_and_executed_nowhere_stays_parked(guards, store, clock):
    """L6: the control of all that."""
    engine = guards.engine(store, RECOVERIES[1], clock=clock, sweep_every_s=None)
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "k", Handler(ZeroDivisionError()), scope="s")
    assert store.record.state == IN_DOUBT
    with pytest.raises(OutcomeUnknown):
        guards.run(engine, "k", Handler(), scope="s")
