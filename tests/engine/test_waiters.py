"""Waiting: duplicates are woken at once, and cost the store nothing."""

import asyncio
import itertools
import threading

import pytest

from coatcheck import AsyncEngine, Engine, KeyBusy, LimitExceeded, Policy
from coatcheck.core.lifecycle import WaitForChange
from coatcheck.core.policy import duration_ms
from coatcheck.core.record import GONE, RUNNING
from coatcheck.engine.waiters import POLL_FIRST_S, POLL_LAST_S, Waiters, poll_pauses_s
from coatcheck.stores.memory import AsyncMemoryStore
from tests.support.engines import Handler, WatchedStore, held_up
from tests.support.times import eventually, wait_for

PATIENT = Policy(wait="20s")


def until_waiting(engine, count, store):
    """Until *count* callers wait for the only record."""
    eventually(lambda: engine.attempts.waiters.count(store.record.id) == count)


# --- in one process ---------------------------------------------------------------------------


def test_waiting_duplicates_are_woken_at_once_and_read_nothing(guards, store):
    """L3: one swap each to find out that they have to wait, and then no read."""
    engine = guards.engine(store, PATIENT)
    handler = held_up("done")
    first = guards.beside(engine, "k", handler)
    wait_for(handler.is_running)
    waiting = [guards.beside(engine, "k", handler) for _ in range(8)]
    until_waiting(engine, 8, store)
    before = store.swaps
    handler.may_end.set()
    assert [call.result() for call in (first, *waiting)] == ["done"] * 9
    assert handler.calls == 1
    assert store.gets == 0
    assert (before, store.swaps) == (9, 10)  # nine claims, of which eight lost; one completion
    assert engine.attempts.waiters.count(store.record.id) == 0


@pytest.mark.parametrize("result", ["done", ZeroDivisionError()])
def test_a_lease_is_kept_until_its_completion_is_written(guards, result):
    """L3: a store that is slow with the last write is not polled by every waiter meanwhile."""
    held: list[bool] = []

    class Watching(WatchedStore):
        def swap(self, swaps):
            held.extend(
                swap.id in engine.attempts.heartbeat.leases for swap in swaps if swap.expected
            )
            return super().swap(swaps)

    engine = guards.engine(Watching(), PATIENT)
    try:
        guards.run(engine, "k", Handler(result))
    except ZeroDivisionError:
        pass
    assert held == [True]
    assert not engine.attempts.heartbeat.leases


def test_when_the_first_fails_one_of_its_waiters_runs_next(guards, store):
    """L4, L1: and the others wait for that one."""
    engine = guards.engine(store, PATIENT)
    failing = held_up(ZeroDivisionError())
    first = guards.beside(engine, "k", failing)
    wait_for(failing.is_running)
    handler = Handler("done")
    waiting = [guards.beside(engine, "k", handler) for _ in range(5)]
    until_waiting(engine, 5, store)
    failing.may_end.set()
    with pytest.raises(ZeroDivisionError):
        first.result()
    assert [call.result() for call in waiting] == ["done"] * 5
    assert (failing.calls, handler.calls) == (1, 1)


def test_a_waiter_that_gives_up_has_changed_nothing(guards, store):
    """L3: 409 with the record as it was, and the first is not disturbed."""
    engine = guards.engine(store)
    handler = held_up("done")
    first = guards.beside(engine, "k", handler)
    wait_for(handler.is_running)
    record, reads = store.record, store.gets
    with pytest.raises(KeyBusy) as refused:
        guards.run(engine, "k", handler, policy=Policy(wait="50ms"))
    assert refused.value.retry_after_s == 1
    assert store.record == record
    assert store.gets == reads + 1  # the last read, when its time was over
    assert engine.attempts.waiters.count(record.id) == 0
    handler.may_end.set()
    assert first.result() == "done"


def test_the_number_of_waiters_is_bounded(guards, store):
    """X2: over the limit a clear refusal, at once."""
    engine = guards.engine(store, Policy(wait="20s", waiters_max=2))
    handler = held_up("done")
    calls = [guards.beside(engine, "k", handler)]
    wait_for(handler.is_running)
    calls += [guards.beside(engine, "k", handler) for _ in range(2)]
    until_waiting(engine, 2, store)
    with pytest.raises(LimitExceeded):
        guards.run(engine, "k", handler)
    handler.may_end.set()
    assert [call.result() for call in calls] == ["done"] * 3


# --- in another process -----------------------------------------------------------------------


