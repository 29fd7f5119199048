"""One record that cannot be written, or one dead shard, costs no other claim its lease (L5)."""

import pytest
from engines import NOW_MS, Clock, WatchedStore, held_up, wait_for

from coatcheck import KeyRing, Policy, current_operation
from coatcheck.core.record import COMPLETED, RUNNING, Record, Swap, completed, is_lease_over
from coatcheck.engine.apart import FAILURES_MAX
from coatcheck.engine.clock import StoreClock
from coatcheck.engine.heart import Heart
from coatcheck.errors import StoreUnavailable, Unreadable
from coatcheck.stores.fates import results_of

LEASE_MS = 60_000
CLAIM = Record(
    *(b"i" * 16, NOW_MS, RUNNING, 1, b"f" * 16, NOW_MS, NOW_MS + LEASE_MS),
    *(NOW_MS + 3_600_000, NOW_MS + 7_200_000, 7, "", "", "", None, None),
)


class Sharded(WatchedStore):
    """Fails as a whole where one of the ids is on a dead shard; the others are written."""

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


class Speaking(Sharded):
    """The same, and it says what became of each."""

    def swap(self, swaps):
        try:
            return super().swap(swaps)
        except StoreUnavailable as error:
            return results_of([error if swap.id in self.dead else None for swap in swaps])


@pytest.fixture
def clock():
    return Clock()


def hearted(store, clock, **options):
    return Heart(store, StoreClock(store, clock), **options)


def claims(store, count):
    """As many claims, in the store."""
    made = [CLAIM._replace(id=b"%16d" % number) for number in range(count)]
    store._records.update({claim.id: claim for claim in made})
    return made


def beats(heart, clock, count=6):
    """Some, with a third of a lease between them; what the last one raised."""
    failure = None
    for _ in range(count):
        clock.pass_s(21)
        failure = beats_once(heart)
    return failure


def beats_once(heart):
    """One; what it raised."""
    try:
        heart.beat()
    except Exception as error:  # noqa: BLE001 - for the test to look at
        return error
    return None


