"""The store goes down after the claim: the completion is retried, and nothing is done twice (D2, L5)."""

import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from coatcheck import Policy
from coatcheck.core.record import COMPLETED, FAILED, RUNNING, Swap, completed, in_doubt, renewed
from coatcheck.engine import attempts
from coatcheck.engine.write_retry import WriteRetry
from coatcheck.errors import StoreUnavailable
from tests.engine.small_api import small_api
from tests.support.engines import WatchedStore
from tests.support.servers.redis import Redis
from tests.support.times import NOW_MS

DOWN = StoreUnavailable("down")
DEAF = StoreUnavailable("deaf", is_ambiguous=True)
A_SWAP = Swap(b"i" * 16, 1, None)


def unplugged(guards, store, handler=lambda: "done", **options):
    """An engine on a store that went down during the work of "k"."""
    engine = guards.engine(store, Policy(patience=0), **options)

    def work():
        store.is_down = True
        return handler()

    with pytest.raises((StoreUnavailable, ZeroDivisionError)):
        guards.run(engine, "k", work, scope="s")
    return engine


def has_been_written(store, state):
    """Wait until a record with this *state* was written."""
    store.is_down = False
    store.wait_for(lambda record: record is not None and record.state == state)


# --- how long ---------------------------------------------------------------------------------


def test_an_ambiguous_write_is_repeated_once_at_once():
    """L2: if it was applied, it finds its own record."""
    retry = WriteRetry(0)
    assert retry.pause_s(A_SWAP, DEAF) == 0
    assert retry.pause_s(A_SWAP, DEAF) is None
    assert WriteRetry(0).pause_s(A_SWAP, DOWN) is None


def test_pauses_grow_and_end_with_the_budget():
    """D2: no request hangs longer than that."""
    retry = WriteRetry(2)
    pauses = []
    while (pause_s := retry.pause_s(A_SWAP, DOWN)) is not None:
        pauses.append(pause_s)
    assert sum(pauses) == pytest.approx(2)
    assert 5 <= len(pauses) <= 8
    assert pauses[0] < 0.1


def test_the_time_that_the_store_takes_to_fail_counts_as_well():
    """D2: a store that is frozen takes its whole time-out for each try."""
    now_s = [100.0]
    retry = WriteRetry(2, now_s[0], clock=lambda: now_s[0])
    tries = 1
    while (pause_s := retry.pause_s(A_SWAP, DEAF)) is not None:
        now_s[0] += pause_s + 5
        tries += 1
    assert tries == 2  # and no third: it is over before that could begin


@pytest.mark.parametrize("failure", [DOWN, DEAF])
def test_so_does_the_time_of_the_first_try(failure):
    """D2: the client's wait is counted from the first try, and the heartbeat goes on."""
    assert WriteRetry(2, 100.0, clock=lambda: 101.9).pause_s(A_SWAP, failure) is not None
    assert WriteRetry(2, 100.0, clock=lambda: 102.0).pause_s(A_SWAP, failure) is None


def test_a_store_that_takes_longer_to_fail_than_that_is_called_once(guards, monkeypatch):
    """D2: such as a file that the application itself has locked."""
    tries, engine = [], guards.engine(Locked(lambda: tries.append(1)), sweep_every_s=None)
    # As if ten seconds had passed when the first try has failed.
    passed = SimpleNamespace(monotonic=lambda: time.monotonic() - 10)
    monkeypatch.setattr(attempts, "time", passed)
    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", lambda: "done", scope="s")
    assert len(tries) == 1


class Locked(WatchedStore):
    """Accepts claims and no completions; reports each try but those of the heartbeat."""

    def __init__(self, report):
        super().__init__()
        self._report = report

    def swap(self, swaps):
        if swaps[0].record.state == RUNNING:
            return super().swap(swaps)
        if threading.current_thread().name != "coatcheck-heartbeat":
            self._report()
        raise StoreUnavailable("locked")


def test_only_writes_that_the_store_did_not_answer_are_repeated():
    retry = WriteRetry(2)
    assert retry.pause_s(A_SWAP, ValueError("no")) is None


# --- the completion of an execution -----------------------------------------------------------


