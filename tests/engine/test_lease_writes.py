"""One record that cannot be written, or one dead shard, delays no other renewal (L5)."""

import pytest

from coatcheck import KeyRing, Policy, current_operation
from coatcheck.core.record import COMPLETED, Swap, completed, is_lease_over
from coatcheck.engine.clock import StoreClock
from coatcheck.engine.lease_writes import FAILURES_MAX
from coatcheck.engine.leases import Heartbeat
from coatcheck.engine.sweeper import Sweeper
from coatcheck.errors import StoreUnavailable, Unreadable
from coatcheck.operation import Lease
from coatcheck.stores.batch_errors import results_of
from tests.support.engines import CLAIM, WatchedStore, held_up
from tests.support.times import wait_for

LEASE_MS = 60_000


class Sharded(WatchedStore):
    """Fails as a whole if one of the ids is on a dead shard; the others are written."""

    def __init__(self, error: Exception | None = None):
        super().__init__()
        self.dead: set[bytes] = set()
        self.asked: list[list[bytes]] = []
        self.error = error or StoreUnavailable("a shard is dead", is_ambiguous=True)

    def swap(self, swaps):
        self.asked.append([swap.id for swap in swaps])
        alive = [swap for swap in swaps if swap.id not in self.dead]
        lost = super().swap(alive)
        if len(alive) < len(swaps):
            raise self.error
        return lost


class Detailed(Sharded):
    """The same, but its error says what became of each."""

    def swap(self, swaps):
        try:
            return super().swap(swaps)
        except StoreUnavailable as error:
            return results_of([error if swap.id in self.dead else None for swap in swaps])


def heartbeat_of(store, clock, **options):
    return Heartbeat(store, StoreClock(store, clock), **options)


def renewing(heartbeat, claim):
    lease = Lease(claim, LEASE_MS)
    heartbeat.start_renewing(lease)
    return lease


def claims(store, count):
    """*count* claims, in the store."""
    made = [CLAIM._replace(id=b"%16d" % number) for number in range(count)]
    store._records.update({claim.id: claim for claim in made})
    return made


def ticks(heartbeat, clock, count=6):
    """Some, with a third of a lease between them; what the last one raised."""
    failure = None
    for _ in range(count):
        clock.advance(21)
        failure = tick_once(heartbeat)
    return failure


def tick_once(heartbeat):
    """One; what it raised."""
    try:
        heartbeat.tick()
    except Exception as error:  # noqa: BLE001 - for the test to look at
        return error
    return None