def test_a_waiter_for_another_process_polls(guards, store):
    """L3: two engines on one store know of each other only what it says."""
    here, there = guards.engine(store, PATIENT), guards.engine(store, PATIENT)
    handler = held_up("done")
    first = guards.beside(there, "k", handler)
    wait_for(handler.is_running)
    waiting = guards.beside(here, "k", handler)
    eventually(lambda: store.gets >= 3)
    handler.may_end.set()
    assert [first.result(), waiting.result()] == ["done"] * 2
    assert handler.calls == 1


def test_a_waiter_for_another_process_follows_its_renewals(guards, store):
    """L5: a longer lease is a change, but not an end."""
    here, there = guards.engine(store, PATIENT), guards.engine(store, PATIENT)
    handler = held_up("done")
    first = guards.beside(there, "k", handler)
    wait_for(handler.is_running)
    waiting = guards.beside(here, "k", handler)
    until_waiting(here, 1, store)
    (held,) = there.attempts.heartbeat.leases.values()
    for _ in range(3):
        held.claim = held.claim._replace(lease_until_ms=0)  # so that it looks due
        there.attempts.heartbeat.tick()
        seen = store.gets
        eventually(lambda seen=seen: store.gets > seen + 1)
    assert store.record.state == RUNNING
    assert not waiting.done()
    handler.may_end.set()
    assert [first.result(), waiting.result()] == ["done"] * 2


def test_polls_become_rarer_and_never_align():
    """L3."""
    pauses, others = (list(itertools.islice(poll_pauses_s(), 30)) for _ in range(2))
    assert 0.8 * POLL_FIRST_S <= pauses[0] <= 1.2 * POLL_FIRST_S
    assert all(0.8 * POLL_LAST_S <= pause <= 1.2 * POLL_LAST_S for pause in pauses[10:])
    assert pauses != others
    # Ten seconds of waiting cost some forty reads, not a thousand.
    assert sum(pauses) > 4


# --- the list of waiters -----------------------------------------------------------------------

RECORD = GONE._replace(id=b"i" * 16, version=1)


def test_every_waiter_is_woken_once():
    waiters, woken = Waiters(), []
    wakes = [lambda record, n=n: woken.append((n, record)) for n in range(3)]
    assert [waiters.join(RECORD.id, wake, 10) for wake in wakes] == [True] * 3
    waiters.leave(RECORD.id, wakes[1])
    waiters.wake(RECORD)
    waiters.wake(RECORD)
    assert woken == [(0, RECORD), (2, RECORD)]
    assert waiters.count(RECORD.id) == 0


def test_without_waiters_nothing_is_kept_in_memory():
    waiters = Waiters()
    for number in range(100):
        id = b"%d" % number
        waiters.join(id, str, 10)
        assert not waiters.join(id, print, 1)
        waiters.leave(id, str)
    assert waiters.waiting == {}


def test_a_waiter_whose_event_loop_is_gone_does_no_harm():
    """L3: one whose loop was closed cannot be woken; the others are, and the writer goes on."""
    store = WatchedStore()
    engine = AsyncEngine(AsyncMemoryStore(store), PATIENT)
    handler = held_up("done")

    async def coroutine():
        return handler()

    def run(results):
        results.append(asyncio.run(engine.run("k", coroutine, scope="s")))

    first, second = [], []
    threads = [threading.Thread(target=run, args=(first,), daemon=True)]
    threads[0].start()
    wait_for(handler.is_running)
    abandoned = asyncio.new_event_loop()
    task = abandoned.create_task(engine.run("k", coroutine, scope="s"))
    while engine.attempts.waiters.count(store.record.id) < 1:
        abandoned.run_until_complete(asyncio.sleep(0))
    abandoned.close()
    threads.append(threading.Thread(target=run, args=(second,), daemon=True))
    threads[1].start()
    until_waiting(engine, 2, store)
    handler.may_end.set()
    for thread in threads:
        thread.join(duration_ms(PATIENT.wait) / 1_000)
    assert (first, second) == (["done"], ["done"])
    task.get_coro().close()
    task._log_destroy_pending = False  # it is what this test is about
    asyncio.run(engine.close())


def test_a_waiter_that_joins_after_the_completion_gets_it_at_once():
    """L3: the waiters were woken before it had joined, so that it would wait in vain."""
    store = WatchedStore()
    with Engine(store) as engine:
        engine.run("k", lambda: "done", scope="s")
        record = store.record

        def wait(version):
            until_ms = engine.attempts.now_ms() + 50
            flow = engine.attempts._wait(WaitForChange(record.id, version, until_ms), 1)
            before = store.gets
            seen = engine._runner.run(flow)
            assert engine.attempts.waiters.waiting == {}
            return seen.record, store.gets - before

        assert wait(record.version - 1) == (record, 0)
        # A version that it knows already, or that is older than what it knows, ends no wait.
        for version in (record.version, record.version + 1):
            assert wait(version)[1] > 0
