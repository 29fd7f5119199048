"""The heartbeat: renews leases in a thread of its own, whatever the handlers do."""

import asyncio
import gc
import threading
import weakref

import pytest

from coatcheck import AsyncEngine, Engine, Policy, current_operation
from coatcheck.core.record import COMPLETED, RUNNING, completed, failed
from coatcheck.engine.clock import StoreClock
from coatcheck.engine.leases import LEASE_MS_MAX, TICKS_PER_LEASE, Heartbeat
from coatcheck.errors import StoreUnavailable
from coatcheck.operation import Operation
from coatcheck.stores.memory import AsyncMemoryStore, MemoryStore
from coatcheck.telemetry import Claimed, Completed
from tests.support.engines import CLAIM, LEASE_S, Handler, WatchedStore, held_up
from tests.support.times import NOW_MS, WAIT_S_MAX, eventually, wait_for


@pytest.fixture
def store():
    store = WatchedStore()
    store._records[CLAIM.id] = CLAIM
    return store


@pytest.fixture
def heartbeat(store, clock):
    heartbeat = heartbeat_of(store, clock)
    yield heartbeat
    heartbeat.stop()


def heartbeat_of(store, clock, **options):
    return Heartbeat(store, StoreClock(store, clock), **options)


def renewing(heartbeat, claim=CLAIM, lease_ms=1_000 * LEASE_S, loop=None):
    """An operation whose lease *heartbeat* renews."""
    operation = Operation(claim, Policy(lease=f"{lease_ms}ms"), loop=loop)
    heartbeat.start_renewing(operation)
    return operation


# --- leases -----------------------------------------------------------------------------------


def test_a_stopped_event_loop_is_noticed_and_its_lease_expires(heartbeat, store, clock, caplog):
    """L5: the heartbeat has a thread of its own, and would renew the lease for ever."""
    loop = asyncio.new_event_loop()

    async def execute():
        renewing(heartbeat, loop=asyncio.get_running_loop())

    loop.run_until_complete(execute())  # and it is stopped in the middle
    clock.advance(30)
    heartbeat.tick()
    assert store.record == CLAIM
    assert heartbeat.leases == {}
    assert "has stopped" in caplog.text
    loop.close()