ERRORS = [StoreUnavailable("a shard is dead"), ValueError("too large"), Unreadable("another's")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_one_renewal_that_fails_does_not_stop_the_others(clock, error):
    """L5: however often it fails, and whatever the reason is."""
    store = Sharded(error)
    heart = hearted(store, clock)
    bad, *others = [heart.hold(claim, LEASE_MS) for claim in claims(store, 5)]
    store.dead = {bad.claim.id}
    beats(heart, clock)
    for held in others:
        assert not is_lease_over(store._records[held.claim.id], clock.now_ms)
        assert held.claim == store._records[held.claim.id]
        assert not held.is_lost
    heart.stop()


def test_a_store_that_says_what_became_of_each_is_asked_once(clock):
    """L5: whoever has failed is known, and nobody is tried again for it."""
    store = Speaking()
    heart = hearted(store, clock)
    bad, *others = [heart.hold(claim, LEASE_MS) for claim in claims(store, 20)]
    store.dead = {bad.claim.id}
    assert isinstance(beats(heart, clock, 1), StoreUnavailable)
    assert len(store.asked) == 1
    assert bad.failures == 1
    assert {held.claim.lease_until_ms for held in others} == {clock.now_ms + LEASE_MS}
    heart.stop()


def test_a_store_that_is_away_as_a_whole_leaves_nobody_suspected_but_who_was_tried(clock):
    """L5: when it is back, all are written in one call again."""
    store = Speaking()
    heart = hearted(store, clock)
    helds = [heart.hold(claim, LEASE_MS) for claim in claims(store, 20)]
    store.dead = {held.claim.id for held in helds}
    assert isinstance(beats(heart, clock, 1), StoreUnavailable)
    assert sum(held.failures for held in helds) == FAILURES_MAX
    heart.stop()


def test_a_claim_whose_successor_cannot_be_read_is_lost(clock):
    """L5, X1: it is sealed with a key that this ring lacks, so it is another's."""
    store = Sharded(Unreadable("sealed with the key '2'"))
    heart = hearted(store, clock)
    lost, kept = [heart.hold(claim, LEASE_MS) for claim in claims(store, 2)]
    store.dead = {lost.claim.id}
    assert beats(heart, clock, 1) is None
    assert (lost.is_lost, kept.is_lost) == (True, False)
    assert list(heart.held.values()) == [kept]
    heart.stop()


def test_an_end_that_cannot_be_written_stops_no_renewal_and_no_other_end(clock):
    """L5."""
    told = []
    store = Sharded()
    heart = hearted(store, clock, tell=told.append)
    bad, other, living = [heart.hold(claim, LEASE_MS) for claim in claims(store, 3)]
    store.dead = {bad.claim.id}
    for held in (bad, other):
        heart.finish(held, Swap(held.claim.id, held.claim.version, completed(held.claim, b"done")))
        heart.let_go(held)
    beats(heart, clock)
    assert store._records[other.claim.id].state == COMPLETED
    assert [record.id for record in told] == [other.claim.id]
    assert not is_lease_over(store._records[living.claim.id], clock.now_ms)
    store.dead = set()
    heart.beat()
    assert store._records[bad.claim.id].state == COMPLETED
    heart.stop()


def test_an_end_that_can_never_be_written_holds_its_key_no_longer_than_its_window(clock, caplog):
    """L5: after that nothing is deduplicated, and the next request begins a new life."""
    store = Sharded(ValueError("too large"))
    heart = hearted(store, clock)
    (claim,) = claims(store, 1)
    held = heart.hold(claim, LEASE_MS)
    store.dead = {claim.id}
    heart.finish(held, Swap(claim.id, claim.version, completed(claim, b"done")))
    clock.now_ms = claim.window_until_ms - 1
    assert isinstance(beats_once(heart), ValueError)
    assert heart.held == {claim.id: held}
    clock.now_ms = claim.window_until_ms
    beats_once(heart)
    assert heart.held == {}
    assert "is not tried any more" in caplog.text
    heart.stop()


@pytest.mark.parametrize("part", ["now_ms", "chore", "sweep"])
def test_nothing_else_that_a_beat_does_can_prevent_a_renewal(clock, part):
    """L5: not the clock, not a chore, and not the sweep."""

    def broken(*_):
        raise ZeroDivisionError(part)

    store = WatchedStore()
    (claim,) = claims(store, 1)
    times = StoreClock(store, clock)
    if part == "now_ms":
        times.look = broken
    if part == "sweep":
        store.sweep = broken
    heart = Heart(store, times, sweep_every_s=0.001, chores=[broken] if part == "chore" else [])
    heart.hold(claim, LEASE_MS)
    beats(heart, clock)
    assert not is_lease_over(store.record, clock.now_ms)
    heart.stop()


def test_a_store_that_is_away_is_not_asked_once_for_each_claim(clock):
    """L5: many claims and a long time-out would make one beat last for hours."""
    store = Sharded()
    heart = hearted(store, clock)
    helds = [heart.hold(claim, LEASE_MS) for claim in claims(store, 200)]
    store.dead = {held.claim.id for held in helds}
    assert isinstance(beats(heart, clock, 1), StoreUnavailable)
    assert len(store.asked) == 1 + FAILURES_MAX
    assert not any(held.is_lost for held in helds)
    heart.stop()


def test_what_has_failed_alone_is_not_tried_with_the_others_again(clock):
    """L5: so that a shard that is dead for long costs the others one call, and no time-out."""
    store = Sharded()
    heart = hearted(store, clock)
    bad, *others = [heart.hold(claim, LEASE_MS) for claim in claims(store, 20)]
    store.dead = {bad.claim.id}
    beats(heart, clock, 1)
    store.asked.clear()
    beats(heart, clock, 1)
    assert store.asked == [[held.claim.id for held in others], [bad.claim.id]]
    store.dead = set()
    beats(heart, clock, 1)
    store.asked.clear()
    assert beats(heart, clock, 1) is None
    assert len(store.asked) == 1  # all together again
    heart.stop()


def test_the_tries_of_one_beat_take_no_longer_than_a_beat(clock):
    """L5: the next renewals are due, whatever the time-outs of these are."""
    store = Sharded()
    seconds = [0.0]
    heart = hearted(store, clock, monotonic=lambda: seconds[0])
    helds = [heart.hold(claim, LEASE_MS) for claim in claims(store, 100)]
    healthy, *rest = helds
    store.dead = {held.claim.id for held in rest}
    swap = store.swap

    def slow(swaps):
        if {s.id for s in swaps} & store.dead:
            seconds[0] += 2
        return swap(swaps)

    store.swap = slow
    beats(heart, clock, 1)
    assert seconds[0] <= 2 + 5 + 2  # all together; for as long as a beat; and the last one
    assert healthy.claim.lease_until_ms == clock.now_ms + LEASE_MS
    tried = {id for ids in store.asked for id in ids if len(ids) == 1}
    beats(heart, clock, 1)
    later = {id for ids in store.asked for id in ids if len(ids) == 1}
    assert len(later) > len(tried)  # whoever was not tried yet is tried next
    heart.stop()


def test_a_claim_that_another_ring_has_sealed_costs_no_other_its_lease(guards, clock):
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
    clock.pass_s(61)
    futures.append(guards.beside(there, "x", takes_over, scope="s"))
    wait_for(noting.is_running)
    futures.append(guards.beside(here, "y", healthy, scope="s"))
    wait_for(healthy.is_running)
    for _ in range(6):
        clock.pass_s(21)
        here.heart.beat()
        there.heart.beat()
    (record,) = [record for record in store.records if record.key == "y"]
    assert not is_lease_over(record, clock.now_ms)
    for handler in (zombie, noting, healthy):
        handler.may_end.set()
    assert futures[2].result() == "healthy"
    assert futures[1].result() == "there"
    assert isinstance(futures[0].exception(), Unreadable)
