"""The clock: the store's time rules, whatever this machine believes."""

import pytest

from coatcheck import KeyBusy, Policy
from coatcheck.core.record import RUNNING
from coatcheck.engine import clock as clocks
from coatcheck.engine.clock import LOOK_EVERY_MS, StoreClock
from tests.support.engines import Handler, WatchedStore
from tests.support.times import Clock

HOUR_MS = 3_600_000


class FarStore(WatchedStore):
    """A store whose clock is hours away from ours."""

    def __init__(self, offset_ms):
        super().__init__()
        self.offset_ms = offset_ms
        self.looks = 0

    def now_ms(self):
        self.looks += 1
        return super().now_ms() + self.offset_ms


class Machine(Clock):
    """This machine's own clocks, which the test sets."""

    CLOCK_BOOTTIME = 7

    def __init__(self):
        super().__init__(5_000_000)
        self.slept_ms = 0

    def sleep_s(self, seconds):
        """Be suspended: only one of the clocks notices."""
        self.advance(seconds)
        self.slept_ms += round(seconds * 1_000)

    def monotonic_ns(self):
        return (self.now_ms - self.slept_ms) * 1_000_000

    def time_ns(self):
        return (self.now_ms + 10 * HOUR_MS) * 1_000_000

    def clock_gettime_ns(self, clock):
        assert clock == self.CLOCK_BOOTTIME
        return self.now_ms * 1_000_000


@pytest.fixture
def local(monkeypatch):
    """A machine that has a clock which goes on while it sleeps."""
    local = Machine()
    monkeypatch.setattr(clocks, "time", local)
    monkeypatch.setattr(clocks, "BOOTTIME", Machine.CLOCK_BOOTTIME)
    return local


class ToldStore(WatchedStore):
    """A store that returns a time that the test sets, after a while."""

    def __init__(self, local, says_ms, takes_ms):
        super().__init__()
        self.local, self.says_ms, self.takes_ms = local, says_ms, takes_ms
        self.looks = 0

    def now_ms(self):
        self.looks += 1
        self.local.now_ms += self.takes_ms
        return self.says_ms


def test_before_the_first_look_the_time_of_this_machine_is_a_guess(local):
    """D2: what runs during an outage, and is claimed as the store comes back, has a date."""
    clock = StoreClock(ToldStore(local, says_ms=77_000, takes_ms=0))
    clock.guess()
    assert clock.now_ms() == local.now_ms + 10 * HOUR_MS
    clock.look()
    clock.guess()
    assert clock.now_ms() == 77_000


def test_time_goes_on_by_our_own_clock_between_two_looks(local):
    clock = StoreClock(ToldStore(local, says_ms=77_000, takes_ms=0))
    clock.look()
    assert clock.now_ms() == 77_000
    local.now_ms += 1_234
    assert clock.now_ms() == 78_234


def test_a_machine_that_was_suspended_knows_that_its_leases_are_over(local):
    """L5: a process that wrongly believes in its lease goes on beside its successor."""
    store = ToldStore(local, says_ms=77_000, takes_ms=0)
    clock = StoreClock(store)
    clock.look()
    local.sleep_s(60)
    assert clock.now_ms() == 77_000 + 60_000
    assert clock.is_due()


def test_without_a_clock_that_goes_on_during_sleep_the_next_look_corrects_it(local, monkeypatch):
    """L5: nothing better is known there; time still never goes back or jumps by itself."""
    monkeypatch.setattr(clocks, "BOOTTIME", None)
    store = ToldStore(local, says_ms=77_000, takes_ms=0)
    clock = StoreClock(store)
    clock.look()
    local.sleep_s(60)
    assert clock.now_ms() == 77_000
    local.advance(LOOK_EVERY_MS / 1_000)
    store.says_ms = 77_000 + 60_000 + LOOK_EVERY_MS
    clock.look()
    assert clock.now_ms() == store.says_ms


