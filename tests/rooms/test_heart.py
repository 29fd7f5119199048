"""The heart: renews leases, whatever the handlers do, and keeps house."""

import asyncio
import gc
import threading
import weakref

import pytest
from engines import NOW_MS, WAIT_S_MAX, Clock, Handler, WatchedStore, eventually, held_up, wait_for

from coatcheck import AsyncEngine, Engine, Policy
from coatcheck.core.record import GONE, RUNNING, Record, completed, failed
from coatcheck.engine.clock import StoreClock
from coatcheck.engine.heart import BEATS_PER_LEASE, LEASE_MS_MAX, Heart
from coatcheck.engine.held import Held
from coatcheck.engine.sweeping import REST_S_MAX, batches, rest_between
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.contract import SWEEP_BATCH
from coatcheck.stores.memory import AsyncMemoryStore

LEASE_MS = 60_000
CLAIM = Record(
    *(b"i" * 16, NOW_MS, RUNNING, 1, b"f" * 16, NOW_MS, NOW_MS + LEASE_MS),
    *(NOW_MS + 3_600_000, NOW_MS + 7_200_000, 7, "", "", "", None, None),
)


@pytest.fixture
def store():
    store = WatchedStore()
    store._records[CLAIM.id] = CLAIM
    return store


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def heart(store, clock):
    heart = heart_of(store, clock)
    yield heart
    heart.stop()


def heart_of(store, clock, **options):
    return Heart(store, StoreClock(store, clock), **options)


# --- leases -----------------------------------------------------------------------------------


def test_a_stopped_event_loop_is_noticed_and_its_lease_runs_out(heart, store, clock, caplog):
    """L5: the heart beats in a thread of its own, and would hold the key for ever."""
    loop = asyncio.new_event_loop()

    async def execute():
        heart.hold(CLAIM, LEASE_MS, asyncio.get_running_loop())

    loop.run_until_complete(execute())  # and it is stopped in the middle
    clock.pass_s(30)
    heart.beat()
    assert store.record == CLAIM
    assert heart.held == {}
    assert "has stopped" in caplog.text
    loop.close()