def test_a_heartbeat_that_could_not_start_its_thread_tries_again_with_the_next_lease(
    heartbeat, store, clock, caplog
):
    """L5: one moment without threads must not cost every later lease."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refused)
        renewing(heartbeat)
    assert "no thread can be started for coatcheck-heartbeat" in caplog.text
    clock.advance(30)
    renewing(heartbeat)
    heartbeat.wake()
    eventually(lambda: store.record.version > CLAIM.version)


def _refused(_thread):
    raise RuntimeError("can't start new thread")


def test_an_event_loop_that_is_only_blocked_keeps_its_claim(heartbeat, store, clock):
    """L5: blocking code is work like any other."""

    async def block():
        renewing(heartbeat, loop=asyncio.get_running_loop())
        clock.advance(30)
        heartbeat.tick()  # as its thread does, while the loop is blocked

    asyncio.run(block())
    assert store.record.lease_until_ms == clock.now_ms + 1_000 * LEASE_S


def test_a_claim_is_renewed_when_a_third_of_its_lease_is_over(heartbeat, store, clock):
    """L5: two renewals may fail before a lease is lost."""
    renewing(heartbeat)
    clock.advance(6.665)
    heartbeat.tick()
    assert store.record == CLAIM
    clock.advance(0.001)
    heartbeat.tick()
    renewed = store.record
    assert renewed.lease_until_ms == clock.now_ms + 1_000 * LEASE_S
    assert (renewed.state, renewed.nonce, renewed.attempt) == (RUNNING, 7, 1)
    heartbeat.tick()
    assert store.record == renewed
    clock.advance(7)
    heartbeat.tick()
    assert store.record.lease_until_ms == clock.now_ms + 1_000 * LEASE_S


def test_a_lease_that_has_ended_is_not_renewed(heartbeat, store, clock):
    """L5."""
    heartbeat.stop_renewing(renewing(heartbeat))
    clock.advance(30)
    heartbeat.tick()
    assert store.record == CLAIM


def test_a_renewal_whose_acknowledgement_was_lost_is_followed_by_the_next(heartbeat, store, clock):
    """L5: the record names our own attempt, so nothing is lost."""
    operation = renewing(heartbeat)
    clock.advance(20)
    store.troubles = ["deaf"]
    with pytest.raises(StoreUnavailable):
        heartbeat.tick()
    clock.advance(5)
    heartbeat.tick()
    assert operation.claim == store.record
    assert store.record.version == CLAIM.version + 1
    clock.advance(15)
    heartbeat.tick()
    assert not operation.is_lost
    assert store.record.version == CLAIM.version + 2
    assert store.record.lease_until_ms == clock.now_ms + 1_000 * LEASE_S
    assert operation.claim == store.record


@pytest.mark.parametrize(
    "current",
    [
        CLAIM._replace(version=NOW_MS + 9, nonce=8, attempt=2),
        completed(CLAIM._replace(nonce=8, attempt=2), b"theirs"),
        failed(CLAIM),
        None,
    ],
    ids=["taken over", "completed", "failed", "swept"],
)
def test_a_claim_that_is_lost_is_marked_and_left_alone(heartbeat, store, clock, current):
    """L5: the fence holds, and the record stays what it is."""
    operation = renewing(heartbeat)
    if current is None:
        del store._records[CLAIM.id]
    else:
        store._records[CLAIM.id] = current
    clock.advance(20)
    heartbeat.tick()
    assert operation.is_lost
    assert heartbeat.leases == {}
    assert store.records == ([] if current is None else [current])


def test_a_renewal_that_finds_our_own_completion_loses_nothing(guards, clock):
    """L5, O3: it comes after the write, and before the request knows that it was written."""
    events, lost = [], Calls()

    class Renewing(MemoryStore):
        def swap(self, swaps):
            conflicts = super().swap(swaps)
            if swaps[0].record.state == COMPLETED:
                clock.advance(LEASE_S / 2)
                engine.attempts.heartbeat.tick()
            return conflicts

    def handler():
        current_operation().on_lost(lambda: lost.append(1))

    engine = guards.engine(Renewing(), clock=clock, listeners=[events.append])
    guards.run(engine, "k", handler, policy=Policy(lease=LEASE_S))
    assert [type(event) for event in events] == [Claimed, Completed]
    assert lost.settled() == []
    assert engine.attempts.heartbeat.leases == {}


def test_a_zombie_does_not_end_the_lease_of_its_successor(heartbeat):
    """L5: two attempts of one operation in one process."""
    zombie = renewing(heartbeat)
    successor = renewing(heartbeat, CLAIM._replace(version=NOW_MS + 1, nonce=8, attempt=2))
    heartbeat.stop_renewing(zombie)
    assert heartbeat.leases == {CLAIM.id: successor}
    heartbeat.stop_renewing(successor)
    heartbeat.stop_renewing(successor)
    assert heartbeat.leases == {}


def test_an_attempt_that_takes_over_in_the_same_process_marks_the_one_before_as_lost(heartbeat):
    """L5: no renewal finds it out, because the heartbeat renews the successor from now on."""
    is_called = threading.Event()
    zombie = renewing(heartbeat)
    zombie.on_lost(is_called.set)
    again = renewing(heartbeat, CLAIM._replace(version=NOW_MS + 1))
    assert not zombie.is_lost  # the same attempt, renewed anew
    again.on_lost(is_called.set)
    renewing(heartbeat, CLAIM._replace(version=NOW_MS + 2, nonce=8, attempt=2))
    assert again.is_lost
    wait_for(is_called)


class Calls(list):
    """Counts calls, which come in threads of their own."""

    def settled(self):
        """The calls, when the threads of all callbacks have ended."""
        for thread in threading.enumerate():
            if thread.name == "coatcheck-on_lost":
                thread.join(WAIT_S_MAX)
        return list(self)


def test_a_callback_is_called_once_although_many_threads_lose_the_claim_at_once():
    """L5: the heartbeat, a step, and the handler that registers the callback."""
    for _ in range(20):
        operation, calls = Operation(CLAIM, Policy()), Calls()
        barrier = threading.Barrier(5, timeout=WAIT_S_MAX)
        operation.on_lost(lambda calls=calls: calls.append("before"))

        def lose(operation=operation, barrier=barrier):
            barrier.wait()
            operation.lose()

        threads = [threading.Thread(target=lose) for _ in range(4)]
        for thread in threads:
            thread.start()
        barrier.wait()
        operation.on_lost(lambda calls=calls: calls.append("meanwhile"))
        for thread in threads:
            thread.join(WAIT_S_MAX)
        assert sorted(calls.settled()) == ["before", "meanwhile"]


def test_a_callback_that_blocks_delays_no_renewal_and_no_other_callback(heartbeat, store, clock):
    """L5: it is the application's own, and has a thread of its own."""
    others = [CLAIM._replace(id=b"%16d" % number) for number in range(2)]
    store._records.update({other.id: other for other in others})
    blocks, may_end, is_called = threading.Event(), threading.Event(), threading.Event()
    threads = []
    lost, kept = renewing(heartbeat), renewing(heartbeat, others[0])
    also_lost = renewing(heartbeat, others[1])

    def block():
        threads.append(threading.current_thread())
        blocks.set()
        wait_for(may_end)

    lost.on_lost(block)
    also_lost.on_lost(is_called.set)
    for operation in (lost, also_lost):
        taken = operation.claim._replace(version=operation.claim.version + 5, nonce=8, attempt=2)
        store._records[taken.id] = taken
    clock.advance(20)
    heartbeat.tick()
    wait_for(blocks)
    wait_for(is_called)
    assert threading.current_thread() not in threads
    assert heartbeat._thread not in threads
    assert (lost.is_lost, also_lost.is_lost) == (True, True)
    clock.advance(20)
    heartbeat.tick()
    assert store._records[kept.claim.id].lease_until_ms == clock.now_ms + 1_000 * LEASE_S
    may_end.set()