def test_a_short_outage_is_not_seen_by_the_client(guards, store):
    """D2: down for two tries, and back."""
    engine = guards.engine(store)
    store.troubles = ["", "down", "down"]
    assert guards.run(engine, "k", lambda: "done", scope="s") == "done"
    assert store.record.state == COMPLETED


def test_a_claim_is_not_repeated_while_the_store_is_down(guards, store):
    """D2: nothing has run, so the client gets the error at once."""
    engine = guards.engine(store)
    guards.run(engine, "first", lambda: None, scope="s")
    store.troubles = ["down"]
    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", lambda: "done", scope="s")
    assert store.troubles == []
    assert guards.run(engine, "k", lambda: "done", scope="s") == "done"


def test_a_release_is_written_later_as_well(guards, store):
    """L4: so that the retry need not wait for the lease."""
    unplugged(guards, store, lambda: 1 / 0)
    has_been_written(store, FAILED)


def test_a_late_release_keeps_the_key_bound_to_a_request_that_took_a_step(guards, store):
    """F1, L7: it answered 403, but only after a step."""

    def place(operation):
        yield operation.step("charge", lambda: 100)
        store.is_down = True
        return 403

    small_api(guards, place, store, policy=Policy(patience=0))()
    fingerprint = store.record.fingerprint
    has_been_written(store, FAILED)
    assert store.record.fingerprint == fingerprint != b""


@pytest.mark.parametrize("change", [lambda claim: renewed(claim, NOW_MS), in_doubt])
def test_a_completion_is_written_on_top_of_a_renewal_or_a_doubt(guards, store, change):
    """L5, L6: of our own heartbeat, or of a process that saw the lease expire."""
    unplugged(guards, store, sweep_every_s=None)
    store._records[store.record.id] = newer = change(store.record)
    has_been_written(store, COMPLETED)
    assert store.record.version == newer.version + 1


def test_a_completion_that_comes_too_late_changes_nothing(guards, store):
    """L5: another attempt has taken over, and its answer is the final one."""
    engine = unplugged(guards, store)
    other = store.record._replace(nonce=1, attempt=2, version=store.record.version + 5)
    store._records[other.id] = other
    store.is_down = False
    engine.attempts.heartbeat.tick()
    assert store.record == other


def test_only_the_executor_of_an_operation_schedules_its_completion(guards, store):
    """L5: another request of the same key, whose take-over failed, schedules nothing."""
    engine = guards.engine(store, Policy(patience=0))
    pending = []

    def work():
        (lease,) = engine.attempts.heartbeat.leases.values()
        taken_over = lease.claim._replace(nonce=1, attempt=2, version=lease.claim.version + 1)
        for record in (taken_over, completed(taken_over, None)):
            engine.attempts._schedule(Swap(record.id, lease.claim.version, record), DOWN)
        pending.append(len(engine.attempts.heartbeat._pending))

    guards.run(engine, "k", work)
    assert pending == [0]


def test_closing_writes_what_can_be_written(guards, store):
    """L5: a deployment ends the process while a completion is pending."""
    engine = unplugged(guards, store)
    store.is_down = False
    guards.done(engine.close())
    assert store.record.state == COMPLETED


# --- a store that is frozen -------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Redis]:
    server = Redis()
    yield server
    server.remove()


@pytest.mark.parametrize("works", [lambda: "done", lambda: 1 / 0], ids=["returns", "raises"])
def test_no_caller_hangs_longer_than_its_budget_on_a_frozen_store(guards, server, works):
    """D2: the policy's patience, and the time-out of the tries that are under way when it is over."""
    engine = guards.engine(f"{server.fresh_url()}&timeout=500ms", Policy(patience="1s"))
    begun_s = []

    def work():
        server.kill(signal.SIGSTOP)
        begun_s.append(time.monotonic())
        return works()

    with pytest.raises((StoreUnavailable, ZeroDivisionError)):
        guards.run(engine, "k", work)
    taken_s = time.monotonic() - begun_s[0]
    server.kill(signal.SIGCONT)
    # 0.5 s each: the first try, the one that is repeated at once, and the last; a second to spare.
    assert taken_s < 1 + 3 * 0.5 + 1
