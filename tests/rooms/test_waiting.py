"""Waiting: duplicates that stand in line, are woken at once, and cost the store nothing."""

import asyncio
import itertools
import threading

import pytest
from engines import Handler, WatchedStore, eventually, held_up, wait_for

from coatcheck import AsyncEngine, Engine, KeyBusy, LimitExceeded, Policy
from coatcheck.core.policy import duration_ms
from coatcheck.core.record import GONE, RUNNING
from coatcheck.core.serve import Watch
from coatcheck.engine.waiting import (
    POLL_FIRST_S,
    POLL_LAST_S,
    Line,
    poll_pauses_s,
)
from coatcheck.stores import Query
from coatcheck.stores.memory import AsyncMemoryStore

PATIENT = Policy(wait="20s")


@pytest.fixture
def store():
    return WatchedStore()


def in_line(engine, count, store):
    """Until *count* callers wait for the only record."""
    eventually(lambda: engine.desk.line.length(store.record.id) == count)


# --- in one process ---------------------------------------------------------------------------


def test_waiting_duplicates_are_woken_at_once_and_read_nothing(guards, store):
    """L3: one swap each to find out that they have to wait, and then not a single look."""
    engine = guards.engine(store, PATIENT)
    handler = held_up("done")
    first = guards.beside(engine, "k", handler)
    wait_for(handler.is_running)
    waiting = [guards.beside(engine, "k", handler) for _ in range(8)]
    in_line(engine, 8, store)
    before = store.swaps
    handler.may_end.set()
    assert [call.result() for call in (first, *waiting)] == ["done"] * 9
    assert handler.calls == 1
    assert store.gets == 0
    assert (before, store.swaps) == (9, 10)  # nine claims, of which eight lost; one completion
    assert engine.desk.line.length(store.record.id) == 0


@pytest.mark.parametrize("result", ["done", ZeroDivisionError()])
def test_a_claim_counts_as_held_here_until_its_end_is_written(guards, result):
    """L3: a store that takes its time over the last write is not asked by everybody meanwhile."""
    held: list[bool] = []

    class Watching(WatchedStore):
        def swap(self, swaps):
            held.extend(swap.id in engine.heart.held for swap in swaps if swap.expected)
            return super().swap(swaps)

    engine = guards.engine(Watching(), PATIENT)
    try:
        guards.run(engine, "k", Handler(result))
    except ZeroDivisionError:
        pass
    assert held == [True]
    assert not engine.heart.held


def test_when_the_first_fails_one_of_those_who_wait_takes_its_place(guards, store):
    """L4, L1: and the others wait for that one."""
    engine = guards.engine(store, PATIENT)
    failing = held_up(ZeroDivisionError())
    first = guards.beside(engine, "k", failing)
    wait_for(failing.is_running)
    handler = Handler("done")
    waiting = [guards.beside(engine, "k", handler) for _ in range(5)]
    in_line(engine, 5, store)
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
    standing, reads = store.record, store.gets
    with pytest.raises(KeyBusy) as refused:
        guards.run(engine, "k", handler, policy=Policy(wait="50ms"))
    assert refused.value.retry_after_s == 1
    assert store.record == standing
    assert store.gets == reads + 1  # the last look, when its time was up
    assert engine.desk.line.length(standing.id) == 0
    handler.may_end.set()
    assert first.result() == "done"


def test_the_line_is_bounded(guards, store):
    """X2: over the limit a clear refusal, at once."""
    engine = guards.engine(store, Policy(wait="20s", waiters_max=2))
    handler = held_up("done")
    calls = [guards.beside(engine, "k", handler)]
    wait_for(handler.is_running)
    calls += [guards.beside(engine, "k", handler) for _ in range(2)]
    in_line(engine, 2, store)
    with pytest.raises(LimitExceeded):
        guards.run(engine, "k", handler)
    handler.may_end.set()
    assert [call.result() for call in calls] == ["done"] * 3


def test_nobody_may_wait_where_the_limit_is_zero(guards, store):
    """X2."""
    engine = guards.engine(store, Policy(wait="20s", waiters_max=0))
    handler = held_up("done")
    first = guards.beside(engine, "k", handler)
    wait_for(handler.is_running)
    with pytest.raises(LimitExceeded):
        guards.run(engine, "k", handler)
    assert engine.desk.line.waiting == {}
    handler.may_end.set()
    assert first.result() == "done"


# --- in another process -----------------------------------------------------------------------