def test_a_callback_that_fails_does_not_stop_the_others(heartbeat, caplog):
    operation, calls = renewing(heartbeat), Calls()
    operation.on_lost(lambda: 1 / 0)
    operation.on_lost(lambda: calls.append(1))
    operation.lose()
    assert calls.settled() == [1]
    assert "an on_lost callback raised" in caplog.text


def test_a_handler_that_ends_during_its_own_renewal_is_not_marked_as_lost(heartbeat, store, clock):
    """L5: a renewal on its way when the handler finishes."""
    operation = renewing(heartbeat)
    clock.advance(20)
    swap = store.swap

    def ends_meanwhile(swaps):
        heartbeat.stop_renewing(operation)
        store._records[CLAIM.id] = completed(CLAIM, b"done")
        return swap(swaps)

    store.swap = ends_meanwhile
    heartbeat.tick()
    assert not operation.is_lost
    assert store.record == completed(CLAIM, b"done")


# --- the thread -------------------------------------------------------------------------------

SHORT = Policy(lease="150ms", window="1h")


def test_a_lease_is_renewed_while_its_handler_blocks_the_event_loop():
    """L5: which no task on that loop could do."""
    store = WatchedStore()

    async def blocking():
        claim = store.record
        store.wait_for(lambda record: record.version >= claim.version + 2)
        return store.record.lease_until_ms > claim.lease_until_ms

    async def use():
        async with AsyncEngine(AsyncMemoryStore(store), SHORT) as engine:
            return await engine.run("k", blocking)

    assert asyncio.run(use()) is True
    assert store.record.attempt == 1