ERRORS = [StoreUnavailable("a shard is dead"), ValueError("too large"), Unreadable("another's")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_one_renewal_that_fails_does_not_stop_the_others(clock, error):
    """L5: however often it fails, and whatever the reason is."""
    store = Sharded(error)
    heartbeat = heartbeat_of(store, clock)
    bad, *others = [renewing(heartbeat, claim) for claim in claims(store, 5)]
    store.dead = {bad.claim.id}
    ticks(heartbeat, clock)
    for lease in others:
        assert not is_lease_over(store._records[lease.claim.id], clock.now_ms)
        assert lease.claim == store._records[lease.claim.id]
        assert not lease.is_lost
    heartbeat.stop()


def test_a_store_that_reports_each_outcome_is_called_once(clock):
    """L5: it is known which has failed, and no other is written again."""
    store = Detailed()
    heartbeat = heartbeat_of(store, clock)
    bad, *others = [renewing(heartbeat, claim) for claim in claims(store, 20)]
    store.dead = {bad.claim.id}
    assert isinstance(ticks(heartbeat, clock, 1), StoreUnavailable)
    assert len(store.asked) == 1
    assert bad.failures == 1
    assert {lease.claim.lease_until_ms for lease in others} == {clock.now_ms + LEASE_MS}
    heartbeat.stop()


def test_while_the_whole_store_is_down_only_the_claims_that_were_tried_alone_count_a_failure(clock):
    """L5: when it is back, all are written in one call again."""
    store = Detailed()
    heartbeat = heartbeat_of(store, clock)
    leases = [renewing(heartbeat, claim) for claim in claims(store, 20)]
    store.dead = {lease.claim.id for lease in leases}
    assert isinstance(ticks(heartbeat, clock, 1), StoreUnavailable)
    assert sum(lease.failures for lease in leases) == FAILURES_MAX
    heartbeat.stop()


def test_a_claim_whose_successor_cannot_be_read_is_lost(clock):
    """L5, X1: it is encrypted with a key that this ring lacks, so another process wrote it."""
    store = Sharded(Unreadable("sealed with the key '2'"))
    heartbeat = heartbeat_of(store, clock)
    lost, kept = [renewing(heartbeat, claim) for claim in claims(store, 2)]
    store.dead = {lost.claim.id}
    assert ticks(heartbeat, clock, 1) is None
    assert (lost.is_lost, kept.is_lost) == (True, False)
    assert list(heartbeat.leases.values()) == [kept]
    heartbeat.stop()


def test_a_completion_that_cannot_be_written_stops_no_renewal_and_no_other_completion(clock):
    """L5."""
    written = []
    store = Sharded()
    heartbeat = heartbeat_of(store, clock, on_written=written.append)
    bad, other, living = [renewing(heartbeat, claim) for claim in claims(store, 3)]
    store.dead = {bad.claim.id}
    for lease in (bad, other):
        heartbeat.schedule_completion(
            lease, Swap(lease.claim.id, lease.claim.version, completed(lease.claim, b"done"))
        )
        heartbeat.stop_renewing(lease)
    ticks(heartbeat, clock)
    assert store._records[other.claim.id].state == COMPLETED
    assert [record.id for record in written] == [other.claim.id]
    assert not is_lease_over(store._records[living.claim.id], clock.now_ms)
    store.dead = set()
    heartbeat.tick()
    assert store._records[bad.claim.id].state == COMPLETED
    heartbeat.stop()


def test_a_completion_that_can_never_be_written_is_given_up_after_its_window(clock, caplog):
    """L5: after that nothing is deduplicated, and the next request begins a new generation."""
    store = Sharded(ValueError("too large"))
    heartbeat = heartbeat_of(store, clock)
    (claim,) = claims(store, 1)
    lease = renewing(heartbeat, claim)
    store.dead = {claim.id}
    heartbeat.schedule_completion(lease, Swap(claim.id, claim.version, completed(claim, b"done")))
    clock.now_ms = claim.window_until_ms - 1
    assert isinstance(tick_once(heartbeat), ValueError)
    assert heartbeat.leases == {claim.id: lease}
    clock.now_ms = claim.window_until_ms
    tick_once(heartbeat)
    assert heartbeat.leases == {}
    assert "could not be stored: its window is over" in caplog.text
    heartbeat.stop()


@pytest.mark.parametrize("part", ["now_ms", "task", "sweep"])
def test_nothing_else_that_a_tick_does_can_prevent_a_renewal(clock, part):
    """L5: not the clock, not another task, and not the sweep."""

    def broken(*_):
        raise ZeroDivisionError(part)

    store = WatchedStore()
    (claim,) = claims(store, 1)
    times = StoreClock(store, clock)
    if part == "now_ms":
        times.look = broken
    if part == "sweep":
        store.sweep = broken
    sweeper = Sweeper(store, 0.001, None)
    tasks = [broken if part == "task" else int, sweeper.tick]
    heartbeat = Heartbeat(store, times, tasks=tasks)
    heartbeat.start_renewing(Lease(claim, LEASE_MS))
    ticks(heartbeat, clock)
    assert not is_lease_over(store.record, clock.now_ms)
    heartbeat.stop()


def test_a_store_that_is_down_is_not_called_once_for_each_claim(clock):
    """L5: many claims and a long time-out would make one tick last for hours."""
    store = Sharded()
    heartbeat = heartbeat_of(store, clock)
    leases = [renewing(heartbeat, claim) for claim in claims(store, 200)]
    store.dead = {lease.claim.id for lease in leases}
    assert isinstance(ticks(heartbeat, clock, 1), StoreUnavailable)
    assert len(store.asked) == 1 + FAILURES_MAX
    assert not any(lease.is_lost for lease in leases)
    heartbeat.stop()


def test_a_claim_that_has_failed_alone_is_left_out_of_the_next_bulk_call(clock):
    """L5: so that a shard that is dead for long costs the others one call, and no time-out."""
    store = Sharded()
    heartbeat = heartbeat_of(store, clock)
    bad, *others = [renewing(heartbeat, claim) for claim in claims(store, 20)]
    store.dead = {bad.claim.id}
    ticks(heartbeat, clock, 1)
    store.asked.clear()
    ticks(heartbeat, clock, 1)
    assert store.asked == [[lease.claim.id for lease in others], [bad.claim.id]]
    store.dead = set()
    ticks(heartbeat, clock, 1)
    store.asked.clear()
    assert ticks(heartbeat, clock, 1) is None
    assert len(store.asked) == 1  # all together again
    heartbeat.stop()


def test_the_writes_of_one_tick_end_before_the_next_tick_is_due(clock):
    """L5: the next renewals are due, whatever the time-outs of these are."""
    store = Sharded()
    seconds = [0.0]
    heartbeat = heartbeat_of(store, clock, monotonic=lambda: seconds[0])
    leases = [renewing(heartbeat, claim) for claim in claims(store, 100)]
    healthy, *rest = leases
    store.dead = {lease.claim.id for lease in rest}
    swap = store.swap

    def slow(swaps):
        if {s.id for s in swaps} & store.dead:
            seconds[0] += 2
        return swap(swaps)

    store.swap = slow
    ticks(heartbeat, clock, 1)
    assert seconds[0] <= 2 + 5 + 2  # all together; for as long as a tick; and the last one
    assert healthy.claim.lease_until_ms == clock.now_ms + LEASE_MS
    tried = {id for ids in store.asked for id in ids if len(ids) == 1}
    ticks(heartbeat, clock, 1)
    later = {id for ids in store.asked for id in ids if len(ids) == 1}
    assert len(later) > len(tried)  # those that were not tried yet come first
    heartbeat.stop()


def test_a_claim_that_another_key_ring_has_encrypted_delays_no_other_renewal(guards, clock):
    """L5, X1: over a real ring, with both engines."""
    store = WatchedStore()
    rings = [KeyRing({"1": b"a" * 32}), KeyRing({"2": b"b" * 32})]
    options = {"clock": clock, "sweep_every_s": None, "recover_every_s": None}
    here, there = (
        guards.engine(store, Policy(lease="60s"), keyring=ring, **options) for ring in rings
    )
    zombie, noting, healthy = held_up("zombie"), held_up("there"), held_up("healthy")

    def takes_over():
        noted = current_operation().note("mine")
        return noting() if noted is None else after(noted)

    async def after(noted):
        await noted
        return noting()

    futures = [guards.beside(here, "x", zombie, scope="s")]
    wait_for(zombie.is_running)
    clock.advance(61)
    futures.append(guards.beside(there, "x", takes_over, scope="s"))
    wait_for(noting.is_running)
    futures.append(guards.beside(here, "y", healthy, scope="s"))
    wait_for(healthy.is_running)
    for _ in range(6):
        clock.advance(21)
        here.attempts.heartbeat.tick()
        there.attempts.heartbeat.tick()
    (record,) = [record for record in store.records if record.key == "y"]
    assert not is_lease_over(record, clock.now_ms)
    for handler in (zombie, noting, healthy):
        handler.may_end.set()
    assert futures[2].result() == "healthy"
    assert futures[1].result() == "there"
    assert isinstance(futures[0].exception(), Unreadable)