def test_who_waits_for_another_process_looks_from_time_to_time(guards, store):
    """L3: two engines on one store know nothing of each other but what it says."""
    here, there = guards.engine(store, PATIENT), guards.engine(store, PATIENT)
    handler = held_up("done")
    first = guards.beside(there, "k", handler)
    wait_for(handler.is_running)
    waiting = guards.beside(here, "k", handler)
    eventually(lambda: store.gets >= 3)
    handler.may_end.set()
    assert [first.result(), waiting.result()] == ["done"] * 2
    assert handler.calls == 1


def test_who_waits_for_another_process_follows_its_renewals(guards, store):
    """L5: a longer lease is a change, but not an end."""
    here, there = guards.engine(store, PATIENT), guards.engine(store, PATIENT)
    handler = held_up("done")
    first = guards.beside(there, "k", handler)
    wait_for(handler.is_running)
    waiting = guards.beside(here, "k", handler)
    in_line(here, 1, store)
    (held,) = there.heart.held.values()
    for _ in range(3):
        held.claim = held.claim._replace(lease_until_ms=0)  # so that it looks due
        there.heart.beat()
        seen = store.gets
        eventually(lambda seen=seen: store.gets > seen + 1)
    assert store.record.state == RUNNING
    assert not waiting.done()
    handler.may_end.set()
    assert [first.result(), waiting.result()] == ["done"] * 2


def test_looks_become_rarer_and_never_go_in_step():
    """L3."""
    pauses, others = (list(itertools.islice(poll_pauses_s(), 30)) for _ in range(2))
    assert 0.8 * POLL_FIRST_S <= pauses[0] <= 1.2 * POLL_FIRST_S
    assert all(0.8 * POLL_LAST_S <= pause <= 1.2 * POLL_LAST_S for pause in pauses[10:])
    assert pauses != others
    # Ten seconds of waiting cost some forty looks, not a thousand.
    assert sum(pauses) > 4


# --- the line itself --------------------------------------------------------------------------

RECORD = GONE._replace(id=b"i" * 16, version=1)


def test_everybody_in_line_is_told_once():
    line, told = Line(), []
    wakes = [lambda record, n=n: told.append((n, record)) for n in range(3)]
    assert [line.join(RECORD.id, wake, 10) for wake in wakes] == [True] * 3
    line.leave(RECORD.id, wakes[1])
    line.tell(RECORD)
    line.tell(RECORD)
    assert told == [(0, RECORD), (2, RECORD)]
    assert line.length(RECORD.id) == 0


def test_who_waits_for_something_else_is_not_told():
    line, told = Line(), []
    line.join(b"other", told.append, 10)
    line.tell(RECORD)
    assert told == []
    assert line.length(b"other") == 1


def test_leaving_a_line_that_one_is_not_in_does_nothing():
    line = Line()
    line.leave(RECORD.id, print)
    line.join(RECORD.id, str, 10)
    line.leave(RECORD.id, print)
    assert line.length(RECORD.id) == 1


def test_an_empty_line_takes_no_memory():
    line = Line()
    for number in range(100):
        id = b"%d" % number
        line.join(id, str, 10)
        assert not line.join(id, print, 1)
        line.leave(id, str)
    assert line.waiting == {}


def test_a_waiter_whose_event_loop_is_gone_hurts_nobody():
    """L3: one whose loop was torn down cannot be woken; the others are, and the writer goes on."""
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
    while engine.desk.line.length(store.record.id) < 1:
        abandoned.run_until_complete(asyncio.sleep(0))
    abandoned.close()
    threads.append(threading.Thread(target=run, args=(second,), daemon=True))
    threads[1].start()
    in_line(engine, 2, store)
    handler.may_end.set()
    for thread in threads:
        thread.join(duration_ms(PATIENT.wait) / 1_000)
    assert (first, second) == (["done"], ["done"])
    task.get_coro().close()
    task._log_destroy_pending = False  # it is what this test is about
    asyncio.run(engine.close())


def test_who_stands_in_line_after_the_end_is_told_at_once():
    """L3: it was woken too early to be told, and nobody would wake it again."""
    with Engine("memory://") as engine:
        engine.run("k", lambda: "done", scope="s")
        (record,) = engine.store.find(Query(key="k")).records
        assert engine.desk.ended_since(Watch(record.id, record.version - 1, 0)) == record
        # Of what it has seen itself, and of a life before, it is told nothing.
        assert engine.desk.ended_since(Watch(record.id, record.version, 0)) is None
        assert engine.desk.ended_since(Watch(record.id, record.version + 1, 0)) is None
        seen = engine._watch(Watch(record.id, record.version - 1, record.window_until_ms), 1)
        assert seen is not None
        assert (seen.record, engine.desk.line.waiting) == (record, {})