def test_a_heart_that_found_no_thread_begins_to_beat_when_there_is_one(heart, store, clock, caplog):
    """L5: else one moment without threads would cost every lease from then on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refused)
        heart.hold(CLAIM, LEASE_MS)
    assert "no thread can be started" in caplog.text
    clock.pass_s(30)
    heart.hold(CLAIM, LEASE_MS)
    heart.wake()
    eventually(lambda: store.record.version > CLAIM.version)


def _refused(_thread):
    raise RuntimeError("can't start new thread")


def test_an_event_loop_that_is_only_blocked_keeps_its_claim(heart, store, clock):
    """L5: blocking code is work like any other."""

    async def block():
        heart.hold(CLAIM, LEASE_MS, asyncio.get_running_loop())
        clock.pass_s(30)
        heart.beat()  # as its thread does, while nothing else turns

    asyncio.run(block())
    assert store.record.lease_until_ms == clock.now_ms + LEASE_MS


def test_a_claim_is_renewed_when_a_third_of_its_lease_is_over(heart, store, clock):
    """L5: two renewals may fail before a lease is lost."""
    heart.hold(CLAIM, LEASE_MS)
    clock.pass_s(19.999)
    heart.beat()
    assert store.record == CLAIM
    clock.pass_s(0.001)
    heart.beat()
    renewed = store.record
    assert renewed.lease_until_ms == clock.now_ms + LEASE_MS
    assert (renewed.state, renewed.nonce, renewed.attempt) == (RUNNING, 7, 1)
    heart.beat()
    assert store.record == renewed
    clock.pass_s(20)
    heart.beat()
    assert store.record.lease_until_ms == clock.now_ms + LEASE_MS


def test_what_was_let_go_is_renewed_no_longer(heart, store, clock):
    """L5."""
    heart.let_go(heart.hold(CLAIM, LEASE_MS))
    clock.pass_s(30)
    heart.beat()
    assert store.record == CLAIM


def test_a_renewal_whose_answer_was_lost_is_followed_by_the_next(heart, store, clock):
    """L5: the record names our own attempt, so nothing is lost."""
    held = heart.hold(CLAIM, LEASE_MS)
    clock.pass_s(20)
    store.troubles = ["deaf"]
    with pytest.raises(StoreUnavailable):
        heart.beat()
    clock.pass_s(5)
    heart.beat()
    assert held.claim == store.record
    assert store.record.version == CLAIM.version + 1
    clock.pass_s(15)
    heart.beat()
    assert not held.is_lost
    assert store.record.version == CLAIM.version + 2
    assert store.record.lease_until_ms == clock.now_ms + LEASE_MS
    assert held.claim == store.record


def test_one_renewal_that_is_lost_does_not_hold_up_the_others(heart, store, clock):
    """L5."""
    other = CLAIM._replace(id=b"j" * 16)
    store._records[other.id] = other
    lost, kept = heart.hold(CLAIM, LEASE_MS), heart.hold(other, LEASE_MS)
    store._records[CLAIM.id] = CLAIM._replace(version=CLAIM.version + 5, nonce=8, attempt=2)
    clock.pass_s(20)
    heart.beat()
    assert (lost.is_lost, kept.is_lost) == (True, False)
    assert list(heart.held.values()) == [kept]
    assert store._records[other.id].lease_until_ms == clock.now_ms + LEASE_MS


@pytest.mark.parametrize(
    "standing",
    [
        CLAIM._replace(version=NOW_MS + 9, nonce=8, attempt=2),
        completed(CLAIM._replace(nonce=8, attempt=2), b"theirs"),
        failed(CLAIM),
        None,
    ],
    ids=["taken over", "completed", "failed", "swept"],
)
def test_a_claim_that_is_lost_is_marked_and_left_alone(heart, store, clock, standing):
    """L5: the fence holds, and the record stays what it is."""
    held = heart.hold(CLAIM, LEASE_MS)
    if standing is None:
        del store._records[CLAIM.id]
    else:
        store._records[CLAIM.id] = standing
    clock.pass_s(20)
    heart.beat()
    assert held.is_lost
    assert heart.held == {}
    assert store.records == ([] if standing is None else [standing])


def test_a_zombie_does_not_let_go_of_what_its_successor_holds(heart):
    """L5: two attempts of one operation in one process."""
    zombie = heart.hold(CLAIM, LEASE_MS)
    successor = heart.hold(CLAIM._replace(version=NOW_MS + 1, nonce=8, attempt=2), LEASE_MS)
    heart.let_go(zombie)
    assert heart.held == {CLAIM.id: successor}
    heart.let_go(successor)
    heart.let_go(successor)
    assert heart.held == {}


def test_whoever_takes_over_in_the_same_process_tells_its_predecessor(heart):
    """L5: nobody else does, because the heart renews the successor from now on."""
    told = threading.Event()
    zombie = heart.hold(CLAIM, LEASE_MS)
    zombie.on_lost(told.set)
    again = heart.hold(CLAIM._replace(version=NOW_MS + 1), LEASE_MS)
    assert not zombie.is_lost  # the same attempt, held anew
    again.on_lost(told.set)
    heart.hold(CLAIM._replace(version=NOW_MS + 2, nonce=8, attempt=2), LEASE_MS)
    assert again.is_lost
    wait_for(told)


class Overtaken(Held):
    """Lost by another thread at the very moment at which somebody looks whether it is."""

    is_late = False  # it comes just after the look, and not just before it

    @property
    def is_lost(self):
        before = self.__dict__["flag"]
        if not self.__dict__.setdefault("is_overtaken", False):
            self.is_overtaken = True
            self.lose()
        return before if self.is_late else self.flag

    @is_lost.setter
    def is_lost(self, flag):
        self.flag = flag


@pytest.mark.parametrize("is_late", [False, True], ids=["just before", "just after"])
@pytest.mark.parametrize("asks_late", [False, True], ids=["asked before", "asks meanwhile"])
def test_a_callback_is_called_once_however_many_lose_it_at_once(is_late, asks_late):
    """L5: the heart, a step, and the handler that asks to be told."""
    held, calls = Overtaken(CLAIM, LEASE_MS), []
    held.is_late = is_late
    if not asks_late:
        held._on_lost = type(held._on_lost)((lambda: calls.append("told"),))
        held.lose()
    else:
        held.on_lost(lambda: calls.append("told"))
    held.lose()
    assert calls == ["told"]


def test_a_callback_that_asks_to_be_told_again_is_not_called_twice(heart):
    """L5: each registration counts once."""
    held, calls = heart.hold(CLAIM, LEASE_MS), []

    def first():
        calls.append("first")
        held.on_lost(lambda: calls.append("second"))

    held.on_lost(first)
    held.lose()
    held.lose()
    assert calls == ["first", "second"]


def test_who_is_told_of_a_lost_claim_may_take_its_time(heart, store, clock):
    """L5: a callback that blocks costs nobody a lease, nor any other its call."""
    others = [CLAIM._replace(id=b"%16d" % number) for number in range(2)]
    store._records.update({other.id: other for other in others})
    blocks, may_end, told = threading.Event(), threading.Event(), threading.Event()
    threads = []
    lost, kept = heart.hold(CLAIM, LEASE_MS), heart.hold(others[0], LEASE_MS)
    also_lost = heart.hold(others[1], LEASE_MS)

    def block():
        threads.append(threading.current_thread())
        blocks.set()
        wait_for(may_end)

    lost.on_lost(block)
    also_lost.on_lost(told.set)
    for held in (lost, also_lost):
        taken = held.claim._replace(version=held.claim.version + 5, nonce=8, attempt=2)
        store._records[taken.id] = taken
    clock.pass_s(20)
    heart.beat()
    wait_for(blocks)
    wait_for(told)
    assert threading.current_thread() not in threads
    assert heart._thread not in threads
    assert (lost.is_lost, also_lost.is_lost) == (True, True)
    clock.pass_s(20)
    heart.beat()
    assert store._records[kept.claim.id].lease_until_ms == clock.now_ms + LEASE_MS
    may_end.set()


def test_a_callback_that_fails_does_not_stop_the_others(heart, caplog):
    held, calls = heart.hold(CLAIM, LEASE_MS), []
    held.on_lost(lambda: 1 / 0)
    held.on_lost(lambda: calls.append(1))
    held.lose()
    assert calls == [1]
    assert "who was told of a lost claim failed" in caplog.text


def test_a_handler_that_ends_during_its_own_renewal_is_not_marked_as_lost(heart, store, clock):
    """L5: a renewal on its way when the handler finishes."""
    held = heart.hold(CLAIM, LEASE_MS)
    clock.pass_s(20)
    swap = store.swap

    def ends_meanwhile(swaps):
        heart.let_go(held)
        store._records[CLAIM.id] = completed(CLAIM, b"done")
        return swap(swaps)

    store.swap = ends_meanwhile
    heart.beat()
    assert not held.is_lost
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


def test_nobody_takes_over_what_is_renewed_however_long_it_takes(guards, clock):
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
        clock.pass_s(50)
        here.heart.beat()
    handler.may_end.set()
    assert [first.result(), second.result()] == ["done", "done"]
    assert handler.calls == 1


def test_a_beat_that_fails_is_tried_again(guards, caplog):
    """L5: a heart that stopped would lose every lease."""
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
    assert "a beat failed and is tried again: the store is down" in caplog.text


@pytest.mark.parametrize("kind", [Engine, AsyncEngine])
def test_an_engine_that_is_forgotten_ends_its_heart(kind):
    """A heart holds no engine alive; its thread ends at its next beat."""
    store = WatchedStore()
    engine = kind(store if kind is Engine else AsyncMemoryStore(store))
    if kind is Engine:
        engine.run("k", Handler())
    else:

        async def done():
            return "done"

        asyncio.run(engine.run("k", done))
    thread, wake, living = engine.heart._thread, engine.heart._wake, weakref.ref(engine.heart)
    assert thread.is_alive()
    assert thread.daemon
    del engine
    gc.collect()
    assert living() is None
    wake.set()  # sooner than its longest pause
    thread.join(WAIT_S_MAX)
    assert not thread.is_alive()
    assert LEASE_MS_MAX / BEATS_PER_LEASE <= 5_000


def test_a_heart_that_was_stopped_begins_no_new_thread(heart):
    heart.hold(CLAIM, LEASE_MS)
    thread = heart._thread
    heart.stop()
    heart.stop()
    assert not thread.is_alive()
    heart.hold(CLAIM, LEASE_MS)
    assert heart._thread is thread


def test_a_heart_that_never_held_anything_has_no_thread(heart):
    heart.stop()
    heart.hold(CLAIM, LEASE_MS)
    assert heart._thread is None


def test_many_threads_that_begin_at_once_start_one_heart(store, clock):
    heart = heart_of(store, clock)
    barrier = threading.Barrier(8, timeout=WAIT_S_MAX)

    def begin(number):
        barrier.wait()
        heart.hold(CLAIM._replace(id=b"%16d" % number), LEASE_MS)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
    hearts_before = hearts()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S_MAX)
    assert len(hearts() - hearts_before) == 1
    assert len(heart.held) == 8
    heart.stop()


def hearts():
    return {thread for thread in threading.enumerate() if thread.name == "coatcheck-heart"}


def test_a_short_lease_makes_the_heart_beat_faster(store, clock):
    """L5: also where the first lease that it held was a long one."""
    heart = heart_of(store, clock)
    heart.hold(CLAIM, LEASE_MS)
    clock.pass_s(1)
    heart.hold(CLAIM._replace(lease_until_ms=clock.now_ms), 300)
    store.wait_for(lambda record: record.lease_until_ms == clock.now_ms + 300)
    heart.stop()


# --- the sweep --------------------------------------------------------------------------------


def sweep(store, now_ms, archive=None):
    """A whole sweep without a rest; how many records it took."""
    return sum(batches(store, now_ms, archive))


def expired(count, *, at_ms=NOW_MS):
    """A store full of what retention allows to take."""
    store = WatchedStore()
    for number in range(count):
        record = GONE._replace(id=b"%16d" % number, version=1, expires_ms=at_ms)
        store._records[record.id] = record
    return store


def test_a_sweep_takes_small_batches_until_nothing_is_left():
    """T3."""
    store = expired(2 * SWEEP_BATCH + 7)
    keeps = CLAIM._replace(expires_ms=NOW_MS)
    store._records[CLAIM.id] = keeps  # past its retention, but somebody holds a live lease
    assert sweep(store, NOW_MS) == 2 * SWEEP_BATCH + 7
    assert store.sweeps == [SWEEP_BATCH, SWEEP_BATCH, 7]
    assert store.records == [keeps]


def test_a_long_backlog_does_not_crowd_out_claims():
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


def test_an_engine_keeps_up_with_whatever_has_come_in(clock):
    """T3: a backlog of any length is gone after one sweep."""
    store = expired(30 * SWEEP_BATCH + 7)
    heart = heart_of(store, clock, sweep_every_s=60)
    heart.beat()
    clock.pass_s(91)
    heart.beat()
    eventually(lambda: not heart.sweeper.is_sweeping())
    assert store.records == []
    assert store.sweeps == [SWEEP_BATCH] * 30 + [7]
    heart.stop()


def test_what_is_swept_can_be_archived_first():
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


def test_nothing_to_archive_is_not_archived():
    """T3."""
    assert sweep(expired(3, at_ms=NOW_MS + 1), NOW_MS, pytest.fail) == 0


def test_an_archive_that_fails_deletes_nothing():
    """T3."""
    store = expired(5)

    def broken(_records):
        raise OSError("the archive is full")

    with pytest.raises(OSError, match="the archive is full"):
        sweep(store, NOW_MS, broken)
    assert len(store.records) == 5


def test_what_changes_while_it_is_archived_is_not_deleted():
    """T3, T2: a late retry began a new life meanwhile."""
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


def test_a_heart_sweeps_about_as_often_as_it_was_told(clock):
    """T3: not at its first beat, when a whole fleet has just been started."""
    store = expired(1)
    heart = heart_of(store, clock, sweep_every_s=60)
    heart.beat()
    clock.pass_s(29)
    heart.beat()
    assert store.sweeps == []
    clock.pass_s(61)
    heart.beat()
    eventually(lambda: not heart.sweeper.is_sweeping())
    assert store.sweeps == [1]
    clock.pass_s(29)
    heart.beat()
    heart.stop()
    assert store.sweeps == [1]


def test_nodes_do_not_sweep_in_step(clock):
    """T3: jittered, by half of the time in both directions."""
    times = set()
    for _ in range(50):
        heart = heart_of(WatchedStore(), clock, sweep_every_s=60)
        heart.beat()
        times.add(heart.sweeper._due_ms - clock.now_ms)
    assert len(times) > 40
    assert all(30_000 <= time_ms <= 90_000 for time_ms in times)


def test_the_first_sweep_is_jittered_on_the_stores_own_clock():
    """T3: before the first look at that clock, nobody knows what time it is."""
    store = expired(1, at_ms=0)
    heart = Heart(store, StoreClock(store), sweep_every_s=60)
    heart.beat()
    assert store.sweeps == []
    assert 29_000 <= heart.sweeper._due_ms - store.now_ms() <= 91_000


def test_a_heart_that_was_told_not_to_sweep_does_not(clock):
    """T3."""
    store = expired(1)
    heart = heart_of(store, clock, sweep_every_s=None)
    clock.pass_s(1_000_000)
    heart.beat()
    assert store.sweeps == []


def test_an_engine_sweeps_and_archives_by_itself(guards, clock):
    """T3: nothing has to be set up."""
    store = expired(3)
    archived = []
    engine = guards.engine(store, clock=clock, archive=archived.extend)
    guards.run(engine, "k", Handler())
    engine.heart.beat()
    clock.pass_s(90)
    engine.heart.beat()
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


def test_an_archive_that_takes_long_costs_nobody_a_lease(clock):
    """L5, T3: it is the application's own, and may take hours."""
    store, archive = expired(3), SlowArchive()
    store._records[CLAIM.id] = CLAIM
    heart = heart_of(store, clock, sweep_every_s=1, archive=archive)
    heart.hold(CLAIM, LEASE_MS)
    heart.beat()
    for _ in range(10):
        clock.pass_s(20)
        heart.beat()
        wait_for(archive.is_running)
        assert store._records[CLAIM.id].lease_until_ms == clock.now_ms + LEASE_MS
    assert archive.calls == 1  # never two of them at once
    archive.may_end.set()
    heart.stop()
    assert store.records == [store._records[CLAIM.id]]


