"""Sweeping: expired records are deleted in small batches, and archived before."""

import gc
import threading
import weakref

import pytest

from coatcheck import Engine
from coatcheck.core.record import GONE
from coatcheck.engine.clock import StoreClock
from coatcheck.engine.leases import Heartbeat
from coatcheck.engine.sweeper import REST_S_MAX, Sweeper, batches, rest_between
from coatcheck.operation import Lease
from coatcheck.stores.contract import SWEEP_BATCH
from tests.support.engines import CLAIM, Handler, WatchedStore
from tests.support.times import NOW_MS, WAIT_S_MAX, Clock, eventually, wait_for

LEASE_MS = 60_000


def sweep(store, now_ms, archive=None):
    """A whole sweep without a rest; how many records it deleted."""
    return sum(batches(store, now_ms, archive))


def expired(count, *, at_ms=NOW_MS):
    """A store full of expired records."""
    store = WatchedStore()
    for number in range(count):
        record = GONE._replace(id=b"%16d" % number, version=1, expires_ms=at_ms)
        store._records[record.id] = record
    return store


def test_a_sweep_takes_small_batches_until_nothing_is_left():
    """T3."""
    store = expired(2 * SWEEP_BATCH + 7)
    keeps = CLAIM._replace(expires_ms=NOW_MS)
    store._records[CLAIM.id] = keeps  # past its retention, but with a live lease
    assert sweep(store, NOW_MS) == 2 * SWEEP_BATCH + 7
    assert store.sweeps == [SWEEP_BATCH, SWEEP_BATCH, 7]
    assert store.records == [keeps]


def test_a_long_backlog_leaves_most_of_the_stores_time_for_claims():
    """T3: after each batch claims have three times as long as it took, or a second at most."""
    seconds, rests = [0.0], []

    def swept():
        for took_s in (0.125, 0.25, 3_600.0):  # the last one was archived, and that took an hour
            seconds[0] += took_s
            yield SWEEP_BATCH

    def rest(rest_s):
        rests.append(rest_s)
        seconds[0] += rest_s

    rest_between(swept(), rest, lambda: seconds[0])
    assert rests == [0.375, 0.75, REST_S_MAX]


def test_one_sweep_deletes_a_backlog_of_any_length(clock):
    """T3: an engine keeps up with a store that takes in more than a few batches."""
    store = expired(30 * SWEEP_BATCH + 7)
    sweeper = Sweeper(store, 60, None)
    sweeper.tick(clock())
    clock.advance(91)
    sweeper.tick(clock())
    eventually(lambda: not sweeper.is_sweeping())
    assert store.records == []
    assert store.sweeps == [SWEEP_BATCH] * 30 + [7]
    sweeper.close()


def test_records_can_be_archived_before_they_are_swept():
    """T3: every record once, in small batches, and before it is gone."""
    store = expired(SWEEP_BATCH + 3)
    archived = []

    def archive(records):
        assert {record.id for record in records} <= set(store._records)
        archived.append(list(records))

    everything = store.records
    assert sweep(store, NOW_MS, archive) == SWEEP_BATCH + 3
    assert [len(batch) for batch in archived] == [SWEEP_BATCH, 3]
    assert sorted(record for batch in archived for record in batch) == everything
    assert store.records == []


def test_an_archive_that_fails_deletes_nothing():
    """T3."""
    store = expired(5)

    def broken(_records):
        raise OSError("the archive is full")

    with pytest.raises(OSError, match="the archive is full"):
        sweep(store, NOW_MS, broken)
    assert len(store.records) == 5


def test_a_record_that_changes_while_it_is_archived_is_not_deleted():
    """T3, T2: a late retry began a new generation meanwhile."""
    store = expired(2)
    first, second = store.records
    alive = CLAIM._replace(id=second.id)

    def archive(_records):
        store._records[second.id] = alive

    assert sweep(store, NOW_MS, archive) == 1
    assert store.records == [alive]
    assert first.id not in store._records