def test_a_lease_that_is_renewed_is_never_taken_over_however_long_it_takes(guards, clock):
    """L5: a duplicate elsewhere waits for many leases, because each is renewed in time."""
    store = WatchedStore()
    here, there = (guards.engine(store, Policy(wait="1h"), clock=clock) for _ in range(2))
    handler = held_up("done")
    first = guards.beside(here, "k", handler)
    wait_for(handler.is_running)
    second = guards.beside(there, "k", handler)
    for _ in range(5):
        seen = store.gets
        eventually(lambda seen=seen: store.gets > seen)
        clock.advance(50)
        here.attempts.heartbeat.tick()
    handler.may_end.set()
    assert [first.result(), second.result()] == ["done", "done"]
    assert handler.calls == 1


def test_a_tick_that_fails_is_repeated(guards, caplog):
    """L5: a heartbeat that stopped would lose every lease."""
    store = WatchedStore()
    engine = guards.engine(store, SHORT)
    handler = held_up("done")
    call = guards.beside(engine, "k", handler)
    wait_for(handler.is_running)
    store.troubles = ["down"]
    began = store.record.version
    store.wait_for(lambda record: record.version >= began + 1)
    handler.may_end.set()
    assert call.result() == "done"
    assert "leases could not be renewed, and are tried again: the store is down" in caplog.text


@pytest.mark.parametrize("kind", [Engine, AsyncEngine])
def test_the_heartbeat_of_a_forgotten_engine_ends(kind):
    """The thread does not keep its engine alive, and ends at the next tick."""
    store = WatchedStore()
    engine = kind(store if kind is Engine else AsyncMemoryStore(store))
    if kind is Engine:
        engine.run("k", Handler())
    else:

        async def done():
            return "done"

        asyncio.run(engine.run("k", done))
    thread, wake, living = (
        engine.attempts.heartbeat._thread,
        engine.attempts.heartbeat._wake,
        weakref.ref(engine.attempts.heartbeat),
    )
    assert thread.is_alive()
    assert thread.daemon
    del engine
    gc.collect()
    assert living() is None
    wake.set()  # sooner than its longest pause
    thread.join(WAIT_S_MAX)
    assert not thread.is_alive()
    assert LEASE_MS_MAX / TICKS_PER_LEASE <= 5_000


def test_a_heartbeat_that_was_stopped_starts_no_new_thread(heartbeat):
    renewing(heartbeat)
    thread = heartbeat._thread
    heartbeat.stop()
    heartbeat.stop()
    assert not thread.is_alive()
    renewing(heartbeat)
    assert heartbeat._thread is thread


def test_many_threads_that_begin_at_once_start_one_heartbeat(store, clock):
    heartbeat = heartbeat_of(store, clock)
    barrier = threading.Barrier(8, timeout=WAIT_S_MAX)

    def begin(number):
        barrier.wait()
        renewing(heartbeat, CLAIM._replace(id=b"%16d" % number))

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
    before = heartbeat_threads()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S_MAX)
    assert len(heartbeat_threads() - before) == 1
    assert len(heartbeat.leases) == 8
    heartbeat.stop()


def heartbeat_threads():
    return {thread for thread in threading.enumerate() if thread.name == "coatcheck-heartbeat"}


def test_a_short_lease_makes_the_heartbeat_tick_faster(store, clock):
    """L5: also if its first lease was a long one."""
    heartbeat = heartbeat_of(store, clock)
    renewing(heartbeat)
    clock.advance(1)
    renewing(heartbeat, CLAIM._replace(lease_until_ms=clock.now_ms), 300)
    store.wait_for(lambda record: record.lease_until_ms == clock.now_ms + 300)
    heartbeat.stop()
