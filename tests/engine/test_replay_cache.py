"""The cache: replays from memory, bounded, and never beyond the window."""

import threading

import pytest

from coatcheck import KeyReused, Misconfigured, Policy
from coatcheck.core.record import COMPLETED, GONE
from coatcheck.engine.replay_cache import RECORD_BYTES_MAX, ReplayCache
from tests.support.engines import Handler
from tests.support.times import WAIT_S_MAX, Clock


def record(number, size=100):
    return GONE._replace(id=b"%16d" % number, version=1, state=COMPLETED, response=bytes(size))


def known(cache, count):
    return [n for n in range(count) if cache.get(b"%16d" % n) is not None]


def test_records_are_bounded_in_number_and_the_least_used_leave_first():
    cache = ReplayCache(records_max=3)
    for number in range(3):
        cache.put(record(number))
    cache.get(record(0).id)
    cache.put(record(3))
    assert known(cache, 5) == [0, 2, 3]


def test_records_are_bounded_in_bytes():
    cache = ReplayCache(bytes_max=250)
    for number in range(5):
        cache.put(record(number, size=100))
    assert known(cache, 5) == [3, 4]
    cache.put(record(5, size=250))
    assert known(cache, 6) == [5]


def test_what_a_record_holds_beside_its_response_counts_too():
    """X2: keys and labels are as long as clients make them."""
    cache = ReplayCache(bytes_max=250)
    for number in range(5):
        cache.put(record(number, size=20)._replace(label="l" * 40, key="k" * 40))
    assert known(cache, 5) == [3, 4]
    cache.put(record(5, size=20)._replace(label="l" * RECORD_BYTES_MAX))
    assert known(cache, 6) == [3, 4]


def test_steps_are_not_kept_in_memory_for_replays():
    """X2: a replay needs none of them, and they may be many times its size."""
    cache = ReplayCache()
    cache.put(record(1)._replace(progress=bytes(100_000)))
    assert cache.get(record(1).id) == record(1)


def test_a_record_that_is_put_in_again_counts_once():
    cache = ReplayCache(bytes_max=250)
    for size in (100, 200, 50, 150):
        cache.put(record(0, size=size))
    cache.put(record(1, size=100))
    assert known(cache, 2) == [0, 1]
    assert len(cache) == 2


def test_a_large_response_does_not_push_out_the_small_ones():
    cache = ReplayCache()
    cache.put(record(0))
    cache.put(record(1, size=RECORD_BYTES_MAX + 1))
    assert known(cache, 2) == [0]
    cache.put(record(1, size=RECORD_BYTES_MAX))
    assert known(cache, 2) == [0, 1]


def test_threads_may_use_it_at_once():
    """Its count stays that of its records, or it would shrink for ever."""
    cache = ReplayCache(bytes_max=5_000, records_max=40)
    barrier = threading.Barrier(4, timeout=WAIT_S_MAX)
    errors = []

    def use(start):
        barrier.wait()
        try:
            for number in range(start, start + 3_000):
                cache.put(record(number % 100, size=number % 200))
                cache.get(b"%16d" % (number % 90))
        except Exception as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=use, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S_MAX)
    assert errors == []
    assert cache._bytes == sum(len(r.response) for r in cache._records.values())


# --- in an engine -----------------------------------------------------------------------------


def test_a_replay_from_memory_does_not_touch_the_store(guards, store):
    """L2."""
    engine = guards.engine(store, sweep_every_s=None)
    guards.run(engine, "k", Handler())
    asked = (store.swaps, store.gets)
    for _ in range(5):
        assert guards.run(engine, "k", Handler("never")) == "done"
        with pytest.raises(KeyReused):
            guards.run(engine, "k", Handler("never"), 1)
    assert (store.swaps, store.gets) == asked


def test_a_replay_from_memory_respects_the_window(guards, store):
    """T1, T2: a cached answer is not given for longer than a stored one."""
    clock = Clock()
    engine = guards.engine(store, Policy(window="1h"), clock=clock, sweep_every_s=None)
    guards.run(engine, "k", Handler("old"))
    clock.advance(3_599.999)
    assert guards.run(engine, "k", Handler("new")) == "old"
    clock.advance(0.001)
    assert guards.run(engine, "k", Handler("new")) == "new"
    assert guards.run(engine, "k", Handler("newer")) == "new"


def test_an_answer_is_cached_only_by_the_engine_that_wrote_it(guards, store):
    """L2: another node's answer comes from the store each time; it may be resolved by hand."""
    writer, reader = guards.engine(store), guards.engine(store)
    guards.run(writer, "k", Handler())
    guards.run(reader, "k", Handler())
    assert (len(writer.attempts.replay_cache), len(reader.attempts.replay_cache)) == (1, 0)


def test_only_final_answers_are_remembered(guards, store):
    """L4, L12."""
    engine = guards.engine(store)
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "a", Handler(ZeroDivisionError()))
    with pytest.raises(Misconfigured):
        guards.run(engine, "b", Handler(object))
    assert len(engine.attempts.replay_cache) == 0