def test_many_nodes_may_sweep_at_once():
    """T3: each record is taken once."""
    store = expired(3 * SWEEP_BATCH)
    taken = []
    threads = [
        threading.Thread(target=lambda: taken.append(sweep(store, NOW_MS))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S_MAX)
    assert sum(taken) == 3 * SWEEP_BATCH
    assert store.records == []


def test_sweeps_come_about_as_often_as_was_asked_for(clock):
    """T3: not at the first tick, when a whole fleet has just been started."""
    store = expired(1)
    sweeper = Sweeper(store, 60, None)
    sweeper.tick(clock())
    clock.advance(29)
    sweeper.tick(clock())
    assert store.sweeps == []
    clock.advance(61)
    sweeper.tick(clock())
    eventually(lambda: not sweeper.is_sweeping())
    assert store.sweeps == [1]
    clock.advance(29)
    sweeper.tick(clock())
    sweeper.close()
    assert store.sweeps == [1]


def test_nodes_do_not_sweep_at_the_same_moments(clock):
    """T3: jittered, by half of the time in both directions."""
    times = set()
    for _ in range(50):
        sweeper = Sweeper(WatchedStore(), 60, None)
        sweeper.tick(clock())
        times.add(sweeper._schedule._due_ms - clock.now_ms)
    assert len(times) > 40
    assert all(30_000 <= time_ms <= 90_000 for time_ms in times)


def test_the_first_sweep_is_jittered_on_the_stores_own_clock():
    """T3: before the first look at that clock, the time is not known."""
    store = expired(1, at_ms=0)
    sweeper = Sweeper(store, 60, None)
    Heartbeat(store, StoreClock(store), tasks=[sweeper.tick]).tick()
    assert store.sweeps == []
    assert 29_000 <= sweeper._schedule._due_ms - store.now_ms() <= 91_000


def test_an_engine_without_a_sweep_interval_never_sweeps(clock):
    """T3."""
    store = expired(1)
    sweeper = Sweeper(store, None, None)
    clock.advance(1_000_000)
    sweeper.tick(clock())
    assert store.sweeps == []


def test_an_engine_sweeps_and_archives_by_itself(guards, clock):
    """T3: nothing has to be set up."""
    store = expired(3)
    archived = []
    engine = guards.engine(store, clock=clock, archive=archived.extend)
    guards.run(engine, "k", Handler())
    engine.attempts.heartbeat.tick()
    clock.advance(90)
    engine.attempts.heartbeat.tick()
    eventually(lambda: len(archived) == 3)
    assert len(store.records) == 1


class SlowArchive:
    """Takes its time, and says when it has begun."""

    def __init__(self):
        self.calls = 0
        self.is_running = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, _records):
        self.calls += 1
        self.is_running.set()
        wait_for(self.may_end)


def test_an_archive_that_takes_long_delays_no_renewal(clock):
    """L5, T3: it is the application's own, and may take hours."""
    store, archive = expired(3), SlowArchive()
    store._records[CLAIM.id] = CLAIM
    sweeper = Sweeper(store, 1, archive)
    heartbeat = Heartbeat(store, StoreClock(store, clock), tasks=[sweeper.tick])
    heartbeat.start_renewing(Lease(CLAIM, LEASE_MS))
    heartbeat.tick()
    for _ in range(10):
        clock.advance(20)
        heartbeat.tick()
        wait_for(archive.is_running)
        assert store._records[CLAIM.id].lease_until_ms == clock.now_ms + LEASE_MS
    assert archive.calls == 1  # never two of them at once
    archive.may_end.set()
    heartbeat.stop()
    sweeper.close()
    assert store.records == [store._records[CLAIM.id]]


def test_a_sweep_that_fails_is_repeated(clock, caplog):
    """T3."""
    store, archived = expired(3), []

    def archive(records):
        archived.append(len(records))
        if len(archived) == 1:
            raise OSError("the archive is full")

    sweeper = Sweeper(store, 1, archive)
    sweeper.tick(clock())
    for number in range(1, 3):
        clock.advance(20)
        sweeper.tick(clock())
        eventually(lambda number=number: len(archived) == number)
        eventually(lambda: not sweeper.is_sweeping())
    assert (archived, store.records) == ([3, 3], [])
    assert "a sweep failed and is repeated: the archive is full" in caplog.text
    sweeper.close()


def test_a_sweep_ends_with_its_engine(clock):
    """T3: a closed engine begins no further batch, and no further sweep."""
    store, archive = expired(3 * SWEEP_BATCH), SlowArchive()
    sweeper = Sweeper(store, 1, archive)
    sweeper.tick(clock())
    clock.advance(20)
    sweeper.tick(clock())
    wait_for(archive.is_running)
    stopping = threading.Thread(target=sweeper.close)
    stopping.start()
    wait_for(sweeper._closed)
    archive.may_end.set()
    stopping.join(WAIT_S_MAX)
    assert not sweeper.is_sweeping()
    assert archive.calls == 1
    assert len(store.records) == 2 * SWEEP_BATCH
    clock.advance(20)
    sweeper.tick(clock())
    assert archive.calls == 1


def test_a_sweep_does_not_keep_a_forgotten_engine_alive():
    """T3: it ends with the batch that is under way."""
    clock, archive = Clock(), SlowArchive()
    store = expired(3 * SWEEP_BATCH)
    engine = Engine(store, clock=clock, archive=archive, sweep_every_s=1)
    engine.attempts.heartbeat.tick()
    clock.advance(20)
    engine.attempts.heartbeat.tick()
    wait_for(archive.is_running)
    thread, living = (
        engine.sweeper._thread,
        weakref.ref(engine.attempts.heartbeat),
    )
    assert thread.daemon
    del engine
    gc.collect()
    assert living() is None
    archive.may_end.set()
    thread.join(WAIT_S_MAX)
    assert not thread.is_alive()
    assert archive.calls == 1