def test_a_sweep_that_fails_is_tried_again(clock, caplog):
    """T3."""
    store, archived = expired(3), []

    def archive(records):
        archived.append(len(records))
        if len(archived) == 1:
            raise OSError("the archive is full")

    heart = heart_of(store, clock, sweep_every_s=1, archive=archive)
    heart.beat()
    for number in range(1, 3):
        clock.pass_s(20)
        heart.beat()
        eventually(lambda number=number: len(archived) == number)
        eventually(lambda: not heart.sweeper.is_sweeping())
    assert (archived, store.records) == ([3, 3], [])
    assert "a sweep failed and is tried again: the archive is full" in caplog.text
    heart.stop()


def test_a_sweep_ends_with_its_engine(clock):
    """T3: what is closed begins no further batch, and no further sweep."""
    store, archive = expired(3 * SWEEP_BATCH), SlowArchive()
    heart = heart_of(store, clock, sweep_every_s=1, archive=archive)
    heart.beat()
    clock.pass_s(20)
    heart.beat()
    wait_for(archive.is_running)
    stopping = threading.Thread(target=heart.stop)
    stopping.start()
    wait_for(heart.sweeper._closed)
    archive.may_end.set()
    stopping.join(WAIT_S_MAX)
    assert not heart.sweeper.is_sweeping()
    assert archive.calls == 1
    assert len(store.records) == 2 * SWEEP_BATCH
    clock.pass_s(20)
    heart.beat()
    assert archive.calls == 1


def test_a_sweep_does_not_keep_an_engine_that_is_forgotten():
    """T3: it ends with the batch that is under way."""
    clock, archive = Clock(), SlowArchive()
    store = expired(3 * SWEEP_BATCH)
    engine = Engine(store, clock=clock, archive=archive, sweep_every_s=1)
    engine.heart.beat()
    clock.pass_s(20)
    engine.heart.beat()
    wait_for(archive.is_running)
    thread, living = engine.heart.sweeper._thread, weakref.ref(engine.heart)
    assert thread.daemon
    del engine
    gc.collect()
    assert living() is None
    archive.may_end.set()
    thread.join(WAIT_S_MAX)
    assert not thread.is_alive()
    assert archive.calls == 1