def test_the_answer_is_taken_to_be_from_the_middle_of_the_asking(local):
    """Half of the round trip is the most that it can be wrong."""
    clock = StoreClock(ToldStore(local, says_ms=77_000, takes_ms=100))
    clock.look()
    assert clock.now_ms() == 77_050


def test_a_look_during_which_we_may_have_been_stopped_is_made_again(local):
    """L5: a process whose time is ahead takes over attempts that still live."""
    store = ToldStore(local, says_ms=77_000, takes_ms=0)
    clock = StoreClock(store)
    clock.look()
    local.now_ms += LOOK_EVERY_MS
    store.says_ms, store.takes_ms = 77_000 + LOOK_EVERY_MS, 60_000
    clock.look()  # asked before a minute's sleep, answered after it
    assert clock.now_ms() == 77_000 + LOOK_EVERY_MS + 60_000
    assert clock.is_due()


def test_the_store_is_not_asked_each_time(local):
    store = ToldStore(local, says_ms=77_000, takes_ms=0)
    clock = StoreClock(store)
    assert clock.is_due()
    for _ in range(3):
        clock.look()
    assert store.looks == 1
    local.now_ms += LOOK_EVERY_MS - 1
    clock.look()
    assert store.looks == 1
    local.now_ms += 1
    clock.look()
    assert store.looks == 2


def test_a_clock_that_was_set_is_followed_at_the_next_look(local):
    store = ToldStore(local, says_ms=77_000, takes_ms=0)
    clock = StoreClock(store)
    clock.look()
    local.now_ms += LOOK_EVERY_MS
    store.says_ms = 50_000  # it was set back
    clock.look()
    assert clock.now_ms() == 50_000


def test_a_time_that_was_given_is_never_corrected():
    """T1: a test brings its own, and nothing below reads another."""
    store = FarStore(HOUR_MS)
    given = Clock(1_000)
    clock = StoreClock(store, given)
    clock.look()
    assert (clock.now_ms(), clock.is_due(), store.looks) == (1_000, False, 0)


@pytest.mark.parametrize("offset_ms", [-50 * HOUR_MS, -5 * HOUR_MS, 5 * HOUR_MS, 50 * HOUR_MS])
def test_records_are_written_in_the_stores_time(guards, offset_ms):
    """T1: leases and windows mean the same on every node."""
    store = FarStore(offset_ms)
    engine = guards.engine(store)
    guards.run(engine, "k", Handler())
    assert abs(store.record.created_ms - store.now_ms()) < 60_000
    assert store.looks == 2  # one of them is ours, above


@pytest.mark.parametrize("offset_ms", [-50 * HOUR_MS, 50 * HOUR_MS])
def test_a_node_whose_own_clock_is_wrong_takes_over_no_attempt_that_lives(guards, offset_ms):
    """L5: the lease is of the store's time, and so is the look at it."""
    store = FarStore(offset_ms)
    engine = guards.engine(store)
    guards.run(engine, "k", Handler())
    running = store.record._replace(
        state=RUNNING, lease_until_ms=store.now_ms() + 60_000, response=None
    )
    store._records[running.id] = running
    other = guards.engine(store, Policy(in_flight="409"))
    handler = Handler()
    with pytest.raises(KeyBusy):
        guards.run(other, "k", handler)
    store._records[running.id] = running._replace(lease_until_ms=store.now_ms() - 1_000)
    assert guards.run(other, "k", handler) == "done"
    assert handler.calls == 1


def test_the_heartbeat_reads_the_stores_clock_too(guards, local):
    """A process that runs for weeks must not drift away."""
    store = FarStore(0)
    engine = guards.engine(store, sweep_every_s=None)
    guards.run(engine, "k", Handler())
    looks = store.looks
    engine.attempts.heartbeat.tick()
    assert store.looks == looks
    local.now_ms += LOOK_EVERY_MS
    engine.attempts.heartbeat.tick()
    assert store.looks == looks + 1
